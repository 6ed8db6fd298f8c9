# SPDX-License-Identifier: Apache-2.0
"""Paths of cameras: ground robots, drones and hands within a free box, and loops that close."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.texture import chance, log_uniform, uniform

GROUND, DRONE, HAND = 0, 1, 2  # kinds of path


@dataclass
class Motion:
    """How b cameras may move."""

    low: Tensor  # [b, 3] least corner of the free box, metres
    high: Tensor  # [b, 3]
    step: Tensor  # [b] metres a frame, typical
    max_yaw: float  # radians a frame
    kind: Tensor  # [b] GROUND, DRONE or HAND


def camera_pose(position: Tensor, yaw: Tensor, pitch: Tensor, roll: Tensor) -> Tensor:
    """Return T_world_camera [..., 4, 4] of an optical frame (x right, y down, z forward) in a z-up world.

    Args:
        position: [..., 3].
        yaw: [...] radians of the optical axis from +x, counter-clockwise from above.
        pitch: [...] radians, positive looking up.
        roll: [...] radians about the optical axis, positive clockwise as the camera sees the world turn counter-clockwise.
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
        cycles: frames after which the functions repeat (frequencies are rounded to whole numbers of turns); None: never.
    """
    count, frames = shape
    rate = log_uniform(generator, (count, waves, 1), slowest, fastest)
    if cycles is not None:
        turn = 2 * math.pi / cycles
        rate = (rate / turn).round().clamp_min(1) * turn
    phase = uniform(generator, (count, waves, 1), 0, 2 * math.pi)
    return torch.sin(rate * torch.arange(frames) + phase).sum(1) * math.sqrt(2 / waves)


def drive(motion: Motion, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drive unicycles: positions [b, s, 2] and headings [b, s]. They turn away from the free box's sides, and stop at times."""
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


def draw_paths(motion: Motion, frames: int, generator: torch.Generator) -> Tensor:
    """Draw T_world_camera [b, s, 4, 4] of cameras that stay within their free boxes."""
    count = len(motion.step)
    shape = (count, frames)
    plane, heading = drive(motion, frames, generator)
    # A camera on a robot looks ahead, or to a side.
    aside = torch.where(chance(generator, (count, 1), 0.35), uniform(generator, (count, 1), -math.pi, math.pi), 0.0)
    height = motion.low[:, 2:] + torch.rand(count, 1, generator=generator) * (motion.high - motion.low)[:, 2:]
    shake = log_uniform(generator, (count, 1), 0.001, 0.03)
    pitch = torch.randn(count, 1, generator=generator) * 0.14 + shake * wander(generator, shape, 0.2, 1.5)
    roll = torch.randn(count, 1, generator=generator) * 0.03 + shake * wander(generator, shape, 0.2, 1.5)
    z = height + shake * 0.5 * wander(generator, shape, 0.2, 1.5)
    position = torch.cat([plane, z[..., None]], -1)
    position = position.clamp(motion.low[:, None], motion.high[:, None])
    return camera_pose(position, heading + aside, pitch, roll)


def draw_loop(low: Tensor, high: Tensor, frames: int, generator: torch.Generator, bend: float = 0.12) -> Tensor:
    """Draw a loop T_world_camera [s, 4, 4] through a free box (low, high [3]) whose last pose joins the first.

    The camera goes round at an even speed, once in `frames` frames, and looks ahead, a little to and fro.
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
    wanted = torch.arange(frames, dtype=torch.float64) / frames * way[-1]
    index = (torch.searchsorted(way, wanted, right=True) - 1).clamp(0, fine - 1)
    weight = ((wanted - way[index]) / pieces[index])[:, None]
    following = curve[(index + 1) % fine]
    plane = curve[index] * (1 - weight) + following * weight
    tangent = following - curve[index]
    shape = (1, frames)
    heading = torch.atan2(tangent[:, 1], tangent[:, 0]).float()
    yaw = heading + 0.2 * wander(generator, shape, 0.02, 0.06, cycles=frames)[0]
    pitch = -0.08 + 0.05 * wander(generator, shape, 0.02, 0.08, cycles=frames)[0]
    roll = 0.015 * wander(generator, shape, 0.02, 0.1, cycles=frames)[0]
    z = middle[2].float() + half[2].float() * 0.7 * wander(generator, shape, 0.01, 0.05, cycles=frames)[0].clamp(-1, 1)
    return camera_pose(torch.cat([plane.float(), z[:, None]], -1), yaw, pitch, roll)
