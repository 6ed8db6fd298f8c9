# SPDX-License-Identifier: Apache-2.0
"""Rooms: walls with doorways, corners and pillars, pictures, tables on legs, cupboards, sofas, lamps and clutter."""
from __future__ import annotations

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.layout import (
    against, anywhere, at_walls, empty_scenes, find_spots, put, put_legs, put_parts, put_tops, scatter, seen_walls,
)
from lingbot_map_ros.synthetic.scene import FACES, FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, Scenes
from lingbot_map_ros.synthetic.texture import COLLAGE, NOISE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

# Which primitives are what.
INNER_WALL, BLOCK, PICTURES, TABLES = FIRST_BOX, FIRST_BOX + 3, FIRST_BOX + 4, FIRST_BOX + 9
CUPBOARDS, SOFA, CLUTTER = FIRST_BOX + 11, FIRST_BOX + 13, FIRST_BOX + 15
LEGS, POLE = FIRST_CYLINDER, FIRST_CYLINDER + 8
LAMP, BALLS = FIRST_ELLIPSOID, FIRST_ELLIPSOID + 1
DOOR_SIDE = 0.45  # metres from the path to either side of a doorway
DOOR_HEIGHT = 2.05  # metres


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
    put_shell(scenes, half, generator)
    low, high = -half[:, :2], half[:, :2]

    def wanted(things: int, share: float) -> Tensor:
        return chance(generator, (count, things), share * clutter)

    _put_inner_wall(scenes, size, path, wanted(1, 0.3)[:, 0], generator)
    _put_block(scenes, size, path, wanted(1, 0.3), generator)
    put_pictures(scenes, PICTURES, half, wanted(5, 0.85), generator)
    _put_tables(scenes, low, high, path, wanted(2, 0.7), generator)

    # Cupboards and shelves, tall, with their backs to a wall.
    cupboard = torch.stack([uniform(generator, (count, 2), 0.3, 0.9), uniform(generator, (count, 2), 0.15, 0.32),
                            uniform(generator, (count, 2), 0.4, 1.05)], -1)
    spots = at_walls(half[:, :2], cupboard[..., 1], generator)
    centre, yaw, found = find_spots(cupboard, torch.zeros(count, 2), *spots, path)
    put(scenes, CUPBOARDS, centre, cupboard, yaw, wanted(2, 0.7) & found)
    scenes.texture[:, CUPBOARDS:SOFA] = draw_numbers(generator, (count, 2, 1), (PLAIN, PLANKS, COLLAGE, PHOTO))

    # A sofa or a bed: a seat and a back.
    sofa = torch.stack([uniform(generator, (count, 1), 0.6, 1.1), uniform(generator, (count, 1), 0.35, 0.6),
                        uniform(generator, (count, 1), 0.35, 0.5)], -1)
    centre, yaw, found = find_spots(sofa, torch.zeros(count, 1), *at_walls(half[:, :2], sofa[..., 1], generator), path)
    seat = sofa * torch.tensor([1.0, 1.0, 0.5])
    back = torch.cat([sofa[..., :1], torch.full((count, 1, 1), 0.1), sofa[..., 2:]], -1)
    offset = torch.zeros(count, 1, 2, 3)
    offset[:, :, 0, 2] = seat[..., 2] - sofa[..., 2]
    offset[:, :, 1, 1] = back[..., 1] - sofa[..., 1]
    put_parts(scenes, SOFA, centre, yaw, offset, torch.stack([seat, back], 2), wanted(1, 0.5) & found)
    scenes.texture[:, SOFA + 1] = scenes.texture[:, SOFA]

    # Clutter of all shapes: on the floor, and some in the air as on a shelf that is not seen.
    shape = (count, 5)
    box = torch.cat([log_uniform(generator, (*shape, 2), 0.06, 0.6),
                     log_uniform(generator, (*shape, 1), 0.06, 0.9)], -1)
    thin = chance(generator, (*shape, 1), 0.2)
    box = torch.where(thin, box * torch.tensor([1.0, 0.05, 1.0]), box)  # a board on its edge
    lift = torch.where(chance(generator, shape, 0.12), uniform(generator, shape, 0.2, 1.8), 0.0)
    scatter(scenes, CLUTTER, box, lift, low, high, path, wanted(5, 0.85), generator)
    ball = log_uniform(generator, (count, 2, 1), 0.06, 0.4) * uniform(generator, (count, 2, 3), 0.6, 1.0)
    lift = torch.where(chance(generator, (count, 2), 0.5), uniform(generator, (count, 2), 0.2, 1.5), 0.0)
    scatter(scenes, BALLS, ball, lift, low, high, path, wanted(2, 0.7), generator)

    _put_lamp(scenes, size, low, high, path, wanted(1, 0.6), generator)
    return scenes


