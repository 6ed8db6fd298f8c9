# SPDX-License-Identifier: Apache-2.0
"""Start the node on one camera: `ros2 launch lingbot_map_ros lingbot_map.launch.py image_topic:=/camera/image_raw`."""
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

import yaml
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterFile

HERE = Path(__file__).absolute().parents[1]  # the installed share folder, or the checkout
CHECKOUT = Path(__file__).resolve().parents[1]  # the same, unless the installed file is a link into the checkout
NODE = "lingbot_map_node"
RVIZ_TOPICS = (*(f"/{NODE}/{name}" for name in (
    "map", "points", "path", "odometry", "visual_odometry", "pose", "keyframes", "grid", "depth")), "/initialpose")
# Fast DDS reads one of these, by its version.
PROFILE_VARIABLE = (
    "FASTRTPS_DEFAULT_PROFILES_FILE" if os.environ.get("ROS_DISTRO") == "jazzy" else "FASTDDS_DEFAULT_PROFILES_FILE")


def default_python() -> str:
    """Return the interpreter with torch: the active virtual environment's, else the checkout's, else this one."""
    for environment in (os.environ.get("VIRTUAL_ENV"), CHECKOUT / ".venv"):
        python = Path(environment or "") / "bin" / "python"
        if environment and python.exists():
            return str(python)
    return sys.executable


ARGUMENTS = {  # name: (default, description)
    "image_topic": ("image", "Topic of the camera's images."),
    "params_file": (str(HERE / "config" / "lingbot_map.yaml"), "Parameters of the node."),
    "checkpoint": ("", "File with the model's weights; empty: as params_file says. A .pt is the published model's."),
    "namespace": ("", "Namespace of the node."),
    "python": (default_python(), "Interpreter that has torch: the node runs in it."),
    "rviz": ("false", "Whether to open RViz as well."),
    "publish_tf": ("", "Whether to publish map -> camera frame; false where that frame has a parent already. Empty: as "
                   "your params_file says, and true where that says nothing."),
    "use_sim_time": ("", "Whether to take the time from /clock; empty: as params_file says."),
}


def start_nodes(context):
    """Return the nodes for the arguments' values."""
    value = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    asked = {name: _boolean(name, value[name]) for name in ("publish_tf", "use_sim_time") if value[name]}
    in_file = _own_parameters(value["params_file"], value["namespace"])
    is_shipped = os.path.abspath(value["params_file"]) == ARGUMENTS["params_file"][0]  # it says the node's defaults
    overrides = dict(asked)
    if is_shipped or "publish_tf" not in in_file:
        overrides.setdefault("publish_tf", True)
    if value["checkpoint"]:
        overrides["checkpoint"] = os.path.abspath(os.path.expanduser(value["checkpoint"]))
        if not overrides["checkpoint"].endswith(".safetensors"):  # such a file says itself what model it is of
            overrides["preset"] = "lingbot_map"
    nodes = [Node(
        # The module rather than lib/lingbot_map_ros/lingbot_map_node: that script names the interpreter that installed
        # it, which on Ubuntu is the system's, without torch.
        executable=value["python"],
        arguments=["-m", "lingbot_map_ros.ros.node"],
        exec_name=NODE,
        name=NODE,
        namespace=value["namespace"],
        parameters=[ParameterFile(value["params_file"]), overrides],
        remappings=[("image", value["image_topic"])],
        output="screen",
        emulate_tty=True,
    )]
    if _boolean("rviz", value["rviz"]):
        prefix = f"/{value['namespace'].strip('/')}" if value["namespace"].strip("/") else ""
        nodes.append(Node(
            package="rviz2",
            executable="rviz2",
            arguments=["-d", str(HERE / "rviz" / "lingbot_map.rviz")],
            parameters=[{"use_sim_time": asked.get("use_sim_time", in_file.get("use_sim_time") is True)}],
            remappings=[("/image", _resolve(value["image_topic"], prefix)),
                        *((topic, prefix + topic) for topic in RVIZ_TOPICS if prefix)],
        ))
    return nodes


def _resolve(topic, prefix):
    """Return a topic's full name in the node's namespace, "" or one that starts with a slash."""
    return topic if topic.startswith("/") else f"{prefix}/{topic}"


def _own_parameters(path, namespace):
    """Return the parameters that a file sets for this node; none if it cannot be read, which its user will say."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    found = {}

    def search(tree, prefix):
        for key, value in tree.items() if isinstance(tree, dict) else ():
            name = f"{prefix}/{key}".strip("/")  # of a node, with wildcards; or of a namespace
            if key != "ros__parameters":
                search(value, name)
            elif isinstance(value, dict) and fnmatch(f"{namespace}/{NODE}".strip("/"), prefix.replace("**/", "*")):
                found.update(value)

    search(tree, "")
    return found


def _boolean(name, text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"{name}:={text}: expected true or false")
    return text.lower() in ("true", "1")


def generate_launch_description():
    """Return what `ros2 launch` runs."""
    actions = [DeclareLaunchArgument(name, default_value=default, description=description)
               for name, (default, description) in ARGUMENTS.items()]
    if PROFILE_VARIABLE not in os.environ:  # large messages need more shared memory than Fast DDS takes by itself
        actions.append(SetEnvironmentVariable(PROFILE_VARIABLE, str(HERE / "config" / "fastdds.xml")))
    return LaunchDescription([*actions, OpaqueFunction(function=start_nodes)])
