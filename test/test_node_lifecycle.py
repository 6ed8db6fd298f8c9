# SPDX-License-Identifier: Apache-2.0
"""Lifecycle transitions and parameter services of the node."""
from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Log, ParameterType
from rcl_interfaces.srv import DescribeParameters, GetParameters, ListParameters
from ros_harness import TIMEOUT, image_message, statuses, wait_until
from sensor_msgs.msg import CompressedImage, Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.ros import parameters
from lingbot_map_ros.ros.parameter_table import ParameterError


def change(ros, node, transition: int, timeout: float = TIMEOUT) -> bool:
    request = ChangeState.Request(transition=Transition(id=transition))
    return ros.call(ChangeState, f"{node.get_fully_qualified_name()}/change_state", request, timeout).success


def state(ros, node) -> str:
    return ros.call(GetState, f"{node.get_fully_qualified_name()}/get_state").current_state.label


def feed(ros, node, start: int, end: int) -> None:
    publisher = ros.publisher(Image, node.resolve_topic_name("image"))
    for index in range(start, end):
        before = node.channels[0].monitor.counts.processed
        publisher.publish(image_message(index))
        wait_until(lambda: node.channels[0].monitor.counts.processed > before, "an image processed")


def set_parameter(ros, node, name: str, value: object):
    return ros.set_parameter(node.get_fully_qualified_name(), name, value)


def test_a_manager_leads_the_node_through_its_life(ros, make_node):
    node = make_node(autostart=False, path_period=0.0)
    topic = node.resolve_topic_name("image")
    odometry = ros.listen(Odometry, f"{node.get_fully_qualified_name()}/odometry")
    paths = ros.listen(Path, f"{node.get_fully_qualified_name()}/path")
    assert state(ros, node) == "unconfigured" and node.channels[0].mapper is None

    assert change(ros, node, Transition.TRANSITION_CONFIGURE)
    assert state(ros, node) == "inactive"
    model = weakref.ref(node.channels[0].mapper.model)
    assert ros.peer.count_subscribers(topic) == 0  # an inactive node does not listen

    assert change(ros, node, Transition.TRANSITION_ACTIVATE)
    assert state(ros, node) == "active"
    feed(ros, node, 0, 5)
    wait_until(lambda: len(odometry) == 5, "5 poses")

    assert change(ros, node, Transition.TRANSITION_DEACTIVATE)
    assert state(ros, node) == "inactive"
    wait_until(lambda: ros.peer.count_subscribers(topic) == 0, "no subscription")
    assert len(node.channels[0].mapper.path) == 5  # paused, not lost

    assert change(ros, node, Transition.TRANSITION_ACTIVATE)
    feed(ros, node, 5, 7)
    wait_until(lambda: len(odometry) == 7, "7 poses, without a new scale phase")
    wait_until(lambda: paths and len(paths[-1].poses) == 7, "the path of both")

    assert change(ros, node, Transition.TRANSITION_DEACTIVATE)
    assert change(ros, node, Transition.TRANSITION_CLEANUP)
    assert state(ros, node) == "unconfigured"
    gc.collect()
    assert model() is None, "the model is still in memory"

    assert change(ros, node, Transition.TRANSITION_CONFIGURE)
    assert change(ros, node, Transition.TRANSITION_ACTIVATE)
    feed(ros, node, 0, 3)
    wait_until(lambda: len(odometry) == 10, "3 poses of a new life")
    assert change(ros, node, Transition.TRANSITION_ACTIVE_SHUTDOWN)
    assert state(ros, node) == "finalized"
    assert node.channels[0].mapper is None


def test_transition_out_of_order_is_refused(ros, make_node):
    node = make_node(autostart=False)
    try:
        assert not change(ros, node, Transition.TRANSITION_ACTIVATE, timeout=3)
    except TimeoutError:
        pass  # jazzy's rclpy raises in place of an answer
    assert state(ros, node) == "unconfigured"  # either way the node goes on


