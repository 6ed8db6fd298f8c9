# SPDX-License-Identifier: Apache-2.0
"""Rooms: four walls, furniture, pictures, tables on legs, a lamp."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.scene import (
    BOXES, CYLINDERS, ELLIPSOIDS, FACES, FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, NOWHERE, PRIMITIVES, Scenes,
    clearance, turn_about_z,
)
from lingbot_map_ros.synthetic.texture import (
    COLLAGE, NOISE, PHOTO, PLAIN, PLANKS, TILES, chance, draw_numbers, log_uniform, uniform,
)

CLEARANCE = 0.3  # metres between a path and any surface
TRIES = 8  # places tried for a thing before it is left out
THINGS = (PLAIN, NOISE, TILES, PLANKS, COLLAGE, PHOTO)  # textures of furniture and the like


def empty_scenes(count: int, generator: torch.Generator) -> Scenes:
    """Return scenes with surfaces drawn but all primitives, shell too, still without a place."""
    shape = (count, PRIMITIVES)
    centre = torch.zeros(*shape, 3)
    centre[..., 2] = NOWHERE
    # A face is as its neighbours more often than not.
    texture = draw_numbers(generator, (*shape, FACES), THINGS)
    same = chance(generator, (*shape, 1), 0.6)
    texture = torch.where(same, texture[..., :1], texture)
    tile = log_uniform(generator, (*shape, 1), 0.5, 2.2) * log_uniform(generator, (*shape, FACES), 0.7, 1.4)
    return Scenes(
        centre=centre,
        half=torch.ones(*shape, 3),
        rotation=torch.eye(3).expand(*shape, 3, 3).clone(),
        texture=texture,
        tile=tile,
        modulation=draw_numbers(generator, shape, (NOISE, COLLAGE)),
        modulation_strength=uniform(generator, shape, 0.05, 0.5),
        modulation_rate=torch.where(chance(generator, shape, 0.5), 0.29, 3.7),
        light=torch.zeros(count, 3),
        light_strength=uniform(generator, (count,), 0.4, 1.4),
        light_falloff=torch.full((count,), 0.08),
        ambient=uniform(generator, (count,), 0.25, 0.8),
        open=torch.zeros(count, dtype=torch.bool),
        sky=torch.zeros(count, 2, 3),
    )


def put(scenes: Scenes, places: slice, centre: Tensor, half: Tensor, yaw: Tensor, wanted: Tensor) -> None:
    """Write primitives [b, k] at `places` where `wanted`."""
    wanted = wanted[..., None]
    scenes.centre[:, places] = torch.where(wanted, centre, scenes.centre[:, places])
    scenes.half[:, places] = torch.where(wanted, half, scenes.half[:, places])
    scenes.rotation[:, places] = torch.where(wanted[..., None], turn_about_z(yaw), scenes.rotation[:, places])


def choose(candidates: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Take the first free candidate: [b, k, tries, ...] and [b, k, tries] -> [b, k, ...] and whether there is one."""
    first = free.float().argmax(-1)
    index = first.reshape(*first.shape, *[1] * (candidates.dim() - 2)).expand(*first.shape, 1, *candidates.shape[3:])
    return candidates.gather(2, index)[:, :, 0], free.any(-1)


def scatter_things(scenes: Scenes, places: slice, half: Tensor, lift: Tensor, yaw: Tensor, low: Tensor, high: Tensor,
                   path: Tensor, wanted: Tensor, generator: torch.Generator, margin: float = CLEARANCE) -> None:
    """Put upright things at random where they keep clear of the path; those that find no place are left out.

    Args:
        places: of the k primitives.
        half: [b, k, 3].
        lift: [b, k] metres from the floor to the thing's foot.
        yaw: [b, k] radians.
        low, high: [b, 2] bounds of the centres.
        path: [b, s, 3].
        wanted: [b, k].
        margin: metres to keep clear of the path.
    """
    count, k = yaw.shape
    spot = low[:, None, None] + torch.rand(count, k, TRIES, 2, generator=generator) * (high - low)[:, None, None]
    z = (lift + half[..., 2])[..., None].expand(count, k, TRIES)
    centre = torch.cat([spot, z[..., None]], -1)  # [b, k, tries, 3]
    rotation = turn_about_z(yaw)[:, :, None]
    free = clearance(path[:, None, None], centre, half[:, :, None], rotation).amin(-1) > margin
    centre, found = choose(centre, free)
    put(scenes, places, centre, half, yaw, wanted & found)


