# SPDX-License-Identifier: Apache-2.0
"""Build script of the ament_python package lingbot_map_ros."""
from glob import glob

from setuptools import find_packages, setup

PACKAGE = "lingbot_map_ros"

setup(
    name=PACKAGE,
    version="0.1.0",
    # `lingbot_map_ros/cache` is a link to `cache/`, so that the cache is imported as lingbot_map_ros.cache.
    packages=find_packages(include=[f"{PACKAGE}*"]),
    package_data={f"{PACKAGE}.models": ["*.safetensors"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{PACKAGE}"]),
        (f"share/{PACKAGE}", ["package.xml"]),
        (f"share/{PACKAGE}/launch", glob("launch/*.launch.py")),
        (f"share/{PACKAGE}/config", glob("config/*")),
        (f"share/{PACKAGE}/rviz", glob("rviz/*.rviz")),
    ],
    python_requires=">=3.11",
    install_requires=["numpy", "opencv-python-headless", "pyyaml", "safetensors", "setuptools", "torch>=2.4"],
    extras_require={
        "cuda": ["flashinfer-python>=0.6"],
        "demo": ["matplotlib"],
        "evaluate": ["evo", "matplotlib", "rosbags", "tqdm"],
        "test": ["hypothesis", "matplotlib", "pytest>=7", "pytest-rerunfailures", "pytest-xdist"],
    },
    zip_safe=False,
    maintainer="lingbot_map_ros developers",
    maintainer_email="developers@lingbot-map-ros.invalid",
    description="Dense mapping from one camera with a streaming transformer, as a ROS 2 node",
    license="Apache-2.0",
    entry_points={
        "console_scripts": [
            "lingbot_map_evaluate = lingbot_map_ros.mapping.evaluation.evaluate:main",
            "lingbot_map_node = lingbot_map_ros.ros.node:main",
            "lingbot_map_replay = lingbot_map_ros.ros.replay:main",
            "synthetic_camera = lingbot_map_ros.ros.synthetic_camera:main",
        ],
    },
)
