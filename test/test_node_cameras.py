# SPDX-License-Identifier: Apache-2.0
"""Several cameras in one node: one model, and for each camera topics, services, frames and a cache of its own."""
from __future__ import annotations

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseArray, PoseStamped, PoseWithCovarianceStamped
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import Log, ParameterType
from rcl_interfaces.srv import GetParameters
from ros_harness import (LATCHED, SCALE_FRAMES, TIMEOUT, Feed, image_message, private, stamp_of, stamps, statuses,
                         values, wait_until)
from sensor_msgs.msg import Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.node_parameters import NodeParameters
from lingbot_map_ros.ros.parameter_table import ParameterError
from lingbot_map_ros.ros.parameters import PER_CAMERA, Parameters

CAMERAS = ["front", "rear"]


def two(ros, node) -> tuple[Feed, Feed]:
    """Return what feeds each of two cameras."""
    return tuple(Feed(ros, node, camera=camera) for camera in CAMERAS)


def positions(poses) -> np.ndarray:
    return np.array([[p.pose.position.x, p.pose.position.y, p.pose.position.z] for p in poses])


def test_each_camera_maps_as_it_would_alone(ros, make_node):
    node, *alone = make_node(cameras=CAMERAS), make_node(), make_node()
    assert len({id(channel.mapper.model) for channel in node.channels}) == 1
    poses = {camera: ros.listen(PoseStamped, private(node, f"{camera}/pose")) for camera in CAMERAS}
    maps = {camera: ros.listen(PointCloud2, private(node, f"{camera}/map"), LATCHED) for camera in CAMERAS}
    expected = {camera: ros.listen(PoseStamped, private(one, "pose")) for camera, one in zip(CAMERAS, alone)}
    front, rear = two(ros, node)
    front_alone, rear_alone = (Feed(ros, one) for one in alone)
    for index in range(8):
        for feed in (front, front_alone):
            feed.send(image_message(index))
        if index % 2:  # the rear camera is slower, and sees something else
            for feed in (rear, rear_alone):
                feed.send(image_message(2 * index, (56, 56)))
    wait_until(lambda: [len(some[camera]) for some in (poses, expected) for camera in CAMERAS] == [8, 4, 8, 4], "all")
    for camera in CAMERAS:
        assert np.array_equal(positions(poses[camera]), positions(expected[camera]))
    assert stamps(poses["rear"]) == [stamp_of(2 * index) for index in (1, 3, 5, 7)]
    assert [channel.monitor.counts.poses for channel in node.channels] == [8, 4]
    wait_until(lambda: all(maps.values()), "both maps")
    assert {camera: maps[camera][-1].header.frame_id for camera in CAMERAS} == {
        "front": "front/map", "rear": "rear/map"}


def test_names_of_all_topics_and_services_carry_the_camera(ros, make_node):
    node = make_node(cameras=CAMERAS)
    topics = {name for name, _ in node.get_publisher_names_and_types_by_node(node.get_name(), node.get_namespace())}
    services = {name for name, _ in node.get_service_names_and_types_by_node(node.get_name(), node.get_namespace())}
    for camera in CAMERAS:
        for topic in (interfaces.ODOMETRY, interfaces.MAP, interfaces.EVENTS, interfaces.DEPTH_INFO):
            assert private(node, topic.name.replace("~", camera)) in topics
            assert private(node, topic.name[2:]) not in topics
        for service in interfaces.SERVICES:
            assert private(node, service.name.replace("~", camera)) in services
            assert private(node, service.name[2:]) not in services
    namespace = node.get_namespace()
    inputs = {name for name, _ in node.get_subscriber_names_and_types_by_node(node.get_name(), namespace)}
    assert {f"{namespace}/{camera}/{name}" for camera in CAMERAS
            for name in ("image", "camera_info", "initialpose")} <= inputs
    assert f"{namespace}/image" not in inputs


