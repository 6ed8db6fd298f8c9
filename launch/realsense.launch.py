# SPDX-License-Identifier: Apache-2.0
"""Map with the colour camera of an Intel RealSense: `ros2 launch lingbot_map_ros realsense.launch.py rviz:=true`.

Needs the camera's driver, which is no dependency of this package: ros-$ROS_DISTRO-realsense2-camera. The arguments of
lingbot_map.launch.py are this file's, too. The driver's own frames are not published, since the colour camera's frame
has the map as its parent; on a robot, where it has another one, start the driver with the robot, and
lingbot_map.launch.py with `publish_tf:=false` or the parameter odom_frame.
"""
import os
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

DRIVER = "realsense2_camera"
ARGUMENTS = {  # name: (default, description)
    "color_profile": ("640x480x30", "Width, height and rate of the images."),
    "serial_no": ("''", "Serial number of the camera; '': the only one."),
}


def start_driver(context):
    """Return the driver, with its colour camera alone."""
    try:
        folder = get_package_share_directory(DRIVER)
    except PackageNotFoundError:
        raise RuntimeError(f"{DRIVER} is not installed: sudo apt install ros-{os.environ.get('ROS_DISTRO', 'DISTRO')}-"
                           f"{DRIVER.replace('_', '-')}") from None
    driver = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(folder) / "launch" / "rs_launch.py")),
        launch_arguments={
            "camera_namespace": LaunchConfiguration("namespace"),
            "camera_name": "camera",
            "serial_no": LaunchConfiguration("serial_no"),
            "rgb_camera.color_profile": LaunchConfiguration("color_profile"),
            "enable_depth": "false",
            "publish_tf": "false",
        }.items())
    return [GroupAction([driver])]  # a scope of its own: publish_tf is an argument of the mapping node's, too


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    mapping = IncludeLaunchDescription(  # first, since it sets the Fast DDS profile that the driver needs, too
        PythonLaunchDescriptionSource(str(Path(__file__).absolute().parent / "lingbot_map.launch.py")),
        launch_arguments={"image_topic": "camera/color/image_raw"}.items())
    arguments = [DeclareLaunchArgument(name, default_value=default, description=description)
                 for name, (default, description) in ARGUMENTS.items()]
    return LaunchDescription([*arguments, mapping, OpaqueFunction(function=start_driver)])