def put_shell(scenes: Scenes, half: Tensor, generator: torch.Generator) -> None:
    """Put walls of half [b, 3] metres: alike, half of them plain; a floor; a ceiling. Some have anything on them."""
    count = len(scenes)
    scenes.centre[:, 0] = half * torch.tensor([0.0, 0, 1])
    scenes.half[:, 0] = half
    scenes.tile[:, 0] = log_uniform(generator, (count, FACES), 1.2, 5.0)
    walls = torch.where(chance(generator, (count, 1), 0.5), draw_numbers(generator, (count, 1), (PLAIN,)),
                        draw_numbers(generator, (count, 1), (NOISE, TILES, PLANKS, PHOTO)))
    odd = chance(generator, (count, 4), 0.25)
    scenes.texture[:, 0, :4] = torch.where(odd, scenes.texture[:, 0, :4], walls)
    scenes.texture[:, 0, 5] = draw_numbers(generator, (count,), (NOISE, TILES, PLANKS, PHOTO))
    scenes.texture[:, 0, 4] = torch.where(chance(generator, (count,), 0.7), draw_numbers(generator, (count,), (PLAIN,)),
                                          scenes.texture[:, 0, 4])


def paint_walls(scenes: Scenes, generator: torch.Generator) -> None:
    """Make the walls of three scenes in five plain, whatever `put_shell` gave them."""
    count = len(scenes)
    painted = chance(generator, (count, 1), 0.6)
    scenes.texture[:, 0, :4] = torch.where(painted, draw_numbers(generator, (count, 1), (PLAIN,)),
                                           scenes.texture[:, 0, :4])


def put_soft_light(scenes: Scenes, size: Tensor, generator: torch.Generator) -> None:
    """Light rooms, `size` [b, 3] metres, as lamps under the ceiling and light walls do: softly, or without shadows."""
    count = len(scenes)
    scenes.light = torch.cat([size[:, :2] / 2 * uniform(generator, (count, 2), -0.8, 0.8),
                              size[:, 2:] * uniform(generator, (count, 1), 0.8, 0.97)], -1)
    shadows = chance(generator, (count,), 0.6)
    scenes.light_strength = torch.where(shadows, uniform(generator, (count,), 0.1, 1.1), 0.0)
    scenes.light_falloff = log_uniform(generator, (count,), 0.01, 0.1)
    scenes.ambient = uniform(generator, (count,), 0.35, 1.0)