def test_failed_configuration_leaves_the_node_unconfigured_and_says_why(ros, make_node, tmp_path):
    log = ros.listen(Log, "/rosout", 1000)
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"this is no checkpoint")
    node = make_node(autostart=False, checkpoint=str(broken))
    assert not change(ros, node, Transition.TRANSITION_CONFIGURE)
    assert state(ros, node) == "unconfigured"
    wait_until(lambda: any(str(broken) in entry.msg and "\n" not in entry.msg and entry.level >= 40 for entry in log),
               "an error of one line that names the file")
    assert set_parameter(ros, node, "checkpoint", "").successful
    assert change(ros, node, Transition.TRANSITION_CONFIGURE)
    assert state(ros, node) == "inactive"


def test_too_little_memory_is_one_line_that_says_what_fits(ros, make_node, monkeypatch):
    from lingbot_map_ros.gct import state as model_state

    monkeypatch.setattr(model_state, "free_bytes", lambda device: 50 << 20)
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(autostart=False, sliding_window=60, max_sliding_window=600)
    assert not change(ros, node, Transition.TRANSITION_CONFIGURE)
    wait_until(lambda: [entry for entry in log if entry.level >= 40], "an error")
    [error] = [entry.msg for entry in log if entry.level >= 40]
    assert error.startswith("not enough memory: the caches need") and "\n" not in error
    fits = int(re.search(r"a sliding_window of (\d+) fits", error)[1])
    assert set_parameter(ros, node, "max_sliding_window", 0).successful
    assert set_parameter(ros, node, "sliding_window", fits).successful
    assert change(ros, node, Transition.TRANSITION_CONFIGURE)


def test_reset_of_a_node_without_a_model_is_refused(ros, make_node):
    node = make_node(autostart=False)
    response = ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset")
    assert not response.success and "unconfigured" in response.message


def test_reset_works_while_inactive(ros, make_node):
    node = make_node()
    feed(ros, node, 0, 4)
    assert change(ros, node, Transition.TRANSITION_DEACTIVATE)
    assert ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset").success
    assert len(node.channels[0].mapper.path) == 0


def test_every_parameter_is_described(ros, make_node):
    node = make_node(autostart=False)
    name = node.get_fully_qualified_name()
    listed = ros.call(ListParameters, f"{name}/list_parameters").result.names
    assert set(parameters.NAMES) <= set(listed)
    request = DescribeParameters.Request(names=list(parameters.NAMES))
    for descriptor in ros.call(DescribeParameters, f"{name}/describe_parameters", request).descriptors:
        assert descriptor.description and descriptor.additional_constraints
        if descriptor.type == ParameterType.PARAMETER_INTEGER:
            assert descriptor.integer_range
        if descriptor.type == ParameterType.PARAMETER_DOUBLE:
            assert descriptor.floating_point_range


def test_parameters_that_may_change_take_effect_at_the_next_frame(ros, make_node):
    node = make_node(map_frame="map", confidence_threshold=1.0, map_period=0.05)
    poses = ros.listen(PoseStamped, f"{node.get_fully_qualified_name()}/pose")
    points = ros.listen(PointCloud2, f"{node.get_fully_qualified_name()}/points")
    feed(ros, node, 0, 4)
    wait_until(lambda: len(poses) == 4 and len(points) == 4, "poses and points")
    assert points[-1].width > 0
    assert set_parameter(ros, node, "map_frame", "hall").successful
    assert set_parameter(ros, node, "confidence_threshold", 1000.0).successful
    mapped = len(node.channels[0].mapper.map.voxels)
    feed(ros, node, 4, 5)
    wait_until(lambda: len(poses) == 5 and len(points) == 5, "the next")
    assert poses[-1].header.frame_id == points[-1].header.frame_id == "hall"
    assert points[-1].width == 0 and len(node.channels[0].mapper.map.voxels) == mapped


