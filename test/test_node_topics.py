# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: images in, every topic out."""
from __future__ import annotations

import math
import os

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Log
from rclpy.qos import QoSProfile, QoSReliabilityPolicy, qos_profile_sensor_data
from ros_harness import (
    LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, statuses, values, wait_until,
)
from sensor_msgs.msg import CompressedImage, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.ros import diagnostics_table, interfaces
from lingbot_map_ros.ros.messages import POINT_TYPE

WARN = int.from_bytes(Log.WARN, "little") if isinstance(Log.WARN, bytes) else Log.WARN  # bytes on jazzy


def cloud_points(cloud: PointCloud2) -> np.ndarray:
    assert [field.name for field in cloud.fields] == ["x", "y", "z", "rgb", "confidence"]
    assert cloud.point_step == POINT_TYPE.itemsize and cloud.row_step == len(cloud.data)
    points = np.frombuffer(cloud.data, POINT_TYPE)
    assert len(points) == cloud.width * cloud.height
    return points


def require_finite(points: np.ndarray) -> None:
    for name in ("x", "y", "z", "confidence"):
        assert np.isfinite(points[name]).all()


def test_images_become_poses_path_and_clouds(ros, make_node):
    node = make_node(map_period=0.05, path_period=0.0, confidence_threshold=1.0)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    poses = ros.listen(PoseStamped, private(node, "pose"))
    paths = ros.listen(Path, private(node, "path"))
    points = ros.listen(PointCloud2, private(node, "points"))
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    Feed(ros, node).images(0, 8)
    wait_until(lambda: len(odometry) == 8 and len(poses) == 8 and len(points) == 8, "8 poses and clouds")
    wait_until(lambda: paths and len(paths[-1].poses) == 8, "the whole path")
    wait_until(lambda: maps and stamps(maps)[-1] == stamp_of(7), "the map after the last image")

    expected = [stamp_of(index) for index in range(8)]
    assert stamps(odometry) == stamps(poses) == stamps(points) == stamps(paths[-1].poses) == expected
    assert {message.header.frame_id for message in (*odometry, *poses, *points, *maps, *paths)} == {"map"}
    assert {message.child_frame_id for message in odometry} == {"camera"}
    for message, pose in zip(odometry, poses):
        assert message.pose.pose == pose.pose
        orientation = pose.pose.orientation
        assert math.isclose(math.hypot(orientation.x, orientation.y, orientation.z, orientation.w), 1, abs_tol=1e-6)
        covariance = np.reshape(message.pose.covariance, (6, 6))
        assert (np.diag(covariance) > 0).all() and np.count_nonzero(covariance) == 6
    for cloud in (*points, *maps):
        require_finite(cloud_points(cloud))
    assert all(len(cloud_points(cloud)) for cloud in points)
    assert len(cloud_points(maps[-1])) == len(node.channels[0].mapper.map.voxels)


def test_twist_leads_from_pose_to_pose(ros, make_node):
    node = make_node()
    odometry = ros.listen(Odometry, private(node, "odometry"))
    Feed(ros, node).images(0, 6)
    wait_until(lambda: len(odometry) == 6, "6 poses")
    first = odometry[0].twist.twist
    assert (first.linear.x, first.linear.y, first.linear.z, first.angular.x) == (0, 0, 0, 0)
    for before, now in zip(odometry, odometry[1:]):
        step = [getattr(now.pose.pose.position, axis) - getattr(before.pose.pose.position, axis) for axis in "xyz"]
        speed = math.hypot(*(getattr(now.twist.twist.linear, axis) for axis in "xyz"))
        assert speed == pytest.approx(math.hypot(*step) / 0.1, rel=1e-6)


def test_a_level_camera_looks_along_x_of_the_map(ros, make_node):
    node = make_node(confidence_threshold=1.0)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, SCALE_FRAMES)
    wait_until(lambda: poses, "a pose")
    q = poses[0].pose.orientation
    ahead = [2 * (q.x * q.z + q.w * q.y), 2 * (q.y * q.z - q.w * q.x)]  # x, y in map of the camera's z axis
    down = 2 * (q.y * q.z + q.w * q.x)  # z in map of the camera's y axis
    assert ahead[0] > 0.7 and down < -0.7  # an untrained model's first pose is only roughly the identity


@pytest.mark.parametrize("reliability", [QoSReliabilityPolicy.RELIABLE, QoSReliabilityPolicy.BEST_EFFORT])
def test_cameras_of_both_reliabilities_are_received(ros, make_node, reliability):
    node = make_node()
    feed = Feed(ros, node, qos=QoSProfile(depth=5, reliability=reliability))
    feed.images(0, SCALE_FRAMES)
    assert node.channels[0].monitor.counts.poses == SCALE_FRAMES