def _put_inner_wall(scenes: Scenes, size: Tensor, path: Tensor, wanted: Tensor, generator: torch.Generator) -> None:
    """Put a wall across the room, with a doorway where the path goes through."""
    count, tries = len(size), 6
    across_x = chance(generator, (count,), 0.5)  # the wall stands at some x and runs along y
    span = torch.where(across_x, size[:, 1], size[:, 0])
    through = torch.where(across_x[:, None], path[..., 0], path[..., 1])
    along = torch.where(across_x[:, None], path[..., 1], path[..., 0])
    place = uniform(generator, (count, tries), -0.35, 0.35) * torch.where(across_x, size[:, 0], size[:, 1])[:, None]
    near = (through[:, None] - place[..., None]).abs() < 0.55  # [b, tries, s]
    low = torch.where(near, along[:, None], torch.inf).amin(-1) - DOOR_SIDE
    high = torch.where(near, along[:, None], -torch.inf).amax(-1) + DOOR_SIDE
    touched = near.any(-1)
    somewhere = uniform(generator, (count, tries), -0.3, 0.3) * span[:, None]
    low, high = torch.where(touched, low, somewhere - DOOR_SIDE), torch.where(touched, high, somewhere + DOOR_SIDE)
    fits = high - low < 0.55 * span[:, None]
    first = fits.float().argmax(-1, keepdim=True)
    place, low, high = (value.gather(1, first)[:, 0] for value in (place, low, high))
    head = torch.where(near.gather(1, first[..., None].expand(-1, -1, path.shape[1]))[:, 0], path[..., 2], 0.0).amax(-1)
    wanted = wanted & fits.any(-1)

    thick = 0.05
    left, right = (low + span / 2).clamp_min(0), (span / 2 - high).clamp_min(0)  # lengths of the pieces
    middles = torch.stack([-span / 2 + left / 2, span / 2 - right / 2, (low + high) / 2], -1)  # [b, 3]
    lengths = torch.stack([left / 2, right / 2, (high - low) / 2], -1).clamp_min(0.01)
    heights = size[:, 2:].expand(-1, 3).clone()
    foot = torch.tensor([0.0, 0.0, DOOR_HEIGHT]).expand(count, 3)
    centre = torch.stack([place[:, None].expand(-1, 3), middles, (foot + heights) / 2], -1)
    half = torch.stack([torch.full((count, 3), thick), lengths, (heights - foot) / 2], -1).clamp_min(0.01)
    centre = torch.where(across_x[:, None, None], centre, centre[..., [1, 0, 2]])
    half = torch.where(across_x[:, None, None], half, half[..., [1, 0, 2]])
    pieces = torch.stack([left > 0.02, right > 0.02, (head < DOOR_HEIGHT - 0.4) & (size[:, 2] > DOOR_HEIGHT + 0.1)], -1)
    put(scenes, INNER_WALL, centre, half, torch.zeros(count, 3), wanted[:, None] & pieces)
    same = torch.where(chance(generator, (count, 1, 1), 0.6), scenes.texture[:, :1, :1], scenes.texture[:, 1:2, :1])
    scenes.texture[:, INNER_WALL:BLOCK] = same
    scenes.tile[:, INNER_WALL:BLOCK] = scenes.tile[:, :1, :1]


def _put_block(scenes: Scenes, size: Tensor, path: Tensor, wanted: Tensor, generator: torch.Generator) -> None:
    """Fill a corner up to the ceiling, which makes the room L-shaped, or put a pillar."""
    count = len(size)
    pillar = chance(generator, (count, 1), 0.35)
    share = torch.where(pillar, 0.12 / size[:, :1], uniform(generator, (count, 1), 0.08, 0.22))
    side = size[:, None, :2] * share[..., None] * uniform(generator, (count, 1, 2), 0.7, 1.4)
    half = torch.cat([side, size[:, None, 2:] / 2], -1)
    corner = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1, -1]])[torch.rand(count, 4, generator=generator).argsort(-1)]
    inset = size[:, None, None, :2] / 2 - side[:, :, None]
    outwards = torch.where(pillar[..., None, None], uniform(generator, (count, 1, 4, 2), 0.2, 0.9), 1)
    spots = corner[:, None] * outwards * inset
    centre, yaw, found = find_spots(half, torch.zeros(count, 1), spots, torch.zeros(count, 1, 4), path)
    put(scenes, BLOCK, centre, half, yaw, wanted & found)
    scenes.texture[:, BLOCK] = scenes.texture[:, 0, :1]
    scenes.tile[:, BLOCK] = scenes.tile[:, 0, :1]


