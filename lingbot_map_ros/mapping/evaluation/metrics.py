# SPDX-License-Identifier: Apache-2.0
"""How far poses and depths are off."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lingbot_map_ros.gct.image import ImageGeometry
from lingbot_map_ros.image_files import ReplayError
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix

STATISTICS = ("rmse", "mean", "median", "max")
MIN_DEPTH_PIXELS = 100  # fewer tell nothing of a frame
DELTA_THRESHOLD = 1.25


@dataclass(frozen=True)
class TrajectoryErrors:
    """Errors of a trajectory after alignment with the ground truth by one similarity, and what they were computed from.

    Lengths are in the ground truth's unit. Arrays have one row a matched pose, in their order in time.
    """

    matched: int
    path_length: float  # of the ground truth, along the matched poses
    scale: float  # ground-truth units a model unit
    T_truth_estimate: np.ndarray  # [4, 4] the similarity: maps points of the estimate's frame into the ground truth's
    stamps: np.ndarray  # [n] seconds
    reference: np.ndarray  # [n, 3] positions
    aligned: np.ndarray  # [n, 3] positions of the estimate
    translation: np.ndarray  # [n] absolute, between positions
    rotation: np.ndarray  # [n] absolute, degrees
    final_heading: float  # see `heading_error`
    summary: dict[str, object]  # for metrics.json


def read_tum(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a trajectory in TUM format: stamps in seconds [n], poses tx, ty, tz, qx, qy, qz, qw [n, 7].

    Lines that start with # and spaces between numbers do not matter. Raises ReplayError for another format.
    """
    try:
        rows = np.loadtxt(path, comments="#", ndmin=2)
    except (ValueError, OSError) as error:
        raise ReplayError(f"{path} cannot be read as a trajectory in TUM format: {error}") from None
    if len(rows) == 0:
        return np.empty(0), np.empty((0, 7))
    if rows.shape[1] != 8:
        raise ReplayError(f"{path} has {rows.shape[1]} numbers a line, a trajectory in TUM format has 8")
    return rows[:, 0], rows[:, 1:]


def trajectory_errors(
    estimate: tuple[np.ndarray, np.ndarray],
    ground_truth: tuple[np.ndarray, np.ndarray],
    max_time_difference: float = 0.02,
) -> TrajectoryErrors:
    """Compare a trajectory with the ground truth, each (stamps [n], poses [n, 7]) as `read_tum` returns them.

    Poses are matched by time, the estimate is aligned by the similarity that fits its positions best (S. Umeyama,
    "Least-squares estimation of transformation parameters between two point patterns", 1991), and errors are those of
    `evo` (https://github.com/MichaelGrupp/evo). Absolute errors (ATE) are of each pose, relative ones (RPE) of the
    motion from one matched pose to the next. max_time_difference: seconds between two poses that match.

    Raises ReplayError where the trajectories cannot be compared: too few poses match, or all lie on one line, which
    tells no rotation.
    """
    from evo.core import metrics, sync
    from evo.core.geometry import GeometryException
    from evo.core.trajectory import PoseTrajectory3D

    def trajectory(stamps: np.ndarray, poses: np.ndarray) -> PoseTrajectory3D:
        return PoseTrajectory3D(positions_xyz=poses[:, :3], orientations_quat_wxyz=poses[:, [6, 3, 4, 5]],
                                timestamps=stamps)

    if min(len(estimate[0]), len(ground_truth[0])) < 3:
        raise ReplayError(f"{len(estimate[0])} poses and {len(ground_truth[0])} of the ground truth cannot be compared")
    try:
        reference, aligned = sync.associate_trajectories(
            trajectory(*ground_truth), trajectory(*estimate), max_diff=max_time_difference)
    except sync.SyncException:
        raise ReplayError(f"no pose is within {max_time_difference:g} s of one of the ground truth") from None
    if reference.num_poses < 3:
        raise ReplayError(f"only {reference.num_poses} poses are within {max_time_difference:g} s of the ground truth")
    try:
        R, t, scale = aligned.align(reference, correct_scale=True)
    except GeometryException:
        raise ReplayError("the positions lie on one line or point: no similarity can be found from them") from None

    def errors(metric) -> tuple[np.ndarray, dict[str, float]]:
        metric.process_data((reference, aligned))
        statistics = metric.get_all_statistics()
        return metric.error, {name: float(statistics[name]) for name in STATISTICS}

    relation = metrics.PoseRelation
    relative = {"delta": 1, "delta_unit": metrics.Unit.frames}
    translation, ate = errors(metrics.APE(relation.translation_part))
    rotation, ate_rotation = errors(metrics.APE(relation.rotation_angle_deg))
    _, rpe = errors(metrics.RPE(relation.translation_part, **relative))
    _, rpe_rotation = errors(metrics.RPE(relation.rotation_angle_deg, **relative))
    path_length = float(reference.path_length)
    T_truth_estimate = np.eye(4)
    T_truth_estimate[:3, :3], T_truth_estimate[:3, 3] = scale * R, t
    final_heading = heading_error(np.array(reference.poses_se3)[[0, -1], :3, :3],
                                  np.array(aligned.poses_se3)[[0, -1], :3, :3])
    if path_length > 0:
        ate["rmse_percent_of_path"] = 100 * ate["rmse"] / path_length
    return TrajectoryErrors(
        matched=reference.num_poses,
        path_length=path_length,
        scale=float(scale),
        T_truth_estimate=T_truth_estimate,
        stamps=np.asarray(aligned.timestamps),
        reference=np.asarray(reference.positions_xyz),
        aligned=np.asarray(aligned.positions_xyz),
        translation=np.asarray(translation),
        rotation=np.asarray(rotation),
        final_heading=final_heading,
        summary={
            "matched_poses": reference.num_poses,
            "path_length": path_length,
            "scale": float(scale),
            "ate": {"translation": ate, "rotation_degrees": ate_rotation},
            "rpe_one_pose": {"translation": rpe, "rotation_degrees": rpe_rotation},
            "final_heading_degrees": final_heading,
        },
    )


