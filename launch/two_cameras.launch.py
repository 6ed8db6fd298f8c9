# SPDX-License-Identifier: Apache-2.0
"""Map with two cameras: `ros2 launch lingbot_map_ros two_cameras.launch.py front_topic:=/front/image_raw`.

Each camera has a node in a namespace of its own, with a model, a map and a map frame of its own: twice the memory and
time of one, and two units of length unless `scale_source` tells metres. The arguments of lingbot_map.launch.py but
image_topic, namespace and params_file are this file's, too.
"""
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

HERE = Path(__file__).absolute().parents[1]
CAMERAS = ("front", "rear")  # namespaces, which config/two_cameras.yaml names as well


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    actions = [DeclareLaunchArgument(f"{name}_topic", default_value=f"/{name}/image_raw",
                                     description=f"Topic of the {name} camera's images.") for name in CAMERAS]
    for name in CAMERAS:
        node = IncludeLaunchDescription(
            PythonLaunchDescriptionSource(str(HERE / "launch" / "lingbot_map.launch.py")),
            launch_arguments={
                "namespace": name,
                "image_topic": LaunchConfiguration(f"{name}_topic"),
                "params_file": str(HERE / "config" / "two_cameras.yaml"),
            }.items())
        actions.append(GroupAction([node]))  # a scope of its own for the arguments
    return LaunchDescription(actions)
