# SPDX-License-Identifier: Apache-2.0
"""What a node does while the model has an image, as it does on a GPU, over real middleware."""
from __future__ import annotations

import math

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from ros_harness import (LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, statuses, values,
                         wait_until)
from sensor_msgs.msg import PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.gct import GCT
from lingbot_map_ros.ros.mapper import Mapper
from lingbot_map_ros.ros.outputs import Outputs
from lingbot_map_ros.ros.worker import Inbox


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch) -> None:
    """Let nodes work as with a model that runs by itself once it has a frame, and expect the next image at any time."""
    monkeypatch.setattr(Mapper, "is_asynchronous", True)
    monkeypatch.setattr(Inbox, "next_in", lambda self: 0.0)


@pytest.fixture
def order(monkeypatch) -> list[tuple[str, int]]:
    """Return the list of what all nodes do with frames: "model", "pose" or "points", and the frame's index."""
    done = []

    def note(owner, name, word, index_of):
        function = getattr(owner, name)

        def noted(self, *arguments, **options):
            done.append((word, index_of(*arguments)))
            return function(self, *arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(GCT, "step", "model", lambda images, state, *_: state.num_kept)
    note(Outputs, "publish_pose", "pose", lambda frame, *_: frame.result.index)
    note(Outputs, "publish_points", "points", lambda frame, *_: frame.result.index)
    return done


def points(channel) -> tuple[np.ndarray, ...]:
    """Return the map, as the services get it."""
    return channel.loaded.worker.submit(channel.pipeline.map_points).result()


def fail_once(monkeypatch, channel) -> None:
    """Let the next frame not enter the map."""
    built = channel.mapper.map
    add = built.add

    def fails(results):
        monkeypatch.setattr(built, "add", add)
        raise RuntimeError("no room for the map")

    monkeypatch.setattr(built, "add", fails)


def test_a_frame_is_mapped_while_the_model_has_the_next_one(ros, make_node, order, monkeypatch):
    node = make_node(diagnostics_period=0.1)
    order.clear()  # of what warmed it up
    clouds = ros.listen(PointCloud2, private(node, "points"))
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    Feed(ros, node).images(0, 6)
    scale = range(SCALE_FRAMES)
    assert order[:10] == [("model", 0), *(("pose", index) for index in scale), ("model", 3),
                          *(("points", index) for index in scale), ("pose", 3), ("model", 4)]
    assert order[10:] == [("points", 3), ("pose", 4), ("model", 5), ("points", 4), ("pose", 5)]
    monkeypatch.setattr(Inbox, "next_in", lambda self: math.inf)
    wait_until(lambda: len(clouds) == 6, "the last frame's points, though no image follows")
    assert stamps(clouds) == [stamp_of(index) for index in range(6)]
    count = str(len(node.channels[0].mapper.map.voxels))
    wait_until(lambda: values(statuses(reports, node)["cache"])["map_points"] == count, "all of the map told of")


def test_a_frame_is_mapped_at_once_where_there_is_time(ros, make_node, order, monkeypatch):
    monkeypatch.setattr(Inbox, "next_in", lambda self: 60.0)
    node = make_node()
    feed = Feed(ros, node)
    feed.images(0, SCALE_FRAMES)
    wait_until(lambda: order[-1:] == [("points", SCALE_FRAMES - 1)], "the points")
    order.clear()
    for index in range(SCALE_FRAMES, 6):
        feed.send(image_message(index))
        wait_until(lambda: order[-1:] == [("points", index)], "the points")
    assert order == [(word, index) for index in range(3, 6) for word in ("model", "pose", "points")]


def test_the_map_is_the_same(ros, make_node, monkeypatch):
    node = make_node()
    Feed(ros, node).images(0, 6)
    monkeypatch.setattr(Mapper, "is_asynchronous", False)
    other = make_node()
    Feed(ros, other).images(0, 6)
    for mine, expected in zip(points(node.channels[0]), points(other.channels[0])):
        np.testing.assert_array_equal(mine, expected)


def test_a_threshold_holds_from_the_next_image_on(ros, make_node):
    node = make_node()
    channel, name = node.channels[0], node.get_fully_qualified_name()
    feed = Feed(ros, node)
    feed.images(0, 5)
    count = len(points(channel)[0])
    feed.images(5, 6)
    assert len(channel.pipeline._to_map) == 1
    assert ros.set_parameter(name, "confidence_threshold", 1e6).successful
    wait_until(lambda: channel.mapper.map.confidence_threshold == 1e6, "it in force")
    more = len(points(channel)[0])
    assert more > count
    feed.images(6, 8)
    assert len(points(channel)[0]) == more


def test_a_new_sequence_gets_nothing_of_the_old_one(ros, make_node):
    node = make_node()
    channel = node.channels[0]
    clouds = ros.listen(PointCloud2, private(node, "points"))
    feed = Feed(ros, node)
    feed.images(0, 5)
    assert ros.call(Trigger, private(node, "reset")).success
    wait_until(lambda: len(clouds) == 5, "the points of the last frame")
    assert len(points(channel)[0]) == 0
    feed.images(5, 5 + SCALE_FRAMES)
    assert len(points(channel)[0]) > 0


def test_the_map_that_is_latched_in_the_end_has_the_last_frame(ros, make_node):
    node = make_node(map_period=60.0)
    Feed(ros, node).images(0, 6)
    assert len(node.channels[0].pipeline._to_map) == 1
    node.trigger_deactivate()
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    wait_until(lambda: maps, "the map")
    assert maps[-1].width == len(node.channels[0].mapper.map.voxels) == len(points(node.channels[0])[0])
    assert node.channels[0].pipeline._to_map == []


def test_points_come_before_the_next_window_starts(ros, make_node, order):
    node = make_node(window_size=8, overlap_keyframes=4)
    feed = Feed(ros, node)
    feed.images(0, 8)  # the eighth fills the window
    wait_until(lambda: node.channels[0].mapper.session.window_index == 1, "the next window")
    assert order[order.index(("pose", 7)):][:3] == [("pose", 7), ("points", 7), ("model", 0)]


@pytest.mark.parametrize("then", ["an image", "a reset", "a parameter", "a deactivation"])
def test_a_map_that_fails_costs_the_sequence_alone(ros, make_node, monkeypatch, then):
    node = make_node()
    channel, name = node.channels[0], node.get_fully_qualified_name()
    poses = ros.listen(PoseStamped, private(node, "pose"))
    feed = Feed(ros, node)
    feed.images(0, 5)
    fail_once(monkeypatch, channel)
    if then == "an image":
        feed.images(5, 6)
    elif then == "a reset":
        assert ros.call(Trigger, private(node, "reset")).success
    elif then == "a parameter":
        assert ros.set_parameter(name, "confidence_threshold", 2.0).successful
        wait_until(lambda: channel.mapper.map.confidence_threshold == 2.0, "it in force")
        assert ros.set_parameter(name, "confidence_threshold", 1.0).successful
    else:
        node.trigger_deactivate()
        assert node.state_name == "inactive"
        node.trigger_activate()
    wait_until(lambda: channel.monitor.counts.failed == 1, "the failure counted")
    feed = Feed(ros, node)
    feed.images(10, 10 + SCALE_FRAMES + 1)
    wait_until(lambda: len(poses) == 5 + SCALE_FRAMES + 1, "poses of a new sequence")
    assert channel.monitor.counts.sequences == 2 and len(points(channel)[0]) > 0


def test_one_cameras_frame_is_mapped_while_the_model_has_the_others(ros, make_node, order, monkeypatch):
    node = make_node(cameras=["front", "rear"])
    front, rear = (Feed(ros, node, camera=camera) for camera in ("front", "rear"))
    front.images(0, 5)
    rear.images(0, 4)
    order.clear()
    front.images(5, 6)
    assert [word for word, _ in order] == ["model", "points", "pose"]  # the rear camera's points
    front.images(6, 7)
    rear.images(4, 5)
    assert [word for word, _ in order[3:]] == ["model", "points", "pose", "model", "points", "pose"]
    # What fails of one camera costs that one's sequence.
    fail_once(monkeypatch, node.channels[1])
    front.images(7, 8)
    wait_until(lambda: node.channels[1].monitor.counts.failed == 1, "the failure counted")
    assert node.channels[0].monitor.counts.failed == 0 and node.channels[0].mapper.session.frame_count == 8
    assert node.channels[1].mapper.session.frame_count == 0
