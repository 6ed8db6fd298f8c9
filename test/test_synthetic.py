# SPDX-License-Identifier: Apache-2.0
"""Rendered scenes: shapes, determinism, and depth, poses and intrinsics that agree."""
from __future__ import annotations

import torch

from lingbot_map_ros.synthetic import ROOMS, SceneGenerator, make_place, render

SIZE = (42, 56)


def test_sequences_have_the_shapes_promised_and_repeat_by_seed():
    first, second = (SceneGenerator(SIZE, seed=5, textures=8).sequences(2, 3, options=ROOMS) for _ in range(2))
    assert first.images.shape == (2, 3, 3, *SIZE)
    assert first.depth.shape == (2, 3, *SIZE)
    assert first.T_world_camera.shape == (2, 3, 4, 4)
    assert first.intrinsics.shape == (2, 3, 3)
    assert first.depth.min() > 0.1
    for name in ("images", "depth", "T_world_camera", "intrinsics"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_the_loop_of_a_place_closes():
    place = make_place(3, frames=60, textures=8)
    position = place.T_world_camera[:, :3, 3]
    steps = (position.roll(-1, 0) - position).norm(dim=-1)
    assert steps[-1] < 1.2 * steps[:-1].max()
    points, colours = place.surface_points(1000)
    assert points.shape == colours.shape == (1000, 3)
    images, depth = render(place, place.T_world_camera[:2], torch.tensor([[30.0, 0, 28], [0, 30, 21], [0, 0, 1]]), SIZE)
    assert images.shape == (2, 3, *SIZE) and depth.shape == (2, *SIZE)
