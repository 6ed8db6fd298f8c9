# SPDX-License-Identifier: Apache-2.0
"""From results to points in map: geometry, filters, and a map of a scene that is known."""
import dataclasses
import math

import numpy as np
import pytest
import torch

from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping import FrameResult, MapBuilder, frame_points
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, quaternion_from_matrix, unproject
from lingbot_map_ros.mapping.map_builder import depth_edges

HEIGHT, WIDTH = 24, 32
INTRINSICS = torch.tensor([[30.0, 0.0, 16.0], [0.0, 28.0, 12.0], [0.0, 0.0, 1.0]])


def make_result(depth, index=0, T_world_camera=None, confidence=None, image=None, is_keyframe=True):
    depth = depth.expand(HEIGHT, WIDTH).clone()
    return FrameResult(
        index=index,
        stamp=index,
        is_keyframe=is_keyframe,
        pose_encoding=torch.zeros(9),
        T_world_camera=torch.eye(4) if T_world_camera is None else T_world_camera,
        intrinsics=INTRINSICS,
        depth=depth,
        confidence=torch.full_like(depth, 2.0) if confidence is None else confidence,
        image=torch.full((3, HEIGHT, WIDTH), 0.5) if image is None else image,
    )


def pose(yaw, position):
    """T_world_camera of a camera turned to the right by yaw [rad] about its y axis (which points down)."""
    T = torch.eye(4)
    T[:3, :3] = torch.tensor(
        [[math.cos(yaw), 0, math.sin(yaw)], [0, 1, 0], [-math.sin(yaw), 0, math.cos(yaw)]], dtype=torch.float32
    )
    T[:3, 3] = torch.tensor(position)
    return T


def wall_depth(T_world_camera, distance):
    """Depth [h, w] of the plane z = distance of the world."""
    v, u = torch.meshgrid(torch.arange(float(HEIGHT)), torch.arange(float(WIDTH)), indexing="ij")
    rays = torch.stack([(u - 16) / 30, (v - 12) / 28, torch.ones_like(u)], dim=-1) @ T_world_camera[:3, :3].T
    return (distance - T_world_camera[2, 3]) / rays[..., 2]


def test_unproject_projects_back():
    generator = torch.Generator().manual_seed(0)
    depth = 0.5 + torch.rand(HEIGHT, WIDTH, generator=generator)
    T = pose(0.7, [1.0, -2.0, 3.0])
    points = unproject(depth, INTRINSICS, T)
    camera = (points - T[:3, 3]) @ T[:3, :3]  # the inverse of a rotation is its transpose
    pixels = camera @ INTRINSICS.T
    u, v = pixels[..., 0] / pixels[..., 2], pixels[..., 1] / pixels[..., 2]
    torch.testing.assert_close(camera[..., 2], depth)
    torch.testing.assert_close(u, torch.arange(float(WIDTH)).expand(HEIGHT, WIDTH), atol=1e-4, rtol=0)
    torch.testing.assert_close(v, torch.arange(float(HEIGHT))[:, None].expand(HEIGHT, WIDTH), atol=1e-4, rtol=0)


def test_map_axes_of_a_level_camera():
    right, down, forward = np.eye(3)
    R = T_MAP_WORLD[:3, :3]
    assert (R @ forward).tolist() == [1, 0, 0]
    assert (R @ right).tolist() == [0, -1, 0]  # y is left
    assert (R @ down).tolist() == [0, 0, -1]  # z is up
    assert np.linalg.det(R) == pytest.approx(1)


def test_quaternions_survive_the_way_through_matrices():
    quaternions = np.random.default_rng(0).normal(size=(500, 4))
    # Half turns and nearly half turns, where w and single components vanish.
    special = [np.eye(4), np.eye(4) + [1e-9, 0, 0, 0], 1 - np.eye(4), np.eye(4) + [0, 0, 0, 1e-6]]
    quaternions = np.concatenate([quaternions, *special])
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    result = quaternion_from_matrix(quaternion_to_matrix(torch.from_numpy(quaternions)).numpy())
    assert (result[:, 3] >= 0).all()
    np.testing.assert_allclose(np.abs((result * quaternions).sum(axis=1)), 1, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1, atol=1e-12)
    assert quaternion_from_matrix(np.eye(3)).tolist() == [0, 0, 0, 1]