def test_offered_qos_is_the_documented_one(ros, make_node):
    node = make_node(publish_tf=True)
    Feed(ros, node).images(0, SCALE_FRAMES)
    for topic in interfaces.PUBLISHED:
        if topic.message is None:
            continue
        infos = [info for info in ros.peer.get_publishers_info_by_topic(node.resolve_topic_name(topic.name))
                 if info.node_namespace == node.get_namespace()]
        assert len(infos) == 1, topic.name
        assert infos[0].topic_type == topic.type_name
        assert infos[0].qos_profile.reliability == topic.qos.reliability
        assert infos[0].qos_profile.durability == topic.qos.durability


def test_map_reaches_who_comes_late(ros, make_node):
    node = make_node(map_period=0.05, confidence_threshold=1.0)
    Feed(ros, node).images(0, 5)
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    wait_until(lambda: maps, "the map")
    assert stamps(maps)[-1] == stamp_of(4) and len(cloud_points(maps[-1])) > 0
    again = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    wait_until(lambda: again, "the map once more, though it has not changed")


def test_map_of_a_paused_node_is_the_newest(ros, make_node):
    node = make_node(map_period=3600.0)
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 4)
    wait_until(lambda: maps, "the first map")
    feed.images(4, 8)
    assert stamps(maps)[-1] != stamp_of(7)
    node.trigger_deactivate()
    late = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    wait_until(lambda: late, "the map for who comes late")
    assert stamps(late)[-1] == stamp_of(7) and len(cloud_points(late[-1])) == len(node.channels[0].mapper.map.voxels)


def test_path_reaches_who_comes_late_and_is_bounded(ros, make_node):
    node = make_node(path_period=0.0, max_path_length=4)
    first = ros.listen(Path, private(node, "path"))
    Feed(ros, node).images(0, 6)
    expected = [stamp_of(index) for index in range(2, 6)]
    wait_until(lambda: first and stamps(first[-1].poses) == expected, "the path")
    late = ros.listen(Path, private(node, "path"))
    wait_until(lambda: late and stamps(late[-1].poses) == expected, "the path once more, though it has not grown")
    assert ros.set_parameter(node.get_fully_qualified_name(), "map_frame", "hall").successful
    ros.listen(Path, private(node, "path"))
    wait_until(lambda: late[-1].header.frame_id == "hall", "the new frame")
    assert {pose.header.frame_id for pose in late[-1].poses} == {"hall"}


def test_an_image_on_its_way_is_not_mapped_when_the_node_is_paused(ros, make_node):
    node = make_node()
    Feed(ros, node).images(0, 5)
    node.trigger_deactivate()
    node.channels[0].loaded.intake.receive(image_message(5))
    wait_until(lambda: node.channels[0].mailbox.is_empty, "the image taken")
    node._worker.submit(lambda: None).result()
    assert node.channels[0].monitor.counts.processed == 5


def test_transform_is_published_on_demand_only(ros, make_node):
    if interfaces.TF.message is None:
        if os.environ.get("LINGBOT_REQUIRE_TF") == "1":
            pytest.fail("tf2_msgs cannot be imported")
        pytest.skip("tf2_msgs cannot be imported")
    node = make_node(map_frame="hall", camera_frame="robot/camera")
    transforms = ros.listen(interfaces.TF.message, "/tf")
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    wait_until(lambda: len(odometry) == 4, "4 poses")
    assert not ros.peer.get_publishers_info_by_topic("/tf")
    assert ros.set_parameter(node.get_fully_qualified_name(), "publish_tf", True).successful
    feed.send(image_message(4))  # the publisher on /tf comes with it
    wait_until(lambda: ros.peer.count_publishers("/tf"), "a publisher on /tf")
    feed.images(5, 8)
    wait_until(lambda: len(odometry) == 8 and transforms and stamps(transforms[-1].transforms) == [stamp_of(7)],
               "the last transform")
    transform = transforms[-1].transforms[0]
    assert (transform.header.frame_id, transform.child_frame_id) == ("hall", "robot/camera")
    position = odometry[-1].pose.pose.position
    translation = transform.transform.translation
    assert (translation.x, translation.y, translation.z) == (position.x, position.y, position.z)
    assert transform.transform.rotation == odometry[-1].pose.pose.orientation


