# SPDX-License-Identifier: Apache-2.0
"""Floors of buildings: blocks of rooms that line the camera's path, doors, windows and notices on them, lamps,
cabinets, bins and plants."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.layout import (
    TRIES, draw_paint, empty_scenes, find_spots, glances, outside, put, put_parts, scatter,
)
from lingbot_map_ros.synthetic.room import paint_walls, put_shell
from lingbot_map_ros.synthetic.scene import FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, NOWHERE, Scenes
from lingbot_map_ros.synthetic.texture import COLLAGE, NOISE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

# Which primitives are what.
BLOCKS, HANGINGS, LAMPS, CABINETS, CLUTTER = FIRST_BOX, FIRST_BOX + 7, FIRST_BOX + 13, FIRST_BOX + 15, FIRST_BOX + 17
PILLARS, POTS, POSTS = FIRST_CYLINDER, FIRST_CYLINDER + 2, FIRST_CYLINDER + 4
CROWNS, BAG = FIRST_ELLIPSOID, FIRST_ELLIPSOID + 2
DOORS = 3  # of the six that hang on walls; the others are windows and notices
MARGIN = 0.4  # metres between a camera and walls
NEAR = 0.3  # and furniture
MODULE = 0.3  # metres: walls stand on this grid, so that those of one side are often in one plane


def draw_corridors(size: Tensor, T_world_camera: Tensor, generator: torch.Generator, clutter: float = 1.0) -> Scenes:
    """Draw b floors of buildings round cameras that are already there.

    Args:
        size: [b, 3] metres, of the building.
        T_world_camera: [b, s, 4, 4], within the outer walls.
        generator: on the CPU.
        clutter: share of the things to put in.
    """
    count, path = len(size), T_world_camera[..., :3, 3]
    scenes = empty_scenes(count, generator)
    half = size / 2
    put_shell(scenes, half, generator)
    scenes.modulation_strength = log_uniform(generator, scenes.modulation_strength.shape, 0.02, 0.25)
    paint_walls(scenes, generator)
    scenes.tint[:, 0] = draw_paint(generator, (count,), 0.88)

    def wanted(things: int, share: float) -> Tensor:
        return chance(generator, (count, things), share * clutter)

    _put_blocks(scenes, size, path, wanted(7, 0.95), generator)
    _put_hangings(scenes, half, T_world_camera, wanted(6, 0.9), generator)
    _put_lamps(scenes, size, path, wanted(2, 0.7), generator)

    # Cabinets, benches and copiers, with their backs to a wall.
    cabinet = torch.stack([uniform(generator, (count, 2), 0.25, 0.9), uniform(generator, (count, 2), 0.15, 0.35),
                           log_uniform(generator, (count, 2), 0.2, 1.0)], -1)
    spots, yaw, fits = _on_walls(scenes, half, T_world_camera, cabinet, generator)
    centre, yaw, found = find_spots(cabinet, torch.zeros(count, 2), spots, yaw, path, NEAR, half[:, :2], fits)
    put(scenes, CABINETS, centre, cabinet, yaw, wanted(2, 0.7) & found)
    scenes.texture[:, CABINETS:CLUTTER] = draw_numbers(generator, (count, 2, 1), (PLAIN, PLANKS, COLLAGE))
    scenes.tint[:, CABINETS:CLUTTER] = draw_paint(generator, (count, 2), 0.4)

    _put_clutter(scenes, half, path, wanted, generator)

    frame = torch.randint(0, path.shape[1], (count,), generator=generator)
    scenes.light = torch.cat([path[torch.arange(count), frame, :2],
                              size[:, 2:] * uniform(generator, (count, 1), 0.85, 0.98)], -1)
    shadows = chance(generator, (count,), 0.6)
    scenes.light_strength = torch.where(shadows, uniform(generator, (count,), 0.1, 1.0), 0.0)
    scenes.light_falloff = log_uniform(generator, (count,), 0.003, 0.08)
    scenes.ambient = uniform(generator, (count,), 0.4, 1.0)
    return scenes


def _put_blocks(scenes: Scenes, size: Tensor, path: Tensor, wanted: Tensor, generator: torch.Generator) -> None:
    """Put blocks up to the ceiling to both sides of the path, square to the building."""
    count, things = wanted.shape
    shape = (count, things, TRIES)
    frames = path.shape[1]
    frame = (torch.arange(things)[:, None] + torch.rand(shape, generator=generator)) / things * frames
    frame = frame.long().clamp_max(frames - 1)
    scene = torch.arange(count)[:, None, None]
    at = path[scene, frame, :2]
    way = path[scene, (frame + 6).clamp_max(frames - 1), :2] - path[scene, (frame - 6).clamp_min(0), :2]
    along_x = (way[..., 0].abs() > way[..., 1].abs()) ^ chance(generator, shape, 0.1)
    half = torch.stack([log_uniform(generator, (count, things), 0.6, 6.0),
                        log_uniform(generator, (count, things), 0.5, 4.0), (size[:, 2:] / 2).expand(-1, things)], -1)
    gap = log_uniform(generator, (count, 1, 1), 0.7, 2.0) * uniform(generator, shape, 0.75, 1.3)
    side = torch.where(chance(generator, shape, 0.5), 1.0, -1.0)
    across = torch.where(along_x, at[..., 1], at[..., 0])
    across = ((across + side * gap) / MODULE).round() * MODULE + side * half[..., 1:2]
    across = across + 0.001 * torch.arange(things)[:, None]  # no two in quite the same plane: neither would be in front
    along = torch.where(along_x, at[..., 0], at[..., 1]) + half[..., :1] * uniform(generator, shape, -1, 1)
    spots = torch.stack([torch.where(along_x, along, across), torch.where(along_x, across, along)], -1)
    yaw = torch.where(along_x, 0.0, math.pi / 2)
    centre, yaw, found = find_spots(half, torch.zeros(count, things), spots, yaw, path, MARGIN)
    put(scenes, BLOCKS, centre, half, yaw, wanted & found)
    alike = chance(generator, (count, things, 1), 0.75)
    scenes.texture[:, BLOCKS:HANGINGS] = torch.where(
        alike, scenes.texture[:, :1, :1],
        draw_numbers(generator, (count, things, 1), (PLAIN, NOISE, TILES, PLANKS, PHOTO)))
    scenes.tile[:, BLOCKS:HANGINGS] = scenes.tile[:, :1, :1]
    paint = draw_paint(generator, (count, things), 0.6)
    scenes.tint[:, BLOCKS:HANGINGS] = torch.where(alike, scenes.tint[:, :1], paint)


def _on_walls(scenes: Scenes, half: Tensor, T_world_camera: Tensor, thing: Tensor, generator: torch.Generator,
              ) -> tuple[Tensor, Tensor, Tensor]:
    """Find spots on walls, the outer and the blocks', where cameras look, for things [b, k, 3] with their backs there.

    Returns: centres [b, k, tries, 2], yaws [b, k, tries], whether the thing fits there [b, k, tries].
    """
    count, things = thing.shape[:2]
    shape = (count, things, TRIES)
    origin, direction = glances(T_world_camera, things, 0.7, generator)

    # Slabs of the blocks' outlines, which are square to the building, and of the shell's, which is left instead of met.
    blocks = slice(BLOCKS, HANGINGS)
    centre = torch.cat([torch.zeros(count, 1, 2), scenes.centre[:, blocks, :2]], 1)[:, None, None]
    extent = (scenes.rotation[:, blocks].abs() @ scenes.half[:, blocks, :, None])[..., :2, 0]
    extent = torch.cat([half[:, None, :2], extent], 1)[:, None, None]  # [b, 1, 1, n, 2]
    middle = (centre - origin[..., None, :]) / direction[..., None, :]
    reach = extent / direction[..., None, :].abs()
    enter, leave = (middle - reach).amax(-1), (middle + reach).amin(-1)
    there = torch.cat([torch.ones(count, 1, dtype=torch.bool), scenes.centre[:, blocks, 2] > NOWHERE / 2], 1)
    met = torch.where(there[:, None, None] & (enter < leave) & (enter > 0), enter, torch.inf)
    met[..., 0] = leave[..., 0]
    distance, which = met.min(-1)
    outer = which == 0
    chosen = which[..., None, None].expand(*shape, 1, 2)
    centre, extent = (value.expand(*shape, *value.shape[3:]).gather(3, chosen)[..., 0, :] for value in (centre, extent))
    point = origin + distance[..., None] * direction
    offset = (point - centre).abs() - extent
    on_x = offset[..., 0] > offset[..., 1]  # the wall is square to x
    # From the wall into the open: away from a block's middle, towards the shell's.
    outwards = torch.where(point < centre, -1.0, 1.0) * torch.where(outer, -1.0, 1.0)[..., None]
    free = extent - thing[:, :, None, :1]
    along = torch.minimum(torch.maximum(point, centre - free), centre + free)
    face = torch.where(outer[..., None], centre - outwards * extent, centre + outwards * extent)
    away = face + outwards * thing[:, :, None, 1:2]
    spots = torch.stack([torch.where(on_x, away[..., 0], along[..., 0]),
                         torch.where(on_x, along[..., 1], away[..., 1])], -1)
    sign = torch.where(on_x, outwards[..., 0], outwards[..., 1])
    yaw = torch.where(on_x, -sign * math.pi / 2, torch.where(sign > 0, 0.0, math.pi))
    fits = torch.where(on_x, free[..., 1], free[..., 0]) > 0
    return spots, yaw, fits & (spots.abs() < half[:, None, None, :2] + 0.01).all(-1)  # blocks may reach outside


def _put_hangings(scenes: Scenes, half: Tensor, T_world_camera: Tensor, wanted: Tensor, generator: torch.Generator,
                  ) -> None:
    """Hang doors, windows and notices: thin boxes half sunk into walls that are looked at; some windows are bright."""
    shape = count, things = wanted.shape
    door = (torch.arange(things) < DOORS)[None]
    wide = torch.where(door, uniform(generator, shape, 0.4, 0.6), log_uniform(generator, shape, 0.12, 1.2))
    high = torch.where(door, uniform(generator, (count, 1), 0.98, 1.1), log_uniform(generator, shape, 0.12, 0.7))
    z = torch.where(door, high, uniform(generator, shape, 1.2, 1.7))
    z = torch.minimum(z, 2 * half[:, 2:] - high - 0.05)
    # Where one hangs over another it is in front.
    thick = (0.015 + 0.001 * torch.arange(things)).expand(shape)
    thing = torch.stack([wide, thick, high], -1)
    spots, yaw, fits = _on_walls(scenes, half, T_world_camera, thing * torch.tensor([1.0, 0, 1]), generator)
    path = T_world_camera[..., :3, 3]
    centre, yaw, found = find_spots(thing, z - high, spots, yaw, path, 0.0, allowed=fits)  # walls are clear of the path
    put(scenes, HANGINGS, centre, thing, yaw, wanted & found & (z > high - 0.01))
    places = slice(HANGINGS, LAMPS)
    scenes.texture[:, places] = torch.where(door[..., None], draw_numbers(generator, (*shape, 1), (PLAIN, PLANKS)),
                                            draw_numbers(generator, (*shape, 1), (PLAIN, COLLAGE, PHOTO)))
    scenes.tile[:, places] = 2 * torch.maximum(wide, high)[..., None]
    paint = torch.where(door[..., None], draw_paint(generator, (count, 1), 0.3), draw_paint(generator, shape, 0.8))
    bright = chance(generator, (*shape, 1), 0.3) & ~door[..., None]
    scenes.tint[:, places] = torch.where(bright, uniform(generator, (*shape, 1), 1.5, 4.0), paint)


def _put_lamps(scenes: Scenes, size: Tensor, path: Tensor, wanted: Tensor, generator: torch.Generator) -> None:
    """Put bright panels under the ceiling over the path."""
    count, things = wanted.shape
    alike = (count, 1, 1)
    lamp = torch.cat([log_uniform(generator, alike, 0.15, 0.8), log_uniform(generator, alike, 0.06, 0.4),
                      torch.full(alike, 0.01)], -1).expand(-1, things, -1)
    frame = torch.randint(0, path.shape[1], (count, things), generator=generator)
    spot = path[torch.arange(count)[:, None], frame]
    centre = torch.cat([spot[..., :2], (size[:, None, 2:] - 0.01).expand(-1, things, -1)], -1)
    yaw = torch.where(chance(generator, (count, 1), 0.5), math.pi / 2, 0.0).expand(-1, things)
    put(scenes, LAMPS, centre, lamp, yaw, wanted)
    scenes.texture[:, LAMPS:CABINETS] = draw_numbers(generator, alike, (PLAIN,))
    scenes.tint[:, LAMPS:CABINETS] = log_uniform(generator, alike, 1.2, 5.0)


def _put_clutter(scenes: Scenes, half: Tensor, path: Tensor, wanted: Callable[[int, float], Tensor],
                 generator: torch.Generator) -> None:
    """Put crates, pillars, plants in pots, bins, posts and a bag on the floor, most of them beside the path."""
    count = len(half)
    low, high = -half[:, :2], half[:, :2]
    shape = (count, 3)
    crate = torch.cat([log_uniform(generator, (*shape, 2), 0.1, 0.5),
                       log_uniform(generator, (*shape, 1), 0.05, 0.7)], -1)
    blocks = slice(BLOCKS, HANGINGS)
    scatter(scenes, CLUTTER, crate, torch.zeros(shape), low, high, path, wanted(3, 0.8), generator, NEAR, blocks)
    scenes.tint[:, CLUTTER:FIRST_CYLINDER] = draw_paint(generator, shape, 0.5)

    shape = (count, 2)
    radius = log_uniform(generator, (*shape, 1), 0.1, 0.4).expand(-1, -1, 2)
    pillar = torch.cat([radius, half[:, None, 2:].expand(-1, 2, -1)], -1)
    scatter(scenes, PILLARS, pillar, torch.zeros(shape), low, high, path, wanted(2, 0.35), generator, NEAR, blocks)
    scenes.texture[:, PILLARS:POTS] = scenes.texture[:, :1, :1]
    scenes.tint[:, PILLARS:POTS] = draw_paint(generator, (count, 1), 0.7)

    # A plant: a pot that carries a crown. Without the crown it is a bin.
    radius, height = uniform(generator, shape, 0.1, 0.25), uniform(generator, shape, 0.12, 0.3)
    crown = radius[..., None] * uniform(generator, (*shape, 3), 1.0, 2.2) * torch.tensor([1.0, 1, 1.3])
    grown = chance(generator, shape, 0.5)
    around = torch.stack([torch.where(grown, crown[..., 0], radius), torch.where(grown, crown[..., 1], radius),
                          height + torch.where(grown, crown[..., 2], 0.0)], -1)
    side = uniform(generator, (count, 2, TRIES, 2), -1, 1)
    frame = torch.randint(0, path.shape[1], (count, 2, TRIES), generator=generator)
    spots = path[torch.arange(count)[:, None, None], frame, :2] + 2.5 * side
    spots = spots.clamp(low[:, None, None] + 0.3, high[:, None, None] - 0.3)
    yaw = torch.zeros(count, 2, TRIES)
    centre, yaw, found = find_spots(around, torch.zeros(shape), spots, yaw, path, NEAR,
                                    allowed=outside(scenes, blocks, spots))
    there = wanted(2, 0.7) & found
    floor = centre * torch.tensor([1.0, 1, 0])
    up = torch.tensor([0.0, 0, 1])
    pot = torch.stack([radius, radius, height], -1)
    put_parts(scenes, POTS, floor, yaw, (up * height[..., None])[:, :, None], pot[:, :, None], there)
    middle = 2 * height + crown[..., 2]
    put_parts(scenes, CROWNS, floor, yaw, (up * middle[..., None])[:, :, None], crown[:, :, None], there & grown)
    scenes.texture[:, CROWNS:BAG] = draw_numbers(generator, (*shape, 1), (NOISE, PHOTO))
    scenes.tint[:, POTS:POSTS] = draw_paint(generator, shape, 0.4)

    shape = (count, 5)
    radius = log_uniform(generator, (*shape, 1), 0.015, 0.2).expand(-1, -1, 2)
    post = torch.cat([radius, log_uniform(generator, (*shape, 1), 0.15, 0.9)], -1)
    scatter(scenes, POSTS, post, torch.zeros(shape), low, high, path, wanted(5, 0.5), generator, NEAR, blocks)
    scenes.tint[:, POSTS:FIRST_ELLIPSOID] = draw_paint(generator, shape, 0.5)
    bag = log_uniform(generator, (count, 1, 1), 0.1, 0.35) * uniform(generator, (count, 1, 3), 0.6, 1.0)
    scatter(scenes, BAG, bag, torch.zeros(count, 1), low, high, path, wanted(1, 0.5), generator, NEAR, blocks)
    scenes.tint[:, BAG] = draw_paint(generator, (count,), 0.4)
