# SPDX-License-Identifier: Apache-2.0
"""Record a camera and what the node makes of it: `ros2 launch lingbot_map_ros record.launch.py image_topic:=/image`.

Topics and QoS are those of config/recording.yaml. Needs rosbag2, which is no dependency of this package:
ros-$ROS_DISTRO-ros2bag. Set the Fast DDS profile for the node and the driver, too (README.md).
"""
import os
import tempfile
from pathlib import Path

import yaml
from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration

HERE = Path(__file__).absolute().parents[1]  # the installed share folder, or the checkout
RECORDER = "ros2bag"
NODE = "lingbot_map_node"
# Fast DDS reads one of these, by its version.
PROFILE_VARIABLE = (
    "FASTRTPS_DEFAULT_PROFILES_FILE" if os.environ.get("ROS_DISTRO") == "jazzy" else "FASTDDS_DEFAULT_PROFILES_FILE")
ARGUMENTS = {  # name: (default, description)
    "image_topic": ("/image", "Topic of the camera's images; a .../compressed one is a tenth as large."),
    "namespace": ("", "Namespace of the node."),
    "profile": (str(HERE / "config" / "recording.yaml"), "Topics to record, and their QoS."),
    "output": ("recording", "Folder to write, which must not exist."),
}


def topic_names(names, image_topic, namespace):
    """Return the names on this robot of a profile's topics, in their order."""
    images = "/" + image_topic.strip("/")
    prefix = f"/{namespace.strip('/')}" if namespace.strip("/") else ""
    own = {"/image": images, "/camera_info": images.removesuffix("/compressed").rpartition("/")[0] + "/camera_info"}
    return [own.get(name, prefix + name if name.startswith(f"/{NODE}/") else name) for name in names]


def record(context):
    """Return the recorder."""
    value = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    try:
        get_package_prefix(RECORDER)
    except PackageNotFoundError:
        raise RuntimeError(f"{RECORDER} is not installed: sudo apt install "
                           f"ros-{os.environ.get('ROS_DISTRO', 'DISTRO')}-{RECORDER}") from None
    profile = yaml.safe_load(Path(value["profile"]).read_text())
    topics = topic_names(profile, value["image_topic"], value["namespace"])
    with tempfile.NamedTemporaryFile("w", prefix="recording_", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(dict(zip(topics, profile.values())), file)
    return [ExecuteProcess(
        cmd=["ros2", "bag", "record", "--output", value["output"], "--qos-profile-overrides-path", file.name,
             "--topics", *topics],
        output="screen")]


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    actions = [DeclareLaunchArgument(name, default_value=default, description=description)
               for name, (default, description) in ARGUMENTS.items()]
    if PROFILE_VARIABLE not in os.environ:  # large messages need more shared memory than Fast DDS takes by itself
        actions.append(SetEnvironmentVariable(PROFILE_VARIABLE, str(HERE / "config" / "fastdds.xml")))
    return LaunchDescription([*actions, OpaqueFunction(function=record)])