def test_without_tf2_msgs_the_node_says_so_once_and_goes_on(ros, make_node, monkeypatch):
    monkeypatch.setattr(interfaces, "TF", interfaces.Topic("/tf", None, interfaces.TF.qos, ""))
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(publish_tf=True)
    Feed(ros, node).images(0, 6)
    assert node.channels[0].monitor.counts.poses == 6
    wait_until(lambda: any("tf2_msgs" in entry.msg for entry in log), "a warning")
    assert sum("tf2_msgs" in entry.msg for entry in log) == 1


@pytest.mark.parametrize(("frame_id", "name"), [
    ("", "camera_optical_frame"),
    ("map", "camera_optical_frame"),  # a frame cannot be its own parent
    ("/", "camera_optical_frame"),
    ("/eye/left", "eye/left"),
    ("my camera", "my_camera"),
])
def test_frame_id_that_tf_does_not_take_is_mended_with_a_warning(ros, make_node, frame_id, name):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    odometry = ros.listen(Odometry, private(node, "odometry"))
    Feed(ros, node).images(0, SCALE_FRAMES, frame_id=frame_id)
    wait_until(lambda: len(odometry) == SCALE_FRAMES, "poses")
    assert {message.child_frame_id for message in odometry} == {name}
    wait_until(lambda: any(f"frame_id is {frame_id!r}" in entry.msg and entry.level == WARN for entry in log),
               "a warning")


@pytest.mark.parametrize(("fields", "words"), [
    ({"encoding": "yuv999"}, ("encoding", "yuv999")),
    ({"step": 10}, ("step", "10")),
    ({"width": 0}, ("width", "0")),
    ({"data": bytes(7)}, ("data", "7 bytes")),
    ({"width": 1, "height": 60_000, "step": 3, "data": bytes(180_000)}, ("aspect ratio", "1x60000")),
])
def test_bad_image_is_reported_and_costs_nothing(ros, make_node, fields, words):
    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1, confidence_threshold=1.0)
    feed = Feed(ros, node)
    feed.images(0, 5)
    mapped = len(node.channels[0].mapper.map.voxels)
    feed.send(image_message(5, **fields))
    topic = node.resolve_topic_name("image")
    wait_until(lambda: any(all(word in entry.msg for word in (topic, *words)) for entry in log), "a warning")
    wait_until(lambda: any(status.level == DiagnosticStatus.ERROR and words[1] in status.message
                           for array in reports for status in array.status), "an error on /diagnostics")
    assert node.channels[0].monitor.counts.failed == 1
    assert len(node.channels[0].mapper.map.voxels) == mapped > 0
    feed.images(6, 8)
    assert node.channels[0].monitor.counts.poses == 7  # the sequence went on: no new scale phase
    assert node.channels[0].monitor.counts.sequences == 1


def test_an_image_that_memory_does_not_hold_is_skipped(ros, make_node, monkeypatch):
    node = make_node()
    feed = Feed(ros, node)
    feed.images(0, 5)

    def fail(*arguments):
        raise RuntimeError("[enforce fail] can't allocate memory")

    monkeypatch.setattr(node.channels[0].mapper, "prepare", fail)
    feed.images(5, 6)
    monkeypatch.undo()
    feed.images(6, 8)
    assert node.channels[0].monitor.counts.failed == 1
    assert node.channels[0].monitor.counts.poses == 7 and node.channels[0].monitor.counts.sequences == 1


