# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: lengths in metres."""
from __future__ import annotations

import math

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import OccupancyGrid, Odometry, Path
from rcl_interfaces.msg import Log
from ros_harness import LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, statuses, values, wait_until
from sensor_msgs.msg import Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.mapping.scale import FloorScale
from lingbot_map_ros.ros.messages import POINT_TYPE


def position(message) -> np.ndarray:
    return np.array([getattr(message.pose.position, axis) for axis in "xyz"])


def xyz(cloud: PointCloud2) -> np.ndarray:
    points = np.frombuffer(cloud.data, POINT_TYPE)
    return np.stack([points["x"], points["y"], points["z"]], axis=1)


def depth(message: Image) -> np.ndarray:
    return np.frombuffer(message.data, np.float32)


def test_a_fixed_scale_is_in_all_outputs_and_changes_them_at_once(ros, make_node):
    topics = {"pose": PoseStamped, "depth": Image, "points": PointCloud2, "odometry": Odometry, "path": Path}
    runs = {}
    for source in ("none", "fixed"):
        node = make_node(scale_source=source, metric_scale=2.5, path_period=0.0, map_period=0.05,
                         diagnostics_period=0.1)
        runs[source] = {name: ros.listen(kind, private(node, name)) for name, kind in topics.items()}
        maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
        events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
        reports = ros.listen(DiagnosticArray, "/diagnostics")
        feed = Feed(ros, node)
        feed.images(0, 5)
        wait_until(lambda: all(len(runs[source][name]) == 5 for name in ("pose", "depth", "points", "odometry")),
                   "5 each")
    model, metric = runs["none"], runs["fixed"]
    for a, b in zip(model["pose"], metric["pose"]):
        np.testing.assert_allclose(2.5 * position(a), position(b), atol=1e-9)
        assert a.pose.orientation == b.pose.orientation
    for a, b in zip(model["depth"], metric["depth"]):
        np.testing.assert_allclose(2.5 * depth(a), depth(b), rtol=1e-5)
    for a, b in zip(model["points"], metric["points"]):
        np.testing.assert_allclose(2.5 * xyz(a), xyz(b), rtol=1e-4, atol=1e-5)
    a, b = model["odometry"][-1].twist.twist, metric["odometry"][-1].twist.twist
    assert b.linear.x == pytest.approx(2.5 * a.linear.x) and b.angular.z == pytest.approx(a.angular.z)

    voxels = node.channels[0].mapper.map.voxels
    wait_until(lambda: maps and maps[-1].width == len(voxels) and len(metric["path"])
               and len(metric["path"][-1].poses) == 5, "the whole map and path")
    before, count = xyz(maps[-1]), len(metric["path"])
    edges = node.channels[0].mapper.map.voxels.voxel_size
    assert edges == pytest.approx(0.05 / 2.5)
    assert ros.set_parameter(node.get_fully_qualified_name(), "metric_scale", 5.0).successful
    # Voxels of half the size in the model's unit, 0.05 m again: none is split or joined.
    wait_until(lambda: len(metric["path"]) > count and len(xyz(maps[-1])) == len(before)
               and np.allclose(np.sort(xyz(maps[-1]), axis=0), np.sort(2 * before, axis=0), rtol=1e-4, atol=1e-5),
               "map and path rescaled")
    assert node.channels[0].mapper.map.voxels.voxel_size == pytest.approx(edges / 2)
    np.testing.assert_allclose(position(metric["path"][-1].poses[-1]), 2 * position(metric["pose"][-1]))
    wait_until(lambda: events[-1].name.endswith("scaled") and values(events[-1])["scale"] == "5", "an event")
    wait_until(lambda: values(statuses(reports, node)["cache"])["metres_per_unit"] == "5", "it on /diagnostics")
    ros.call(Trigger, private(node, "reset"))
    feed.images(5, 5 + SCALE_FRAMES)
    assert node.channels[0].mapper.alignment.scale == 5


def odometry(index: int, metres: np.ndarray) -> Odometry:
    message = Odometry()
    message.header.stamp.sec, message.header.stamp.nanosec = stamp_of(index)
    message.pose.pose.position.x, message.pose.pose.position.y, message.pose.pose.position.z = map(float, metres)
    message.pose.pose.orientation.w = 1.0
    return message


