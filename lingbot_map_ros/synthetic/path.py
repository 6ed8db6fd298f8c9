# SPDX-License-Identifier: Apache-2.0
"""Paths of cameras: ground robots, drones and hands within a free box, and loops that close."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform


GROUND, DRONE, HAND = 0, 1, 2  # kinds of path
LOOK_INWARDS = 0.4  # radians from ahead, of the camera on a loop: it sees what stands in the middle


@dataclass
class Motion:
    """How b cameras may move."""

    low: Tensor  # [b, 3] least corner of the free box, metres
    high: Tensor  # [b, 3]
    step: Tensor  # [b] metres a frame, typical
    max_yaw: float  # radians a frame
    kind: Tensor  # [b] GROUND, DRONE or HAND
    look_down: Tensor  # [b] bool, of hands: whether the camera looks at what is on the floor and on tables
    square: Tensor  # [b] bool: whether those that go ahead go straight on and turn at right angles, as in corridors


def camera_pose(position: Tensor, yaw: Tensor, pitch: Tensor, roll: Tensor) -> Tensor:
    """Return T_world_camera [..., 4, 4] of an optical frame (x right, y down, z forward) in a z-up world.

    Args:
        position: [..., 3].
        yaw: [...] radians of the optical axis from +x, counter-clockwise from above.
        pitch: [...] radians, positive looking up.
        roll: [...] radians about the optical axis, positive clockwise as seen from behind the camera.
    """
    zero = torch.zeros_like(yaw)
    forward = torch.stack([yaw.cos() * pitch.cos(), yaw.sin() * pitch.cos(), pitch.sin()], dim=-1)
    level = torch.stack([yaw.sin(), -yaw.cos(), zero], dim=-1)  # to the right
    down = torch.linalg.cross(forward, level)
    cos, sin = roll.cos()[..., None], roll.sin()[..., None]
    T = position.new_zeros(*position.shape[:-1], 4, 4)
    T[..., :3, 0] = cos * level + sin * down
    T[..., :3, 1] = cos * down - sin * level
    T[..., :3, 2] = forward
    T[..., :3, 3] = position
    T[..., 3, 3] = 1
    return T


def wander(generator: torch.Generator, shape: tuple[int, int], slowest: float, fastest: float, waves: int = 3,
           cycles: int | None = None) -> Tensor:
    """Draw smooth random functions of the frame number, [b, s], of about unit variance.

    Args:
        shape: (b, s).
        slowest, fastest: radians a frame of the sinusoids that are summed.
        waves: their number.
        cycles: frames after which the functions repeat (frequencies become whole numbers of turns); None: never.
    """
    count, frames = shape
    rate = log_uniform(generator, (count, waves, 1), slowest, fastest)
    if cycles is not None:
        turn = 2 * math.pi / cycles
        rate = (rate / turn).round().clamp_min(1) * turn
    phase = uniform(generator, (count, waves, 1), 0, 2 * math.pi)
    return torch.sin(rate * torch.arange(frames) + phase).sum(1) * math.sqrt(2 / waves)


def drive(motion: Motion, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drive unicycles: positions [b, s, 2] and headings [b, s].

    They turn away from the free box's sides, and stop at times.
    """
    count = len(motion.step)
    low, high = motion.low[:, :2], motion.high[:, :2]
    position = low + torch.rand(count, 2, generator=generator) * (high - low)
    heading = uniform(generator, (count,), -math.pi, math.pi)
    restless = log_uniform(generator, (count,), 0.007, motion.max_yaw * 0.6)  # radians a frame
    rate = torch.randn(count, generator=generator) * restless
    impulses = torch.randn(frames, count, generator=generator)
    speed = (1 + 0.5 * wander(generator, (count, frames), 0.02, 0.4)).clamp(0, 2)
    stops = (wander(generator, (count, frames), 0.02, 0.2) > 1.1) & chance(generator, (count, 1), 0.4)
    speed = torch.where(stops, 0.0, speed) * motion.step[:, None]
    side = torch.where(chance(generator, (count,), 0.5), 1.0, -1.0)
    ahead = (4 * motion.step).clamp(0.25, 4)
    turn = restless.mul(1.5).clamp(0.05, motion.max_yaw)
    middle = (low + high) / 2
    positions, headings = [], []
    for frame in range(frames):
        positions.append(position)
        headings.append(heading)
        forward = torch.stack([heading.cos(), heading.sin()], -1)
        probe = position + forward * ahead[:, None]
        blocked = ((probe < low) | (probe > high)).any(-1)
        towards = middle - position
        cross = forward[:, 0] * towards[:, 1] - forward[:, 1] * towards[:, 0]
        away = torch.where(cross.abs() > 0.05, cross.sign(), side) * turn
        rate = 0.85 * rate + 0.5 * restless * impulses[frame]
        rate = torch.where(blocked, away, rate).clamp(-motion.max_yaw, motion.max_yaw)
        following = position + forward * speed[:, frame, None]
        free = ((following > low) & (following < high)).all(-1, keepdim=True)
        position = torch.where(free, following, position)  # else turn on the spot
        heading = heading + rate
    return torch.stack(positions, 1), torch.stack(headings, 1)


