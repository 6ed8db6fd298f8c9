# SPDX-License-Identifier: Apache-2.0
"""What the model says of one frame."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One frame as predicted, in the world of its window or mapped into that of the first. Tensors without gradient."""

    is_keyframe: bool
    pose_encoding: torch.Tensor  # [9] (see gct.pose)
    T_world_camera: torch.Tensor  # [4, 4], camera points into world
    intrinsics: torch.Tensor  # [3, 3], pixels of the model's image
    depth: torch.Tensor  # [h, w], along the optical axis
    confidence: torch.Tensor  # [h, w], 1 or more
