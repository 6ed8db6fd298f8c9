# SPDX-License-Identifier: Apache-2.0
"""Furnished rooms, as kitchens and living rooms are: worktops along walls and round a corner, tables with chairs round
them, things on top, in paints from white to black."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.layout import (
    TRIES, against, anywhere, apart, at_walls, draw_paint, empty_scenes, find_spots, footprints, in_view, put, put_legs,
    put_parts, put_tops, seen_walls,
)
from lingbot_map_ros.synthetic.room import paint_walls, put_pictures, put_shell, put_soft_light
from lingbot_map_ros.synthetic.scene import (
    FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, Scenes, turn_about_z,
)
from lingbot_map_ros.synthetic.texture import COLLAGE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

# Which primitives are what.
COUNTERS, CABINETS, TABLES, CHAIRS = FIRST_BOX, FIRST_BOX + 4, FIRST_BOX + 6, FIRST_BOX + 8
PICTURES, OBJECTS = FIRST_BOX + 14, FIRST_BOX + 16
TABLE_LEGS, COLUMN, CHAIR_LEGS, MUG = FIRST_CYLINDER, FIRST_CYLINDER + 4, FIRST_CYLINDER + 5, FIRST_CYLINDER + 8
BOWLS, BAG = FIRST_ELLIPSOID, FIRST_ELLIPSOID + 2
SURFACES = (PLAIN, PLANKS)  # kinds of texture of furniture
FRONTS = (PLAIN, PLANKS, TILES)  # of cupboards: joints are gaps between doors
ROWS = 2  # of the things: books, papers or jars side by side at the back of a worktop, seen as one box
MARGIN = 0.25  # metres between a camera and furniture: one is held over a table


def draw_interiors(size: Tensor, T_world_camera: Tensor, generator: torch.Generator, clutter: float = 1.0) -> Scenes:
    """Draw b furnished rooms round cameras that are already there, most of the furniture where those look.

    Args:
        size: [b, 3] metres.
        T_world_camera: [b, s, 4, 4], within the walls.
        generator: on the CPU.
        clutter: share of the things to put in.
    """
    count, path = len(size), T_world_camera[..., :3, 3]
    scenes = empty_scenes(count, generator)
    half = size / 2
    put_shell(scenes, half, generator)
    paint_walls(scenes, generator)
    scenes.modulation_strength = log_uniform(generator, scenes.modulation_strength.shape, 0.02, 0.25)

    def wanted(things: int, share: float) -> Tensor:
        return chance(generator, (count, things), share * clutter)

    scenes.tint[:, 0, :] = draw_paint(generator, (count,), 0.7)

    counters = _put_counters(scenes, half, T_world_camera, wanted(2, 0.9), wanted(2, 0.7), generator)
    around = torch.cat([path, footprints(*counters)], 1)
    tables = _put_tables(scenes, half, T_world_camera, around, wanted(2, 0.9), generator)
    _put_chairs(scenes, half, tables, path, wanted(3, 0.85), generator)
    put_pictures(scenes, PICTURES, half, wanted(2, 0.85), generator, T_world_camera)
    _put_things(scenes, counters, tables, path, wanted(7, 0.9), generator)

    bag = log_uniform(generator, (count, 1, 1), 0.08, 0.35) * uniform(generator, (count, 1, 3), 0.6, 1.0)
    scenes.tint[:, BAG] = draw_paint(generator, (count,), 0.5)
    spots = anywhere(-half[:, :2], half[:, :2], path, 1, generator)
    centre, yaw, found = find_spots(bag, torch.zeros(count, 1), *spots, path, MARGIN, half[:, :2])
    put(scenes, BAG, centre, bag, yaw, wanted(1, 0.6) & found)

    put_soft_light(scenes, size, generator)
    return scenes


def _find_runs(half: Tensor, counter: Tensor, corner: Tensor, T_world_camera: Tensor, generator: torch.Generator,
               ) -> tuple[Tensor, Tensor, Tensor]:
    """Find two boxes' places along walls, the first where cameras look; with `corner` [b, 1] both meet in one.

    Returns: centre [b, 2, 3], yaw [b, 2], whether there is a place [b, 2].
    """
    path = T_world_camera[..., :3, 3]
    on_x, sign, along = seen_walls(half, T_world_camera, 1, generator)
    side = torch.where(on_x, half[:, None, None, 1], half[:, None, None, 0])
    reach = (1 - counter[:, :1, :1] / side).clamp_min(0)
    along = torch.where(corner[..., None], torch.where(along < 0, -reach, reach), along.clamp(-reach, reach))
    floor = torch.zeros(corner.shape)
    first = find_spots(counter[:, :1], floor, *against(half, counter[:, :1, 1], on_x, sign, along), path, MARGIN, half)
    # The other begins where the first ends, at the wall beside it.
    place = first[0][:, 0, :2]
    on_x = (torch.where(place < 0, place + half, half - place) - counter[:, 0, 1:2]).abs().argmin(-1) == 0
    ends = torch.where(place < 0, -1.0, 1.0)
    sign, end = torch.where(on_x, ends[:, 1], ends[:, 0]), torch.where(on_x, ends[:, 0], ends[:, 1])
    side = torch.where(on_x, half[:, 0], half[:, 1])
    along = end * (1 - (2 * counter[:, 0, 1] + counter[:, 1, 0]) / side)
    beside, turned = against(half, counter[:, 1:, 1],
                             *(value[:, None, None].expand(-1, 1, TRIES) for value in (~on_x, sign, along)))
    spots, yaw = at_walls(half, counter[:, 1:, 1], generator)
    spots, yaw = torch.where(corner[..., None, None], beside, spots), torch.where(corner[..., None], turned, yaw)
    second = find_spots(counter[:, 1:], floor, spots, yaw, path, MARGIN, half)
    centre, yaw, found = (torch.cat(both, 1) for both in zip(first, second))
    extent = (turn_about_z(yaw).abs() @ counter[..., None])[..., :2, 0]
    clear = ((centre[:, 0, :2] - centre[:, 1, :2]).abs() > extent.sum(1) - 0.01).any(-1)
    found[:, 1] &= clear | ~found[:, 0]
    return centre, yaw, found


def _put_counters(scenes: Scenes, half: Tensor, T_world_camera: Tensor, wanted: Tensor, cabinets: Tensor,
                  generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put two worktops on cupboards along walls, half of them round a corner, and cupboards or boards higher up.

    Returns: the boxes round the worktops.
    """
    shape, path = wanted.shape, T_world_camera[..., :3, 3]
    counter = torch.stack([uniform(generator, shape, 0.5, 2.5), uniform(generator, shape, 0.2, 0.4),
                           uniform(generator, shape, 0.34, 0.5)], -1)
    corner = chance(generator, (shape[0], 1), 0.5)
    counter[:, 1:, 1:] = torch.where(corner[..., None], counter[:, :1, 1:], counter[:, 1:, 1:])
    counter[..., 0] = torch.minimum(counter[..., 0], half[:, None, :2].amin(-1) - counter[..., 1])
    centre, yaw, found = _find_runs(half[:, :2], counter, corner, T_world_camera, generator)
    wanted = wanted & found
    thick = uniform(generator, shape, 0.01, 0.03)
    inset = uniform(generator, shape, 0.0, 0.08)  # from the worktop's edge back to the doors
    body = counter - torch.stack([torch.zeros(shape), inset / 2, thick], -1)
    top = torch.cat([counter[..., :2], thick[..., None]], -1)
    offset = torch.zeros(*shape, 2, 3)
    offset[:, :, 0, 1], offset[:, :, 0, 2] = -inset / 2, -thick
    offset[:, :, 1, 2] = counter[..., 2] - thick
    put_parts(scenes, COUNTERS, centre, yaw, offset, torch.stack([body, top], 2), wanted)
    front, worktop = (draw_numbers(generator, (shape[0], 1, 1), kinds) for kinds in (FRONTS, SURFACES))
    scenes.texture[:, COUNTERS:CABINETS:2], scenes.texture[:, COUNTERS + 1:CABINETS:2] = front, worktop
    scenes.tile[:, COUNTERS:CABINETS:2] = uniform(generator, (shape[0], 1, 1), 1.2, 4.0)
    front_paint, worktop_paint = (draw_paint(generator, (shape[0], 1), 0.3) for _ in range(2))
    scenes.tint[:, COUNTERS:CABINETS:2], scenes.tint[:, COUNTERS + 1:CABINETS:2] = front_paint, worktop_paint

    cabinet = torch.stack([uniform(generator, shape, 0.3, 1.3), uniform(generator, shape, 0.1, 0.2),
                           uniform(generator, shape, 0.15, 0.4)], -1)
    board = chance(generator, (*shape, 1), 0.4)
    cabinet = torch.where(board, torch.cat([cabinet[..., :2], torch.full((*shape, 1), 0.015)], -1), cabinet)
    spots = against(half[:, :2], cabinet[..., 1], *seen_walls(half[:, :2], T_world_camera, 2, generator))
    *place, found = find_spots(cabinet, uniform(generator, shape, 1.25, 1.6), *spots, path, MARGIN, half[:, :2])
    put(scenes, CABINETS, place[0], cabinet, place[1], cabinets & found)
    like = chance(generator, (shape[0], 1, 1), 0.6)
    scenes.texture[:, CABINETS:TABLES] = torch.where(like, front, scenes.texture[:, CABINETS:TABLES])
    scenes.tint[:, CABINETS:TABLES] = torch.where(like, front_paint, draw_paint(generator, shape, 0.4))
    return centre, counter, yaw, wanted