def walk(motion: Motion, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Go straight on for some metres along x or y, turn to the left or right, and so on: as `drive`.

    The headings, where cameras look, sway a little about the way.
    """
    count = len(motion.step)
    low, high = motion.low[:, :2], motion.high[:, :2]
    position = low + torch.rand(count, 2, generator=generator) * (high - low)
    target = torch.randint(0, 4, (count,), generator=generator) * (math.pi / 2)
    heading = target + uniform(generator, (count,), -0.3, 0.3)
    speed = (1 + 0.5 * wander(generator, (count, frames), 0.02, 0.4)).clamp(0, 2) * motion.step[:, None]
    legs = log_uniform(generator, (count, frames), 1.0, 12.0)  # metres until the next turn
    sides = torch.where(chance(generator, (count, frames), 0.5), 1.0, -1.0)
    turn = (motion.step / 0.5).clamp(0.02, motion.max_yaw)
    ahead = (4 * motion.step).clamp_min(0.5)
    leg, middle = legs[:, 0], (low + high) / 2
    positions, headings = [], []
    for frame in range(frames):
        positions.append(position)
        headings.append(heading)
        probe = position + ahead[:, None] * torch.stack([target.cos(), target.sin()], -1)
        blocked = ((probe < low) | (probe > high)).any(-1)
        towards = middle - position
        cross = target.cos() * towards[:, 1] - target.sin() * towards[:, 0]
        side = torch.where(blocked & (cross.abs() > 0.05), cross.sign(), sides[:, frame])
        straight = (target - heading).abs() < 0.2
        turns = straight & (blocked | (leg <= 0))
        target = torch.where(turns, target + side * math.pi / 2, target)
        leg = torch.where(turns, legs[:, frame], leg - speed[:, frame])
        following = position + torch.stack([heading.cos(), heading.sin()], -1) * speed[:, frame, None]
        free = ((following > low) & (following < high)).all(-1, keepdim=True)
        position = torch.where(free, following, position)  # else turn on the spot
        heading = heading + torch.maximum(torch.minimum(target - heading, turn), -turn)
    return torch.stack(positions, 1), torch.stack(headings, 1) + 0.05 * wander(generator, (count, frames), 0.02, 0.2)


def orbit(motion: Motion, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Walk round something and look at it, or away from it: positions [b, s, 2] and headings [b, s]."""
    count = len(motion.step)
    shape = (count, frames)
    low, high = motion.low[:, :2], motion.high[:, :2]
    reach = (high - low).amin(-1) / 2
    middle = (low + high) / 2 + (torch.rand(count, 2, generator=generator) - 0.5) * (high - low) * 0.3
    radius = reach * uniform(generator, (count,), 0.45, 0.7)
    side = torch.where(chance(generator, (count,), 0.5), 1.0, -1.0)
    rate = (motion.step / radius).clamp_max(motion.max_yaw) * side
    angle = uniform(generator, (count, 1), -math.pi, math.pi) + rate[:, None] * torch.arange(frames)
    distance = radius[:, None] * (1 + 0.12 * wander(generator, shape, 0.01, 0.1))
    position = middle[:, None] + distance[..., None] * torch.stack([angle.cos(), angle.sin()], -1)
    inwards = torch.where(chance(generator, (count, 1), 0.75), math.pi, 0.0)
    return position, angle + inwards + 0.12 * wander(generator, shape, 0.01, 0.15)


def linger(motion: Motion, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stand, sway and look around: positions [b, s, 2] and headings [b, s]."""
    count = len(motion.step)
    shape = (count, frames)
    low, high = motion.low[:, :2], motion.high[:, :2]
    spot = low + (high - low) * uniform(generator, (count, 2), 0.2, 0.8)
    sway = torch.stack([wander(generator, shape, 0.02, 0.25), wander(generator, shape, 0.02, 0.25)], -1)
    position = spot[:, None] + sway * (motion.step / 0.12)[:, None, None]
    heading = uniform(generator, (count, 1), -math.pi, math.pi) + wander(generator, shape, 0.01, 0.15) * uniform(
        generator, (count, 1), 0.05, 0.8)
    return position, heading


def draw_paths(motion: Motion, frames: int, generator: torch.Generator) -> Tensor:
    """Draw T_world_camera [b, s, 4, 4] of cameras that stay within their free boxes."""
    count = len(motion.step)
    shape = (count, frames)
    ground, drone, hand = (motion.kind[:, None] == kind for kind in (GROUND, DRONE, HAND))

    # Robots, drones and half of the hands go ahead; the others walk round something, or stand and look around.
    plane, heading = drive(motion, frames, generator)
    manner = torch.rand(count, 1, generator=generator)
    lingers = hand & (manner > 0.45) & (manner <= 0.7)
    for others, chosen in ((orbit, hand & (manner > 0.7)), (linger, lingers)):
        positions, headings = others(motion, frames, generator)
        plane, heading = torch.where(chosen[..., None], positions, plane), torch.where(chosen, headings, heading)
    square = motion.square[:, None] & ~lingers  # nobody walks round things in a corridor
    if square.any():  # else nothing is drawn
        positions, headings = walk(motion, frames, generator)
        plane, heading = torch.where(square[..., None], positions, plane), torch.where(square, headings, heading)
    # Most cameras look ahead, some to a side or back.
    aside = torch.where(chance(generator, (count, 1), 0.3), uniform(generator, (count, 1), -math.pi, math.pi), 0.0)
    ahead = square | ~(hand & (manner > 0.45))
    aside = torch.where(square, 0.2 * aside, aside)  # in a corridor there is nothing but a wall beside
    yaw = heading + torch.where(ahead, aside, 0.0)

    shake = log_uniform(generator, (count, 1), 0.001, 0.02) * torch.where(ground, 1.0, 1.5)
    step = wander(generator, shape, 0.3, 0.9, waves=1)  # the walker's bob
    bob = torch.where(hand, uniform(generator, (count, 1), 0, 0.02), 0.0) * (motion.step[:, None] / 0.1).clamp_max(1)
    rise = torch.where(drone, uniform(generator, (count, 1), 0.1, 0.45), torch.where(hand, 0.05, 0.0))
    low, high = motion.low[:, None, 2], motion.high[:, None, 2]
    z = low + (high - low) * (uniform(generator, (count, 1), 0.1, 0.9)
                              + rise * wander(generator, shape, 0.01, 0.1))
    z = z + bob * step + 0.3 * shake * wander(generator, shape, 0.2, 1.5)
    position = torch.cat([plane, z[..., None]], -1)
    position[..., :2] += 0.3 * shake[..., None] * torch.stack([wander(generator, shape, 0.2, 1.5),
                                                               wander(generator, shape, 0.2, 1.5)], -1)
    position = position.clamp(motion.low[:, None], motion.high[:, None])

    loose = torch.where(ground, 0.02, 0.08)  # radians that the camera's attitude drifts
    tilt = torch.randn(count, 1, generator=generator) * 0.14
    tilt = torch.where(drone, uniform(generator, (count, 1), -0.6, 0.1), tilt)
    down = hand & motion.look_down[:, None]
    tilt = torch.where(down, uniform(generator, (count, 1), -0.8, -0.1), tilt)
    loose = torch.where(down, 0.14, loose)
    pitch = tilt + loose * wander(generator, shape, 0.01, 0.15) + shake * wander(generator, shape, 0.2, 1.5)
    roll = torch.randn(count, 1, generator=generator) * torch.where(hand, 0.06, 0.02)
    roll = roll + 0.6 * loose * wander(generator, shape, 0.01, 0.15) + shake * wander(generator, shape, 0.2, 1.5)
    turning = torch.zeros(shape)
    turning[:, 1:] = heading.diff(dim=1)
    bank = torch.nn.functional.avg_pool1d(turning[:, None], 9, stride=1, padding=4)[:, 0]  # a drone rolls into a turn
    roll = roll + torch.where(drone, 2.0 * bank, 0.0).clamp(-0.5, 0.5)
    yaw = yaw + shake * wander(generator, shape, 0.2, 1.5)
    yaw = torch.cat([yaw[:, :1], yaw.diff(dim=1).clamp(-motion.max_yaw, motion.max_yaw)], 1).cumsum(1)
    return camera_pose(position, yaw, pitch.clamp(-1.3, 1.3), roll)


def between(T_world_camera: Tensor, share: Tensor) -> Tensor:
    """Return the poses [..., r, 4, 4] that cameras pass on their way to the next frame.

    Args:
        T_world_camera: [b, s, 4, 4]; the way after the last frame is that before it.
        share: [b, s, r] of the way from each frame to the next, also negative.
    """
    rotation, position = T_world_camera[..., :3, :3], T_world_camera[..., :3, 3]
    if T_world_camera.shape[1] == 1:
        return T_world_camera[:, :, None].expand(*share.shape, 4, 4)
    turn = rotation[:, :-1].transpose(-1, -2) @ rotation[:, 1:]
    # The rotation vector of a turn well below half a circle: its axis times its angle.
    skew = torch.stack([turn[..., 2, 1] - turn[..., 1, 2], turn[..., 0, 2] - turn[..., 2, 0],
                        turn[..., 1, 0] - turn[..., 0, 1]], -1) / 2
    sine = skew.norm(dim=-1, keepdim=True).clamp(1e-9, 1)
    vector = skew * (torch.asin(sine) / sine)
    vector = torch.cat([vector, vector[:, -1:]], 1)
    move = torch.cat([position.diff(dim=1), position[:, -1:] - position[:, -2:-1]], 1)
    x, y, z = (share[..., None] * vector[:, :, None]).unbind(-1)
    zero = torch.zeros_like(x)
    generator = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    T = T_world_camera[:, :, None].repeat(1, 1, share.shape[2], 1, 1)
    T[..., :3, :3] = rotation[:, :, None] @ torch.linalg.matrix_exp(generator)
    T[..., :3, 3] = position[:, :, None] + share[..., None] * move[:, :, None]
    return T


def draw_loop(low: Tensor, high: Tensor, generator: torch.Generator, *, frames: int | None = None, step: float = 0.05,
              bend: float = 0.12) -> Tensor:
    """Draw a loop T_world_camera [s, 4, 4] through a free box whose last pose joins the first.

    The camera goes round once at an even speed and looks ahead and somewhat inwards, a little to and fro.

    Args:
        low, high: [3] corners of the free box, metres.
        generator: on the CPU.
        frames: s; None: as many as `step` makes.
        step: metres from one frame to the next, about.
        bend: how far the loop departs from an ellipse, as a share of its size.
    """
    fine = 4096
    angle = torch.arange(fine, dtype=torch.float64) * (2 * math.pi / fine)
    radius = torch.ones_like(angle)
    for waves in (2, 3):
        strength = bend * (0.5 + torch.rand(1, generator=generator).item())
        radius += strength * torch.cos(waves * angle + uniform(generator, (1,), 0, 2 * math.pi).item())
    radius = radius / radius.max()
    middle, half = (low + high).double() / 2, (high - low).double() / 2
    curve = middle[:2] + half[:2] * radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)
    # Even speed: invert the length of the way so far.
    pieces = (curve.roll(-1, 0) - curve).norm(dim=-1)
    way = torch.cat([torch.zeros(1, dtype=torch.float64), pieces.cumsum(0)])
    frames = frames or max(8, round(way[-1].item() / step))
    wanted = torch.arange(frames, dtype=torch.float64) / frames * way[-1]
    index = (torch.searchsorted(way, wanted, right=True) - 1).clamp(0, fine - 1)
    weight = ((wanted - way[index]) / pieces[index])[:, None]
    following = curve[(index + 1) % fine]
    plane = curve[index] * (1 - weight) + following * weight
    tangent = following - curve[index]
    shape = (1, frames)
    heading = torch.atan2(tangent[:, 1], tangent[:, 0]).float()
    yaw = heading + LOOK_INWARDS + 0.2 * wander(generator, shape, 0.02, 0.06, cycles=frames)[0]
    pitch = -0.08 + 0.05 * wander(generator, shape, 0.02, 0.08, cycles=frames)[0]
    roll = 0.015 * wander(generator, shape, 0.02, 0.1, cycles=frames)[0]
    z = middle[2].float() + half[2].float() * 0.7 * wander(generator, shape, 0.01, 0.05, cycles=frames)[0].clamp(-1, 1)
    return camera_pose(torch.cat([plane.float(), z[:, None]], -1), yaw, pitch, roll)