def test_warnings_of_a_stream_of_bad_images_are_throttled(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    feed = Feed(ros, node)
    for index in range(50):
        feed.send(image_message(index, encoding="none"))
    assert node.channels[0].monitor.counts.failed == 50
    wait_until(lambda: any("none" in entry.msg for entry in log), "a warning")
    assert sum("none" in entry.msg for entry in log) <= 2


def test_other_resolution_starts_a_new_sequence(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(map_period=0.05, path_period=0.0)
    paths = ros.listen(Path, private(node, "path"))
    feed = Feed(ros, node)
    feed.images(0, 5)
    feed.images(5, 5 + SCALE_FRAMES, size=(60, 60))
    assert node.channels[0].monitor.counts.sequences == 2 and node.channels[0].monitor.counts.poses == 5 + SCALE_FRAMES
    wait_until(lambda: paths and stamps(paths[-1].poses) == [stamp_of(i) for i in range(5, 5 + SCALE_FRAMES)],
               "the new sequence's path alone")
    wait_until(lambda: any("64x48" in entry.msg and "60x60" in entry.msg for entry in log), "a warning")


def test_a_camera_that_changes_size_all_the_time_does_not_fill_the_log(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    feed = Feed(ros, node)
    for index in range(30):
        feed.images(index, index + 1, size=((48, 64), (60, 60))[index % 2])
    wait_until(lambda: len(events) == 30, "an event each")
    wait_until(lambda: any("5 sequences started within" in entry.msg and "60x60" in entry.msg for entry in log),
               "a warning that says why")
    assert sum("a new sequence starts" in entry.msg for entry in log) < 15
    assert sum("caches of" in entry.msg for entry in log) < 15
    assert sum("sequences started within" in entry.msg for entry in log) < 10


def test_reset_starts_a_new_sequence(ros, make_node):
    node = make_node(map_period=0.05, path_period=0.0, confidence_threshold=1.0)
    paths = ros.listen(Path, private(node, "path"))
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: maps and maps[-1].width and paths and paths[-1].poses, "map and path")
    response = ros.call(Trigger, private(node, "reset"))
    assert response.success and response.message
    wait_until(lambda: maps[-1].width == 0 and not paths[-1].poses, "an empty map and path")
    poses = node.channels[0].monitor.counts.poses
    feed.images(5, 5 + SCALE_FRAMES - 1)
    assert node.channels[0].monitor.counts.poses == poses  # scale frames gather again
    feed.images(5 + SCALE_FRAMES - 1, 10)
    wait_until(lambda: stamps(paths[-1].poses) == [stamp_of(index) for index in range(5, 10)], "the new path")


def test_poses_that_are_not_plausible_never_leave(ros, make_node, monkeypatch):
    import torch

    node = make_node(path_period=0.0)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    step = node.channels[0].mapper.session.step
    broken = iter([float("nan"), 1e27])

    def break_pose(*arguments):
        from dataclasses import replace
        T = torch.eye(4)
        T[0, 3] = next(broken)
        return [replace(result, T_world_camera=T) for result in step(*arguments)]

    monkeypatch.setattr(node.channels[0].mapper.session, "step", break_pose)
    feed.images(4, 6)
    monkeypatch.undo()
    feed.images(6, 8)
    wait_until(lambda: len(odometry) == 6, "the good poses")
    assert stamps(odometry) == [stamp_of(index) for index in (0, 1, 2, 3, 6, 7)]
    assert node.channels[0].monitor.counts.rejected == 2 and len(node.channels[0].mapper.path) == 6


def test_model_failure_is_reported_and_a_new_sequence_starts(ros, make_node, monkeypatch):
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1)
    feed = Feed(ros, node)
    feed.images(0, 4)

    def fail(*arguments):
        raise RuntimeError("the GPU is on fire")

    monkeypatch.setattr(node.channels[0].mapper.session, "step", fail)
    feed.images(4, 5)
    monkeypatch.undo()
    feed.images(5, 5 + SCALE_FRAMES)
    channel = node.channels[0]
    assert channel.monitor.counts.poses == 4 + SCALE_FRAMES and len(channel.mapper.path) == SCALE_FRAMES
    wait_until(lambda: any(status.level == DiagnosticStatus.ERROR and "on fire" in status.message
                           for array in reports for status in array.status), "an error on /diagnostics")


def test_newest_image_wins_and_dropped_ones_are_counted(ros, make_node, monkeypatch):
    import threading

    node = make_node(diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    step, gate = node.channels[0].mapper.session.step, threading.Event()
    monkeypatch.setattr(node.channels[0].mapper.session, "step", lambda *args: gate.wait(20) and step(*args))
    publisher = feed._publisher
    publisher.publish(image_message(4))
    channel = node.channels[0]
    wait_until(lambda: channel.monitor.counts.received == 5 and channel.mailbox.is_empty, "image 4 with the model")
    for index in range(5, 9):
        publisher.publish(image_message(index))
        wait_until(lambda: node.channels[0].monitor.counts.received == index + 1, "an image received")
    gate.set()
    wait_until(lambda: len(odometry) == 6, "the two processed images' poses")
    assert stamps(odometry)[-2:] == [stamp_of(4), stamp_of(8)]
    wait_until(lambda: statuses(reports, node)
               and values(statuses(reports, node)["camera"])["frames_processed"] == "6", "6 processed on /diagnostics")
    counts = values(statuses(reports, node)["camera"])
    assert (counts["frames_received"], counts["frames_dropped"], counts["frames_failed"]) == ("9", "3", "0")


def test_diagnostics_tell_the_state_of_cache_and_model(ros, make_node):
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1, confidence_threshold=1.0, cache_dtype="bfloat16")
    Feed(ros, node).images(0, 9)
    wait_until(lambda: "cache" in statuses(reports, node)
               and values(statuses(reports, node)["cache"])["frame_count"] == "9", "9 frames in the cache")
    parts = statuses(reports, node)
    assert set(parts) == {"camera", "tracking", "cache", "model"}
    assert all(status.level == DiagnosticStatus.OK and status.hardware_id for status in parts.values())
    cache = values(parts["cache"])
    assert set(node.channels[0].mapper.session.cache_stats()) <= set(cache) and cache["attention_backend"] == "sdpa"
    assert cache["cache_dtype"] == "bfloat16"
    assert (cache["scale_pages"], cache["live_pages"], cache["special_tokens"]) == ("3", "4", "54")
    assert int(cache["cache_bytes"]) > int(cache["bytes"]) > 0 and int(cache["map_points"]) > 0
    model = values(parts["model"])
    assert (model["model"], model["device"], model["dtype"], model["state"]) == ("tiny", "cpu", "float32", "active")
    assert int(model["device_memory_bytes"]) > 1e7
    assert parts["tracking"].message == "TRACKING" and values(parts["tracking"])["poses_published"] == "9"
    assert math.isfinite(float(model["frames_per_second"]))


def test_every_value_on_diagnostics_is_documented(ros, make_node):
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1, window_size=12, overlap_keyframes=4, jump_factor=1e6)
    Feed(ros, node).images(0, 14)  # past a hand-over
    wait_until(lambda: "tracking" in statuses(reports, node)
               and values(statuses(reports, node)["tracking"])["hand_overs"] == "1", "a hand-over")
    for part, status in statuses(reports, node).items():
        assert set(values(status)) == diagnostics_table.keys(part), part
    assert set(statuses(reports, node)) == set(diagnostics_table.STATUSES)