def heading_error(true_rotations: np.ndarray, rotations: np.ndarray) -> float:
    """Return by how many degrees the last of two or more orientations [n, 3, 3] is turned about the ground truth's z.

    That is after the first ones were laid over each other: the drift of the heading, where z is up. Left is positive.
    """
    R_true_estimate = true_rotations[0] @ rotations[0].T  # lays the first one over the true one
    _, _, z, w = quaternion_from_matrix(R_true_estimate @ rotations[-1] @ true_rotations[-1].T)
    return float(np.degrees(2 * np.arctan2(z, w)))  # the turn about z alone (swing-twist decomposition)


def sample_depth(depth: np.ndarray, geometry: ImageGeometry) -> np.ndarray:
    """Return a depth image [H, W] of the camera at the pixels of the model's image: [h, w], nearest values.

    The depth image shows what the camera's image shows, in the same or another resolution.
    """
    height, width = geometry.image_size
    camera_height, camera_width = geometry.camera_size
    # Edges, not centres, of pixels are what crops and scales: the centre of pixel i is at i + 0.5 from the edge.
    columns = (np.arange(width) + 0.5 + geometry.offset_x) / geometry.scale_x * depth.shape[1] / camera_width
    rows = (np.arange(height) + 0.5 + geometry.offset_y) / geometry.scale_y * depth.shape[0] / camera_height
    columns = np.clip(columns.astype(int), 0, depth.shape[1] - 1)
    rows = np.clip(rows.astype(int), 0, depth.shape[0] - 1)
    return depth[rows[:, None], columns]


@dataclass(frozen=True)
class DepthErrors:
    """Errors of one frame's depths after scaling by the ratio of medians."""

    scale: float  # known over predicted median
    abs_rel: float  # mean of |error| / known depth
    delta_1: float  # share of pixels that are off by less than a factor of 1.25


def depth_errors(predicted: np.ndarray, known: np.ndarray) -> DepthErrors | None:
    """Compare depths [h, w] where they are known (finite, above 0); None where that is hardly anywhere.

    Predicted depths that are not finite and above 0 count as wholly wrong: an absolute relative error of 1.
    """
    valid = np.isfinite(known) & (known > 0)
    if valid.sum() < MIN_DEPTH_PIXELS:
        return None
    known, predicted = known[valid].astype(np.float64), predicted[valid].astype(np.float64)
    good = np.isfinite(predicted) & (predicted > 0)
    if not good.any():
        return DepthErrors(scale=float("nan"), abs_rel=1.0, delta_1=0.0)
    predicted = np.where(good, predicted, 0.0)
    scale = float(np.median(known[good]) / np.median(predicted[good]))
    predicted *= scale
    with np.errstate(divide="ignore"):
        ratio = np.maximum(predicted / known, known / predicted)
    abs_rel = np.abs(predicted - known) / known
    return DepthErrors(scale, float(abs_rel.mean()), float((ratio < DELTA_THRESHOLD).mean()))
