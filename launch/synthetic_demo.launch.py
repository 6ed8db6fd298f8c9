# SPDX-License-Identifier: Apache-2.0
"""Map a rendered place, with RViz if wanted: `ros2 launch lingbot_map_ros synthetic_demo.launch.py rviz:=true`."""
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

ARGUMENTS = {  # name: (type, default, description); parameters of the camera
    "place": (str, "room", "Kind of place: room, kitchen, office, corridor or outdoors."),
    "seed": (int, "0", "Which one."),
    "rate": (float, "10.0", "Images a second."),
    "loop_frames": (int, "360", "Images of one round; the more, the slower the camera moves."),
    "dropped": (float, "0.0", "Share of images that are lost."),
    "blurred": (float, "0.0", "Share of images that are blurred."),
}


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    mapping = IncludeLaunchDescription(PythonLaunchDescriptionSource(
        str(Path(__file__).absolute().parent / "lingbot_map.launch.py")))  # its arguments are this file's, too
    parameters = {name: ParameterValue(LaunchConfiguration(name), value_type=kind)
                  for name, (kind, _, _) in ARGUMENTS.items()}
    camera = Node(
        executable=LaunchConfiguration("python"),  # which the included file has declared
        arguments=["-m", "lingbot_map_ros.ros.synthetic_camera"],
        exec_name="synthetic_camera",
        name="synthetic_camera",
        namespace=LaunchConfiguration("namespace"),
        parameters=[{"wait_for_subscriber": True, **parameters}],
        remappings=[("image", LaunchConfiguration("image_topic"))],
        output="screen",
        emulate_tty=True,
    )
    arguments = [DeclareLaunchArgument(name, default_value=default, description=description)
                 for name, (_, default, description) in ARGUMENTS.items()]
    return LaunchDescription([*arguments, mapping, camera])