def draw_rooms(size: Tensor, path: Tensor, generator: torch.Generator, clutter: float = 1.0) -> Scenes:
    """Draw b rooms round paths that are already there.

    Args:
        size: [b, 3] metres.
        path: [b, s, 3] positions of the camera, within the walls.
        generator: on the CPU.
        clutter: share of the things to put in.
    """
    count = len(size)
    scenes = empty_scenes(count, generator)
    half = size / 2
    scenes.centre[:, 0] = torch.stack([torch.zeros(count), torch.zeros(count), half[:, 2]], -1)
    scenes.half[:, 0] = half
    scenes.tile[:, 0] = log_uniform(generator, (count, FACES), 1.2, 5.0)
    # Four walls alike, most of them plain; a floor; a ceiling. Some rooms are papered with anything.
    walls = torch.where(chance(generator, (count, 1), 0.5), draw_numbers(generator, (count, 1), (PLAIN,)),
                        draw_numbers(generator, (count, 1), (NOISE, TILES, PHOTO)))
    odd = chance(generator, (count, 4), 0.25)
    scenes.texture[:, 0, :4] = torch.where(odd, scenes.texture[:, 0, :4], walls)
    scenes.texture[:, 0, 5] = draw_numbers(generator, (count,), (NOISE, TILES, PLANKS, PLANKS, PHOTO))
    scenes.texture[:, 0, 4] = torch.where(chance(generator, (count,), 0.7), draw_numbers(generator, (count,), (PLAIN,)),
                                          scenes.texture[:, 0, 4])
    low, high = -half[:, :2], half[:, :2]

    boxes = slice(FIRST_BOX, FIRST_BOX + 12)
    shape = (count, 12)
    things = torch.cat([log_uniform(generator, (*shape, 2), 0.08, 0.6), log_uniform(generator, (*shape, 1), 0.08, 1.1)], -1)
    lift = torch.where(chance(generator, shape, 0.2), uniform(generator, shape, 0.2, 1.8), 0.0)
    yaw = torch.where(chance(generator, shape, 0.6), uniform(generator, shape, 0, math.pi), 0.0)
    scatter_things(scenes, boxes, things, lift, yaw, low, high, path, chance(generator, shape, 0.85 * clutter), generator)

    # Pictures, thin boxes half sunk into a wall.
    shape = (count, 5)
    pictures = slice(FIRST_BOX + 12, FIRST_BOX + 17)
    wide = uniform(generator, (*shape, 2), 0.2, 0.9)
    thing = torch.stack([torch.full(shape, 0.02), wide[..., 0], wide[..., 1] * 0.8], -1)
    wall = torch.randint(0, 4, shape, generator=generator)
    along = uniform(generator, shape, -1, 1)
    across = torch.where(wall % 2 == 0, 1.0, -1.0)
    on_x = wall < 2
    centre = torch.stack([torch.where(on_x, across, along) * half[:, None, 0],
                          torch.where(on_x, along, across) * half[:, None, 1], uniform(generator, shape, 0.9, 1.8)], -1)
    put(scenes, pictures, centre, thing, torch.where(on_x, 0.0, math.pi / 2), chance(generator, shape, clutter))
    scenes.tile[:, pictures] = 2 * wide.amax(-1)[..., None]
    scenes.texture[:, pictures] = draw_numbers(generator, (*shape, 1), (COLLAGE, PHOTO))

    shape = (count, CYLINDERS)
    radius = log_uniform(generator, shape, 0.02, 0.3)
    things = torch.stack([radius, radius, log_uniform(generator, shape, 0.1, 1.2)], -1)
    scatter_things(scenes, slice(FIRST_CYLINDER, FIRST_ELLIPSOID), things, torch.zeros(shape),
                   uniform(generator, shape, 0, math.pi), low, high, path, chance(generator, shape, 0.8 * clutter), generator)

    shape = (count, ELLIPSOIDS)
    things = log_uniform(generator, (*shape, 1), 0.08, 0.4) * uniform(generator, (*shape, 3), 0.7, 1.0)
    scatter_things(scenes, slice(FIRST_ELLIPSOID, PRIMITIVES), things, uniform(generator, shape, 0, 1.2),
                   uniform(generator, shape, 0, math.pi), low, high, path, chance(generator, shape, 0.8 * clutter), generator)

    scenes.light = torch.cat([low + (high - low) * uniform(generator, (count, 2), 0.1, 0.9),
                              size[:, 2:] * uniform(generator, (count, 1), 0.7, 0.97)], -1)
    return scenes