def test_frame_points_in_map():
    image = torch.rand(3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    xyz, rgb, confidence = frame_points(make_result(torch.tensor(2.0), image=image))
    assert xyz.shape == rgb.shape == (HEIGHT * WIDTH, 3) and rgb.dtype == torch.uint8
    assert xyz.dtype == confidence.dtype == torch.float32
    # Row by row: the first pixel is up and to the left, in front of the camera.
    x, y, z = xyz[0].tolist()
    assert (x, y, z) == pytest.approx((2.0, 16 / 30 * 2, 12 / 28 * 2))
    assert rgb.reshape(HEIGHT, WIDTH, 3).permute(2, 0, 1).equal((image * 255).round().to(torch.uint8))
    assert (confidence == 2).all()


def test_frame_points_uses_the_given_map_frame():
    T_map_world = np.eye(4)
    T_map_world[:3, 3] = [10, 20, 30]
    result = make_result(torch.tensor(2.0), T_world_camera=pose(0.3, [1.0, 0.0, 0.0]))
    expected = unproject(result.depth, INTRINSICS, result.T_world_camera) + torch.tensor([10.0, 20, 30])
    torch.testing.assert_close(frame_points(result, T_map_world=T_map_world).xyz, expected.reshape(-1, 3))


def test_frame_points_leaves_out_what_is_not_sure():
    confidence = torch.ones(HEIGHT, WIDTH)
    confidence[:10] = 3.0
    confidence[0, 0], confidence[1, 1] = math.nan, math.inf
    result = make_result(torch.tensor(2.0), confidence=confidence)
    assert len(frame_points(result, 1.0).xyz) == HEIGHT * WIDTH - 2
    assert len(frame_points(result, 3.0).xyz) == 10 * WIDTH - 2
    assert len(frame_points(result, 3.1).xyz) == 0


def test_frame_points_leaves_out_bad_depths():
    depth = torch.full((HEIGHT, WIDTH), 2.0)
    depth[3, 4], depth[6, 7], depth[9, 10], depth[12, 13] = math.nan, math.inf, 0.0, -1.0
    xyz = frame_points(make_result(depth)).xyz
    assert len(xyz) >= HEIGHT * WIDTH - 4 * 5  # their neighbours may go with them
    np.testing.assert_allclose(xyz[:, 0], 2.0, atol=1e-6)


def test_frame_points_leaves_out_points_that_are_not_finite():
    result = make_result(torch.tensor(2.0))
    broken = INTRINSICS.clone()
    broken[0, 0] = math.nan
    assert len(frame_points(dataclasses.replace(result, intrinsics=broken)).xyz) == 0


def test_depth_edges_are_both_sides_of_a_jump():
    depth = torch.full((HEIGHT, WIDTH), 2.0)
    depth[:, 10:] = 3.0
    edges = depth_edges(depth, 0.1)
    assert edges[:, 9:11].all() and not edges[:, :9].any() and not edges[:, 11:].any()
    assert depth_edges(depth.T, 0.1).equal(edges.T)
    assert not depth_edges(depth, 0.6).any()
    slope = 2.0 * 1.05 ** torch.arange(float(WIDTH)).expand(HEIGHT, WIDTH)
    assert not depth_edges(slope, 0.1).any()
    assert len(frame_points(make_result(depth)).xyz) == HEIGHT * (WIDTH - 2)


def test_views_of_one_wall_make_one_wall():
    """Four cameras look at the plane z = 2 of the world: x = 2 of map, whatever their pose."""
    poses = [pose(0, [0, 0, 0]), pose(0.2, [-0.3, 0, 0.1]), pose(-0.25, [0.4, 0.1, 0.2]), pose(0.1, [0, 0, 0.5])]
    results = [make_result(wall_depth(T, 2.0), i, T) for i, T in enumerate(poses)]
    builder = MapBuilder(max_points=10_000, voxel_fraction=0.05)
    builder.add(results[:2])
    first = len(builder.voxels)
    median = torch.stack([result.depth for result in results[:2]]).median()
    assert builder.voxels.voxel_size == pytest.approx(0.05 * float(median))
    for result in results[2:]:
        builder.add([result])
    xyz = builder.voxels.points().xyz
    np.testing.assert_allclose(xyz[:, 0], 2.0, atol=1e-5)
    assert first < len(xyz) < 4 * HEIGHT * WIDTH / 2  # the views overlap


def test_only_keyframes_enter_the_map():
    builder = MapBuilder(max_points=10_000)
    builder.add([make_result(torch.tensor(2.0))])
    version, count = builder.voxels.version, len(builder.voxels)
    assert builder.add([make_result(torch.tensor(1.0), 1, is_keyframe=False)]) == [None]
    assert (builder.voxels.version, len(builder.voxels)) == (version, count)
    builder.add([make_result(torch.tensor(1.0), 2)])
    assert len(builder.voxels) > count


def test_voxels_are_sized_anew_after_a_reset():
    builder = MapBuilder(max_points=10_000, voxel_fraction=0.1)
    builder.add([])
    builder.add([make_result(torch.tensor(math.nan))])  # tells no size: the next one does
    assert len(builder.voxels) == 0
    builder.add([make_result(torch.tensor(2.0), 1)])
    assert builder.voxels.voxel_size == pytest.approx(0.2)
    builder.add([make_result(torch.tensor(5.0), 2)])
    assert builder.voxels.voxel_size == pytest.approx(0.2)
    builder.reset()
    assert len(builder.voxels) == 0
    builder.add([make_result(torch.tensor(5.0))])
    assert builder.voxels.voxel_size == pytest.approx(0.5)


def test_the_map_stays_within_its_bound():
    builder = MapBuilder(max_points=500, voxel_fraction=0.01)
    for i in range(5):
        builder.add([make_result(torch.tensor(2.0 + i), i)])
        assert len(builder.voxels) <= 500
    assert builder.voxels.dropped >= 5 * HEIGHT * WIDTH - 500


def test_points_are_returned_as_they_enter_the_map():
    builder = MapBuilder(max_points=100_000, confidence_threshold=1.5)
    result = make_result(torch.tensor(2.0))
    [points] = builder.add([result])
    assert len(points.xyz) == HEIGHT * WIDTH
    assert all(torch.equal(a, b) for a, b in zip(points, frame_points(result, 1.5)))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.0, math.nan])
