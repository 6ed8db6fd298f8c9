# SPDX-License-Identifier: Apache-2.0
"""Motions that add up to a continuous pose."""
from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lingbot_map_ros.mapping.visual_odometry import VisualOdometry

SMALL = st.floats(-0.5, 0.5)


def pose(x: float, y: float, yaw: float) -> np.ndarray:
    T = np.eye(4)
    c, s = math.cos(yaw), math.sin(yaw)
    T[:2, :2], T[:2, 3] = [[c, -s], [s, c]], [x, y]
    return T


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=20), SMALL)
def test_motions_of_a_path_lead_to_its_end(steps, yaw):
    odometry, start = VisualOdometry(), pose(1.0, -2.0, yaw)
    odometry.T_odom_camera, T = start, np.eye(4)
    for step in steps:
        odometry.move(pose(*step), 3.0)
        T = T @ pose(*step)
    T[:3, 3] *= 3.0
    np.testing.assert_allclose(odometry.T_odom_camera, start @ T, atol=1e-9)
    assert math.isclose(odometry.path_length, 3 * sum(math.hypot(x, y) for x, y, _ in steps), abs_tol=1e-9)


def test_another_scale_is_that_of_what_follows():
    odometry = VisualOdometry()
    odometry.T_odom_camera = np.eye(4)
    odometry.move(pose(1, 0, 0), 1.0)
    odometry.move(pose(1, 0, 0), 10.0)
    np.testing.assert_allclose(odometry.T_odom_camera[:3, 3], [11, 0, 0])


def test_an_unknown_motion_is_none():
    odometry = VisualOdometry()
    odometry.T_odom_camera = pose(1, 2, 0.3)
    assert odometry.move(None, 2.0) is None
    np.testing.assert_array_equal(odometry.T_odom_camera, pose(1, 2, 0.3))


def test_twenty_thousand_motions_stay_a_rotation():
    odometry = VisualOdometry()
    odometry.T_odom_camera = np.eye(4)
    motion = pose(0.01, 0, 0.01)
    motion[:3, :3] = motion[:3, :3].astype(np.float32) * (1 + 1e-7)
    for _ in range(20_000):
        odometry.move(motion, 1.0)
    R = odometry.T_odom_camera[:3, :3]
    np.testing.assert_allclose(R @ R.T, np.eye(3), atol=1e-12)
