# SPDX-License-Identifier: Apache-2.0
"""Map with two cameras: `ros2 launch lingbot_map_ros two_cameras.launch.py front_topic:=/front/image_raw`.

One node and one model serve both in turn. Each camera has a cache, a map and a map frame of its own (front/map), and
its own unit of length unless `scale_source` tells metres. A params_file of your own must name the cameras front and
rear. The arguments of lingbot_map.launch.py but image_topic and rviz (whose topics are those of a single camera) are
this file's, too.
"""
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import SetRemap

HERE = Path(__file__).absolute().parents[1]
CAMERAS = ("front", "rear")  # as config/two_cameras.yaml names them


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    arguments = [DeclareLaunchArgument(f"{name}_topic", default_value=f"/{name}/image_raw",
                                       description=f"Topic of the {name} camera's images.") for name in CAMERAS]
    arguments.append(DeclareLaunchArgument("params_file", default_value=str(HERE / "config" / "two_cameras.yaml"),
                                           description="Parameters of the node."))
    topics = [SetRemap(f"{name}/image", LaunchConfiguration(f"{name}_topic")) for name in CAMERAS]
    node = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(HERE / "launch" / "lingbot_map.launch.py")),
        launch_arguments={"params_file": LaunchConfiguration("params_file")}.items())
    return LaunchDescription([*arguments, GroupAction([*topics, node])])