def test_parameters_of_map_and_path_wait_for_a_reset(ros, make_node):
    node = make_node()
    feed(ros, node, 0, 8)
    for name, value in (("scale_frames", 2), ("sliding_window", 3), ("keyframe_interval", 2), ("max_map_points", 500),
                        ("max_path_length", 4), ("camera_iterations", 2)):
        assert set_parameter(ros, node, name, value).successful
    mapper = node.channels[0].mapper
    assert mapper.map.voxels.max_points == 20_000 and mapper.session.config.camera_iterations == 4
    assert ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset").success
    before = node.channels[0].monitor.counts.poses
    feed(ros, node, 9, 10)
    assert node.channels[0].monitor.counts.poses == before
    feed(ros, node, 10, 19)
    assert node.channels[0].monitor.counts.poses == before + 10
    stats = node.channels[0].mapper.session.cache_stats()
    assert (stats["scale_pages"], stats["live_pages"]) == (2, 3)
    assert stats["frame_count"] == 2 + 4  # of 8 frames after the scale frames every second one
    assert node.channels[0].mapper.map.voxels.max_points == 500 and len(node.channels[0].mapper.path) == 4
    assert node.channels[0].mapper.session.config.camera_iterations == 2
    assert set_parameter(ros, node, "sliding_window", 4).successful  # memory is reserved as the node was configured


@pytest.mark.parametrize(("name", "value", "reason"), [
    ("scale_frames", -1, "scale_frames"),
    ("sliding_window", 5000, "1024"),
    ("sliding_window", "wide", "type"),
    ("camera_size", "640", "WIDTHxHEIGHT"),
    ("camera_size", "10000x10", "four digits"),
    ("confidence_threshold", 0.5, "confidence_threshold"),
    ("confidence_threshold", float("nan"), "nan"),
    ("map_frame", "", "name"),
    ("camera_frame", "/camera", "slash"),
    ("remembered_frames", 5, "remembered_frames must be at least 7"),
    ("remembered_frames", 65, "remembered_frames 65 is beyond the 64"),
    ("sliding_window", 5, "raise max_sliding_window or cache_memory_mib at start"),
    ("window_size", 8, "overlap_keyframes"),
    ("max_sliding_window", 8, "unconfigured"),
    ("cache_memory_mib", 8, "unconfigured"),
    ("attention_backend", "sdpa", "unconfigured"),
    ("cache_dtype", "float8_e4m3fn", "unconfigured"),
    ("keyframe_policy", "whim", "motion, interval"),
    ("checkpoint", "/somewhere.pt", "unconfigured"),
    ("device", "cuda", "unconfigured"),
    ("autostart", False, "read-only"),
])
def test_bad_value_is_refused_with_the_reason(ros, make_node, name, value, reason):
    node = make_node()
    before = node.parameters
    result = set_parameter(ros, node, name, value)
    assert not result.successful and reason in result.reason
    assert node.parameters == before
    request = GetParameters.Request(names=[name])
    [kept] = ros.call(GetParameters, f"{node.get_fully_qualified_name()}/get_parameters", request).values
    from rclpy.parameter import parameter_value_to_python
    assert parameter_value_to_python(kept) == getattr(before, name)


def test_what_belongs_to_the_model_can_be_set_while_unconfigured(ros, make_node):
    node = make_node(autostart=False)
    assert set_parameter(ros, node, "image_width", 42).successful
    assert not set_parameter(ros, node, "device", "tpu").successful
    assert change(ros, node, Transition.TRANSITION_CONFIGURE)
    assert change(ros, node, Transition.TRANSITION_ACTIVATE)
    feed(ros, node, 0, 3)
    assert node.channels[0].mapper.session.image_size[1] == 42


def test_window_cannot_change_unchecked_while_the_model_loads(ros, make_node, monkeypatch):
    from lingbot_map_ros.ros import loaded_model

    build, loads, go_on = loaded_model.build_model, threading.Event(), threading.Event()

    def slow_build(*arguments, **options):
        loads.set()
        assert go_on.wait(TIMEOUT)
        return build(*arguments, **options)

    monkeypatch.setattr(loaded_model, "build_model", slow_build)
    node = make_node(autostart=False)
    starter = threading.Thread(target=node.start)
    starter.start()
    try:
        assert loads.wait(TIMEOUT)
        for name, value in (("sliding_window", 30), ("camera_iterations", 8), ("max_map_points", 10)):
            result = set_parameter(ros, node, name, value)
            assert not result.successful and f"{name} cannot be set while the model is being loaded" in result.reason
        assert set_parameter(ros, node, "map_frame", "hall").successful
        assert set_parameter(ros, node, "max_path_length", 2).successful
    finally:
        go_on.set()
        starter.join()
    assert node.parameters.sliding_window == 0 and node.parameters.map_frame == "hall"
    assert set_parameter(ros, node, "sliding_window", 2).successful
    assert ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset").success
    feed(ros, node, 0, 5)
    assert len(node.channels[0].mapper.path) == 2


