# SPDX-License-Identifier: Apache-2.0
"""What shows and records the node's topics, RViz, Foxglove and rosbag2, against the topics that there are."""
import json
import re
from pathlib import Path

import pytest
import yaml
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseArray, PoseStamped
from nav_msgs.msg import OccupancyGrid, Odometry
from nav_msgs.msg import Path as PathMessage
from ros_harness import REPOSITORY
from sensor_msgs.msg import Image, PointCloud2

from lingbot_map_ros.ros import diagnostics, interfaces
from lingbot_map_ros.ros.diagnostics import Counts, Interval
from lingbot_map_ros.ros.node_parameters import NodeParameters

NODE = "lingbot_map_node"
FOXGLOVE_NODES = {"3D", "Image", "DiagnosticSummary", "RawMessages", "Plot"}


def absolute(name: str) -> str:
    """Return the full name of a topic of the node without a namespace or remappings."""
    name = name.replace("~", f"/{NODE}")
    return name if name.startswith("/") else f"/{name}"


PUBLISHED = {absolute(topic.name): topic for topic in interfaces.PUBLISHED}
TOPICS = PUBLISHED | {absolute(topic.name): topic for topic in interfaces.SUBSCRIBED}


def policies(topic: interfaces.Topic) -> tuple[str, str]:
    """Return reliability and durability in words."""
    return tuple(topic.qos_text.split(", ")[:2])


def test_rviz_shows_what_the_node_publishes():
    manager = yaml.safe_load((REPOSITORY / "rviz" / "lingbot_map.rviz").read_text())["Visualization Manager"]
    displays = {display["Name"]: display for display in manager["Displays"] if "Topic" in display}
    messages = {"PointCloud2": PointCloud2, "Path": PathMessage, "Odometry": Odometry, "Pose": PoseStamped,
                "PoseArray": PoseArray, "Map": OccupancyGrid, "Image": Image}
    for display in displays.values():
        topic = TOPICS[display["Topic"]["Value"]]
        assert topic.message is messages[display["Class"].split("/")[1]]
        asked = (display["Topic"]["Reliability Policy"].lower(), display["Topic"]["Durability Policy"].lower())
        assert asked == policies(topic), display["Name"]
    shown = {displays[name]["Topic"]["Value"].removeprefix(f"/{NODE}/") for name in displays}
    assert shown == {"map", "points", "path", "odometry", "visual_odometry", "pose", "keyframes", "grid", "depth",
                     "/image"}
    assert manager["Global Options"]["Fixed Frame"] == interfaces.FRAMES[0][0] == "map"
    (pose_tool,) = [tool for tool in manager["Tools"] if tool["Class"].endswith("SetInitialPose")]
    assert pose_tool["Topic"]["Value"] == absolute(interfaces.INITIAL_POSE.name)


def test_launch_file_moves_all_topics_of_rviz_into_a_namespace():
    source = (REPOSITORY / "launch" / "lingbot_map.launch.py").read_text()
    values = {"NODE": NODE}
    exec(source[source.index("RVIZ_TOPICS = ("):source.index("# Fast DDS reads")], values)
    config = (REPOSITORY / "rviz" / "lingbot_map.rviz").read_text()
    used = set(re.findall(r"^ +Value: (/\S+)$", config, re.MULTILINE))
    assert set(values["RVIZ_TOPICS"]) == used - {"/image"}  # which is moved to the camera's


@pytest.fixture(scope="module")
def layout() -> dict:
    return json.loads((REPOSITORY / "config" / "foxglove.json").read_text())


def test_foxglove_layout_holds_every_panel_once(layout):
    def leaves(node) -> list[str]:
        return [node] if isinstance(node, str) else leaves(node["first"]) + leaves(node["second"])

    panels = leaves(layout["layout"])
    assert sorted(panels) == sorted(layout["configById"])
    assert {panel.split("!")[0] for panel in panels} == FOXGLOVE_NODES


def test_foxglove_layout_names_topics_that_there_are(layout):
    panels = layout["configById"]
    scene = panels["3D!map"]
    assert scene["followTf"] == "map"
    assert set(scene["topics"]) <= set(PUBLISHED)
    assert {f"/{NODE}/map", f"/{NODE}/path"} <= {topic for topic, view in scene["topics"].items() if view["visible"]}
    assert scene["publish"]["poseEstimateTopic"] == absolute(interfaces.INITIAL_POSE.name)
    for name in ("Image!camera", "Image!depth"):
        assert TOPICS[panels[name]["imageMode"]["imageTopic"]].message is Image
    info = TOPICS[panels["Image!depth"]["imageMode"]["calibrationTopic"]]
    assert info is interfaces.DEPTH_INFO
    assert PUBLISHED[panels["DiagnosticSummary!all"]["topicToRender"]].message is DiagnosticArray
    assert PUBLISHED[panels["RawMessages!tracking"]["topicPath"]].message is DiagnosticStatus


