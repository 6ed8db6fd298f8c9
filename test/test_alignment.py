# SPDX-License-Identifier: Apache-2.0
"""From the session's map to map."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.mapping.alignment import T_BODY_OPTICAL, Alignment
from lingbot_map_ros.mapping.voxel_map import MapPoints

NUMBER = st.floats(-50, 50)
ANGLE = st.floats(-3.1, 3.1)


def body(x: float, y: float, z: float, yaw: float, pitch: float = 0.0) -> np.ndarray:
    """Return the pose of a body with x forward and z up, turned about y, then z."""
    c, s, cp, sp = math.cos(yaw), math.sin(yaw), math.cos(pitch), math.sin(pitch)
    T = np.eye(4)
    T[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    T[:3, 3] = x, y, z
    return T


def test_nothing_is_changed_by_default():
    T = body(1, 2, 3, 0.5) @ T_BODY_OPTICAL
    np.testing.assert_array_equal(Alignment().pose(T), T)


@settings(max_examples=60, deadline=None)
@given(st.tuples(NUMBER, NUMBER, NUMBER, ANGLE, st.floats(-1.2, 1.2)), st.tuples(NUMBER, NUMBER, NUMBER, ANGLE),
       st.floats(0.01, 100))
def test_a_camera_is_where_it_was_placed_at_every_scale(camera, target, scale):
    T_model_camera = body(*camera) @ T_BODY_OPTICAL
    for alignment in (Alignment().scaled(scale).placed(T_model_camera, body(*target), T_BODY_OPTICAL),
                      Alignment().placed(T_model_camera, body(*target), T_BODY_OPTICAL).scaled(scale)):
        placed = alignment.pose(T_model_camera)
        np.testing.assert_allclose(placed[:3, 3], target[:3], atol=1e-9)
        # The heading is the one asked for, the pitch stays as the session sees it: z is still up.
        expected = body(*target[:3], target[3], camera[4]) @ T_BODY_OPTICAL
        np.testing.assert_allclose(placed, expected, atol=1e-9)
        # All else keeps its place relative to the camera, by the scale.
        xyz = torch.tensor([[3.0, -2.0, 1.0]], dtype=torch.float64)
        moved = alignment.points(MapPoints(xyz, torch.zeros(1, 3, dtype=torch.uint8), torch.ones(1))).xyz[0].numpy()
        seen = T_model_camera[:3, :3].T @ (xyz[0].numpy() - T_model_camera[:3, 3])
        np.testing.assert_allclose(placed[:3, :3].T @ (moved - placed[:3, 3]), scale * seen, atol=1e-6 * max(1, scale))


def test_a_camera_on_a_body_is_placed_with_it():
    T_body_camera = body(0.3, 0.0, 0.2, 0.0, 0.4) @ T_BODY_OPTICAL
    T_model_camera = body(0, 0, 0, 0.7, 0.4) @ T_BODY_OPTICAL
    placed = Alignment().placed(T_model_camera, body(5, 6, 0, -1.0), T_body_camera).pose(T_model_camera)
    np.testing.assert_allclose(placed, body(5, 6, 0, -1.0) @ T_body_camera, atol=1e-9)


def test_a_camera_that_looks_straight_down_has_the_heading_of_its_body():
    T_body_camera = body(0, 0, 1, 0, math.pi / 2) @ T_BODY_OPTICAL
    T_model_camera = body(0, 0, 0, 0.2, math.pi / 2) @ T_BODY_OPTICAL
    placed = Alignment().placed(T_model_camera, body(1, 1, 0, 0.9), T_body_camera).pose(T_model_camera)
    np.testing.assert_allclose(placed, body(1, 1, 0, 0.9) @ T_body_camera, atol=1e-9)


@pytest.mark.parametrize("T", [body(0, 0, 0, 0, math.pi / 2), body(0, 0, 0, math.nan)])
def test_poses_without_a_heading_are_refused(T):
    with pytest.raises(ValueError, match="heading"):
        Alignment().placed(T_BODY_OPTICAL, T, T_BODY_OPTICAL)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        Alignment().scaled(scale)


def test_height_is_the_inverse_of_points():
    tilt = body(0, 0, 0, 0.3, -0.6)[:3, :3]
    alignment = Alignment(2.5, 0.4, tilt, np.array([1.0, 2, 3]), np.array([4.0, 5, 6]))
    level = np.array([[0.5, 0.5, alignment.height(7.0)]])
    np.testing.assert_allclose(alignment.level(level @ tilt), level)
    point = MapPoints(torch.from_numpy(level @ tilt), None, None)
    assert alignment.points(point).xyz[0, 2] == pytest.approx(7)


@settings(max_examples=30, deadline=None)
@given(st.floats(-1.2, 1.2), ANGLE, st.floats(0.1, 10))
def test_a_mounted_camera_starts_with_its_body_level_at_the_origin(pitch, turn, scale):
    T_body_camera = body(0.3, -0.1, 1.2, turn, pitch) @ T_BODY_OPTICAL
    T_model_camera = body(0.01, 0.02, 0, 0.03, 0.04) @ T_BODY_OPTICAL  # the first pose is about the identity
    alignment = Alignment(scale).levelled(T_model_camera, T_body_camera)
    np.testing.assert_allclose(alignment.pose(T_model_camera), T_body_camera, atol=1e-9)
    moved = alignment.placed(T_model_camera, body(5, 6, 0, 1.0), T_body_camera)
    np.testing.assert_allclose(moved.pose(T_model_camera), body(5, 6, 0, 1.0) @ T_body_camera, atol=1e-9)
