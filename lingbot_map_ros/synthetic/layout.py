# SPDX-License-Identifier: Apache-2.0
"""Put things into scenes, clear of the camera's path."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.scene import FACES, NOWHERE, PRIMITIVES, Scenes, clearance, turn_about_z
from lingbot_map_ros.synthetic.texture import COLLAGE, NOISE, PHOTO, PLAIN, PLANKS, TILES, draw_numbers

CLEARANCE = 0.35  # metres between a camera and any thing
SLACK = 0.01  # metres that a thing with its back to a wall may be in it
TRIES = 8  # spots tried for a thing before it is left out
THINGS = (PLAIN, NOISE, TILES, PLANKS, COLLAGE, PHOTO)  # kinds of texture of furniture and the like


def empty_scenes(count: int, generator: torch.Generator) -> Scenes:
    """Return scenes with surfaces and a light's strength drawn, but nothing in its place yet."""
    shape = (count, PRIMITIVES)
    centre = torch.zeros(*shape, 3)
    centre[..., 2] = NOWHERE
    texture = draw_numbers(generator, (*shape, FACES), THINGS)
    texture = torch.where(chance(generator, (*shape, 1), 0.7), texture[..., :1], texture)
    return Scenes(
        centre=centre,
        half=torch.ones(*shape, 3),
        rotation=torch.eye(3).expand(*shape, 3, 3).clone(),
        texture=texture,
        tile=log_uniform(generator, (*shape, 1), 0.4, 2.2) * log_uniform(generator, (*shape, FACES), 0.8, 1.25),
        tint=torch.ones(*shape, 3),
        modulation=draw_numbers(generator, shape, (NOISE,)),
        modulation_strength=log_uniform(generator, shape, 0.04, 0.5),
        modulation_rate=torch.where(chance(generator, shape, 0.5), 0.29, 3.7),
        light=torch.zeros(count, 3),
        light_strength=uniform(generator, (count,), 0.4, 1.4),
        light_falloff=torch.full((count,), 0.08),
        ambient=uniform(generator, (count,), 0.25, 0.8),
        open=torch.zeros(count, dtype=torch.bool),
        sky=torch.zeros(count, 2, 3),
    )


def put(scenes: Scenes, first: int, centre: Tensor, half: Tensor, yaw: Tensor, wanted: Tensor) -> None:
    """Write k primitives from number `first` on: centre and half [b, k, 3], yaw and wanted [b, k]; others stay."""
    places = slice(first, first + yaw.shape[1])
    scenes.centre[:, places] = torch.where(wanted[..., None], centre, scenes.centre[:, places])
    scenes.half[:, places] = torch.where(wanted[..., None], half, scenes.half[:, places])
    scenes.rotation[:, places] = torch.where(wanted[..., None, None], turn_about_z(yaw), scenes.rotation[:, places])


def put_parts(scenes: Scenes, first: int, spot: Tensor, yaw: Tensor, offset: Tensor, half: Tensor, wanted: Tensor,
              ) -> None:
    """Write the parts of k things, thing by thing.

    Args:
        first: number of the first part.
        spot: [b, k, 3] the things' origins in the world.
        yaw: [b, k] radians.
        offset, half: [b, k, parts, 3] the parts' centres in the thing's axes, and their half sizes.
        wanted: [b, k].
    """
    parts = offset.shape[2]
    centre = spot[:, :, None] + (turn_about_z(yaw)[:, :, None] @ offset[..., None])[..., 0]
    put(scenes, first, centre.flatten(1, 2), half.flatten(1, 2), yaw.repeat_interleave(parts, 1),
        wanted.repeat_interleave(parts, 1))


def put_tops(scenes: Scenes, first: int, centre: Tensor, yaw: Tensor, table: Tensor, thick: Tensor, wanted: Tensor,
             ) -> None:
    """Write the tops of k tables: centre and table [b, k, 3], the boxes round them; yaw, thick and wanted [b, k]."""
    offset = torch.zeros_like(table)
    offset[..., 2] = table[..., 2] - thick
    top = torch.cat([table[..., :2], thick[..., None]], -1)
    put_parts(scenes, first, centre, yaw, offset[:, :, None], top[:, :, None], wanted)


