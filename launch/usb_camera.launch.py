# SPDX-License-Identifier: Apache-2.0
"""Map with a USB camera: `ros2 launch lingbot_map_ros usb_camera.launch.py video_device:=/dev/video0 rviz:=true`.

Needs the camera's driver, which is no dependency of this package: ros-$ROS_DISTRO-usb-cam or, with
`driver:=v4l2_camera`, ros-$ROS_DISTRO-v4l2-camera. The arguments of lingbot_map.launch.py are this file's, too.
"""
import os
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

ARGUMENTS = {  # name: (default, description)
    "driver": ("usb_cam", "Package of the camera's driver: usb_cam or v4l2_camera."),
    "video_device": ("/dev/video0", "The camera."),
    "image_width": ("640", "Pixels, of a size that the camera has."),
    "image_height": ("480", "Pixels."),
}
FRAME = "camera_optical_frame"


def start_driver(context):
    """Return the driver's node."""
    value = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    driver, width, height = value["driver"], int(value["image_width"]), int(value["image_height"])
    drivers = {  # package: (executable, parameters)
        "usb_cam": ("usb_cam_node_exe", {"image_width": width, "image_height": height, "frame_id": FRAME}),
        "v4l2_camera": ("v4l2_camera_node", {"image_size": [width, height], "camera_frame_id": FRAME}),
    }
    if driver not in drivers:
        raise ValueError(f"driver:={driver}: expected {' or '.join(drivers)}")
    try:
        get_package_prefix(driver)
    except PackageNotFoundError:
        raise RuntimeError(f"{driver} is not installed: sudo apt install ros-{os.environ.get('ROS_DISTRO', 'DISTRO')}-"
                           f"{driver.replace('_', '-')}") from None
    executable, parameters = drivers[driver]
    return [Node(
        package=driver,
        executable=executable,
        name=driver,
        namespace=[LaunchConfiguration("namespace"), "/camera"],
        parameters=[{"video_device": value["video_device"], **parameters}],
        output="screen",
    )]


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    mapping = IncludeLaunchDescription(  # first, since it sets the Fast DDS profile that the driver needs, too
        PythonLaunchDescriptionSource(str(Path(__file__).absolute().parent / "lingbot_map.launch.py")),
        launch_arguments={"image_topic": "camera/image_raw"}.items())
    arguments = [DeclareLaunchArgument(name, default_value=default, description=description)
                 for name, (default, description) in ARGUMENTS.items()]
    return LaunchDescription([*arguments, mapping, OpaqueFunction(function=start_driver)])
