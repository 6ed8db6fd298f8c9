# SPDX-License-Identifier: Apache-2.0
"""Which frames after the scale frames are keyframes: by count, or by how far the image has moved."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lingbot_map_ros.mapping.geometry import invert_rigid, unproject
from lingbot_map_ros.mapping.prediction import Prediction

FLOW_STRIDE = 8  # pixels between the points whose flow is measured
MIN_DEPTH = 1e-6  # points nearer than this, in either camera, have no flow


@dataclass(frozen=True)
class Progress:
    """How far a window has come when a frame is to be decided on."""

    frames: int  # since the scale frames, without the one to be decided on
    frames_since_keyframe: int  # likewise
    last_keyframe: Prediction  # at first the last scale frame


class KeyframePolicy(Protocol):
    """Decides which frames are kept. Holds no state of the window, so that it may be exchanged at any time."""

    def before(self, progress: Progress) -> bool | None:
        """Say whether the next frame is a keyframe; None: its prediction will tell."""

    def after(self, progress: Progress, prediction: Prediction) -> bool | torch.Tensor:
        """Say whether the frame that was left open is a keyframe: maybe on the prediction's device, not waited for."""


@dataclass(frozen=True)
class EveryNthFrame:
    """The first frame after the scale frames and every n-th from there are keyframes."""

    interval: int

    def before(self, progress: Progress) -> bool:
        """See KeyframePolicy."""
        return progress.frames % self.interval == 0

    def after(self, progress: Progress, prediction: Prediction) -> bool:
        """See KeyframePolicy."""
        return self.before(progress)


@dataclass(frozen=True)
class ImageMotion:
    """A frame is a keyframe when the image has moved by more than some pixels since the last one.

    The first frame after the scale frames is one, too, and so is every frame `max_gap` frames after the last keyframe
    (0: never, so that a standing camera adds none).
    """

    flow_threshold: float  # mean, pixels of the model's image
    max_gap: int = 0

    def before(self, progress: Progress) -> None:
        """See KeyframePolicy."""

    def after(self, progress: Progress, prediction: Prediction) -> bool | torch.Tensor:
        """See KeyframePolicy."""
        return (
            progress.frames == 0
            or 0 < self.max_gap <= progress.frames_since_keyframe + 1
            or mean_flow(prediction, progress.last_keyframe) > self.flow_threshold
        )


def mean_flow(frame: Prediction, keyframe: Prediction) -> torch.Tensor:
    """Return how far, in pixels, a frame's points lie on average from where the keyframe sees them. A scalar tensor.

    Pixels on a grid are lifted with the frame's depth and pose and projected with the keyframe's pose and intrinsics;
    those without depth, or behind the keyframe's camera, do not count. 0 if none counts.
    """
    depth = frame.depth[::FLOW_STRIDE, ::FLOW_STRIDE]
    T_keyframe_camera = invert_rigid(keyframe.T_world_camera) @ frame.T_world_camera
    grid_intrinsics = frame.intrinsics.clone()
    grid_intrinsics[:2] /= FLOW_STRIDE
    points = unproject(depth, grid_intrinsics, T_keyframe_camera)  # [rows, columns, 3]
    z = points[..., 2]
    projected = points @ keyframe.intrinsics.T
    rows, columns = (torch.arange(n, device=depth.device) * float(FLOW_STRIDE) for n in depth.shape)
    flow = torch.hypot(projected[..., 0] / z - columns, projected[..., 1] / z - rows[:, None])
    counts = (depth > MIN_DEPTH) & (z > MIN_DEPTH)
    return torch.where(counts, flow, 0.0).sum() / counts.sum().clamp_min(1)
