# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: pause, files, initial pose."""
from __future__ import annotations

import errno
import math
import os
import threading

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticStatus
from geometry_msgs.msg import PoseStamped, PoseWithCovarianceStamped
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Log
from rclpy.executors import SingleThreadedExecutor
from rclpy.task import Future
from ros_harness import LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, wait_until
from sensor_msgs.msg import Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.mapping.export import read_map, write_ply
from lingbot_map_ros.mapping.trajectory import tum_line
from lingbot_map_ros.ros import messages
from lingbot_map_ros.ros.messages import POINT_TYPE
from lingbot_map_ros.ros.process import spin


def call(ros, node, name: str) -> Trigger.Response:
    return ros.call(Trigger, private(node, name))


def cloud_xyz(cloud: PointCloud2) -> np.ndarray:
    points = np.frombuffer(cloud.data, POINT_TYPE)
    return np.stack([points["x"], points["y"], points["z"]], axis=1)


def pose_matrix(pose) -> np.ndarray:
    return messages.pose_matrix(pose.position, pose.orientation)


def initial_pose(x: float, y: float, yaw: float, frame: str = "map") -> PoseWithCovarianceStamped:
    message = PoseWithCovarianceStamped()
    message.header.frame_id = frame
    message.pose.pose.position.x, message.pose.pose.position.y = x, y
    message.pose.pose.orientation.z, message.pose.pose.orientation.w = math.sin(yaw / 2), math.cos(yaw / 2)
    return message


def heading(message: PoseStamped) -> float:
    """Return the angle about z of where the camera's body heads: x of a body is z of an optical frame."""
    forward = pose_matrix(message.pose)[:3, :3] @ [0.0, 0.0, 1.0]
    return math.atan2(forward[1], forward[0])


def test_pause_and_resume(ros, make_node):
    node = make_node(diagnostics_period=0.1)
    states = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    publisher = ros.publisher(Image, node.resolve_topic_name("image"))
    feed = Feed(ros, node)
    feed.images(0, 5)
    response = call(ros, node, "pause")
    assert response.success and "paused" in response.message
    wait_until(lambda: states and "mapping is paused" in states[-1].values[0].value, "the state")
    for index in range(5, 9):
        publisher.publish(image_message(index))
        wait_until(lambda: node.channels[0].monitor.counts.skipped == index - 4, "it skipped")
    assert call(ros, node, "pause").success  # again
    # An image that waited when the node was paused is no sign of a model that hangs.
    node.channels[0].monitor.image_received()
    assert node.channels[0].monitor.stall > 0
    assert call(ros, node, "pause").success and node.channels[0].monitor.stall == 0
    assert call(ros, node, "resume").success
    feed.images(9, 12)
    wait_until(lambda: len(poses) == 8, "poses")
    assert stamps(poses) == [stamp_of(index) for index in (0, 1, 2, 3, 4, 9, 10, 11)]
    assert node.channels[0].monitor.counts.sequences == 1
    wait_until(lambda: states[-1].message == "TRACKING", "the state")


@pytest.mark.parametrize("name", ["map.ply", "hall 2.pcd"])
def test_map_is_saved_as_it_is_published_and_loaded_again(ros, make_node, tmp_path, name):
    folder = tmp_path / "made" / "when needed"
    node = make_node(save_directory=str(folder), map_file=name, map_period=0.05)
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: maps and stamps(maps)[-1] == stamp_of(4), "the map")
    response = call(ros, node, "save_map")
    assert response.success, response.message
    assert str(folder / name) in response.message and str(len(node.channels[0].mapper.map.voxels)) in response.message
    assert [path.name for path in folder.iterdir()] == [name]
    xyz, rgb, confidence = read_map(folder / name)
    np.testing.assert_array_equal(xyz, cloud_xyz(maps[-1]))

    feed.images(5, 8)
    assert call(ros, node, "save_map").success  # replaces it
    saved = read_map(folder / name)[0]
    assert call(ros, node, "reset").success
    wait_until(lambda: maps[-1].width == 0, "an empty map")
    response = call(ros, node, "load_map")
    assert response.success and str(len(saved)) in response.message
    wait_until(lambda: maps[-1].width == len(saved), "the loaded map")
    np.testing.assert_array_equal(cloud_xyz(maps[-1]), saved)
    feed.images(8, 8 + SCALE_FRAMES)
    count = len(node.channels[0].mapper.map.voxels)
    wait_until(lambda: maps[-1].width == len(saved) + count, "both maps")
    assert call(ros, node, "reset").success
    wait_until(lambda: maps[-1].width == 0, "an empty map again")


