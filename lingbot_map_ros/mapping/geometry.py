# SPDX-License-Identifier: Apache-2.0
"""Pixels to points, rotations to quaternions, and the axes of the map."""
from __future__ import annotations

import numpy as np
import torch

# The map (REP-103: x forward, y left, z up) of a level camera whose optical frame (x right, y down, z forward) is the
# world: [4, 4], maps world points into map.
T_MAP_WORLD = np.array(
    [
        [0.0, 0.0, 1.0, 0.0],
        [-1.0, 0.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
T_MAP_WORLD.setflags(write=False)


def unproject(depth: torch.Tensor, intrinsics: torch.Tensor, T_target_camera: torch.Tensor) -> torch.Tensor:
    """Lift every pixel to a point in the target frame.

    Pixels are lifted at their integer indices, as the model was trained: column u of a camera with principal point cx
    lies on the ray x/z = (u - cx) / fx.

    Args:
        depth: [h, w], along the optical axis (not along the ray).
        intrinsics: [3, 3], in pixels of this depth image; no skew.
        T_target_camera: [4, 4], maps points of the camera's optical frame into the target frame.

    Returns:
        [h, w, 3], in the unit of depth, on depth's device.
    """
    h, w = depth.shape
    fx, fy, cx, cy = intrinsics[0, 0], intrinsics[1, 1], intrinsics[0, 2], intrinsics[1, 2]
    x = (torch.arange(w, device=depth.device, dtype=depth.dtype) - cx) / fx  # [w]
    y = (torch.arange(h, device=depth.device, dtype=depth.dtype) - cy) / fy  # [h]
    camera = torch.stack((x * depth, y[:, None] * depth, depth), dim=-1)
    T = T_target_camera.to(depth)
    return camera @ T[:3, :3].T + T[:3, 3]


def invert_rigid(T: torch.Tensor) -> torch.Tensor:
    """Return the inverse [4, 4] of a rotation and translation [4, 4]."""
    inverse = torch.eye(4, dtype=T.dtype, device=T.device)
    inverse[:3, :3] = T[:3, :3].T
    inverse[:3, 3] = -T[:3, :3].T @ T[:3, 3]
    return inverse


def is_rigid(T: np.ndarray) -> bool:
    """Say whether a matrix [4, 4] is a finite rotation and translation, as exactly as a model predicts one."""
    return bool(np.isfinite(T).all() and abs(np.linalg.det(T[:3, :3]) - 1) <= 0.01)


def rigid(T: np.ndarray) -> np.ndarray:
    """Return a copy of a motion [4, 4] with a rotation that is one: products drift from that."""
    T = T.copy()
    T[:3, :3] = matrix_from_quaternion(quaternion_from_matrix(T[:3, :3]))
    return T


def quaternion_from_matrix(rotation: np.ndarray) -> np.ndarray:
    """Turn rotation matrices [..., 3, 3] into unit quaternions [..., 4] in ROS order x, y, z, w, with w >= 0.

    Of the four ways to read a quaternion off a matrix the one with the largest divisor is taken, so the result is
    accurate at any angle (S. W. Shepperd, "Quaternion from rotation matrix", 1978).
    """
    r = np.asarray(rotation, dtype=np.float64)
    xx, yy, zz = r[..., 0, 0], r[..., 1, 1], r[..., 2, 2]
    # Row i holds the quaternion (x, y, z, w) times 4 times its own i-th entry.
    rows = np.stack(
        [
            np.stack([1 + xx - yy - zz, r[..., 0, 1] + r[..., 1, 0], r[..., 0, 2] + r[..., 2, 0],
                      r[..., 2, 1] - r[..., 1, 2]], axis=-1),
            np.stack([r[..., 0, 1] + r[..., 1, 0], 1 - xx + yy - zz, r[..., 1, 2] + r[..., 2, 1],
                      r[..., 0, 2] - r[..., 2, 0]], axis=-1),
            np.stack([r[..., 0, 2] + r[..., 2, 0], r[..., 1, 2] + r[..., 2, 1], 1 - xx - yy + zz,
                      r[..., 1, 0] - r[..., 0, 1]], axis=-1),
            np.stack([r[..., 2, 1] - r[..., 1, 2], r[..., 0, 2] - r[..., 2, 0], r[..., 1, 0] - r[..., 0, 1],
                      1 + xx + yy + zz], axis=-1),
        ],
        axis=-2,
    )  # [..., 4, 4]
    best = np.argmax(np.diagonal(rows, axis1=-2, axis2=-1), axis=-1)
    quaternion = np.take_along_axis(rows, best[..., None, None], axis=-2)[..., 0, :]
    quaternion = quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True)
    return np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)


def matrix_from_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """Turn quaternions [..., 4] (x, y, z, w), of any length but 0, into rotation matrices [..., 3, 3]."""
    q = np.asarray(quaternion, dtype=np.float64)
    x, y, z, w = np.moveaxis(q / np.linalg.norm(q, axis=-1, keepdims=True), -1, 0)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return np.stack(rows, axis=-1).reshape(*q.shape[:-1], 3, 3)
