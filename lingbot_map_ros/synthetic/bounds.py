# SPDX-License-Identifier: Apache-2.0
"""Which pixels a primitive, or its shadow, can touch: spares a CPU most of the work. GPUs do without."""
from __future__ import annotations

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.scene import NOWHERE, Scenes, clearance

NEAR = 0.02  # metres in front of the camera; nothing comes nearer
FARTHEST = 1000.0  # most times that a shadow is as large as its primitive; float32 blurs what is larger
PADDING = 2  # pixels, for rays off the pixels' centres and for rounding
Window = tuple[slice, slice] | None  # rows and columns of an image; None: no pixel


def corners(scene: Scenes) -> Tensor:
    """Return the corners [n, 8, 3] of the primitives' boxes in the world, of one scene."""
    signs = torch.tensor([[x, y, z] for x in (-1.0, 1) for y in (-1.0, 1) for z in (-1.0, 1)])
    local = signs * scene.half[0, :, None]
    return local @ scene.rotation[0].transpose(-1, -2) + scene.centre[0, :, None]


def shadow_corners(scene: Scenes) -> Tensor:
    """Return points [n, 16, 3] whose hull holds the primitives and all that they can shade within the shell.

    Seen from the light, a shadow is the primitive made larger: as much as brings all of it beyond the shell.
    """
    near = corners(scene)
    shell, light = near[0], scene.light[0]
    distance = clearance(light[None], scene.centre[0], scene.half[0], scene.rotation[0])[..., 0]
    scale = ((shell - light).norm(dim=-1).amax() / distance)[:, None, None]
    points = torch.cat([near, light + scale * (near - light)], dim=1)
    # Around a light, or right in front of it, a primitive can shade anything.
    return torch.where(scale < FARTHEST, points, torch.cat([shell, shell]))


def windows(points: Tensor, scene: Scenes, T_world_camera: Tensor, intrinsics: Tensor, image_size: tuple[int, int],
            ) -> list[Window]:
    """Return for each primitive the window that holds the hull of its points in any of v views.

    Args:
        points: [n, k, 3] in the world.
        scene: of one, on the CPU; primitives that are not used get None.
        T_world_camera: [v, 4, 4].
        intrinsics: [3, 3].
        image_size: (height, width).
    """
    height, width = image_size
    rotation, origin = T_world_camera[:, None, :3, :3], T_world_camera[:, None, None, :3, 3]
    camera = (points - origin) @ rotation  # [v, n, k, 3]
    depth = camera[..., 2]
    front = depth > NEAR
    # The hull's edges that pass through the near plane end there.
    a, b = camera[..., :, None, :], camera[..., None, :, :]
    gap = b[..., 2] - a[..., 2]
    share = ((NEAR - a[..., 2]) / torch.where(gap.abs() < 1e-9, 1e-9, gap))[..., None]
    crossing = (front[..., :, None] & ~front[..., None, :])
    cut = a + share * (b - a)
    seen = torch.cat([front, crossing.flatten(-2)], -1)
    everything = torch.cat([camera, cut.flatten(-3, -2)], -2)
    pixel = everything[..., :2] / everything[..., 2:].clamp_min(NEAR / 2) * intrinsics[[0, 1], [0, 1]] \
        + intrinsics[:2, 2]
    low = torch.where(seen[..., None], pixel, torch.inf).amin((0, 2)) - PADDING
    high = torch.where(seen[..., None], pixel, -torch.inf).amax((0, 2)) + PADDING
    limits = torch.tensor([width, height])
    low = low.clamp_min(0).minimum(limits).floor().int().tolist()
    high = high.clamp_min(0).minimum(limits).ceil().int().tolist()
    used = (scene.centre[0, :, 2] > NOWHERE / 2).tolist()
    return [(slice(y0, y1), slice(x0, x1)) if use and x1 > x0 and y1 > y0 else None
            for use, (x0, y0), (x1, y1) in zip(used, low, high)]


def list_windows(image_windows: list[Window], rows: Tensor) -> list[Window]:
    """Return windows on a list of pixels, as an image of one row, from windows on the image.

    Args:
        image_windows: from `windows`.
        rows: [p] the pixels' rows, in rising order.
    """
    edges = [(w[0].start, w[0].stop) if w else (0, 0) for w in image_windows]
    ends = torch.searchsorted(rows, torch.tensor(edges, dtype=rows.dtype, device=rows.device)).tolist()
    return [(slice(None), slice(start, stop)) if w and stop > start else None
            for w, (start, stop) in zip(image_windows, ends)]
