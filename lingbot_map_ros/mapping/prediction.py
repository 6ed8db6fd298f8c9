# SPDX-License-Identifier: Apache-2.0
"""What the model says of one frame."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from lingbot_map_ros.mapping.geometry import quaternion_from_matrix

FIGURE_STRIDE = 4  # pixels between those that medians are taken of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One frame as predicted, in the world of its window or mapped into that of the first. Tensors without gradient."""

    is_keyframe: bool
    pose_encoding: torch.Tensor  # [9] (see gct.pose)
    T_world_camera: torch.Tensor  # [4, 4], camera points into world
    intrinsics: torch.Tensor  # [3, 3], pixels of the model's image
    depth: torch.Tensor  # [h, w], along the optical axis
    confidence: torch.Tensor  # [h, w], 1 or more


class Figures(NamedTuple):
    """What is to be known of a prediction at once, not on its device. Numbers may be NaN or infinite."""

    T_world_camera: np.ndarray  # [4, 4] float64
    intrinsics: np.ndarray  # [3, 3] float64
    median_depth: float  # of every FIGURE_STRIDE-th row and column
    median_confidence: float  # likewise


def figures_of(prediction: Prediction) -> Figures:
    """Return a prediction's figures; waits for the device, once."""
    maps = (values[::FIGURE_STRIDE, ::FIGURE_STRIDE] for values in (prediction.depth, prediction.confidence))
    parts = prediction.T_world_camera, prediction.intrinsics, *(values.median() for values in maps)
    figures = torch.cat([part.double().flatten() for part in parts]).cpu().numpy()
    return Figures(figures[:16].reshape(4, 4), figures[16:25].reshape(3, 3), float(figures[25]), float(figures[26]))


def moved(prediction: Prediction, T_world_camera: np.ndarray) -> Prediction:
    """Return a prediction at another pose [4, 4]."""
    encoding = prediction.pose_encoding.clone()
    pose = np.concatenate([T_world_camera[:3, 3], quaternion_from_matrix(T_world_camera[:3, :3])])
    encoding[:7] = torch.from_numpy(pose).to(encoding)
    return replace(prediction, pose_encoding=encoding,
                   T_world_camera=torch.from_numpy(T_world_camera).to(prediction.T_world_camera))


def with_focal_lengths(prediction: Prediction, focal_lengths: np.ndarray) -> Prediction:
    """Return a prediction with other focal lengths [2], along x and y, in pixels."""
    encoding, intrinsics = prediction.pose_encoding.clone(), prediction.intrinsics.clone()
    size = np.array(prediction.depth.shape)  # height, width
    encoding[7:] = torch.from_numpy(2 * np.arctan(size / 2 / focal_lengths[::-1])).to(encoding)
    intrinsics[[0, 1], [0, 1]] = torch.from_numpy(focal_lengths).to(intrinsics)
    return replace(prediction, pose_encoding=encoding, intrinsics=intrinsics)
