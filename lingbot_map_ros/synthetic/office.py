# SPDX-License-Identifier: Apache-2.0
"""Open offices: desks with screens, drawers and office chairs, panels between them, cabinets, windows and lamps."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.layout import (
    TRIES, against, apart, draw_paint, empty_scenes, find_spots, footprints, in_view, put, put_parts, scatter,
    seen_walls,
)
from lingbot_map_ros.synthetic.room import put_pictures, put_shell, put_soft_light
from lingbot_map_ros.synthetic.scene import FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, Scenes, turn_about_z
from lingbot_map_ros.synthetic.texture import COLLAGE, NOISE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

DESKS = 2
# Which primitives are what: the parts of both desks, then the rest.
TOPS, PANELS, SCREENS, DRAWERS, SHEETS = (FIRST_BOX + DESKS * part for part in range(5))
SEATS, PARTITIONS, CABINET, PICTURES, LAMP = (FIRST_BOX + k for k in (10, 14, 16, 17, 19))
CHAIR_FEET, DESK_LEGS, BIN = FIRST_CYLINDER, FIRST_CYLINDER + 2 * DESKS, FIRST_CYLINDER + 4 * DESKS
BALLS, BAG = FIRST_ELLIPSOID, FIRST_ELLIPSOID + DESKS
MARGIN = 0.25  # metres between a camera and furniture


def draw_offices(size: Tensor, T_world_camera: Tensor, generator: torch.Generator, clutter: float = 1.0) -> Scenes:
    """Draw b open offices round cameras that are already there, the desks where those look.

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
    scenes.modulation_strength = log_uniform(generator, scenes.modulation_strength.shape, 0.02, 0.25)
    tiled = chance(generator, (count,), 0.5)  # a hung ceiling
    scenes.texture[:, 0, 4] = torch.where(tiled, draw_numbers(generator, (count,), (TILES,)), scenes.texture[:, 0, 4])
    scenes.tint[:, 0] = draw_paint(generator, (count,), 0.8)

    def wanted(things: int, share: float) -> Tensor:
        return chance(generator, (count, things), share * clutter)

    desks = _put_desks(scenes, half, T_world_camera, wanted(DESKS, 0.95), generator)
    chairs = _put_chairs(scenes, half, desks, path, wanted(DESKS, 0.85), generator)
    around = torch.cat([path, footprints(*desks, level=0.0), footprints(*chairs, level=0.0)], 1)

    low, high = -half[:, :2], half[:, :2]
    panel = torch.stack([uniform(generator, (count, 2), 0.4, 1.6), uniform(generator, (count, 2), 0.015, 0.04),
                         uniform(generator, (count, 2), 0.5, 0.9)], -1)
    spots = in_view(half, T_world_camera, 2, generator, 0.6, 4.0)
    yaw = torch.randint(0, 2, spots.shape[:3], generator=generator) * (math.pi / 2)
    centre, yaw, found = find_spots(panel, torch.zeros(count, 2), spots, yaw, around, MARGIN, half[:, :2])
    put(scenes, PARTITIONS, centre, panel, yaw, wanted(2, 0.6) & found)
    cloth = draw_numbers(generator, (count, 1, 1), (PLAIN, NOISE))
    scenes.texture[:, PARTITIONS:CABINET], scenes.texture[:, PANELS:SCREENS] = cloth, cloth
    paint = draw_paint(generator, (count, 1), 0.4)
    scenes.tint[:, PARTITIONS:CABINET], scenes.tint[:, PANELS:SCREENS] = paint, paint

    cabinet = torch.stack([uniform(generator, (count, 1), 0.3, 1.0), uniform(generator, (count, 1), 0.18, 0.3),
                           uniform(generator, (count, 1), 0.3, 1.0)], -1)
    spots, yaw = against(half[:, :2], cabinet[..., 1], *seen_walls(half[:, :2], T_world_camera, 1, generator))
    centre, yaw, found = find_spots(cabinet, torch.zeros(count, 1), spots, yaw, around, MARGIN, half[:, :2])
    put(scenes, CABINET, centre, cabinet, yaw, wanted(1, 0.7) & found)
    scenes.texture[:, CABINET] = draw_numbers(generator, (count, 1), (PLAIN, PLANKS, COLLAGE))
    scenes.tint[:, CABINET] = draw_paint(generator, (count,), 0.4)

    # A door, and a window or a whiteboard: half of the windows are bright.
    put_pictures(scenes, PICTURES, half, wanted(2, 0.85), generator, T_world_camera)
    scenes.half[:, PICTURES + 1, [0, 2]] *= uniform(generator, (count, 1), 1.0, 1.8)
    scenes.texture[:, PICTURES + 1] = draw_numbers(generator, (count, 1), (PLAIN, COLLAGE, PHOTO))
    bright = chance(generator, (count, 1), 0.5)
    scenes.tint[:, PICTURES + 1] = torch.where(bright, uniform(generator, (count, 1), 1.5, 4.0), 1.0)

    lamp = torch.tensor([0.6, 0.15, 0.01]) * uniform(generator, (count, 1, 1), 0.5, 1.5)
    spot = in_view(half, T_world_camera, 1, generator, 0.5, 4.0)[:, :, 0]
    put(scenes, LAMP, torch.cat([spot, size[:, None, 2:] - 0.01], -1), lamp, torch.zeros(count, 1), wanted(1, 0.6))
    scenes.texture[:, LAMP] = draw_numbers(generator, (count, 1), (PLAIN,))
    scenes.tint[:, LAMP] = log_uniform(generator, (count, 1), 1.2, 5.0)

    basket = torch.stack([*[uniform(generator, (count,), 0.1, 0.2)] * 2, uniform(generator, (count,), 0.12, 0.35)], -1)
    scatter(scenes, BIN, basket[:, None], torch.zeros(count, 1), low, high, path, wanted(1, 0.8), generator, MARGIN)
    scenes.tint[:, BIN] = draw_paint(generator, (count,), 0.3)
    bag = log_uniform(generator, (count, 1, 1), 0.1, 0.35) * uniform(generator, (count, 1, 3), 0.6, 1.0)
    scatter(scenes, BAG, bag, torch.zeros(count, 1), low, high, path, wanted(1, 0.6), generator, MARGIN)
    scenes.tint[:, BAG] = draw_paint(generator, (count,), 0.3)

    put_soft_light(scenes, size, generator)
    return scenes


