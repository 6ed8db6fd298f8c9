# SPDX-License-Identifier: Apache-2.0
"""Outdoor places: ground, sky and sun, buildings, cars, walls, signs, trees and posts."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.layout import anywhere, at_walls, empty_scenes, find_spots, put, put_parts, scatter
from lingbot_map_ros.synthetic.scene import FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, Scenes
from lingbot_map_ros.synthetic.texture import FACADE, NOISE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

SHELL_HALF = (150.0, 150.0, 75.0)  # metres: the ground ends 150 m away, where nothing but haze is to be seen
SUN_DISTANCE = 500.0  # metres
# Which primitives are what.
BUILDINGS, CARS, WALLS, CLUTTER = FIRST_BOX, FIRST_BOX + 6, FIRST_BOX + 10, FIRST_BOX + 13
SIGNS, SLAB = FIRST_BOX + 17, FIRST_BOX + 19
SIGN_POLES, TRUNKS, POSTS = FIRST_CYLINDER, FIRST_CYLINDER + 2, FIRST_CYLINDER + 5
CROWNS = FIRST_ELLIPSOID


def draw_streets(size: Tensor, path: Tensor, generator: torch.Generator, clutter: float = 1.0) -> Scenes:
    """Draw b outdoor places round paths that are already there.

    Args:
        size: [b, 2] metres of the free area, which buildings surround.
        path: [b, s, 3] positions of the camera.
        generator: on the CPU.
        clutter: share of the things to put in.
    """
    count = len(size)
    scenes = empty_scenes(count, generator)
    scenes.half[:, 0] = torch.tensor(SHELL_HALF)
    scenes.centre[:, 0] = torch.tensor([0.0, 0.0, SHELL_HALF[2]])
    scenes.tile[:, 0] = log_uniform(generator, (count, 1), 1.5, 8.0)
    scenes.texture[:, 0, 5] = draw_numbers(generator, (count,), (NOISE, TILES, PHOTO))
    scenes.modulation[:, 0] = draw_numbers(generator, (count,), (NOISE,))  # the sky's clouds too
    scenes.open[:] = True
    low, high = -size / 2, size / 2

    def wanted(things: int, share: float) -> Tensor:
        return chance(generator, (count, things), share * clutter)

    def upright(*ranges: tuple[float, float], things: int) -> Tensor:
        return torch.stack([log_uniform(generator, (count, things), *limits) for limits in ranges], -1)

    building = upright((3.0, 14.0), (2.0, 9.0), (1.6, 9.0), things=6)
    gap = torch.where(chance(generator, (count, 6), 0.7), uniform(generator, (count, 6), 0, 3),
                      uniform(generator, (count, 6), 3, 30))
    spots, yaw = at_walls(high, -(building[..., 1] + gap), generator)  # outside the area, along its sides
    centre, yaw, found = find_spots(building, torch.zeros(count, 6), spots, yaw, path, margin=1.0)
    put(scenes, BUILDINGS, centre, building, yaw, wanted(6, 0.95) & found)
    scenes.texture[:, BUILDINGS:CARS, :4] = torch.where(
        chance(generator, (count, 6, 1), 0.6), draw_numbers(generator, (count, 6, 1), (FACADE,)),
        draw_numbers(generator, (count, 6, 1), (PLAIN, NOISE, TILES, PHOTO)))
    scenes.tile[:, BUILDINGS:CARS] = log_uniform(generator, (count, 6, 1), 3.0, 12.0)

    # Cars: a body and a cabin on it.
    car = torch.stack([uniform(generator, (count, 2), 1.7, 2.4), uniform(generator, (count, 2), 0.8, 1.0),
                       uniform(generator, (count, 2), 0.7, 1.0)], -1)
    centre, yaw, found = find_spots(car, torch.zeros(count, 2), *anywhere(low, high, path, 2, generator), path)
    body, cabin = car * torch.tensor([1.0, 1.0, 0.45]), car * torch.tensor([0.55, 0.9, 0.4])
    offset = torch.zeros(count, 2, 2, 3)
    offset[:, :, 0, 2] = -0.35 * car[..., 2]
    offset[:, :, 1, 2] = 0.5 * car[..., 2]
    offset[:, :, 1, 0] = -0.15 * car[..., 0]
    put_parts(scenes, CARS, centre, yaw, offset, torch.stack([body, cabin], 2), wanted(2, 0.7) & found)
    scenes.texture[:, CARS:WALLS] = draw_numbers(generator, (count, 4, 1), (PLAIN, PHOTO))

    wall = upright((1.0, 6.0), (0.08, 0.4), (0.3, 1.1), things=3)
    scatter(scenes, WALLS, wall, torch.zeros(count, 3), low, high, path, wanted(3, 0.8), generator)
    scenes.texture[:, WALLS:CLUTTER] = draw_numbers(generator, (count, 3, 1), (NOISE, TILES, PLANKS, PHOTO))
    crate = upright((0.15, 0.9), (0.15, 0.9), (0.15, 0.9), things=4)
    scatter(scenes, CLUTTER, crate, torch.zeros(count, 4), low, high, path, wanted(4, 0.85), generator)
    slab = upright((1.0, 4.0), (0.5, 2.5), (0.05, 0.1), things=1)
    scatter(scenes, SLAB, slab, torch.zeros(count, 1), low, high, path, wanted(1, 0.6), generator)

    # Signs: a plate on a pole.
    height = uniform(generator, (count, 2), 0.9, 1.6)
    plate = torch.stack([uniform(generator, (count, 2), 0.2, 0.9), torch.full((count, 2), 0.02),
                         uniform(generator, (count, 2), 0.2, 0.5)], -1)
    around = torch.stack([plate[..., 0], torch.full((count, 2), 0.06), height], -1)
    centre, yaw, found = find_spots(around, torch.zeros(count, 2), *anywhere(low, high, path, 2, generator), path)
    found = found & wanted(2, 0.7)
    offset = torch.zeros(count, 2, 1, 3)
    offset[..., 0, 2] = height - plate[..., 2]
    offset[..., 0, 1] = 0.05
    put_parts(scenes, SIGNS, centre, yaw, offset, plate[:, :, None], found)
    scenes.tile[:, SIGNS:SLAB] = 2 * plate.amax(-1, keepdim=True)
    pole = around * torch.tensor([0.0, 0.0, 1.0]) + torch.tensor([0.03, 0.03, 0.0])
    put_parts(scenes, SIGN_POLES, centre, yaw, torch.zeros(count, 2, 1, 3), pole[:, :, None], found)

    # Trees: a trunk that carries a crown.
    height = uniform(generator, (count, 3), 0.9, 2.2)
    radius = log_uniform(generator, (count, 3), 0.06, 0.3)
    crown = uniform(generator, (count, 3, 3), 0.7, 1.0) * uniform(generator, (count, 3, 1), 0.8, 2.4)
    trunk = torch.stack([radius, radius, height], -1)
    around = torch.cat([crown[..., :2], (height + crown[..., 2])[..., None]], -1)
    centre, yaw, found = find_spots(around, torch.zeros(count, 3), *anywhere(low, high, path, 3, generator), path)
    found = found & wanted(3, 0.7)
    offset = torch.zeros(count, 3, 1, 3)
    offset[..., 0, 2] = height - around[..., 2]
    put_parts(scenes, TRUNKS, centre, yaw, offset, trunk[:, :, None], found)
    put_parts(scenes, CROWNS, centre, yaw, offset + offset.new_tensor([0, 0, 1]) * height[..., None, None],
              crown[:, :, None], found)
    scenes.texture[:, CROWNS:CROWNS + 3] = draw_numbers(generator, (count, 3, 1), (NOISE, PHOTO))
    scenes.tile[:, CROWNS:CROWNS + 3] = uniform(generator, (count, 3, 1), 0.8, 2.0)

    radius = log_uniform(generator, (count, 4), 0.03, 0.2)
    post = torch.stack([radius, radius, log_uniform(generator, (count, 4), 0.4, 3.0)], -1)
    scatter(scenes, POSTS, post, torch.zeros(count, 4), low, high, path, wanted(4, 0.85), generator)

    _put_sun(scenes, generator)
    return scenes


def _put_sun(scenes: Scenes, generator: torch.Generator) -> None:
    """Draw the sun's height and the sky: from a clear noon to an overcast evening."""
    count = len(scenes)
    azimuth, height = uniform(generator, (count,), 0, 2 * math.pi), uniform(generator, (count,), 0.25, 1.3)
    scenes.light = SUN_DISTANCE * torch.stack(
        [azimuth.cos() * height.cos(), azimuth.sin() * height.cos(), height.sin()], -1)
    scenes.light_falloff[:] = 0
    overcast = chance(generator, (count,), 0.35)
    scenes.light_strength = torch.where(overcast, uniform(generator, (count,), 0.0, 0.25),
                                        uniform(generator, (count,), 0.6, 1.5))
    scenes.ambient = uniform(generator, (count,), 0.3, 0.6) + torch.where(overcast, 0.3, 0.0)
    blue = torch.where(overcast, uniform(generator, (count,), 0, 0.2), uniform(generator, (count,), 0.4, 1))[:, None]
    bright = uniform(generator, (count, 1), 0.7, 1.3)
    white = torch.tensor([0.95, 0.97, 1.0])
    scenes.sky = torch.stack([torch.lerp(white, torch.tensor([0.75, 0.86, 1.0]), blue) * bright,
                              torch.lerp(0.8 * white, torch.tensor([0.28, 0.5, 0.95]), blue) * bright], 1)
    scenes.modulation_strength[:, 0] = uniform(generator, (count,), 0.1, 0.6)
    scenes.modulation_rate[:, 0] = 0.29