def test_scale_from_odometry(ros, make_node):
    """Odometry that is the node's own path times 40, as it comes once the node's is known from another run."""
    node = make_node()
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 20)
    wait_until(lambda: len(poses) == 20, "poses")
    truth = [40 * position(message) for message in poses]
    assert sum(np.linalg.norm(b - a) for a, b in zip(truth, truth[1:])) > 1

    node = make_node(scale_source="odometry")
    scaled = ros.listen(PoseStamped, private(node, "pose"))
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    log = ros.listen(Log, "/rosout", 1000)
    feed = Feed(ros, node)
    publisher = ros.publisher(Odometry, node.resolve_topic_name("odom"))
    bad = odometry(0, np.full(3, math.nan))
    publisher.publish(bad)
    wait_until(lambda: any(node.resolve_topic_name("odom") in entry.msg and "position is [nan" in entry.msg
                           for entry in log), "a warning")
    for index, metres in enumerate(truth):
        publisher.publish(odometry(index, metres))
        samples = node.channels[0].loaded.scale._odometry._transforms._samples
        wait_until(lambda: samples and len(samples["body"].stamps) == index + 1, "odometry known")
        feed.send(image_message(index))
    wait_until(lambda: len(scaled) == 20, "poses")
    assert node.channels[0].loaded.scale.value == pytest.approx(40, rel=1e-3)
    np.testing.assert_allclose(position(scaled[-1]), truth[-1], rtol=1e-2, atol=1e-3)
    wait_until(lambda: any(event.name.endswith("scaled") for event in events), "an event")


def test_voxels_and_heights_are_in_metres_once_the_scale_is_known(ros, make_node, monkeypatch):
    """A scale that is found after some frames: map, updates and plan are in metres from then on, as if from the start.
    """
    found = []
    monkeypatch.setattr(FloorScale, "add", lambda *args: found.pop() if found else None)
    node = make_node(scale_source="height", voxel_size=0.5, voxel_fraction=0.02, publish_grid=True, map_period=0.05,
                     map_updates_period=0.0, grid_resolution=0.1, diagnostics_period=0.1)
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    updates = ros.listen(PointCloud2, private(node, "map_updates"))
    grids = ros.listen(OccupancyGrid, private(node, "grid"), LATCHED)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    feed = Feed(ros, node)
    feed.images(0, 5)
    scene = node.channels[0].mapper.map.scene_depth
    assert node.channels[0].mapper.map.voxels.voxel_size == pytest.approx(0.02 * scene)
    wait_until(lambda: maps and grids, "map and plan")
    assert grids[-1].info.resolution == pytest.approx(0.1 * scene)
    before = len(xyz(maps[-1]))

    found.append(8.0)
    feed.images(5, 6)
    voxels = node.channels[0].mapper.map.voxels
    assert voxels.voxel_size == pytest.approx(0.5 / 8)
    wait_until(lambda: len(xyz(maps[-1])) == len(voxels) and grids[-1].info.resolution == pytest.approx(0.1), "metres")
    count = len(voxels)
    assert count < before
    cells = np.floor(xyz(maps[-1]).astype(np.float64) / 0.5)
    assert len(np.unique(cells, axis=0)) > 0.99 * count  # a point a voxel, but for rounding at edges
    wait_until(lambda: updates[-1].width == count, "all of them as an update")
    wait_until(lambda: values(statuses(reports, node)["cache"])["map_voxel_size"] == "0.5", "the size on /diagnostics")
    ros.call(Trigger, private(node, "reset"))
    feed.images(6, 6 + SCALE_FRAMES)
    assert voxels.voxel_size == pytest.approx(0.02 * node.channels[0].mapper.map.scene_depth)


def test_missing_odometry_is_named(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(scale_source="odometry")
    Feed(ros, node).images(0, 6)
    text = f"no scale from {node.resolve_topic_name('odom')}"
    wait_until(lambda: any(text in entry.msg for entry in log), "a warning")
    assert node.channels[0].monitor.counts.poses == 6 and node.channels[0].mapper.alignment.scale == 1


def test_scale_from_the_cameras_height(ros, make_node, monkeypatch):
    """An untrained model shows no floor, so the heights of one stand in for what it sees."""
    seen = []
    add = FloorScale.add

    def stand_in(self, heights, camera_height):
        seen.append(heights)
        rng = np.random.default_rng(len(seen))
        return add(self, np.concatenate([np.full(3000, -0.5), rng.uniform(-0.5, 1, 3000)]), camera_height)

    monkeypatch.setattr(FloorScale, "add", stand_in)
    node = make_node(scale_source="height", camera_height=1.5)
    points = ros.listen(PointCloud2, private(node, "points"))
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 6)
    wait_until(lambda: len(points) == 6 and len(poses) == 6, "points")
    assert node.channels[0].loaded.scale.value == pytest.approx(3)
    # A keyframe's own points tell the scale of its pose: three are enough, even of those that begin a sequence.
    for pose, unscaled in list(zip(poses, node.channels[0].mapper.path.poses()))[2:]:
        np.testing.assert_allclose(position(pose), 3 * unscaled[:3], atol=1e-5)
    # What it was asked of is how high the points lie over the camera.
    expected = (xyz(points[-1])[:, 2] - position(poses[-1])[2]) / 3
    np.testing.assert_allclose(seen[-1], expected, atol=1e-4)