def test_camera_iterations_beyond_the_budget_are_refused(ros, make_node):
    node = make_node(cache_memory_mib=3)
    feed(ros, node, 0, 4)
    window = node.channels[0].mapper.session.config.sliding_window
    assert set_parameter(ros, node, "sliding_window", window).successful
    result = set_parameter(ros, node, "camera_iterations", 8)
    assert not result.successful and "MiB" in result.reason
    assert ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset").success
    feed(ros, node, 4, 8)
    assert node.channels[0].monitor.counts.failed == 0


def test_new_diagnostics_period_begins_at_once(ros, make_node):
    node = make_node(autostart=False, diagnostics_period=60.0)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    assert set_parameter(ros, node, "diagnostics_period", 0.1).successful
    wait_until(lambda: statuses(reports, node), "a report in the new period", 10)


def test_load_error_goes_when_a_parameter_is_mended(ros, make_node):
    node = make_node(autostart=False, image_width=50, diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")

    def model() -> str:
        status = statuses(reports, node).get("model")
        return status.message if status else ""

    assert not change(ros, node, Transition.TRANSITION_CONFIGURE)
    wait_until(lambda: "image_width" in model(), "the error")
    assert set_parameter(ros, node, "image_width", 42).successful
    wait_until(lambda: model() == "unconfigured", "no error")


def test_call_that_takes_too_long_says_that_it_will_be_done(ros, make_node, monkeypatch):
    from lingbot_map_ros.ros import services

    monkeypatch.setattr(services, "CALL_TIMEOUT", 0.1)
    node = make_node()
    feed(ros, node, 0, 4)
    go_on = threading.Event()
    node._worker.submit(lambda: go_on.wait(TIMEOUT))
    response = ros.call(Trigger, f"{node.get_fully_qualified_name()}/reset")
    go_on.set()
    assert not response.success and "it will be done" in response.message
    wait_until(lambda: len(node.channels[0].mapper.path) == 0, "the reset")


def test_whole_number_is_taken_for_a_double(ros, make_node):
    node = make_node(map_period=2)
    assert node.parameters.map_period == 2.0
    assert set_parameter(ros, node, "map_period", 3).successful
    assert node.parameters.map_period == 3.0 and isinstance(node.parameters.map_period, float)


@pytest.mark.parametrize("bad", [{"scale_frames": 1000}, {"scale_frames": 2.5}, {"dtype": "float8"}, {"map_period": 0}])
def test_bad_parameter_at_start_is_refused(ros, make_node, bad):
    with pytest.raises(ParameterError, match=next(iter(bad))):
        make_node(**bad)


@pytest.mark.parametrize(("message", "variable", "words"), [
    (None, None, ("0 publishers; ros2 topic list",)),
    (CompressedImage, None, ("1 publisher of sensor_msgs/msg/CompressedImage, which is not read",)),
    (Image, None, ("1 publisher, of sensor_msgs/msg/Image (reliable, volatile)", "unless FASTDDS_DEFAULT_PROFILES_FILE "
                   "is set, on jazzy FASTRTPS_DEFAULT_PROFILES_FILE (see README)")),
    (Image, "FASTDDS_DEFAULT_PROFILES_FILE", ("is FASTDDS_DEFAULT_PROFILES_FILE set for the camera's driver, too",)),
])
def test_silence_names_its_likely_cause(ros, make_node, monkeypatch, message, variable, words):
    from lingbot_map_ros.ros.channel import PROFILE_VARIABLES, _why_silent

    for name in PROFILE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "/profile.xml")
    node = make_node(autostart=False)
    topic = node.resolve_topic_name("image")
    publisher = ros.peer.create_publisher(message, topic, 1) if message else None
    wait_until(lambda: node.count_publishers(topic) == bool(message), "the publisher")
    text = _why_silent(node.get_publishers_info_by_topic(topic), "raw", "image")
    if publisher is not None:
        ros.peer.destroy_publisher(publisher)
    if rclpy.get_rmw_implementation_identifier() != "rmw_fastrtps_cpp":
        words = words[:1] if variable is None else ()
    assert all(word in text for word in words), text
