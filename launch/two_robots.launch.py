# SPDX-License-Identifier: Apache-2.0
"""Map on two robots that share one ROS network: `ros2 launch lingbot_map_ros two_robots.launch.py`.

Each robot has a node in its namespace, and its name before all frames: robot1/map, robot1/camera_optical_frame. In
practice each robot starts its own: `lingbot_map.launch.py namespace:=robot1 params_file:=two_robots.yaml`. The
arguments of lingbot_map.launch.py but namespace and params_file are this file's, too.
"""
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

HERE = Path(__file__).absolute().parents[1]
ROBOTS = ("robot1", "robot2")  # namespaces, which config/two_robots.yaml names as well


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    actions = [DeclareLaunchArgument("image_topic", default_value="camera/image_raw",
                                     description="Topic of the images in each robot's namespace.")]
    for name in ROBOTS:
        node = IncludeLaunchDescription(
            PythonLaunchDescriptionSource(str(HERE / "launch" / "lingbot_map.launch.py")),
            launch_arguments={
                "namespace": name,
                "image_topic": LaunchConfiguration("image_topic"),
                "params_file": str(HERE / "config" / "two_robots.yaml"),
            }.items())
        actions.append(GroupAction([node]))  # a scope of its own for the arguments
    return LaunchDescription(actions)