def put_legs(scenes: Scenes, first: int, centre: Tensor, yaw: Tensor, table: Tensor, thick: Tensor, radius: Tensor,
             inset: float, wanted: Tensor) -> None:
    """Write the four legs of each of k tables, of radius [b, k], `inset` metres from its sides; else as `put_tops`."""
    corner = torch.tensor([[1.0, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]])
    offset = corner * (table - inset)[:, :, None] - torch.tensor([0.0, 0.0, 1]) * thick[..., None, None]
    leg = torch.stack([radius, radius, table[..., 2] - thick], -1)
    put_parts(scenes, first, centre, yaw, offset, leg[:, :, None].expand(-1, -1, 4, -1), wanted)


def find_spots(half: Tensor, lift: Tensor, spots: Tensor, yaw: Tensor, path: Tensor, margin: float = CLEARANCE,
               room_half: Tensor | None = None, allowed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Choose for each of k things the first spot that is clear of the path.

    Args:
        half: [b, k, 3] metres, of the box round the thing.
        lift: [b, k] metres from the floor to its foot.
        spots: [b, k, tries, 2] centres to try.
        yaw: [b, k, tries] radians.
        path: [b, s, 3].
        margin: metres to keep clear of the path.
        room_half: [b, 2] half the sides of walls that things are to stay within; None: they may reach through.
        allowed: [b, k, tries] which spots may be chosen; None: all.

    Returns:
        centre [b, k, 3], yaw [b, k], whether a spot was found [b, k].
    """
    z = (lift + half[..., 2])[..., None, None].expand(*spots.shape[:3], 1)
    centre = torch.cat([spots, z], -1)
    rotation = turn_about_z(yaw)
    free = clearance(path[:, None, None], centre, half[:, :, None], rotation).amin(-1) > margin
    if room_half is not None:
        reach = spots.abs() + (rotation.abs() @ half[:, :, None, :, None])[..., :2, 0]
        free = free & (reach < room_half[:, None, None] + SLACK).all(-1)
    if allowed is not None:
        free = free & allowed
    first = free.float().argmax(-1, keepdim=True)
    return (centre.gather(2, first[..., None].expand(-1, -1, -1, 3))[:, :, 0], yaw.gather(2, first)[..., 0],
            free.any(-1))


def anywhere(low: Tensor, high: Tensor, path: Tensor, things: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw spots within bounds, most of them beside the path where they are seen, and yaws, some of them square.

    Args:
        low, high: [b, 2].
        path: [b, s, 3].
        things: k.

    Returns:
        spots [b, k, tries, 2], yaws [b, k, tries].
    """
    count = len(low)
    shape = (count, things, TRIES)
    spots = low[:, None, None] + torch.rand(*shape, 2, generator=generator) * (high - low)[:, None, None]
    visited = torch.randint(0, path.shape[1], shape, generator=generator).flatten(1)
    beside = path[..., :2].gather(1, visited[..., None].expand(-1, -1, 2)).unflatten(1, shape[1:])
    reach = (high - low).amax(-1).clamp_min(2)[:, None, None] / 2
    distance = 0.8 * (reach / 0.8) ** torch.rand(shape, generator=generator)  # as many near as far
    angle = uniform(generator, shape, -math.pi, math.pi)
    beside = beside + distance[..., None] * torch.stack([angle.cos(), angle.sin()], -1)
    beside = beside.clamp(low[:, None, None], high[:, None, None])
    spots = torch.where(chance(generator, (*shape, 1), 0.65), beside, spots)
    turned = chance(generator, (*shape[:2], 1), 0.6)
    return spots, torch.where(turned, uniform(generator, shape, 0, math.pi), 0.0)


def at_walls(room_half: Tensor, depth: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw spots [b, k, tries, 2] with the back to a wall, and yaws [b, k, tries].

    Args:
        room_half: [b, 2] half the room's sides.
        depth: [b, k] half the thing's size along its own y, which points away from the wall.
    """
    shape = (*depth.shape, TRIES)
    wall = torch.randint(0, 4, shape, generator=generator)
    along = uniform(generator, shape, -1, 1)
    return against(room_half, depth, wall < 2, torch.where(wall % 2 == 0, 1.0, -1.0), along)


def against(room_half: Tensor, depth: Tensor, on_x: Tensor, sign: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Return spots [b, k, tries, 2] with the back to given walls, and yaws [b, k, tries].

    Args:
        room_half, depth: as for `at_walls`.
        on_x, sign: [b, k, tries] which wall: at the end of x, or else of y, the greater (1) or the smaller (-1).
        along: [b, k, tries] from -1 to 1, how far along the wall.
    """
    half_x, half_y = (room_half[:, None, None, k].expand_as(along) for k in range(2))
    x = torch.where(on_x, sign * (half_x - depth[..., None]), along * half_x)
    y = torch.where(on_x, along * half_y, sign * (half_y - depth[..., None]))
    yaw = torch.where(on_x, torch.where(sign > 0, math.pi / 2, -math.pi / 2), torch.where(sign > 0, math.pi, 0.0))
    return torch.stack([x, y], -1), yaw


def glances(T_world_camera: Tensor, things: int, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw where cameras [b, s, 4, 4] of random frames look, seen from above, for k things.

    spread: radians to either side at most.

    Returns: origins and directions [b, k, tries, 2]; no part of a direction is 0, so that one may divide by it.
    """
    shape = (len(T_world_camera), things, TRIES)
    frame = torch.randint(0, T_world_camera.shape[1], shape, generator=generator)
    T = T_world_camera[torch.arange(len(T_world_camera))[:, None, None], frame]
    heading = torch.atan2(T[..., 1, 2], T[..., 0, 2]) + uniform(generator, shape, -spread, spread)
    direction = torch.stack([heading.cos(), heading.sin()], -1)
    return T[..., :2, 3], torch.where(direction < 0, -1.0, 1.0) * direction.abs().clamp_min(1e-6)


def seen_walls(room_half: Tensor, T_world_camera: Tensor, things: int, generator: torch.Generator,
               ) -> tuple[Tensor, Tensor, Tensor]:
    """Draw places on walls where cameras [b, s, 4, 4] look: `on_x`, `sign` and `along` of `against`, for k things."""
    origin, direction = glances(T_world_camera, things, 0.5, generator)
    sign = torch.where(direction < 0, -1.0, 1.0)
    distance = (sign * room_half[:, None, None] - origin) / direction
    on_x = distance[..., 0] < distance[..., 1]
    met = origin + distance.amin(-1, keepdim=True) * direction
    along = (met / room_half[:, None, None]).clamp(-1, 1)
    return on_x, torch.where(on_x, sign[..., 0], sign[..., 1]), torch.where(on_x, along[..., 1], along[..., 0])


def in_view(half: Tensor, T_world_camera: Tensor, things: int, generator: torch.Generator, near: float = 0.3,
            far: float = 1.2) -> Tensor:
    """Draw spots [b, k, tries, 2] before the cameras of randomly chosen frames, those first that most cameras see.

    Args:
        half: [b, 2] or more, half the sides of the walls, metres.
        T_world_camera: [b, s, 4, 4].
        things: k.
        near, far: metres ahead; half of `far` to the sides at most. What is farther than 1.25 of it is not seen.
    """
    shape = (len(half), things, TRIES)
    frame = torch.randint(0, T_world_camera.shape[1], shape, generator=generator)
    T = T_world_camera[torch.arange(len(half))[:, None, None], frame]
    forward = torch.nn.functional.normalize(T[..., :2, 2], dim=-1)
    left = torch.stack([-forward[..., 1], forward[..., 0]], -1)
    spots = (T[..., :2, 3] + forward * log_uniform(generator, (*shape, 1), near, far)
             + left * uniform(generator, (*shape, 1), -far / 2, far / 2))
    inside = half[:, None, None, :2] - 0.4
    spots = spots.clamp(-inside, inside)
    way = spots[..., None, :] - T_world_camera[:, None, None, :, :2, 3]  # [b, k, tries, s, 2]
    distance = way.norm(dim=-1)
    ahead = torch.nn.functional.normalize(T_world_camera[..., :2, 2], dim=-1)[:, None, None]
    seen = ((way * ahead).sum(-1) > 0.7 * distance) & (distance < 1.25 * far)
    order = seen.float().mean(-1).argsort(dim=-1, descending=True, stable=True)
    return spots.gather(2, order[..., None].expand_as(spots))


def footprints(centre: Tensor, half: Tensor, yaw: Tensor, wanted: Tensor, level: float = 1.0) -> Tensor:
    """Return points [b, 21 k, 3] for others to keep clear of: a grid in each of k boxes.

    Args:
        centre, half: [b, k, 3] metres.
        yaw, wanted: [b, k]; points of those that are not wanted are out of the way.
        level: height of the grid, from -1, the lower face, to 1, the upper one.
    """
    corner = torch.cartesian_prod(torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 3), torch.tensor([level]))
    local = corner * half[:, :, None]
    points = centre[:, :, None] + (turn_about_z(yaw)[:, :, None] @ local[..., None])[..., 0]
    return torch.where(wanted[:, :, None, None], points, NOWHERE).flatten(1, 2)


def outside(scenes: Scenes, boxes: slice, spots: Tensor) -> Tensor:
    """Tell which spots [b, k, tries, 2] lie in the outlines of none of the boxes that are there, [b, k, tries]."""
    centre, half = scenes.centre[:, None, None, boxes], scenes.half[:, None, None, boxes, :2]
    turn = scenes.rotation[:, None, None, boxes, :2, :2]  # [b, 1, 1, n, 2, 2]
    local = ((spots[..., None, :] - centre[..., :2])[..., None, :] @ turn)[..., 0, :]
    return ~((local.abs() < half).all(-1) & (centre[..., 2] > NOWHERE / 2)).any(-1)


def apart(centre: Tensor, radius: Tensor, wanted: Tensor) -> Tensor:
    """Return which of k things stay when those are left out that come too near to one before them.

    Args:
        centre: [b, k, 3] metres.
        radius: [b, k] metres, of what is to be kept clear round each.
        wanted: [b, k].
    """
    stays = wanted.clone()
    for later in range(1, wanted.shape[1]):
        distance = (centre[:, :later, :2] - centre[:, later:later + 1, :2]).norm(dim=-1)
        near = distance < radius[:, :later] + radius[:, later:later + 1]
        stays[:, later] &= ~(near & stays[:, :later]).any(1)
    return stays


def draw_paint(generator: torch.Generator, shape: Sequence[int], plain: float) -> Tensor:
    """Draw tints [*shape, 3]: white with a share of `plain`, else dark or of a strong colour."""
    colour = uniform(generator, (*shape, 3), 0.05, 1.0)
    colour = colour / colour.amax(-1, keepdim=True) * uniform(generator, (*shape, 1), 0.3, 1.0)
    dark = log_uniform(generator, (*shape, 1), 0.06, 0.5).expand_as(colour)
    colour = torch.where(chance(generator, (*shape, 1), 0.5), colour, dark)
    return torch.where(chance(generator, (*shape, 1), plain), 1.0, colour)


def scatter(scenes: Scenes, first: int, half: Tensor, lift: Tensor, low: Tensor, high: Tensor, path: Tensor,
            wanted: Tensor, generator: torch.Generator, margin: float = CLEARANCE, solid: slice | None = None) -> None:
    """Put k single primitives (half [b, k, 3], lift and wanted [b, k]) anywhere within bounds (low, high [b, 2]).

    solid: boxes in which nothing is to stand; None: none.
    """
    spots, yaw = anywhere(low, high, path, half.shape[1], generator)
    allowed = None if solid is None else outside(scenes, solid, spots)
    centre, yaw, found = find_spots(half, lift, spots, yaw, path, margin, allowed=allowed)
    put(scenes, first, centre, half, yaw, wanted & found)
