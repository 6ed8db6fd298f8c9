# SPDX-License-Identifier: Apache-2.0
"""Errors of poses and depths of a sequence, and those of doing nothing clever."""
from __future__ import annotations

import numpy as np


def umeyama(source: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return scale, rotation [3, 3] and translation [3] of the similarity that takes points [n, 3] onto others best.

    S. Umeyama, "Least-squares estimation of transformation parameters between two point patterns", 1991.
    """
    source_mean, target_mean = source.mean(0), target.mean(0)
    a, b = source - source_mean, target - target_mean
    u, singular, vt = np.linalg.svd(b.T @ a / len(a))
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = (u * sign) @ vt
    scale = float((singular * sign).sum() / max((a**2).sum() / len(a), 1e-12))
    return scale, rotation, target_mean - scale * rotation @ source_mean


def angle(rotation: np.ndarray) -> np.ndarray:
    """Return the angles [...] in degrees of rotations [..., 3, 3]."""
    return np.degrees(np.arccos(np.clip((np.trace(rotation, axis1=-2, axis2=-1) - 1) / 2, -1, 1)))


def trajectory_error(positions: np.ndarray, truth: np.ndarray) -> float:
    """Return the root mean square distance (ATE) of positions [n, 3] from the truth after alignment by a similarity."""
    scale, rotation, translation = umeyama(positions, truth)
    return float(np.sqrt((((scale * positions @ rotation.T + translation) - truth) ** 2).sum(-1).mean()))


def pose_errors(T: np.ndarray, T_true: np.ndarray) -> dict[str, float]:
    """Compare camera-to-world poses [n, 4, 4] in any unit with true ones.

    Returns: ate_path and ate_extent (% of the path's length and of the extent of the positions), rotation_step (mean
    error of the rotation from frame to frame, degrees) and rotation_step_true (what there was to find),
    translation_step (mean error of the step, after scaling, as % of the mean step), heading_end (error of the last
    rotation against the first, degrees), and ate_path_static and ate_path_constant (of standing still and of going on
    as between the first two frames).
    """
    R, t, R_true, t_true = T[:, :3, :3], T[:, :3, 3], T_true[:, :3, :3], T_true[:, :3, 3]
    path = max(np.linalg.norm(np.diff(t_true, axis=0), axis=-1).sum(), 1e-9)
    extent = max(np.linalg.norm(t_true.max(0) - t_true.min(0)), 1e-9)
    scale, _, _ = umeyama(t, t_true)
    ate = trajectory_error(t, t_true)

    def steps(R: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        back = np.swapaxes(R[:-1], -1, -2)
        return back @ R[1:], (back @ np.diff(t, axis=0)[..., None])[..., 0]

    turned, moved = steps(R, t)
    turned_true, moved_true = steps(R_true, t_true)
    step = max(np.linalg.norm(moved_true, axis=-1).mean(), 1e-9)

    motion = np.linalg.inv(T_true[0]) @ T_true[1]
    constant = [T_true[0]]
    for _ in range(len(T_true) - 1):
        constant.append(constant[-1] @ motion)
    constant = np.stack(constant)[:, :3, 3]
    is_moving = np.ptp(constant, axis=0).max() > 0
    spread = float(np.sqrt(((t_true - t_true.mean(0)) ** 2).sum(-1).mean()))
    return {
        "ate_path": 100 * ate / path,
        "ate_extent": 100 * ate / extent,
        "rotation_step": float(angle(np.swapaxes(turned, -1, -2) @ turned_true).mean()),
        "rotation_step_true": float(angle(turned_true).mean()),
        "translation_step": float(100 * np.linalg.norm(scale * moved - moved_true, axis=-1).mean() / step),
        "heading_end": float(angle((R[0].T @ R[-1]).T @ (R_true[0].T @ R_true[-1]))),
        "ate_path_static": 100 * spread / path,
        "ate_path_constant": 100 * (trajectory_error(constant, t_true) if is_moving else spread) / path,
    }


def depth_errors(depth: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Compare depths [frames, h, w] of one sequence where the truth is finite, after scaling by one ratio of medians.

    Returns abs_rel (mean of |error| / true depth, %), delta (% of pixels that are off by less than a factor of 1.25),
    and abs_rel_median (abs_rel of a picture that has the true median everywhere).
    """
    known = np.isfinite(truth) & (truth > 0)
    depth, truth = depth[known].astype(np.float64), truth[known].astype(np.float64)
    ratio = depth * np.median(truth / depth) / truth
    return {
        "abs_rel": float(100 * np.abs(ratio - 1).mean()),
        "delta": float(100 * (np.maximum(ratio, 1 / ratio) < 1.25).mean()),
        "abs_rel_median": float(100 * np.abs(np.median(truth) / truth - 1).mean()),
    }


def confidence_errors(depth: np.ndarray, confidence: np.ndarray, truth: np.ndarray, shares: int = 10,
                      ) -> dict[str, list]:
    """Tell how depth errors fall as confidence rises: pixels [frames, h, w] in `shares` equal groups by confidence.

    Returns lists in rising order: the groups' median confidence and abs_rel (%).
    """
    known = np.isfinite(truth) & (truth > 0)
    depth, confidence, truth = depth[known].astype(np.float64), confidence[known], truth[known].astype(np.float64)
    off = np.abs(depth * np.median(truth / depth) / truth - 1)
    groups = np.array_split(np.argsort(confidence), shares)
    return {"confidence": [float(np.median(confidence[group])) for group in groups],
            "abs_rel": [float(100 * off[group].mean()) for group in groups]}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over sequences."""
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