def _put_desks(scenes: Scenes, half: Tensor, T_world_camera: Tensor, wanted: Tensor, generator: torch.Generator,
               ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put two desks, half of the time the second beside the first or back to back with it, and what belongs to them.

    A desk's own y points to who sits there.

    Returns: centres [b, 2, 3] of the boxes round them, those boxes [b, 2, 3], yaws [b, 2], whether they are there.
    """
    count, path = len(half), T_world_camera[..., :3, 3]
    shape = (count, DESKS)
    wide, deep = uniform(generator, shape, 0.5, 1.0), uniform(generator, shape, 0.3, 0.45)
    height = uniform(generator, (count, 1), 0.68, 0.78).expand(shape)
    thick = uniform(generator, (count, 1), 0.01, 0.025).expand(shape)
    has_panel = chance(generator, (count, 1), 0.6)
    panel_height = torch.where(has_panel, uniform(generator, (count, 1), 0.9, 1.6), 0.72).expand(shape)
    screen = torch.stack([uniform(generator, shape, 0.15, 0.38), uniform(generator, shape, 0.008, 0.04),
                          uniform(generator, shape, 0.1, 0.25)], -1)
    raised = torch.where(chance(generator, shape, 0.5), uniform(generator, shape, 0.03, 0.15), 0.0)
    highest = torch.maximum(panel_height, height + raised + 2 * screen[..., 2])
    box = torch.stack([wide, deep + 0.04, highest / 2], -1)

    spots = in_view(half, T_world_camera, DESKS, generator, 0.4, 2.5)
    square = torch.randint(0, 4, (*shape, TRIES), generator=generator) * (math.pi / 2)
    yaw = torch.where(chance(generator, (count, 1, 1), 0.7), square,
                      uniform(generator, (*shape, TRIES), -math.pi, math.pi))
    floor = torch.zeros(count, 1)
    first = find_spots(box[:, :1], floor, spots[:, :1], yaw[:, :1], path, MARGIN, half[:, :2])
    side = torch.where(chance(generator, (count, TRIES), 0.5), 1.0, -1.0)
    behind = chance(generator, (count, TRIES), 0.4)
    offset = torch.stack([torch.where(behind, 0.0, side * (wide.sum(-1, keepdim=True) + 0.01)),
                          torch.where(behind, -(deep.sum(-1, keepdim=True) + 0.09), 0.0)], -1)
    turn = turn_about_z(first[1])[..., :2, :2]  # [b, 1, 2, 2]
    beside = first[0][:, :, :2] + (turn @ offset[..., None])[..., 0]  # [b, tries, 2]
    row = chance(generator, (count, 1), 0.6) & (torch.arange(TRIES) < TRIES - 2)  # else it stands where it is seen
    spots = torch.where(row[..., None], beside, spots[:, 1])[:, None]
    yaw = torch.where(row, first[1] + torch.where(behind, math.pi, 0.0), yaw[:, 1])[:, None]
    second = find_spots(box[:, 1:], floor, spots, yaw, path, MARGIN, half[:, :2])
    centre, yaw, found = (torch.cat(both, 1) for both in zip(first, second))
    # Seen along the first desk's axes, the second is beside it.
    way = (turn[:, 0].transpose(-1, -2) @ (centre[:, 1] - centre[:, 0])[:, :2, None])[..., 0].abs()
    reach = (turn_about_z(yaw[:, 1] - yaw[:, 0])[:, :2, :2].abs() @ box[:, 1, :2, None])[..., 0]
    found[:, 1] &= (way - reach - box[:, 0, :2] > -0.005).any(-1) | ~found[:, 0]
    wanted = wanted & found
    ground = centre * torch.tensor([1.0, 1, 0])
    zero = torch.zeros(shape)

    def part(number: int, offset: list[Tensor], size: list[Tensor], share: float, there: Tensor = wanted) -> None:
        offset, size = (torch.stack(axes, -1)[:, :, None] for axes in (offset, size))
        put_parts(scenes, number, ground, yaw, offset, size, there & wanted & chance(generator, shape, share))

    part(TOPS, [zero, zero, height - thick], [wide, deep, thick], 1.0)
    part(PANELS, [zero, -deep - 0.02, panel_height / 2], [wide, torch.full(shape, 0.02), panel_height / 2], 1.0,
         has_panel.expand(shape))
    across = uniform(generator, shape, -1, 1) * (wide - screen[..., 0]).clamp_min(0)
    part(SCREENS, [across, -0.4 * deep, height + raised + screen[..., 2]], list(screen.unbind(-1)), 0.9)
    side = torch.where(chance(generator, shape, 0.5), 1.0, -1.0)
    has_drawers = chance(generator, shape, 0.8)
    drawer = uniform(generator, shape, 0.17, 0.23)
    drawer_height = (height - 2 * thick) / 2 * torch.where(chance(generator, shape, 0.5), 1.0, 0.85)
    part(DRAWERS, [side * (wide - drawer), zero, drawer_height], [drawer, 0.9 * deep, drawer_height], 1.0,
         has_drawers)
    end = torch.where(chance(generator, shape, 0.5), 1.0, -1.0)  # of the desk, where papers lie
    sheet = [log_uniform(generator, shape, 0.08, 0.3).minimum(0.35 * wide),
             log_uniform(generator, shape, 0.06, 0.2).minimum(0.5 * deep), log_uniform(generator, shape, 0.003, 0.04)]
    part(SHEETS, [end * uniform(generator, shape, 0.35, 0.6) * wide, 0.4 * deep, height + sheet[2]], sheet, 0.85)
    ball = log_uniform(generator, shape, 0.03, 0.1)
    tall = ball * uniform(generator, shape, 0.7, 1.5)
    spot = [-end * uniform(generator, shape, 0.3, 0.8) * wide, uniform(generator, shape, 0.2, 0.7) * deep]
    part(BALLS, [*spot, height + tall], [ball, ball, tall], 0.6)
    leg = uniform(generator, (count, 1), 0.015, 0.04).expand(shape)
    long = (height - 2 * thick) / 2
    for number, front in enumerate((1.0, -1.0)):  # at the end without drawers; without any, at opposite corners
        at = [torch.where(has_drawers, -side, front * side) * (wide - 0.06), front * (deep - 0.06), long]
        offset = torch.stack(at, -1)[:, :, None]
        half_leg = torch.stack([leg, leg, long], -1)[:, :, None]
        put_parts(scenes, DESK_LEGS + DESKS * number, ground, yaw, offset, half_leg, wanted)

    surface = draw_numbers(generator, (count, 1, 1), (PLAIN, PLANKS))
    for first, last in ((TOPS, PANELS), (DRAWERS, SHEETS)):
        scenes.texture[:, first:last] = surface
    scenes.tint[:, TOPS:PANELS] = draw_paint(generator, (count, 1), 0.5)
    scenes.tint[:, DRAWERS:SHEETS] = draw_paint(generator, (count, 1), 0.4)
    scenes.tint[:, DESK_LEGS:BIN] = draw_paint(generator, (count, 1), 0.4)
    # Most screens are dark from behind and show something in front; here they are the one or the other.
    dark = chance(generator, (*shape, 1), 0.5)
    scenes.texture[:, SCREENS:DRAWERS] = draw_numbers(generator, (*shape, 1), (PLAIN, COLLAGE, PHOTO))
    scenes.tile[:, SCREENS:DRAWERS] = 2 * screen.amax(-1, keepdim=True)
    scenes.tint[:, SCREENS:DRAWERS] = torch.where(dark, log_uniform(generator, (*shape, 1), 0.04, 0.2),
                                                  uniform(generator, (*shape, 1), 0.7, 1.6))
    scenes.texture[:, SHEETS:SEATS] = draw_numbers(generator, (*shape, 1), (PLAIN, COLLAGE, PHOTO))
    scenes.tile[:, SHEETS:SEATS] = 0.5
    scenes.tint[:, SHEETS:SEATS] = draw_paint(generator, shape, 0.6)
    scenes.tint[:, BALLS:BAG] = draw_paint(generator, shape, 0.4)
    return centre, box, yaw, wanted


def _put_chairs(scenes: Scenes, half: Tensor, desks: tuple[Tensor, ...], path: Tensor, wanted: Tensor,
                generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put an office chair at each desk: a seat and a back on a column with a wide foot; return the boxes round them."""
    centre, desk, desk_yaw, there = desks
    shape = wanted.shape
    tries = (*shape, TRIES)
    seat_half, seat_height = uniform(generator, shape, 0.2, 0.27), uniform(generator, shape, 0.42, 0.55)
    back_height = uniform(generator, shape, 0.18, 0.34)
    foot_radius = uniform(generator, shape, 0.2, 0.32)
    around = torch.maximum(seat_half, foot_radius)
    # A chair that is turned away from its desk stands farther off.
    turned = chance(generator, tries, 0.3)
    out = torch.where(turned, 1.45, 1.0) * around[..., None] + uniform(generator, tries, 0.0, 0.5)
    local = torch.stack([uniform(generator, tries, -0.7, 0.7) * desk[..., :1], desk[..., 1:2] + out], -1)
    spots = centre[:, :, None, :2] + (turn_about_z(desk_yaw)[:, :, None, :2, :2] @ local[..., None])[..., 0]
    # A chair's own y points to its back, that is away from the desk.
    yaw = desk_yaw[..., None] + torch.where(turned, uniform(generator, tries, -math.pi, math.pi),
                                            uniform(generator, tries, -0.6, 0.6))
    box = torch.stack([around, around, seat_height / 2 + 0.04 + back_height], -1)
    spot, yaw, found = find_spots(box, torch.zeros(shape), spots, yaw, path, MARGIN, half[:, :2])
    # A chair of one desk is not to stand in the other.
    other, other_yaw, other_box = centre.flip(1), desk_yaw.flip(1), desk.flip(1)
    way = (turn_about_z(other_yaw)[..., :2, :2].transpose(-1, -2) @ (spot - other)[..., :2, None])[..., 0]
    blocked = (way.abs() < other_box[..., :2] + around[..., None]).all(-1) & there.flip(1)
    wanted = apart(spot, around, wanted & found & there & ~blocked)
    ground = spot * torch.tensor([1.0, 1, 0])
    thick = uniform(generator, shape, 0.025, 0.05)
    offset, parts = torch.zeros(*shape, 2, 3), torch.zeros(*shape, 2, 3)
    offset[:, :, 0, 2] = seat_height - thick
    parts[:, :, 0] = torch.stack([seat_half, seat_half, thick], -1)
    offset[:, :, 1, 1], offset[:, :, 1, 2] = seat_half - thick, seat_height + 0.08 + back_height
    parts[:, :, 1] = torch.stack([0.9 * seat_half, thick, back_height], -1)
    put_parts(scenes, SEATS, ground, yaw, offset, parts, wanted)
    offset, parts = torch.zeros(*shape, 2, 3), torch.zeros(*shape, 2, 3)  # the column and the foot
    offset[:, :, 0, 2] = parts[:, :, 0, 2] = (seat_height - 2 * thick) / 2
    parts[:, :, 0, :2] = 0.03
    flat = uniform(generator, shape, 0.02, 0.05)
    offset[:, :, 1, 2] = 0.03 + flat
    parts[:, :, 1] = torch.stack([foot_radius, foot_radius, flat], -1)
    put_parts(scenes, CHAIR_FEET, ground, yaw, offset, parts, wanted)
    scenes.texture[:, SEATS:PARTITIONS] = draw_numbers(generator, (shape[0], 1, 1), (PLAIN, NOISE))
    scenes.tint[:, SEATS:PARTITIONS] = draw_paint(generator, (shape[0], 1), 0.2)
    scenes.tint[:, CHAIR_FEET:DESK_LEGS] = draw_paint(generator, (shape[0], 1), 0.3)
    return spot, box, yaw, wanted
