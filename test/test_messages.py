# SPDX-License-Identifier: Apache-2.0
"""Poses and points to messages."""
from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch
from builtin_interfaces.msg import Time
from sensor_msgs.msg import PointField

from lingbot_map_ros.mapping.uncertainty import Uncertainty
from lingbot_map_ros.mapping.voxel_map import MapPoints
from lingbot_map_ros.ros import messages
from lingbot_map_ros.ros.outputs import pack

STAMP = Time(sec=12, nanosec=345)


def pose_matrix(axis: str = "z", degrees: float = 0.0, position=(0.0, 0.0, 0.0)) -> np.ndarray:
    """Return the pose of a frame turned by an angle about one of its axes."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    first, second = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    T = np.eye(4)
    T[first, first] = T[second, second] = c
    T[second, first], T[first, second] = s, -s
    T[:3, 3] = position
    return T


def test_pose_has_position_and_orientation():
    pose = messages.pose(pose_matrix("x", 90, (1, 2, 3)))
    assert (pose.position.x, pose.position.y, pose.position.z) == (1, 2, 3)
    orientation = pose.orientation
    assert (orientation.x, orientation.y, orientation.z, orientation.w) == pytest.approx((0.5**0.5, 0, 0, 0.5**0.5))


def test_odometry_without_twist():
    message = messages.odometry(pose_matrix(), None, None, STAMP, "map", "camera")
    assert (message.header.stamp, message.header.frame_id, message.child_frame_id) == (STAMP, "map", "camera")
    assert message.pose.covariance[0] == message.twist.covariance[0] == -1
    assert message.twist.twist.linear.x == message.twist.twist.angular.z == 0


def test_twist_is_in_the_axes_of_the_later_pose():
    # Facing left (y of the map) and moving 1 m along y in half a second is moving ahead with 2 m/s.
    before = pose_matrix("z", 90)
    now = pose_matrix("z", 90, (0, 1, 0))
    linear, angular = messages.twist_between(before, now, 0.5)
    np.testing.assert_allclose(linear, [2, 0, 0], atol=1e-12)
    np.testing.assert_allclose(angular, 0, atol=1e-12)


@pytest.mark.parametrize("degrees", [1e-7, 1e-3, 10, 90, 179, -30, -179])
@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_angular_velocity_is_angle_by_time(axis, degrees):
    base = pose_matrix("x", 40) @ pose_matrix("y", -70)
    _, angular = messages.twist_between(base, base @ pose_matrix(axis, degrees), 0.25)
    expected = np.zeros(3)
    expected["xyz".index(axis)] = math.radians(degrees) / 0.25
    np.testing.assert_allclose(angular, expected, rtol=1e-6, atol=1e-9)


def test_odometry_carries_the_twist():
    message = messages.odometry(pose_matrix(), (np.array([1.0, 2, 3]), np.array([4.0, 5, 6])), Uncertainty(1, 2, 3, 4),
                                STAMP, "map", "camera")
    assert np.array_equal(np.reshape(message.pose.covariance, (6, 6)), np.diag([1, 1, 1, 4, 4, 4]))
    assert np.array_equal(np.reshape(message.twist.covariance, (6, 6)), np.diag([9, 9, 9, 16, 16, 16]))
    twist = message.twist.twist
    assert (twist.linear.x, twist.linear.y, twist.linear.z) == (1, 2, 3)
    assert (twist.angular.x, twist.angular.y, twist.angular.z) == (4, 5, 6)


def test_transform_is_the_pose_of_the_child():
    message = messages.transform_stamped(pose_matrix("z", 180, (1, 2, 3)), STAMP, "map", "camera")
    assert (message.header.stamp, message.header.frame_id, message.child_frame_id) == (STAMP, "map", "camera")
    translation, rotation = message.transform.translation, message.transform.rotation
    assert (translation.x, translation.y, translation.z) == (1, 2, 3)
    assert (abs(rotation.z), rotation.w) == pytest.approx((1, 0))


def test_path_keeps_order_and_stamps():
    poses = [messages.pose_stamped(pose_matrix(position=(n, 0, 0)), Time(sec=n), "map") for n in (1, 2)]
    path = messages.path(deque(poses), STAMP, "map")
    assert (path.header.stamp, path.header.frame_id) == (STAMP, "map")
    assert path.poses == poses


def test_point_cloud_is_read_back_by_its_own_fields():
    xyz = np.array([[1, 2, 3], [-4, 5.5, 1e-3]], np.float32)
    rgb = np.array([[255, 1, 2], [0, 128, 200]], np.uint8)
    points = MapPoints(*map(torch.from_numpy, (xyz, rgb, np.array([1.5, 9.0], np.float32))))
    cloud = messages.point_cloud(pack(points), STAMP, "map")
    assert (cloud.header.stamp, cloud.header.frame_id) == (STAMP, "map")
    assert (cloud.width, cloud.height, cloud.is_dense, cloud.is_bigendian) == (2, 1, True, False)
    assert len(cloud.data) == cloud.row_step * cloud.height == cloud.point_step * 2
    assert all(field.datatype == PointField.FLOAT32 and field.count == 1 for field in cloud.fields)
    raw = np.frombuffer(cloud.data, np.uint8).reshape(2, cloud.point_step)
    column = {field.name: raw[:, field.offset:field.offset + 4].copy() for field in cloud.fields}
    np.testing.assert_array_equal(np.concatenate([column[a].view("<f4") for a in "xyz"], 1), xyz)
    np.testing.assert_array_equal(column["rgb"][:, [2, 1, 0]], rgb)  # 0x00RRGGBB, little-endian
    np.testing.assert_array_equal(column["confidence"].view("<f4")[:, 0], [1.5, 9])


def test_empty_cloud_is_valid():
    points = MapPoints(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.uint8), torch.zeros(0))
    cloud = messages.point_cloud(pack(points), STAMP, "map")
    assert (cloud.width, cloud.row_step, len(cloud.data)) == (0, 0, 0) and len(cloud.fields) == 5


def test_pose_back_to_matrix():
    T = pose_matrix("y", -70, (1, 2, 3)) @ pose_matrix("x", 30)
    message = messages.pose(T)
    np.testing.assert_allclose(messages.pose_matrix(message.position, message.orientation), T, atol=1e-12)


@pytest.mark.parametrize(("field", "values"), [
    ("position", (math.nan, 0, 0)), ("orientation", (0, 0, 0, 0)), ("orientation", (0, 0, math.inf, 1)),
    ("orientation", (0, 0, 0, 7))])
def test_poses_that_are_none_are_named(field, values):
    message = messages.pose(pose_matrix())
    for axis, value in zip("xyzw", values):
        setattr(getattr(message, field), axis, float(value))
    with pytest.raises(ValueError, match=f"{field} is .*{values[-1] if field == 'orientation' and values[-1] else ''}"):
        messages.pose_matrix(message.position, message.orientation)
