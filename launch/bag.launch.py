# SPDX-License-Identifier: Apache-2.0
"""Map a recording in its own time: `ros2 launch lingbot_map_ros bag.launch.py bag:=FOLDER image_topic:=/camera/image`.

Playing starts when the model is loaded. Images, their camera_info and /tf_static are played; whatever else is needed,
such as /tf and /odom, `topics` names: not the outputs of a mapping node that were recorded, which would mix with this
node's. The node stays when the recording is over, so that the map can be looked at and saved. Needs rosbag2, which is
no dependency of this package: ros-$ROS_DISTRO-ros2bag. The arguments of lingbot_map.launch.py are this file's, too.
"""
import os
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription, OpaqueFunction, RegisterEventHandler)
from launch.event_handlers import OnProcessIO
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

PLAYER = "ros2bag"
READY = b"waiting for images on"  # says the node when its model is loaded
ARGUMENTS = {  # name: (default or None, description)
    "bag": (None, "The recording."),
    "rate": ("1.0", "Seconds of the recording a second; lower where images are dropped (frames_dropped)."),
    "loop": ("false", "Whether to play it again and again: each time a new sequence starts."),
    "topics": ("", "Further topics to play, with spaces between them."),
}


def play(context):
    """Return what plays the recording as soon as the node is ready."""
    value = {name: LaunchConfiguration(name).perform(context) for name in (*ARGUMENTS, "image_topic", "namespace")}
    if not Path(value["bag"]).exists():
        raise ValueError(f"bag:={value['bag']}: there is no such file or folder")
    if value["loop"].lower() not in ("true", "false"):
        raise ValueError(f"loop:={value['loop']}: expected true or false")
    try:
        get_package_prefix(PLAYER)
    except PackageNotFoundError:
        raise RuntimeError(f"{PLAYER} is not installed: sudo apt install "
                           f"ros-{os.environ.get('ROS_DISTRO', 'DISTRO')}-{PLAYER}") from None
    images = value["image_topic"]
    if not images.startswith("/"):
        images = "/".join(("", *value["namespace"].strip("/").split("/"), images)).replace("//", "/")
    topics = [images, f"{images.removesuffix('/compressed').rpartition('/')[0]}/camera_info", "/tf_static",
              *value["topics"].split()]
    player = ExecuteProcess(
        cmd=["ros2", "bag", "play", value["bag"], "--clock", "--rate", value["rate"], "--topics", *topics,
             *(["--loop"] if value["loop"].lower() == "true" else [])],
        output="screen")
    is_playing = False

    def start(event):
        nonlocal is_playing
        if is_playing or READY not in event.text:
            return None
        is_playing = True
        return player

    return [RegisterEventHandler(OnProcessIO(on_stdout=start, on_stderr=start))]


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    mapping = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(__file__).absolute().parent / "lingbot_map.launch.py")),
        launch_arguments={"use_sim_time": "true"}.items())
    arguments = [DeclareLaunchArgument(name, default_value=default, description=description)
                 for name, (default, description) in ARGUMENTS.items()]
    handler = OpaqueFunction(function=play)
    return LaunchDescription([
        *arguments,
        # Declared by the included file, too, which comes last, so that none of the node's words is missed.
        DeclareLaunchArgument("image_topic", description="Topic of the recorded images."),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node."),
        handler,
        mapping,
    ])