def test_frames_are_the_cameras_but_odometry_is_the_robots():
    parameters = NodeParameters(Parameters(cameras=("front", "rear"), frame_prefix="robot1/", odom_frame="odom",
                                           base_frame="base"), {"front.camera_frame": "optical"})
    front = parameters.of("front")
    assert [front.frame(name) for name in ("map_frame", "camera_frame", "odom_frame", "base_frame")] == [
        "robot1/front/map", "robot1/optical", "robot1/odom", "robot1/base"]
    assert front.file("map_file") == "front_map.ply" and front.own_frame("odom") == "robot1/front/odom"
    single = NodeParameters(Parameters(frame_prefix="robot1/")).of("")
    assert (single.frame("map_frame"), single.file("map_file")) == ("robot1/map", "map.ply")


def test_images_without_a_frame_get_one_of_their_camera(ros, make_node):
    node = make_node(cameras=CAMERAS, frame_prefix="robot1/")
    odometry = ros.listen(Odometry, private(node, "rear/odometry"))
    visual = ros.listen(Odometry, private(node, "rear/visual_odometry"))
    _, rear = two(ros, node)
    rear.images(0, SCALE_FRAMES, frame_id="")
    wait_until(lambda: odometry and visual, "odometry")
    assert odometry[0].header.frame_id == "robot1/rear/map"
    assert odometry[0].child_frame_id == "robot1/rear/camera_optical_frame"
    assert visual[0].header.frame_id == "robot1/rear/odom"


def test_services_act_on_their_camera_only(ros, make_node, tmp_path):
    node = make_node(cameras=CAMERAS, save_directory=str(tmp_path))
    front, rear = two(ros, node)
    front.images(0, 5)
    rear.images(0, 5)
    for camera in CAMERAS:
        for service in ("save_map", "save_trajectory"):
            response = ros.call(Trigger, private(node, f"{camera}/{service}"))
            assert response.success and str(tmp_path / camera) in response.message
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "front_map.ply", "front_trajectory.txt", "rear_map.ply", "rear_trajectory.txt"]
    assert "starts at the next image" in ros.call(Trigger, private(node, "rear/reset")).message
    assert [len(channel.mapper.path) for channel in node.channels] == [5, 0]
    assert ros.call(Trigger, private(node, "front/pause")).success
    rear.images(5, 8)
    assert [channel.loaded.intake.is_paused for channel in node.channels] == [True, False]
    assert [channel.monitor.counts.sequences for channel in node.channels] == [1, 2]


def test_initialpose_places_its_camera(ros, make_node):
    node = make_node(cameras=CAMERAS)
    poses = {camera: ros.listen(PoseStamped, private(node, f"{camera}/pose")) for camera in CAMERAS}
    message = PoseWithCovarianceStamped()
    message.header.frame_id = "rear/map"
    message.pose.pose.position.x, message.pose.pose.orientation.w = 7.0, 1.0
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("rear/initialpose"))
    publisher.publish(message)
    wait_until(lambda: node.channels[1].loaded.placement.pose_to_come is not None, "it taken")
    for feed in two(ros, node):
        feed.images(0, SCALE_FRAMES)
    wait_until(lambda: all(len(received) == SCALE_FRAMES for received in poses.values()), "poses")
    assert poses["rear"][0].pose.position.x == pytest.approx(7.0)
    assert abs(poses["front"][0].pose.position.x) < 1.0