def test_bad_voxel_sizes_are_refused(fraction):
    with pytest.raises(ValueError, match=f"voxel_fraction.*{fraction}"):
        MapBuilder(voxel_fraction=fraction)


@pytest.mark.parametrize("size", [0.0, -0.1, math.inf, math.nan])
def test_bad_voxel_sizes_in_metres_are_refused(size):
    with pytest.raises(ValueError, match=f"voxel_size.*{size}"):
        MapBuilder(voxel_size=size)


def test_voxels_are_in_metres_once_the_scale_is_known():
    builder = MapBuilder(max_points=10_000, voxel_fraction=0.1, voxel_size=0.5)
    builder.set_scale(10.0)
    builder.add([make_result(torch.tensor(2.0))])
    assert builder.voxels.voxel_size == pytest.approx(0.05)
    builder.reset()  # another unit, that nobody knows
    builder.add([make_result(torch.tensor(2.0))])
    assert builder.voxels.voxel_size == pytest.approx(0.2)
    version, before = builder.voxels.version, len(builder.voxels)
    builder.set_scale(1.0)
    assert builder.voxels.voxel_size == pytest.approx(0.5)
    assert builder.voxels.version > version and 0 < len(builder.voxels) < before
    version = builder.voxels.version
    builder.set_scale(1.0)
    assert builder.voxels.version == version
    builder.add([make_result(torch.tensor(2.0), 1)])  # the same wall: the same voxels
    assert len(builder.voxels) < before
