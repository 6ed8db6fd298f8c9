# SPDX-License-Identifier: Apache-2.0
"""Decoding of pose encodings."""
import math

import pytest
import torch

from lingbot_map_ros.gct import decode_pose_encoding
from lingbot_map_ros.gct.pose import quaternion_to_matrix


def encoding(t=(0, 0, 0), q=(0, 0, 0, 1), fov=(1, 1)):
    return torch.tensor([*t, *q, *fov], dtype=torch.float64)


@pytest.mark.parametrize("axis", range(3))
def test_rotation_about_an_axis(axis):
    angle = 0.7
    direction = torch.eye(3, dtype=torch.float64)[axis]
    q = torch.cat([math.sin(angle / 2) * direction, torch.tensor([math.cos(angle / 2)], dtype=torch.float64)])
    skew = torch.zeros(3, 3, dtype=torch.float64)
    following, last = (axis + 1) % 3, (axis + 2) % 3
    skew[last, following], skew[following, last] = 1, -1
    expected = torch.linalg.matrix_exp(angle * skew)
    torch.testing.assert_close(quaternion_to_matrix(q), expected)
    torch.testing.assert_close(quaternion_to_matrix(-2.5 * q), expected)  # neither length nor sign matters


def test_any_quaternion_gives_a_rotation_that_keeps_its_axis():
    q = torch.randn(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = quaternion_to_matrix(q)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64).expand(100, 3, 3))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(100, dtype=torch.float64))
    torch.testing.assert_close((rotation @ q[:, :3, None])[..., 0], q[:, :3])


def test_a_camera_point_is_taken_to_the_world():
    quarter = math.sqrt(0.5)
    T, _ = decode_pose_encoding(encoding(t=(1, 2, 3), q=(0, quarter, 0, quarter)), (42, 56))  # a turn to the right
    ahead = torch.tensor([0, 0, 5, 1], dtype=torch.float64)
    torch.testing.assert_close(T @ ahead, torch.tensor([6, 2, 3, 1], dtype=torch.float64))


def test_intrinsics_see_the_field_of_view():
    _, K = decode_pose_encoding(encoding(fov=(math.radians(60), math.radians(90))), (42, 56))
    expected = torch.tensor([[28, 0, 28], [0, 21 * math.sqrt(3), 21], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(K, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_keep_shape_and_dtype(dtype):
    T, K = decode_pose_encoding(torch.rand(2, 5, 9, dtype=dtype), (42, 56))
    assert T.shape == (2, 5, 4, 4) and K.shape == (2, 5, 3, 3) and T.dtype == K.dtype == dtype


def test_degenerate_encodings_stay_finite():
    T, K = decode_pose_encoding(encoding(q=(0, 0, 0, 0), fov=(0, 4)).float(), (42, 56))
    assert torch.equal(T, torch.eye(4))
    assert K.isfinite().all() and K[0, 0] > 0 and K[1, 1] > 0


def test_values_that_are_not_finite_stay_visible():
    T, K = decode_pose_encoding(encoding(t=(math.nan, 0, 0), fov=(math.nan, 1)), (42, 56))
    assert T[0, 3].isnan() and K[1, 1].isnan()
    for index in range(4):
        quaternion = [0.1, 0.2, 0.3, 0.9]
        quaternion[index] = math.nan
        assert not quaternion_to_matrix(torch.tensor(quaternion)).isfinite().all()


@pytest.mark.parametrize("length", [1e-30, 1e-10, 1e10, 1e30])
def test_a_quaternion_of_any_length_is_its_direction(length):
    unit = torch.tensor([0.5, -0.1, 0.3, 0.8])
    torch.testing.assert_close(quaternion_to_matrix(unit * length), quaternion_to_matrix(unit))
