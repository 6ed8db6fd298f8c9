# SPDX-License-Identifier: Apache-2.0
"""The pose encoding [tx, ty, tz, qx, qy, qz, qw, fov_h, fov_w]: camera-to-world pose and fields of view."""
from __future__ import annotations

import math

import torch

MIN_FOV = 1e-3  # radians; a field of view of 0 would be an infinite focal length
MAX_FOV = math.pi - 1e-3


def quaternion_to_matrix(quaternion: torch.Tensor) -> torch.Tensor:
    """Return the rotation [..., 3, 3] of a quaternion [..., 4] (x, y, z, w) of any length.

    A zero quaternion, which has no direction, gives the identity.
    """
    # Scaled by its largest component first, so that the squares neither overflow nor vanish.
    largest = quaternion.abs().amax(dim=-1, keepdim=True)
    identity = torch.zeros_like(quaternion)
    identity[..., 3] = 1
    scaled = torch.where(largest == 0, identity, quaternion / torch.where(largest == 0, 1.0, largest))
    unit = scaled / scaled.norm(dim=-1, keepdim=True)
    x, y, z, w = unit.unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def decode_pose_encoding(
    pose_encoding: torch.Tensor, image_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T_world_camera [..., 4, 4] and intrinsics [..., 3, 3] of pose encodings [..., 9].

    The camera is an optical frame (x right, y down, z forward), the world approximately that of the first camera;
    lengths are in model units. Intrinsics are in pixels of the model's image of (height, width), with the principal
    point at (width / 2, height / 2), which is what the published model was trained with although pixels are lifted at
    their integer indices (see mapping/geometry.py): fy = (height / 2) / tan(fov_h / 2),
    fx = (width / 2) / tan(fov_w / 2). Fields of view are held within (0, pi). Values that are not finite stay so.
    """
    height, width = image_size
    shape = pose_encoding.shape[:-1]
    T_world_camera = pose_encoding.new_zeros(*shape, 4, 4)
    T_world_camera[..., :3, :3] = quaternion_to_matrix(pose_encoding[..., 3:7])
    T_world_camera[..., :3, 3] = pose_encoding[..., :3]
    T_world_camera[..., 3, 3] = 1

    half_tan = torch.tan(pose_encoding[..., 7:].clamp(MIN_FOV, MAX_FOV) / 2)
    intrinsics = pose_encoding.new_zeros(*shape, 3, 3)
    intrinsics[..., 0, 0] = width / 2 / half_tan[..., 1]
    intrinsics[..., 1, 1] = height / 2 / half_tan[..., 0]
    intrinsics[..., 0, 2] = width / 2
    intrinsics[..., 1, 2] = height / 2
    intrinsics[..., 2, 2] = 1
    return T_world_camera, intrinsics