def test_sequence_beyond_the_trained_range_is_a_warning(ros, make_node):
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1, windowed=False)
    Feed(ros, node).images(0, 65)
    wait_until(lambda: "cache" in statuses(reports, node)
               and statuses(reports, node)["cache"].level == DiagnosticStatus.WARN, "a warning")
    assert "64" in statuses(reports, node)["cache"].message


def test_silence_is_explained(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    context = rclpy.Context()
    context.init()
    camera = rclpy.create_node("camera", context=context)
    try:
        camera.create_publisher(CompressedImage, "/robot_silent/image", 1)  # of another type than the node takes
        node = make_node(namespace="robot_silent", diagnostics_period=0.1, image_timeout=0.3, autostart=False)
        topic = node.resolve_topic_name("image")
        wait_until(lambda: node.get_publishers_info_by_topic(topic), "the camera known to the node")
        assert node.start()
        wait_until(lambda: "camera" in statuses(reports, node)
                   and statuses(reports, node)["camera"].level == DiagnosticStatus.WARN, "a warning")
        assert topic in statuses(reports, node)["camera"].message
        wait_until(lambda: any(all(word in entry.msg for word in (
            "no image", topic, "1 publisher ", "sensor_msgs/msg/CompressedImage", "sensor_msgs/msg/Image"))
            for entry in log), "a warning in the log")
    finally:
        camera.destroy_node()
        context.shutdown()


def test_incompatible_subscription_is_warned_of(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    ros.listen(Odometry, private(node, "odometry"), LATCHED)  # but odometry is volatile
    wait_until(lambda: any(private(node, "odometry") in entry.msg and "DURABILITY" in entry.msg for entry in log),
               "a warning with topic and policy")


def test_simulated_time_that_stands_still_stops_nothing(ros, make_node):
    node = make_node(use_sim_time=True, diagnostics_period=0.1, map_period=0.05, confidence_threshold=1.0)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    Feed(ros, node).images(0, 5)
    wait_until(lambda: maps and stamps(maps)[-1] == stamp_of(4), "the map")
    wait_until(lambda: "camera" in statuses(reports, node), "diagnostics")


def test_sensor_data_subscribers_receive_outputs(ros, make_node):
    node = make_node()
    odometry = ros.listen(Odometry, private(node, "odometry"), qos_profile_sensor_data)
    Feed(ros, node).images(0, SCALE_FRAMES)
    wait_until(lambda: len(odometry) == SCALE_FRAMES, "poses")


def test_clouds_are_not_built_for_nobody(ros, make_node, monkeypatch):
    from lingbot_map_ros.ros import outputs

    built = []
    monkeypatch.setattr(outputs, "_cloud", lambda *args: built.append(args))
    node = make_node(map_period=0.05)
    Feed(ros, node).images(0, 6)
    assert node.channels[0].monitor.counts.poses == 6 and built == []
