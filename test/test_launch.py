# SPDX-License-Identifier: Apache-2.0
"""The launch files, launched for real where launch_ros can be imported (with ROS 2 from apt; the wheels lack it)."""
import importlib.util
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import yaml
from diagnostic_msgs.msg import DiagnosticStatus
from nav_msgs.msg import Odometry
from ros_harness import LATCHED, REPOSITORY, TIMEOUT, image_message, stamp_of, stamps, wait_until
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
            process.send_signal(signal.SIGINT)  # ends what it has launched, too
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
    wait_until(publisher.get_subscription_count, "the node's subscription, which comes after")
    events = ros.listen(DiagnosticStatus, "/robot/lingbot_map_node/events", LATCHED)

    def taken() -> bool:
        publisher.publish(image_message(0))  # again: the first ones may be lost before the node has found the publisher
        return bool(events)

    wait_until(taken, "the first image taken")
    for index in range(1, 6):
        publisher.publish(image_message(index))
        wait_until(lambda: len(odometry) > index, f"the pose of image {index}")
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


def test_profile_gives_large_messages_room():
    tree = xml.etree.ElementTree.parse(REPOSITORY / "config" / "fastdds.xml")
    name = "{http://www.eprosima.com}"
    transports = {t.find(f"{name}transport_id").text: t for t in tree.iter(f"{name}transport_descriptor")}
    used = [element.text for element in tree.find(f".//{name}userTransports")]
    assert sorted(transports[identifier].find(f"{name}type").text for identifier in used) == ["SHM", "UDPv4"]
    (shared,) = [t for t in transports.values() if t.find(f"{name}type").text == "SHM"]
    assert int(shared.find(f"{name}segment_size").text) >= int(shared.find(f"{name}maxMessageSize").text) >= 2**26


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Yield a function that makes a ROS package whose executables print the parameters that they get, and sleep."""
    prefix = tmp_path / "ros"
    monkeypatch.setenv("AMENT_PREFIX_PATH", f"{prefix}:{os.environ.get('AMENT_PREFIX_PATH', '')}")

    def make(name: str, *executables: str) -> Path:
        index = prefix / "share" / "ament_index" / "resource_index" / "packages"
        index.mkdir(parents=True, exist_ok=True)
        (index / name).touch()
        (prefix / "lib" / name).mkdir(parents=True)
        (prefix / "share" / name / "launch").mkdir(parents=True)
        for executable in executables:
            path = prefix / "lib" / name / executable
            path.write_text('#!/bin/sh\necho "given: $@"\nfor f in "$@"; do [ -f "$f" ] && cat "$f"; done\n'
                            "env | grep PROFILES_FILE\n")
            path.chmod(0o755)
        return prefix / "share" / name

    return make


def said(launch, folder: Path, file: str, *arguments: str, rc: int = 0) -> str:
    """Launch a file with a command in place of the node that prints its arguments; return what was said."""
    assert (launch("python:=/bin/echo", *arguments, file=file).wait(TIMEOUT) != 0) == (rc != 0)
    return (folder / "launch.log").read_text()


@needs_launch_ros
@pytest.mark.parametrize(("driver", "executable", "expected"), [
    ("usb_cam", "usb_cam_node_exe", ("image_width: 320", "image_height: 240", "frame_id: camera_optical_frame")),
    ("v4l2_camera", "v4l2_camera_node", ("- 320\n    - 240", "camera_frame_id: camera_optical_frame")),
])
def test_usb_camera_is_started_and_mapped(launch, package, tmp_path, driver, executable, expected):
    package(driver, executable)
    text = said(launch, tmp_path, "usb_camera.launch.py", f"driver:={driver}", "image_width:=320", "image_height:=240",
                "video_device:=/dev/video7", "namespace:=robot")
    assert "-r image:=camera/image_raw" in text
    assert "__ns:=/robot/camera" in text
    plain = re.sub(r"^\[[^\]]+\] ", "", text, flags=re.MULTILINE)
    assert all(part in plain for part in (*expected, "video_device: /dev/video7"))
    assert f"{REPOSITORY}/config/fastdds.xml" in text


@needs_launch_ros
def test_realsense_is_started_with_its_colour_camera_and_mapped(launch, package, tmp_path):
    share = package("realsense2_camera", "realsense2_camera_node")
    (share / "launch" / "rs_launch.py").write_text(
        "from launch import LaunchDescription\n"
        "from launch.actions import LogInfo\n"
        "from launch.substitutions import LaunchConfiguration as L\n"
        "def generate_launch_description():\n"
        "    names = ('camera_namespace', 'camera_name', 'rgb_camera.color_profile', 'enable_depth', 'publish_tf')\n"
        "    return LaunchDescription([LogInfo(msg=[n, '=', L(n)]) for n in names])\n")
    text = said(launch, tmp_path, "realsense.launch.py", "namespace:=robot", "publish_tf:=true")
    for words in ("camera_namespace=robot", "camera_name=camera", "color_profile=640x480x30", "enable_depth=false",
                  "publish_tf=false", "-r image:=camera/color/image_raw"):
        assert words in text
    files = [word for word in text.split() if "launch_params" in word]
    assert "publish_tf: true" in Path(files[-1]).read_text()  # the node's


@needs_launch_ros
@pytest.mark.parametrize(("file", "arguments", "missing"), [
    ("usb_camera.launch.py", (), "ros-{distro}-usb-cam"),
    ("realsense.launch.py", (), "ros-{distro}-realsense2-camera"),
    ("record.launch.py", (), "ros-{distro}-ros2bag"),
    ("bag.launch.py", ("bag:=.", "image_topic:=/image"), "ros-{distro}-ros2bag"),
])
def test_driver_that_is_missing_is_named(launch, tmp_path, monkeypatch, file, arguments, missing):
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path))
    text = said(launch, tmp_path, file, *arguments, rc=1)
    assert f"is not installed: sudo apt install {missing}".format(distro=os.environ.get("ROS_DISTRO", "DISTRO")) in text


@pytest.fixture
def ros2(tmp_path, monkeypatch, package):
    """Put a command `ros2` on the path that prints its arguments."""
    package("ros2bag")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ros2"
    command.write_text('#!/bin/sh\necho "ros2 $@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


@needs_launch_ros
def test_recording_is_played_once_the_node_is_ready(launch, ros2, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nsleep 1\necho loading\n'
                      'echo "waiting for images on /x"\necho "waiting for images on"\n')
    python.chmod(0o755)
    (tmp_path / "bag").mkdir()
    assert launch(f"python:={python}", f"bag:={tmp_path}/bag", "image_topic:=camera/image_raw", "namespace:=robot",
                  "loop:=true", "topics:=/tf /odom", "rate:=0.5", file="bag.launch.py").wait(TIMEOUT) == 0
    text = (tmp_path / "launch.log").read_text()
    assert sum("ros2 bag play" in line and "process started" not in line for line in text.splitlines()) == 1
    assert (f"ros2 bag play {tmp_path}/bag --clock --rate 0.5 --topics /robot/camera/image_raw "
            "/robot/camera/camera_info /tf_static /tf /odom --loop") in text
    assert text.index("waiting for images") < text.index("ros2 bag play")


@needs_launch_ros
def test_bag_that_is_not_there_is_refused(launch, tmp_path):
    assert "bag:=nowhere: there is no such file or folder" in said(
        launch, tmp_path, "bag.launch.py", "bag:=nowhere", "image_topic:=/image", rc=1)


@needs_launch_ros
def test_recorder_takes_the_profile_with_this_robots_names(launch, ros2, tmp_path):
    text = said(launch, tmp_path, "record.launch.py", "image_topic:=/camera/image_raw/compressed", "namespace:=robot",
                "output:=run1")
    (line,) = [line for line in text.splitlines() if "ros2 bag record" in line]
    words = line[line.index("ros2 bag record"):].split()
    topics = words[words.index("--topics") + 1:]
    assert words[words.index("--output") + 1] == "run1"
    assert topics[:3] == ["/camera/image_raw/compressed", "/camera/camera_info", "/odom"]
    assert "/robot/lingbot_map_node/map" in topics and "/lingbot_map_node/map" not in topics
    profile = yaml.safe_load(Path(words[words.index("--qos-profile-overrides-path") + 1]).read_text())
    assert set(profile) == set(topics)
    assert profile["/robot/lingbot_map_node/map"]["durability"] == "transient_local"


@needs_launch_ros
def test_two_robots_are_two_nodes(launch, tmp_path):
    text = said(launch, tmp_path, "two_robots.launch.py")
    for namespace in ("robot1", "robot2"):
        (line,) = [line for line in text.splitlines() if f"__ns:=/{namespace}" in line]
        assert "-r image:=camera/image_raw" in line and str(REPOSITORY / "config" / "two_robots.yaml") in line


@needs_launch_ros
def test_two_cameras_are_one_node(launch, tmp_path):
    text = said(launch, tmp_path, "two_cameras.launch.py", "front_topic:=/a")
    (line,) = [line for line in text.splitlines() if "-r front/image:=/a" in line]
    assert "-r rear/image:=/rear/image_raw" in line and str(REPOSITORY / "config" / "two_cameras.yaml") in line
    own = tmp_path / "own.yaml"
    own.write_text("/**:\n  ros__parameters:\n    cameras: [front, rear]\n    rear.image_rotation: 180\n")
    assert f"--params-file {own}" in said(launch, tmp_path, "two_cameras.launch.py", f"params_file:={own}")