def test_foxglove_layout_plots_values_that_diagnostics_have(layout):
    interval = Interval(seconds=1.0, latencies=[0.1])
    camera = diagnostics.camera_status(NODE, "camera", "/image", True, 1, 0.0, 0, 3.0, 0, None, Counts(), interval)
    model = diagnostics.model_status(NODE, "cpu", "active", "", "", {}, interval)
    found = {status.name: {entry.key for entry in status.values} for status in (camera, model)}
    cache = (REPOSITORY / "cache" / "kv_cache.py").read_text()
    found[f"{NODE}: cache"] = set(re.findall(r'"(\w+)": ', cache[cache.index("def get_cache_stats"):]))
    plots = [panel for name, panel in layout["configById"].items() if name.startswith("Plot!")]
    paths = [path["value"] for panel in plots for path in panel["paths"]]
    assert len(paths) >= 4
    for path in paths:
        topic, status, key = re.fullmatch(
            r'(/\w+)\.status\[:\]\{name=="([^"]+)"\}\.values\[:\]\{key=="(\w+)"\}\.value', path).groups()
        assert topic in PUBLISHED and key in found[status], path


def recording() -> dict:
    return yaml.safe_load((REPOSITORY / "config" / "recording.yaml").read_text())


def test_recording_takes_topics_that_there_are_with_a_fitting_qos():
    profile = recording()
    assert set(profile) <= set(TOPICS)
    assert {f"/{NODE}/{name}" for name in ("odometry", "visual_odometry", "map", "tracking_state", "events")} <= set(
        profile)
    assert {"/image", "/camera_info", "/tf", "/tf_static", "/odom", "/diagnostics"} <= set(profile)
    for name, qos in profile.items():
        assert set(qos) == {"history", "depth", "reliability", "durability"}
        assert qos["history"] == "keep_last" and qos["depth"] >= 1
        asked = tuple(qos[policy].replace("_", " ") for policy in ("reliability", "durability"))
        assert asked == policies(TOPICS[name]), name  # no more than is offered, and latched messages, too


def example(name: str) -> tuple[dict, tuple[str, ...]]:
    """Return an example's parameter file and the names in its launch file."""
    source = (REPOSITORY / "launch" / f"{name}.launch.py").read_text()
    assert f'"config" / "{name}.yaml"' in source
    names = re.findall(r'"(\w+)"', re.search(r"^(?:CAMERAS|ROBOTS) = \((.*?)\)", source, re.MULTILINE)[1])
    return yaml.safe_load((REPOSITORY / "config" / f"{name}.yaml").read_text()), tuple(names)


def test_parameter_file_of_two_robots_names_the_nodes_that_are_started():
    tree, robots = example("two_robots")
    assert set(tree) == {f"/{robot}/{NODE}" for robot in robots}
    parameters = [NodeParameters().changed(entry["ros__parameters"]).shared for entry in tree.values()]
    assert [entry.frame_prefix for entry in parameters] == [f"{robot}/" for robot in robots]


def test_parameter_file_of_two_cameras_names_those_of_the_launch_file():
    tree, cameras = example("two_cameras")
    assert NodeParameters().changed(tree["/**"]["ros__parameters"]).shared.cameras == cameras


def test_examples_refer_to_files_that_are_installed():
    files = sorted((REPOSITORY / "launch").glob("*.py"))
    assert len(files) >= 8
    for path in files:
        assert path.name.endswith(".launch.py")  # what setup.py installs
        source = path.read_text()
        compile(source, str(path), "exec")
        for folder, name in re.findall(r'"(config|launch|rviz)" / "([\w.]+)"', source):
            assert (REPOSITORY / folder / name).is_file() or name == "rs_launch.py", f"{path.name}: {name}"


def test_player_starts_at_words_that_the_node_says():
    words = re.search(r'^READY = b"(.*)"', (REPOSITORY / "launch" / "bag.launch.py").read_text(), re.MULTILINE)[1]
    assert words in (Path(interfaces.__file__).parent / "channel.py").read_text()