def _chosen(boxes: Sequence[Tensor], which: Tensor) -> list[Tensor]:
    """Return centre, half, yaw and presence, each [b, m, ...], of the boxes that numbers [b, k] choose."""
    return [value.gather(1, which[..., None].expand(-1, -1, 3) if value.ndim == 3 else which) for value in boxes]


def _put_tables(scenes: Scenes, half: Tensor, T_world_camera: Tensor, around: Tensor, wanted: Tensor,
                generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put two tables, the first on four legs, the other on a column or a block; return the boxes round them.

    around: [b, n, 3], points to keep clear of.
    """
    shape, path = wanted.shape, T_world_camera[..., :3, 3]
    high = torch.where(chance(generator, shape, 0.25), uniform(generator, shape, 0.18, 0.3),
                       uniform(generator, shape, 0.34, 0.4))
    table = torch.stack([uniform(generator, shape, 0.5, 1.3), uniform(generator, shape, 0.35, 0.8), high], -1)
    spots, yaw = anywhere(-half[:, :2], half[:, :2], path, 2, generator)
    seen = chance(generator, (*shape, 1, 1), 0.8)
    spots = torch.where(seen, in_view(half, T_world_camera, 2, generator), spots)
    centre, yaw, found = find_spots(table, torch.zeros(shape), spots, yaw, around, MARGIN, half[:, :2])
    wanted = apart(centre, table[..., :2].mean(-1), wanted & found)
    thick = uniform(generator, shape, 0.01, 0.03)
    put_tops(scenes, TABLES, centre, yaw, table, thick, wanted)
    surface = draw_numbers(generator, (*shape, 1), SURFACES)
    scenes.texture[:, TABLES:CHAIRS] = surface
    paint = draw_paint(generator, shape, 0.6)
    scenes.tint[:, TABLES:CHAIRS] = paint

    radius = uniform(generator, (shape[0], 1), 0.015, 0.05)
    put_legs(scenes, TABLE_LEGS, centre[:, :1], yaw[:, :1], table[:, :1], thick[:, :1], radius, 0.05, wanted[:, :1])
    scenes.texture[:, TABLE_LEGS:COLUMN] = surface[:, :1]
    scenes.tint[:, TABLE_LEGS:COLUMN] = paint[:, :1]
    radius = log_uniform(generator, (shape[0], 1), 0.04, 0.35).minimum(table[:, 1:, 1])
    column = torch.stack([radius, radius, high[:, 1:] - thick[:, 1:]], -1)
    offset = -torch.tensor([0.0, 0.0, 1]) * thick[:, 1:, None, None]
    put_parts(scenes, COLUMN, centre[:, 1:], yaw[:, 1:], offset, column[:, :, None], wanted[:, 1:])
    return centre, table, yaw, wanted


def _put_chairs(scenes: Scenes, half: Tensor, tables: tuple[Tensor, ...], path: Tensor, wanted: Tensor,
                generator: torch.Generator) -> None:
    """Put three chairs at tables that are there, mostly turned to them: a seat, a back and a foot."""
    shape = wanted.shape
    which = torch.randint(0, 2, shape, generator=generator)
    which = torch.where(tables[3].gather(1, which), which, 1 - which)
    table_centre, table, table_yaw, there = _chosen(tables, which)
    tries = (*shape, TRIES)
    side = torch.randint(0, 4, tries, generator=generator)
    on_x, sign = side < 2, torch.where(side % 2 == 0, 1.0, -1.0)
    out = sign * (torch.where(on_x, table[..., None, 0], table[..., None, 1]) + uniform(generator, tries, -0.05, 0.45))
    along = uniform(generator, tries, -0.7, 0.7) * torch.where(on_x, table[..., None, 1], table[..., None, 0])
    local = torch.stack([torch.where(on_x, out, along), torch.where(on_x, along, out), torch.zeros(tries)], -1)
    spots = table_centre[:, :, None] + (turn_about_z(table_yaw)[:, :, None] @ local[..., None])[..., 0]
    outwards = table_yaw[..., None] + torch.where(on_x, 0.0, math.pi / 2) + torch.where(sign > 0, 0.0, math.pi)
    # A chair's own y points away from its back.
    yaw = outwards + math.pi / 2 + torch.where(chance(generator, tries, 0.8), uniform(generator, tries, -0.4, 0.4),
                                               uniform(generator, tries, -math.pi, math.pi))
    wide, seat_height = uniform(generator, shape, 0.17, 0.25), uniform(generator, shape, 0.4, 0.5)
    back_height = uniform(generator, shape, 0.15, 0.3)
    chair = torch.stack([wide, wide, seat_height / 2 + back_height], -1)
    centre, yaw, found = find_spots(chair, torch.zeros(shape), spots[..., :2], yaw, path, MARGIN, half[:, :2])
    wanted = apart(centre, 0.9 * wide, wanted & found & there)
    floor = centre * torch.tensor([1.0, 1, 0])
    thick = uniform(generator, (*shape, 2), 0.015, 0.045)
    seat = torch.stack([wide, wide, thick[..., 0]], -1)
    back = torch.stack([wide, thick[..., 1], back_height], -1)
    offset = torch.zeros(*shape, 2, 3)
    offset[:, :, 0, 2] = seat_height - thick[..., 0]
    offset[:, :, 1, 1] = thick[..., 1] - wide
    offset[:, :, 1, 2] = seat_height + back_height
    put_parts(scenes, CHAIRS, floor, yaw, offset, torch.stack([seat, back], 2), wanted)
    foot_height = (seat_height - 2 * thick[..., 0]) / 2
    radius = torch.where(chance(generator, shape, 0.6), 0.03, 0.7 * wide)
    offset = torch.zeros(*shape, 1, 3)
    offset[:, :, 0, 2] = foot_height
    foot = torch.stack([radius, radius, foot_height], -1)
    put_parts(scenes, CHAIR_LEGS, floor, yaw, offset, foot[:, :, None], wanted)
    surface = draw_numbers(generator, (shape[0], 1, 1), SURFACES)
    scenes.texture[:, CHAIRS:PICTURES], scenes.texture[:, CHAIR_LEGS:MUG] = surface, surface
    paint = draw_paint(generator, (shape[0], 1), 0.4)
    scenes.tint[:, CHAIRS:PICTURES], scenes.tint[:, CHAIR_LEGS:MUG] = paint, paint


def _put_things(scenes: Scenes, counters: tuple[Tensor, ...], tables: tuple[Tensor, ...], path: Tensor, wanted: Tensor,
                generator: torch.Generator) -> None:
    """Put rows of books or jars on worktops; boxes, sheets of paper, a mug and bowls on these and on tables, too.

    counters, tables: centre, half, yaw, whether it is there, of two each.
    """
    shape = wanted.shape
    tops = [torch.cat(both, 1) for both in zip(counters, tables)]
    box = torch.cat([log_uniform(generator, (*shape, 2), 0.05, 0.25), log_uniform(generator, (*shape, 1), 0.02, 0.25)],
                    -1)
    sheet = box * torch.tensor([1.0, 1, 0]) + torch.tensor([0.0, 0, 0.004])
    box = torch.where(chance(generator, (*shape, 1), 0.45), sheet, box)
    rounded = torch.cat([log_uniform(generator, (*shape, 1), 0.03, 0.12).expand(-1, -1, 2),
                        log_uniform(generator, (*shape, 1), 0.03, 0.14)], -1)
    rows = (shape[0], ROWS)
    row = torch.stack([log_uniform(generator, rows, 0.15, 1.0), uniform(generator, rows, 0.03, 0.1),
                       log_uniform(generator, rows, 0.05, 0.2)], -1).minimum(counters[1])
    is_row = chance(generator, rows, 0.7)
    thing = torch.cat([torch.where(is_row[..., None], row, box[:, :ROWS]), box[:, ROWS:4], rounded[:, 4:]], 1)
    which = torch.randint(0, tops[0].shape[1], shape, generator=generator)
    which[:, :ROWS] = torch.where(is_row, torch.arange(ROWS), which[:, :ROWS])
    centre, half, yaw, there = _chosen(tops, which)
    free = (half[..., :2] - thing[..., :2].amax(-1, keepdim=True)).clamp_min(0.0)
    free[:, :ROWS, 0] = torch.where(is_row, (half - thing)[:, :ROWS, 0], free[:, :ROWS, 0])
    local = free[:, :, None] * uniform(generator, (*shape, TRIES, 2), -1, 1)
    local[:, :ROWS, :, 1] = torch.where(is_row[..., None], (thing - half)[:, :ROWS, None, 1], local[:, :ROWS, :, 1])
    turn = turn_about_z(yaw)[..., :2, :2]
    spots = centre[:, :, None, :2] + (turn[:, :, None] @ local[..., None])[..., 0]
    turned = yaw[..., None] + uniform(generator, (*shape, TRIES), -math.pi, math.pi) * chance(
        generator, (*shape, TRIES), 0.7)
    turned[:, :ROWS] = torch.where(is_row[..., None], yaw[:, :ROWS, None], turned[:, :ROWS])
    height = centre[..., 2] + half[..., 2]
    centre, yaw, found = find_spots(thing, height, spots, turned, path, MARGIN)
    wanted = wanted & found & there
    for first, part in ((OBJECTS, slice(0, 4)), (MUG, slice(4, 5)), (BOWLS, slice(5, 7))):
        put(scenes, first, centre[:, part], thing[:, part], yaw[:, part], wanted[:, part])
    scenes.texture[:, OBJECTS:OBJECTS + 4] = draw_numbers(generator, (shape[0], 4, 1), (PLAIN, COLLAGE, PHOTO, PHOTO))
    scenes.tile[:, OBJECTS:OBJECTS + 4] = 2 * thing[:, :4].amax(-1, keepdim=True)
    scenes.tint[:, OBJECTS:OBJECTS + 4] = draw_paint(generator, (shape[0], 4), 0.6)