def put_pictures(scenes: Scenes, first: int, half: Tensor, wanted: Tensor, generator: torch.Generator,
                 T_world_camera: Tensor | None = None) -> None:
    """Hang pictures, windows and a door, the first: thin boxes half sunk into the walls, from number `first` on.

    T_world_camera: [b, s, 4, 4] cameras that look at where they hang; None: they hang anywhere.
    """
    count, things = wanted.shape
    places = slice(first, first + things)
    door = torch.arange(things)[None] == 0
    wide = torch.where(door, 0.45, uniform(generator, (count, things), 0.2, 0.8))
    high = torch.where(door, 1.0, uniform(generator, (count, things), 0.15, 0.6))
    z = torch.where(door, 1.0, uniform(generator, (count, things), 1.1, 1.8))
    thing = torch.stack([wide, torch.full_like(wide, 0.02), high], -1)
    depth = torch.zeros(count, things)
    if T_world_camera is None:
        spots, yaw = at_walls(half[:, :2], depth, generator)
    else:
        spots, yaw = against(half[:, :2], depth, *seen_walls(half[:, :2], T_world_camera, things, generator))
    put(scenes, first, torch.cat([spots[:, :, 0], z[..., None]], -1), thing, yaw[:, :, 0], wanted)
    scenes.tile[:, places] = 2 * torch.maximum(wide, high)[..., None]
    scenes.texture[:, places] = draw_numbers(generator, (count, things, 1), (COLLAGE, PHOTO))
    scenes.texture[:, first] = draw_numbers(generator, (count, 1), (PLAIN, PLANKS))


def _put_tables(scenes: Scenes, low: Tensor, high: Tensor, path: Tensor, wanted: Tensor, generator: torch.Generator,
                ) -> None:
    """Put two tables or benches: a thin top on four thin legs. Legs without a table stand for themselves."""
    count = len(low)
    shape = (count, 2)
    table = torch.stack([uniform(generator, shape, 0.25, 0.9), uniform(generator, shape, 0.2, 0.5),
                         uniform(generator, shape, 0.2, 0.4)], -1)
    centre, yaw, found = find_spots(table, torch.zeros(shape), *anywhere(low, high, path, 2, generator), path)
    wanted = wanted & found
    thick = uniform(generator, shape, 0.012, 0.03)
    put_tops(scenes, TABLES, centre, yaw, table, thick, wanted)
    scenes.texture[:, TABLES:CUPBOARDS] = draw_numbers(generator, (*shape, 1), (PLAIN, PLANKS, NOISE))

    radius, loose_radius = uniform(generator, shape, 0.015, 0.04), log_uniform(generator, (count, 8), 0.02, 0.25)
    loose = torch.stack([loose_radius, loose_radius, log_uniform(generator, (count, 8), 0.08, 1.2)], -1)
    scatter(scenes, LEGS, loose, torch.zeros(count, 8), low, high, path, chance(generator, (count, 8), 0.5), generator)
    put_legs(scenes, LEGS, centre, yaw, table, thick, radius, 0.06, wanted)
    # A table's legs are alike.
    scenes.texture[:, LEGS:POLE] = scenes.texture[:, LEGS:POLE:4, :1].repeat_interleave(4, 1)


def _put_lamp(scenes: Scenes, size: Tensor, low: Tensor, high: Tensor, path: Tensor, wanted: Tensor,
              generator: torch.Generator) -> None:
    """Put a lamp on a pole, and the room's light under the ceiling."""
    count = len(size)
    height = uniform(generator, (count, 1), 0.5, 0.9)
    lamp = torch.stack([torch.full((count, 1), 0.2), torch.full((count, 1), 0.2), height], -1)
    centre, yaw, found = find_spots(lamp, torch.zeros(count, 1), *anywhere(low, high, path, 1, generator), path)
    pole = lamp * torch.tensor([0.08, 0.08, 1.0])
    put(scenes, POLE, centre, pole, yaw, wanted & found)
    shade = torch.tensor([0.2, 0.2, 0.16]).expand(count, 1, 3)
    put(scenes, LAMP, centre + torch.cat([torch.zeros(count, 1, 2), height[..., None]], -1), shade, yaw, wanted & found)
    scenes.light = torch.cat([low + (high - low) * uniform(generator, (count, 2), 0.1, 0.9),
                              size[:, 2:] * uniform(generator, (count, 1), 0.75, 0.97)], -1)