def test_trajectory_is_saved(ros, make_node, tmp_path):
    node = make_node(save_directory=str(tmp_path), trajectory_file="run.txt")
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 5)
    wait_until(lambda: len(poses) == 5, "poses")
    response = call(ros, node, "save_trajectory")
    assert response.success and "5 poses" in response.message
    lines = (tmp_path / "run.txt").read_text().splitlines(keepends=True)
    for line, message in zip(lines, poses, strict=True):
        p, q = message.pose.position, message.pose.orientation
        expected = tum_line(message.header.stamp.sec * 10**9 + message.header.stamp.nanosec,
                            [p.x, p.y, p.z, q.x, q.y, q.z, q.w])
        np.testing.assert_allclose([float(word) for word in line.split()], [float(word) for word in expected.split()],
                                   rtol=0, atol=1e-12)


def test_saving_that_fails_says_why_and_leaves_the_old_file(ros, make_node, tmp_path, monkeypatch):
    node = make_node(save_directory=str(tmp_path))
    feed = Feed(ros, node)
    feed.images(0, 4)
    assert call(ros, node, "save_map").success
    old = (tmp_path / "map.ply").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    feed.images(4, 6)
    for name in ("save_map", "save_trajectory"):
        response = call(ros, node, name)
        assert not response.success and "No space left" in response.message
    monkeypatch.undo()
    assert (tmp_path / "map.ply").read_bytes() == old and len(list(tmp_path.iterdir())) == 1
    feed.images(6, 8)
    assert node.channels[0].monitor.counts.poses == 8
    assert call(ros, node, "save_map").success


def test_places_that_cannot_be_written_to_are_named(ros, make_node, tmp_path):
    (tmp_path / "file").write_text("")
    node = make_node(save_directory=str(tmp_path / "file"))
    response = call(ros, node, "save_map")
    assert not response.success and str(tmp_path / "file") in response.message
    other = make_node(save_directory="")
    response = call(ros, other, "save_map")
    assert not response.success and "save_directory" in response.message


def test_files_are_in_the_one_folder_only(ros, make_node, tmp_path):
    folder = tmp_path / "maps"
    folder.mkdir()
    node = make_node(save_directory=str(folder))
    name = node.get_fully_qualified_name()
    for value in ("../map.ply", "/tmp/map.ply", "a/b.ply", "..", "", ".ply", "map.txt"):
        result = ros.set_parameter(name, "map_file", value)
        assert not result.successful and "map_file" in result.reason, value
    assert not ros.set_parameter(name, "save_directory", str(tmp_path)).successful
    write_ply(tmp_path / "outside.ply", np.zeros((1, 3)), np.zeros((1, 3), np.uint8), np.ones(1))
    (folder / "map.ply").symlink_to(tmp_path / "outside.ply")
    for service in ("load_map", "save_map"):
        response = call(ros, node, service)
        assert not response.success and "link" in response.message
    assert len(read_map(tmp_path / "outside.ply")[0]) == 1


@pytest.mark.parametrize(("content", "words"), [
    (None, ("No such file", "map.ply")),
    (b"no map", ("not a PLY file",)),
    ("too many", ("30 points", "max_map_points is 20")),
])
def test_maps_that_cannot_be_loaded_are_named_and_cost_nothing(ros, make_node, tmp_path, content, words):
    node = make_node(save_directory=str(tmp_path), max_map_points=20)
    feed = Feed(ros, node)
    feed.images(0, 4)
    if content == "too many":
        write_ply(tmp_path / "map.ply", np.zeros((30, 3)), np.zeros((30, 3), np.uint8), np.ones(30))
    elif content:
        (tmp_path / "map.ply").write_bytes(content)
    response = call(ros, node, "load_map")
    assert not response.success and all(word in response.message for word in words), response.message
    feed.images(4, 6)
    assert node.channels[0].monitor.counts.poses == 6 and len(node.channels[0].mapper.map.voxels) == 20


def test_services_without_a_model_say_so(ros, make_node):
    node = make_node(autostart=False)
    for name in ("reset", "pause", "resume", "save_map", "load_map", "save_trajectory", "describe_cache"):
        response = call(ros, node, name)
        assert not response.success
        assert response.message == "there is no model: the node is unconfigured"