def test_diagnostics_have_a_part_for_each_camera_and_one_model(ros, make_node):
    node = make_node(cameras=CAMERAS, diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    events = ros.listen(DiagnosticStatus, private(node, "rear/events"), LATCHED)
    states = ros.listen(DiagnosticStatus, private(node, "front/tracking_state"), LATCHED)
    front, rear = two(ros, node)
    front.images(0, 6)
    rear.images(0, 4)

    def found() -> dict:
        return statuses(reports, node)

    def processed(camera: str) -> str:
        return values(found()[f"{camera}/camera"])["frames_processed"] if f"{camera}/camera" in found() else ""

    wait_until(lambda: (processed("front"), processed("rear")) == ("6", "4"), "both counts")
    assert set(found()) == {"model", *(f"{camera}/{part}" for camera in CAMERAS
                                       for part in ("camera", "cache", "tracking"))}
    assert values(found()["front/camera"])["topic"] == node.resolve_topic_name("front/image")
    assert values(found()["rear/cache"])["frame_count"] == "4"
    own = next(array for array in reversed(reports) if array.status[0].name.startswith(private(node, "")[1:-1]))
    assert [status.name.rsplit(": ")[1] for status in own.status].count("model") == 1
    wait_until(lambda: events and states, "an event and a state")
    assert events[0].name.endswith(": rear/sequence") and states[-1].name.endswith(": front/tracking")
    assert states[-1].message == "TRACKING"


def test_a_camera_that_fails_leaves_the_other_alone(ros, make_node, monkeypatch):
    node = make_node(cameras=CAMERAS)
    front, rear = two(ros, node)
    front.images(0, 5)
    rear.images(0, 5)
    monkeypatch.setattr(node.channels[1].mapper.session, "step", lambda *arguments: 1 / 0)
    rear.images(5, 7)
    rear.send(image_message(7, encoding="nonsense"))
    front.images(5, 8)
    assert [channel.monitor.counts.failed for channel in node.channels] == [0, 3]
    assert [channel.monitor.counts.sequences for channel in node.channels] == [1, 1]
    assert len(node.channels[0].mapper.path) == 8 and len(node.channels[1].mapper.path) == 0


def test_a_silent_camera_is_told_of_while_the_other_maps(ros, make_node):
    node = make_node(cameras=CAMERAS, image_timeout=0.5, diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    front, _ = two(ros, node)
    index = 0

    def silent() -> bool:
        nonlocal index
        front.send(image_message(index))
        index += 1
        found = statuses(reports, node)
        return bool(found) and found["rear/camera"].message.startswith("no image on") and (
            found["front/camera"].level == DiagnosticStatus.OK)

    wait_until(silent, "the silence of one")
    assert statuses(reports, node)["model"].level == DiagnosticStatus.OK


def test_what_differs_between_cameras_can_be_set_for_one(ros, make_node):
    node = make_node(cameras=CAMERAS, **{"rear.image_rotation": 180, "front.max_rate": 2.0})
    name = node.get_fully_qualified_name()
    front, rear = two(ros, node)
    for index in range(6):
        front.send(image_message(index))
        rear.send(image_message(index))
    assert [channel.pipeline._view.rotation for channel in node.channels] == [0, 180]
    assert [channel.monitor.counts.skipped for channel in node.channels] == [4, 0]
    refused = ros.set_parameter(name, "rear.image_rotation", 45)
    assert not refused.successful and "rear.image_rotation is 45: expected 0, 90" in refused.reason
    refused = ros.set_parameter(name, "rear.image_transport", "compressed")
    assert not refused.successful and "rear.image_transport can be set only while the node is unconfigured" in (
        refused.reason)
    assert ros.set_parameter(name, "rear.image_rotation", 0).successful
    assert ros.set_parameter(name, "image_rotation", 90).successful  # for the camera that has none of its own
    front.send(image_message(10))
    rear.send(image_message(10))
    assert [channel.pipeline._view.rotation for channel in node.channels] == [90, 0]
    assert ros.set_parameter(name, "confidence_threshold", 2.0).successful
    wait_until(lambda: [channel.mapper.map.confidence_threshold for channel in node.channels] == [2.0, 2.0], "both")


def test_a_value_of_one_camera_can_be_taken_back_and_set_again(ros, make_node):
    node = make_node(cameras=CAMERAS, max_rate=7.0)
    name = node.get_fully_qualified_name()
    for _ in range(2):
        assert ros.set_parameter(name, "front.max_rate", 2.0).successful
        assert [channel.scope.parameters.max_rate for channel in node.channels] == [2.0, 7.0]
        assert ros.set_parameter(name, "front.max_rate", None).successful
        assert [channel.scope.parameters.max_rate for channel in node.channels] == [7.0, 7.0]


def test_cameras_that_share_a_frame_are_warned_of(ros, make_node):
    node = make_node(cameras=CAMERAS, diagnostics_period=0.1)
    log = ros.listen(Log, "/rosout", 1000)
    for feed in two(ros, node):
        feed.images(0, SCALE_FRAMES, frame_id="optical")
    wait_until(lambda: any("the frame of the cameras front and rear is optical" in entry.msg for entry in log), "it")
    assert ros.set_parameter(node.get_fully_qualified_name(), "rear.camera_frame", "rear_optical").successful


def test_a_qos_that_cannot_be_leaves_nothing_behind(ros, make_node):
    for topic, namespace in (("/tf", "bad_tf_qos"), ("/bad_map_qos/lingbot_map_node/rear/map", "bad_map_qos")):
        node = make_node(namespace=namespace, cameras=CAMERAS, autostart=False, publish_tf=True,
                         **{f"qos_overrides.{topic}.publisher.reliability": "perhaps"})
        before = node.get_publisher_names_and_types_by_node(node.get_name(), node.get_namespace())
        for _ in range(2):
            assert not node.start()
            assert topic in node._load_error
            # What is destroyed leaves the graph a little later.
            wait_until(lambda: node.get_publisher_names_and_types_by_node(
                node.get_name(), node.get_namespace()) == before, "no more publishers than before")


def test_window_parameters_hold_for_all_cameras_and_are_judged_by_all(ros, make_node):
    node = make_node(cameras=CAMERAS, max_sliding_window=8)
    name = node.get_fully_qualified_name()
    for feed in two(ros, node):
        feed.images(0, 5)
    assert ros.set_parameter(name, "sliding_window", 2).successful
    wait_until(lambda: all(channel.mapper.session.config.sliding_window == 2 for channel in node.channels), "both")
    refused = ros.set_parameter(name, "sliding_window", 9)
    assert not refused.successful and "max_sliding_window" in refused.reason


def test_a_memory_budget_is_shared(ros, make_node):
    node, alone = make_node(cameras=CAMERAS, cache_memory_mib=8), make_node(cache_memory_mib=4)
    for feed in (*two(ros, node), Feed(ros, alone)):
        feed.images(0, SCALE_FRAMES)
    windows = [channel.mapper.session.config.sliding_window for channel in (*node.channels, *alone.channels)]
    assert len(set(windows)) == 1
    assert sum(channel.mapper.session.memory_bytes for channel in node.channels) <= 8 << 20


def test_lifecycle_frees_and_reloads_all_cameras(ros, make_node):
    node = make_node(cameras=CAMERAS)
    keyframes = ros.listen(PoseArray, private(node, "rear/keyframes"))
    for feed in two(ros, node):
        feed.images(0, 5)
    node.trigger_deactivate()
    assert [len(channel.mapper.path) for channel in node.channels] == [5, 5]
    assert "the node is not active" in node.channels[1].pipeline.tracking.reasons
    node.trigger_cleanup()
    assert all(channel.mapper is None and channel.pipeline is None for channel in node.channels)
    response = ros.call(Trigger, private(node, "rear/reset"))
    assert not response.success and "unconfigured" in response.message
    assert node.start()
    for feed in two(ros, node):
        feed.images(5, 10)
    assert [len(channel.mapper.path) for channel in node.channels] == [5, 5]
    wait_until(lambda: keyframes and len(keyframes[-1].poses) == 5, "the keyframes")


@pytest.mark.parametrize(("cameras", "reason"), [
    (("front", "front"), "twice"),
    (("front", ""), "letters"),
    (("front camera",), "letters"),
    (("1st",), "a letter first"),
    (("front__left",), "single underscores"),
    ((), "expected 1 to 16 names"),
    (tuple(f"camera{i}" for i in range(17)), "expected 1 to 16 names"),
])
def test_bad_names_are_refused(cameras, reason):
    with pytest.raises(ParameterError, match="cameras is") as caught:
        Parameters(cameras=cameras)
    assert reason in str(caught.value)


def test_one_named_camera_has_its_name_everywhere(ros, make_node):
    node = make_node(cameras=["head"])
    poses = ros.listen(PoseStamped, private(node, "head/pose"))
    Feed(ros, node, camera="head").images(0, SCALE_FRAMES)
    wait_until(lambda: len(poses) == SCALE_FRAMES, "poses")
    assert poses[0].header.frame_id == "head/map"


def test_odometry_has_one_parent_only():
    shared = Parameters(cameras=("front", "rear"), odom_frame="odom", publish_tf=True)
    with pytest.raises(ParameterError, match="front and rear, but odom_frame can have one parent only"):
        NodeParameters(shared)
    one = NodeParameters(shared, {"rear.publish_tf": False})
    assert one.of("front").publish_tf and not one.of("rear").publish_tf
    with pytest.raises(ParameterError, match="one parent"):
        one.changed({"rear.publish_tf": True})
    with pytest.raises(ParameterError, match="one parent"):
        one.changed({"rear.publish_tf": None})  # what holds for all is back
    assert one.changed({"publish_tf": False, "rear.publish_tf": True}).of("rear").publish_tf


def test_frames_of_several_cameras_differ():
    cameras = ("front", "rear")
    with pytest.raises(ParameterError, match="camera_frame is 'optical' for more than one camera: set front.camera_"):
        NodeParameters(Parameters(cameras=cameras, camera_frame="optical"))
    one = NodeParameters(Parameters(cameras=cameras, camera_frame="optical"), {"rear.camera_frame": "rear_optical"})
    assert [one.of(camera).frame("camera_frame") for camera in cameras] == ["optical", "rear_optical"]
    with pytest.raises(ParameterError, match="odom_frame is 'front/map', which is map_frame too"):
        NodeParameters(Parameters(cameras=cameras, odom_frame="front/map"))
    NodeParameters(Parameters(cameras=cameras, odom_frame="map"))  # theirs are front/map and rear/map


def test_names_of_one_camera_are_not_asked_of_several():
    shared = Parameters(cameras=("front", "rear"))
    with pytest.raises(ValueError):
        shared.frame("map_frame")


def test_a_budget_too_small_to_divide_is_refused():
    with pytest.raises(ParameterError, match="cache_memory_mib is 1: 2 cameras share it"):
        NodeParameters(Parameters(cameras=("front", "rear"), cache_memory_mib=1))


def test_values_of_one_camera_have_the_table_s_types_and_ranges():
    parameters = NodeParameters(Parameters(cameras=("front",)))
    assert set(PER_CAMERA) <= set(Parameters.__dataclass_fields__)
    assert parameters.changed({"front.max_rate": 5}).of("front").max_rate == 5.0
    for name, value in (("max_rate", -1.0), ("undistort", 1), ("camera_frame", "/a"), ("calibration", "Q")):
        with pytest.raises(ParameterError, match=f"front.{name} is {value!r}"):
            parameters.changed({f"front.{name}": value})
    assert parameters.known({"front.max_rate": 1.0, "rear.max_rate": 1.0, "use_sim_time": True, "max_rate": 2.0}) == {
        "front.max_rate": 1.0, "max_rate": 2.0}


def test_two_cameras_from_a_parameter_file(ros, node_process, tmp_path):
    file = tmp_path / "cameras.yaml"
    file.write_text("/**:\n  ros__parameters:\n    cameras: [front, rear]\n    rear.image_rotation: 180\n"
                    "    front: {max_rate: 5.0}\n")
    process = node_process(arguments=["--params-file", str(file), "-r", "front/image:=/one", "-r", "__ns:=/robot"])
    poses = ros.listen(PoseStamped, "/robot/lingbot_map_node/front/pose")
    process.wait_for_text("waiting for images on /robot/rear/image")
    assert "waiting for images on /one" in process.text()
    publisher = ros.publisher(Image, "/one")
    index = 0

    def arrived() -> bool:
        nonlocal index
        publisher.publish(image_message(index))
        index += 5
        return bool(poses)

    wait_until(arrived, "poses", TIMEOUT)
    names = ["rear.image_rotation", "front.image_rotation", "front.max_rate", "cameras"]
    found = ros.call(GetParameters, "/robot/lingbot_map_node/get_parameters", GetParameters.Request(names=names)).values
    assert (found[0].integer_value, found[1].type, found[2].double_value, list(found[3].string_array_value)) == (
        180, ParameterType.PARAMETER_NOT_SET, 5.0, CAMERAS)
    assert process.stop() == 0


def test_an_error_at_the_start_names_its_camera(node_process):
    process = node_process({"cameras": "[front, rear]",
                            "qos_overrides./lingbot_map_node/rear/map.publisher.reliability": "perhaps"})
    assert process.process.wait(TIMEOUT) == 1
    assert "camera rear: " in process.text() and "/lingbot_map_node/rear/map" in process.text()
