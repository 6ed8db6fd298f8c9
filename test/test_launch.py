# SPDX-License-Identifier: Apache-2.0
"""The launch file, launched for real where launch_ros can be imported (with ROS 2 from apt; the wheels lack it)."""
import importlib.util
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import yaml
from nav_msgs.msg import Odometry
from ros_harness import REPOSITORY, TIMEOUT, image_message, stamp_of, stamps, wait_until
from sensor_msgs.msg import Image

from lingbot_map_ros.ros import interfaces

needs_launch_ros = pytest.mark.skipif(
    not (importlib.util.find_spec("launch") and importlib.util.find_spec("launch_ros")),
    reason="launch_ros is not here: it comes with ROS 2 from apt, not with the wheels")

LAUNCH = """
import sys
from launch import LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
path, *arguments = sys.argv[1:]
service = LaunchService(noninteractive=True)
service.include_launch_description(IncludeLaunchDescription(
    PythonLaunchDescriptionSource(path), launch_arguments=[argument.split(":=", 1) for argument in arguments]))
sys.exit(service.run())
"""


@pytest.fixture
def launch(tmp_path):
    """Yield a function that launches a file with arguments, as a process."""
    processes = []

    def start(*arguments: str, file: str = "lingbot_map.launch.py") -> subprocess.Popen:
        environment = {key: value for key, value in os.environ.items() if "DEFAULT_PROFILES_FILE" not in key}
        path = REPOSITORY / "launch" / file
        with open(tmp_path / "launch.log", "wb") as log:
            processes.append(subprocess.Popen([sys.executable, "-c", LAUNCH, str(path), *arguments], env=environment,
                                              cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait(TIMEOUT)


@needs_launch_ros
def test_launched_node_maps_a_camera(ros, launch, tmp_path):
    parameters = tmp_path / "tiny.yaml"
    parameters.write_text("/**:\n  ros__parameters:\n    preset: tiny\n    device: cpu\n    scale_frames: 2\n")
    # An interpreter that tells what it is started with, to see that the argument and the profile get there.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nenv > {tmp_path}/environment\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    odometry = ros.listen(Odometry, "/robot/lingbot_map_node/odometry")
    transforms = ros.listen(interfaces.TFMessage, "/tf") if interfaces.TFMessage else None
    process = launch("namespace:=robot", "image_topic:=/front/image_raw", f"params_file:={parameters}",
                     f"python:={python}")
    publisher = ros.publisher(Image, "/front/image_raw")
    wait_until(lambda: ros.peer.count_publishers("/robot/lingbot_map_node/odometry"), "odometry offered")
    for index in range(6):
        publisher.publish(image_message(index))
        wait_until(lambda: index < 1 or len(odometry) > index, f"the pose of image {index}")
    assert stamps(odometry) == [stamp_of(index) for index in range(6)]
    if transforms is not None:
        wait_until(lambda: transforms, "a transform on /tf")
        first = transforms[0].transforms[0]
        assert (first.header.frame_id, first.child_frame_id) == ("map", "camera")
    environment = (tmp_path / "environment").read_text()
    assert f"_DEFAULT_PROFILES_FILE={REPOSITORY}/config/fastdds.xml" in environment

    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0
    assert "process has finished cleanly" in (tmp_path / "launch.log").read_text()


@needs_launch_ros
def test_launched_demo_maps_a_rendered_place(ros, launch, tmp_path):
    parameters = tmp_path / "tiny.yaml"
    parameters.write_text("/**/lingbot_map_node:\n  ros__parameters: {preset: tiny, device: cpu, scale_frames: 2, "
                          "init_motion: 0.0, jump_factor: 1.0e+6}\n")
    odometry = ros.listen(Odometry, "/robot/lingbot_map_node/odometry")
    truth = ros.listen(Odometry, "/robot/ground_truth/odometry")
    process = launch("namespace:=robot", "image_topic:=front/image", f"params_file:={parameters}", "loop_frames:=8",
                     "rate:=2", "dropped:=0.25", f"python:={sys.executable}", file="synthetic_demo.launch.py")
    wait_until(lambda: len(odometry) > 4, "poses of the rendered images", timeout=3 * TIMEOUT)
    assert set(stamps(odometry)) < set(stamps(truth))
    assert (truth[0].header.frame_id, odometry[0].child_frame_id) == ("world", "camera_optical_frame")
    assert ros.peer.count_publishers("/robot/front/image") == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0
    assert (tmp_path / "launch.log").read_text().count("process has finished cleanly") == 2


@needs_launch_ros
def test_argument_that_is_no_boolean_is_refused(launch, tmp_path):
    assert launch("publish_tf:=perhaps").wait(TIMEOUT) != 0
    assert "publish_tf:=perhaps: expected true or false" in (tmp_path / "launch.log").read_text()


def overrides(launch, folder, *arguments: str) -> dict:
    """Launch a command in place of the node that prints its arguments; return the parameters that come last of all."""
    assert launch("python:=/bin/echo", *arguments).wait(TIMEOUT) == 0
    files = [word for word in (folder / "launch.log").read_text().split() if "launch_params" in word]
    if not files:
        return {}
    ((_, node),) = yaml.safe_load(Path(files[-1]).read_text()).items()
    return node["ros__parameters"]


@needs_launch_ros
@pytest.mark.parametrize(("content", "arguments", "expected"), [
    (None, (), {"publish_tf": True}),  # the shipped file
    ("/**: {ros__parameters: {preset: tiny}}", (), {"publish_tf": True}),
    ("/**: {ros__parameters: {publish_tf: false, use_sim_time: true}}", (), {}),
    ("/**: {ros__parameters: {publish_tf: false, use_sim_time: true}}", ("publish_tf:=true", "use_sim_time:=false"),
     {"publish_tf": True, "use_sim_time": False}),
    ("lingbot_map_node: {ros__parameters: {publish_tf: false}}", (), {}),
    ("/**/lingbot_map_node: {ros__parameters: {publish_tf: false}}", (), {}),
    ("robot: {lingbot_map_node: {ros__parameters: {publish_tf: false}}}", ("namespace:=robot",), {}),
    ("camera: {ros__parameters: {publish_tf: false}}", (), {"publish_tf": True}),  # another node's
])
def test_parameter_file_of_the_user_comes_before_the_launch_files_own_values(
        launch, tmp_path, content, arguments, expected):
    if content is not None:
        (tmp_path / "my.yaml").write_text(content)
        arguments += (f"params_file:={tmp_path}/my.yaml",)
    assert overrides(launch, tmp_path, *arguments) == expected


@needs_launch_ros
def test_published_checkpoint_brings_its_preset(launch, tmp_path):
    values = overrides(launch, tmp_path, "checkpoint:=nowhere/weights.pt")
    assert values["preset"] == "lingbot_map"
    assert values["checkpoint"] == str(tmp_path / "nowhere" / "weights.pt")
    assert values["publish_tf"] is True


def test_rviz_shows_what_the_node_publishes():
    config = yaml.safe_load((REPOSITORY / "rviz" / "lingbot_map.rviz").read_text())
    manager = config["Visualization Manager"]
    topics = {topic.name.replace("~", "/lingbot_map_node"): topic for topic in interfaces.PUBLISHED}
    shown = [display["Topic"] for display in manager["Displays"] if "Topic" in display]
    assert {topic["Value"] for topic in shown} == {
        f"/lingbot_map_node/{name}" for name in ("map", "points", "path", "odometry")}
    for topic in shown:
        policies = f"{topic['Reliability Policy']}, {topic['Durability Policy']}".lower()
        assert topics[topic["Value"]].qos_text.startswith(policies)
    assert manager["Global Options"]["Fixed Frame"] == "map"


def test_profile_gives_large_messages_room():
    tree = xml.etree.ElementTree.parse(REPOSITORY / "config" / "fastdds.xml")
    name = "{http://www.eprosima.com}"
    transports = {t.find(f"{name}transport_id").text: t for t in tree.iter(f"{name}transport_descriptor")}
    used = [element.text for element in tree.find(f".//{name}userTransports")]
    assert sorted(transports[identifier].find(f"{name}type").text for identifier in used) == ["SHM", "UDPv4"]
    (shared,) = [t for t in transports.values() if t.find(f"{name}type").text == "SHM"]
    assert int(shared.find(f"{name}segment_size").text) >= int(shared.find(f"{name}maxMessageSize").text) >= 2**26
