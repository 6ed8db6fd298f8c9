# SPDX-License-Identifier: Apache-2.0
"""The bird's-eye picture: what is cut, what is coloured, what is level."""
import sys

import cv2
import numpy as np
import pytest

from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, quaternion_from_matrix
from lingbot_map_ros.mapping.topdown import cut_height, level_rotation, rasterize, write_comparison, write_topdown


def rotation(axis, angle):
    return cv2.Rodrigues(np.array(axis, dtype=float) * angle)[0]


def make_poses(yaws, pitch, R_map_level=np.eye(3)):
    """Poses of cameras on a line that look down by `pitch` and turn left by `yaws` [rad], in a map that is askew."""
    rows = []
    for i, yaw in enumerate(yaws):
        R = R_map_level @ rotation([0, 0, 1], yaw) @ rotation([0, 1, 0], pitch) @ T_MAP_WORLD[:3, :3]
        rows.append([*(R_map_level @ [0.1 * i, 0, 0]), *quaternion_from_matrix(R)])
    return np.array(rows)


@pytest.fixture
def room():
    """Points [n, 3] and colours of a floor (green) 2 x 1, walls (grey) and a ceiling (red), the camera at height 0."""
    generator = np.random.default_rng(0)
    n = 4000
    floor, ceiling, wall = (generator.uniform([0, 0, 0], [2, 1, 1], (n, 3)) for _ in range(3))
    floor[:, 2], ceiling[:, 2], wall[:, 1] = -0.5, 0.9, 1.0
    wall[:, 2] = wall[:, 2] * 1.4 - 0.5
    xyz = np.concatenate([floor, wall, ceiling])
    rgb = np.repeat(np.array([[0, 200, 0], [90, 90, 90], [220, 0, 0]], np.uint8), n, axis=0)
    return xyz, rgb


def test_picture_of_a_room(tmp_path, room):
    path = tmp_path / "topdown.png"
    write_topdown(path, *room, make_poses(np.linspace(0, 1, 12), 0.1), point_size=0.03)
    picture = cv2.imread(str(path)).astype(int)
    assert picture is not None and min(picture.shape[:2]) > 300
    blue, green, red = np.moveaxis(picture, -1, 0)
    share = ((green > red + 50) & (green > blue + 50)).mean()
    assert share > 0.3  # the floor shows
    assert ((red > 180) & (green < 60) & (blue < 60)).mean() < 0.02  # the ceiling does not (the path is red, too)
    assert [p.name for p in tmp_path.iterdir()] == ["topdown.png"]


def test_comparison_shows_both_maps_at_one_scale(tmp_path, room):
    path = tmp_path / "comparison.png"
    xyz, rgb = room
    positions = np.stack([np.linspace(0.3, 1.7, 9), np.full(9, 0.5), np.zeros(9)], axis=1)
    blue = np.full_like(rgb, [0, 0, 200])
    write_comparison(path, room, (xyz, blue), positions, positions + [0, 0.1, 0], point_size=0.03)
    picture = cv2.imread(str(path)).astype(int)
    halves = picture[:, :picture.shape[1] // 2], picture[:, picture.shape[1] // 2:]
    shares = []
    for half, channel in zip(halves, (1, 0)):  # green where it is true, blue where it was mapped
        others = np.delete(half, channel, axis=2).max(axis=2)
        shares.append((half[..., channel] > others + 50).mean())
    assert 0.2 < shares[0] < shares[1] < 0.6  # the wall is green in neither, blue in the second
    assert ((picture[..., 2] > 180) & (picture[..., 1] < 60) & (picture[..., 0] < 70)).any()  # the estimated path
    with pytest.raises(ValueError, match="nothing to compare"):
        write_comparison(path, room, room, positions[:0], positions)


def test_path_alone_and_points_alone(tmp_path, room):
    empty = np.zeros((0, 3)), np.zeros((0, 3), np.uint8)
    for i, (points, poses) in enumerate([(empty, make_poses([0.0], 0)), (room, np.zeros((0, 7)))]):
        write_topdown(tmp_path / f"{i}.png", *points, poses)
        assert cv2.imread(str(tmp_path / f"{i}.png")) is not None
    with pytest.raises(ValueError, match="nothing to draw"):
        write_topdown(tmp_path / "none.png", *empty, np.zeros((0, 7)))
    assert not (tmp_path / "none.png").exists()


def test_missing_matplotlib_is_named(tmp_path, room, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        write_topdown(tmp_path / "topdown.png", *room, make_poses([0.0], 0))


def test_rasterize_places_and_averages():
    xyz = np.array([[0.5, 0.5, 0], [0.6, 0.4, 9], [2.5, 1.5, 0], [7, 7, 0]])
    rgb = np.array([[255, 0, 0], [0, 0, 255], [0, 255, 0], [1, 1, 1]], np.uint8)
    picture = rasterize(xyz, rgb, np.zeros(2), np.array([3.0, 2.0]), 1.0)
    assert picture.shape == (2, 3, 4)
    assert picture[0, 0, :3].tolist() == [0.5, 0, 0.5]
    assert picture[1, 2, :3].tolist() == [0, 1, 0]
    assert (picture[..., 3] > 0).sum() == 2 and picture[0, 0, 3] > picture[1, 2, 3]
    wide = rasterize(xyz[:1], rgb[:1], np.zeros(2), np.array([3.0, 2.0]), 1.0, splat=3)
    assert (wide[..., 3] > 0).tolist() == [[True, True, False], [True, True, False]]


def test_cut_is_between_camera_and_ceiling():
    z = np.concatenate([np.linspace(-1, 2, 500), np.full(100, 2.0)])
    assert cut_height(z, np.array([0.0, 0.4])) == pytest.approx(0.4 + 0.5 * (2.0 - 0.4))
    assert cut_height(z, np.array([5.0])) == 2.0  # nothing is above the camera: all stays
    assert cut_height(z, np.zeros(0)) == 2.0


def test_level_rotation_finds_the_vertical():
    """A first camera that looks down by 0.3 rad tilts the map; the turns of the path tell."""
    R_map_level = rotation([0, 1, 0], -0.3)
    R = level_rotation(make_poses(np.linspace(-1.2, 1.2, 20), 0.3, R_map_level))
    np.testing.assert_allclose(R @ R_map_level @ [0, 0, 1], [0, 0, 1], atol=0.02)
    np.testing.assert_allclose(R @ R.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(R) == pytest.approx(1)


def test_level_rotation_trusts_the_map_on_a_straight_path():
    np.testing.assert_allclose(level_rotation(make_poses(np.full(20, 0.4), 0.3)), np.eye(3), atol=1e-9)
    assert np.array_equal(level_rotation(np.zeros((0, 7))), np.eye(3))
