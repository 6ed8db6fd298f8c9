# SPDX-License-Identifier: Apache-2.0
"""The model and its streaming step."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lingbot_map_ros.cache import FlashInferKVCacheManager
from lingbot_map_ros.gct.config import GCTConfig


@dataclass
class GCTState:
    """What the model remembers of one sequence. A model serves any number of states."""

    cache: FlashInferKVCacheManager  # of the aggregator's global blocks
    camera_cache: FlashInferKVCacheManager  # of the camera head, one token a frame


@dataclass(frozen=True)
class GCTOutput:
    """Predictions for n frames of h x w pixels, in fp32."""

    pose_encoding: torch.Tensor  # [n, 9] tx ty tz qx qy qz qw fov_h fov_w, camera to world (design: the model's page)
    depth: torch.Tensor  # [n, h, w] along the optical axis, model units
    confidence: torch.Tensor  # [n, h, w], 1 or more


class GCT(nn.Module):
    """Streaming geometric context transformer."""

    config: GCTConfig

    def new_state(
        self,
        image_size: tuple[int, int],
        *,
        scale_frames: int | None = None,
        sliding_window: int | None = None,
        remembered_frames: int | None = None,
        camera_iterations: int = 4,
        spare_frames: int = 1,
    ) -> GCTState:
        """Allocate the caches of one sequence of images of (height, width); None means the configuration's value."""
        raise NotImplementedError

    def step(self, images: torch.Tensor, state: GCTState, keep: bool = True) -> GCTOutput:
        """Predict for images [n, 3, h, w] in [0, 1]: first the scale frames in one batch, then one frame a call."""
        raise NotImplementedError


def build_model(
    preset: str = "default",
    *,
    checkpoint: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GCT:
    """Build a model; `default` without a checkpoint carries the weights that ship with the package."""
    raise NotImplementedError