def test_nothing_waits_for_a_file(ros, make_node, tmp_path, monkeypatch):
    node = make_node(save_directory=str(tmp_path))
    ros.executor.remove_node(node)  # of many threads; a process of its own has one
    executor, stop = SingleThreadedExecutor(), Future()
    executor.add_node(node)
    spinner = threading.Thread(target=spin, args=(executor, node.get_logger(), stop))
    spinner.start()
    feed = Feed(ros, node)
    feed.images(0, 4)
    gate, entered, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        entered.set()
        assert gate.wait(20)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(call(ros, node, "save_map")))
    caller.start()
    assert entered.wait(20)
    feed.images(4, 8)
    assert node.channels[0].monitor.counts.poses == 8 and not answers
    # Neither does what else is asked of the node, though it is spun by one thread.
    assert call(ros, node, "reset").success
    assert ros.set_parameter(node.get_fully_qualified_name(), "map_period", 1.0).successful and not answers
    gate.set()
    caller.join()
    stop.set_result(None)
    spinner.join()
    executor.shutdown()
    assert answers[0].success and "map.ply" in answers[0].message


def test_initial_pose_moves_the_map(ros, make_node):
    node = make_node(path_period=0.0, map_period=0.05)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    paths = ros.listen(Path, private(node, "path"))
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("initialpose"))
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: maps and stamps(maps)[-1] == stamp_of(4) and paths and len(paths[-1].poses) == 5, "map and path")
    before = np.array([pose_matrix(message.pose) for message in paths[-1].poses])
    points = cloud_xyz(maps[-1])
    publisher.publish(initial_pose(5.0, -3.0, 2.0))
    wait_until(lambda: paths[-1].poses and abs(paths[-1].poses[-1].pose.position.x - 5) < 1e-6, "the path moved")
    after = np.array([pose_matrix(message.pose) for message in paths[-1].poses])
    np.testing.assert_allclose(after[-1][:3, 3], [5, -3, 0], atol=1e-9)
    assert heading(paths[-1].poses[-1]) == pytest.approx(math.remainder(2.0, 2 * math.pi), abs=1e-6)
    # The same rigid motion moves all poses and the map.
    motion = after[-1] @ np.linalg.inv(before[-1])
    np.testing.assert_allclose(after, motion @ before, atol=1e-6)
    wait_until(lambda: np.allclose(cloud_xyz(maps[-1]), points @ motion[:3, :3].T + motion[:3, 3], atol=1e-4),
               "the map")
    wait_until(lambda: events and events[-1].name.endswith("placed"), "an event")
    feed.images(5, 6)
    wait_until(lambda: len(poses) == 6 and len(odometry) == 6, "a pose")
    step = np.linalg.norm(pose_matrix(poses[-1].pose)[:3, 3] - after[-1][:3, 3])
    assert step == pytest.approx(np.linalg.norm([getattr(odometry[-1].twist.twist.linear, a) for a in "xyz"]) * 0.1)


def test_initial_pose_before_the_first_image(ros, make_node):
    node = make_node()
    poses = ros.listen(PoseStamped, private(node, "pose"))
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("initialpose"))
    publisher.publish(initial_pose(1.0, 2.0, -1.0))
    wait_until(lambda: node.channels[0].loaded.placement.pose_to_come is not None, "it taken")
    Feed(ros, node).images(0, SCALE_FRAMES)
    wait_until(lambda: len(poses) == SCALE_FRAMES, "poses")
    assert (poses[0].pose.position.x, poses[0].pose.position.y) == pytest.approx((1, 2))
    assert heading(poses[0]) == pytest.approx(-1)


@pytest.mark.parametrize(("message", "words"), [
    (initial_pose(math.nan, 0, 0), ("position", "nan")),
    (initial_pose(0, 0, 0, "odom"), ("frame_id", "'odom'", "'map'")),
    (PoseWithCovarianceStamped(), None),
])
def test_initial_poses_that_are_none_are_named(ros, make_node, message, words):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    feed = Feed(ros, node)
    feed.images(0, 4)
    if words is None:
        message.pose.pose.orientation.w, words = 0.0, ("orientation", "[0.0, 0.0, 0.0, 0.0]")
    alignment = node.channels[0].mapper.alignment
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("initialpose"))
    publisher.publish(message)
    topic = node.resolve_topic_name("initialpose")
    wait_until(lambda: any(all(word in entry.msg for word in (topic, *words)) for entry in log), "a warning")
    feed.images(4, 6)
    assert node.channels[0].monitor.counts.poses == 6 and node.channels[0].mapper.alignment is alignment
