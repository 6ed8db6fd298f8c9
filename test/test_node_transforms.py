# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware and the robot's TF: map -> odom, the camera's mounting, names of frames."""
from __future__ import annotations

import math

import numpy as np
import pytest
from geometry_msgs.msg import PoseStamped, PoseWithCovarianceStamped
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import Log
from ros_harness import LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, wait_until
from sensor_msgs.msg import PointCloud2

from lingbot_map_ros.mapping.alignment import T_BODY_OPTICAL
from lingbot_map_ros.ros import interfaces, messages

pytestmark = pytest.mark.skipif(interfaces.TF.message is None, reason="tf2_msgs cannot be imported")

STATIC = interfaces.TF_STATIC.qos


def matrix(pose) -> np.ndarray:
    return messages.pose_matrix(pose.position, pose.orientation)


def body(x: float = 0.0, yaw: float = 0.0, pitch: float = 0.0, z: float = 0.0) -> np.ndarray:
    c, s, cp, sp = math.cos(yaw), math.sin(yaw), math.cos(pitch), math.sin(pitch)
    T = np.eye(4)
    T[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    T[0, 3], T[2, 3] = x, z
    return T


MOUNTING = body(0.3, 0.0, 0.4, 0.8) @ T_BODY_OPTICAL  # looks down by 23 degrees


class Robot:
    """Publishes odom -> base and base -> camera."""

    def __init__(self, ros, node, prefix: str = "") -> None:
        self._prefix = prefix
        message = interfaces.TF.message
        self._static = ros.publisher(message, "/tf_static", STATIC)
        self._moving = ros.publisher(message, "/tf", 100)
        self._node = node
        self._static.publish(message(transforms=[self._transform(MOUNTING, 0, "base", "camera", frame="camera")]))
        wait_until(lambda: self._knows("camera"), "the mounting known")

    def move(self, index: int, T: np.ndarray) -> None:
        """Be at a place in odom at the time of an image, and wait until the node knows."""
        self._moving.publish(interfaces.TF.message(transforms=[self._transform(T, index, "odom", "base")]))
        stamp_ns = stamp_of(index)[0] * 10**9 + stamp_of(index)[1]
        samples, frame = self._node._transforms._transforms._samples, self._prefix + "base"
        wait_until(lambda: frame in samples and stamp_ns in samples[frame].stamps, "odometry known")

    def _knows(self, frame: str) -> bool:
        return frame in self._node._transforms._transforms._static

    def _transform(self, T, index, parent, child, frame=None):
        stamp = messages.time(stamp_of(index)[0] * 10**9 + stamp_of(index)[1])
        return messages.transform_stamped(T, stamp, self._prefix + parent, frame or self._prefix + child)


def test_map_to_odom_joins_map_and_odometry(ros, make_node):
    node = make_node(publish_tf=True, odom_frame="odom", frame_prefix="bot/", transform_tolerance=0.25)
    transforms = ros.listen(interfaces.TF.message, "/tf")
    poses = ros.listen(PoseStamped, private(node, "pose"))
    robot, feed = Robot(ros, node, "bot/"), Feed(ros, node)

    def published() -> list:
        return [t for message in transforms for t in message.transforms if t.child_frame_id == "bot/odom"]

    for index in range(6):
        robot.move(index, body(0.1 * index, 0.05 * index))
        feed.images(index, index + 1)
    wait_until(lambda: len(published()) == 6 and len(poses) == 6, "a transform for each pose")
    for index, (transform, pose) in enumerate(zip(published(), poses)):
        assert transform.header.frame_id == pose.header.frame_id == "bot/map"
        ahead = stamp_of(index)[0] * 10**9 + stamp_of(index)[1] + 250_000_000
        assert messages.nanoseconds(transform.header.stamp) == ahead
        T_map_odom = messages.pose_matrix(transform.transform.translation, transform.transform.rotation)
        T_odom_camera = body(0.1 * index, 0.05 * index) @ MOUNTING
        np.testing.assert_allclose(T_map_odom @ T_odom_camera, matrix(pose.pose), atol=1e-6)
    assert not any(t.child_frame_id == "camera" and t.header.frame_id == "bot/map"
                   for message in transforms for t in message.transforms)


def test_missing_odometry_is_named_and_costs_nothing(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(publish_tf=True, odom_frame="odom")
    feed = Feed(ros, node)
    feed.images(0, 4)
    wait_until(lambda: any("map -> odom is not published" in entry.msg and "nobody publishes the frame" in entry.msg
                           for entry in log), "a warning")
    robot = Robot(ros, node)
    for index in range(4, 6):
        robot.move(index, body())
        feed.images(index, index + 1)
    assert node.channels[0].monitor.counts.poses == 6


@pytest.mark.parametrize("what", ["nan", "quaternion", "loop"])
def test_hostile_transforms_are_named(ros, make_node, what):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(publish_tf=True, odom_frame="odom", transform_tolerance=10.0)
    robot, feed = Robot(ros, node), Feed(ros, node)
    robot.move(0, body())
    bad = messages.transform_stamped(body(), messages.time(0), "odom", "base")
    if what == "nan":
        bad.transform.translation.x = math.nan
    elif what == "quaternion":
        bad.transform.rotation.w = 0.0
    else:
        bad.header.frame_id = "base"
    robot._moving.publish(interfaces.TF.message(transforms=[bad]))
    wait_until(lambda: any("-> base on /tf is not used" in entry.msg for entry in log), "a warning")
    feed.images(0, 5)
    assert node.channels[0].monitor.counts.poses == 5


def test_map_is_level_where_the_mounting_is_known(ros, make_node):
    node = make_node(base_frame="base")
    poses = ros.listen(PoseStamped, private(node, "pose"))
    clouds = ros.listen(PointCloud2, private(node, "points"))
    Robot(ros, node)
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: len(poses) == 5 and len(clouds) == 5, "poses")
    np.testing.assert_allclose(matrix(poses[0].pose), MOUNTING, atol=1e-6)
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("initialpose"))
    message = PoseWithCovarianceStamped()
    message.pose.pose = messages.pose(body(7.0, 1.5))
    publisher.publish(message)
    wait_until(lambda: node.channels[0].mapper.alignment.yaw, "it placed")
    _, path = node.channels[0].mapper.trajectory()
    assert np.allclose(path[-1, :3], (body(7.0, 1.5) @ MOUNTING)[:3, 3])
    ros.call(interfaces.RESET.service, private(node, "reset"))
    feed.images(5, 5 + SCALE_FRAMES)
    wait_until(lambda: len(poses) == 5 + SCALE_FRAMES, "poses")
    np.testing.assert_allclose(matrix(poses[5].pose), MOUNTING, atol=1e-6)


def test_unknown_mounting_is_named(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(base_frame="chassis")
    Feed(ros, node).images(0, 5)
    wait_until(lambda: any("base_frame" in entry.msg and "nobody publishes the frame" in entry.msg for entry in log),
               "a warning")
    assert node.channels[0].monitor.counts.poses == 5


def test_frames_have_the_prefix(ros, make_node):
    node = make_node(frame_prefix="bot/", camera_frame="eye", map_period=0.05)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    feed = Feed(ros, node)
    for index in range(4):
        feed.send(image_message(index))
    wait_until(lambda: len(odometry) == 4 and maps, "poses and map")
    assert {m.header.frame_id for m in (*odometry, *maps)} == {"bot/map"}
    assert {m.child_frame_id for m in odometry} == {"bot/eye"}
