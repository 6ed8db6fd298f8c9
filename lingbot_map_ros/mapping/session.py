# SPDX-License-Identifier: Apache-2.0
"""One camera's sequence through the model."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lingbot_map_ros.gct import GCT


@dataclass(frozen=True)
class SessionConfig:
    """The window of a session. None means the model's own value."""

    scale_frames: int | None = None
    sliding_window: int | None = None
    keyframe_interval: int = 1  # every n-th frame after the scale frames is kept
    remembered_frames: int | None = None  # kept frames whose special tokens are remembered
    camera_iterations: int = 4
    device: torch.device | str | None = None  # None: where the model is
    dtype: torch.dtype | None = None  # None: the model's


@dataclass(frozen=True)
class FrameResult:
    """What the model says of one frame. World: the first camera's optical frame, in model units (not metres)."""

    index: int  # of the frame in its sequence, from 0
    stamp: float | int | object  # as given to `step`
    is_keyframe: bool
    pose_encoding: torch.Tensor  # [9]
    T_world_camera: torch.Tensor  # [4, 4], camera points into world
    intrinsics: torch.Tensor  # [3, 3], pixels of the model's image
    depth: torch.Tensor  # [h, w], along the optical axis
    confidence: torch.Tensor  # [h, w], 1 or more
    image: torch.Tensor  # [3, h, w], as given to `step`
    timings: dict[str, float] = field(default_factory=dict)  # seconds by stage


class MappingSession:
    """Feeds images to a model and turns its outputs into poses, intrinsics and depth."""

    def __init__(self, model: GCT, config: SessionConfig = SessionConfig()) -> None:
        raise NotImplementedError

    def step(self, image: torch.Tensor, stamp: object = None) -> list[FrameResult]:
        """Take one image [3, h, w] in [0, 1]: no result while scale frames gather, then one for each, then one a frame."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start a new sequence; memory stays as it is."""
        raise NotImplementedError

    def cache_stats(self) -> dict[str, int]:
        """Return the cache's state (see FlashInferKVCacheManager.get_cache_stats)."""
        raise NotImplementedError
