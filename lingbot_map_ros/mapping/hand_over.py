# SPDX-License-Identifier: Apache-2.0
"""From one window of the model to the next: the similarity that maps the new window into the world."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.mapping.prediction import Prediction

MIN_SCALE, MAX_SCALE = 1e-3, 1e3
MIN_RATIOS = 100  # pixels that must tell the scale
MAX_SPREAD = 2.0  # third over first quartile of the ratios: beyond, the two windows do not see the same scene


@dataclass(frozen=True)
class Similarity:
    """Maps a window's world into the first window's: x -> scale * R x + t. In float64, since windows chain."""

    scale: float
    T_world_window: torch.Tensor  # [4, 4], R and t
    encoding_matrix: torch.Tensor  # [9, 9], maps pose encodings (see gct.pose), but for the translation

    @staticmethod
    def make(scale: float, rotation: torch.Tensor, translation: torch.Tensor) -> Similarity:
        """Make a similarity from a matrix [3, 3] that is nearly a rotation; the result's is one, on the same device."""
        # Predictions are float32: chained as they are, their errors would add up to no rotation at all.
        quaternion = torch.from_numpy(quaternion_from_matrix(rotation.cpu().numpy())).to(rotation.device)
        T, encoding = (torch.eye(n, dtype=torch.float64, device=rotation.device) for n in (4, 9))
        T[:3, :3] = quaternion_to_matrix(quaternion)
        T[:3, 3] = translation
        encoding[:3, :3] = scale * T[:3, :3]
        encoding[3:7, 3:7] = _product_with(quaternion)
        return Similarity(scale, T, encoding)

    @property
    def rotation(self) -> torch.Tensor:
        """R, [3, 3]."""
        return self.T_world_window[:3, :3]

    @staticmethod
    def identity(device: torch.device | str = "cpu") -> Similarity:
        """Return the first window's."""
        zero = torch.zeros(3, dtype=torch.float64, device=device)
        return Similarity.make(1.0, torch.eye(3, dtype=torch.float64, device=device), zero)

    def map(self, prediction: Prediction) -> Prediction:
        """Map a window's prediction: centres by the similarity, rotations by its rotation, depths by its scale.

        Does not wait for the device, where the similarity must be, too.
        """
        # Few operations: on a GPU each one is a launch, while an image waits.
        T = prediction.T_world_camera.to(torch.float64, copy=True)
        T[:3, 3] *= self.scale
        T = self.T_world_window @ T
        encoding = self.encoding_matrix @ prediction.pose_encoding.double()
        encoding[:3] += self.T_world_window[:3, 3]
        return replace(
            prediction,
            pose_encoding=encoding.to(prediction.pose_encoding),
            T_world_camera=T.to(prediction.T_world_camera),
            depth=self.scale * prediction.depth,
        )


@dataclass(frozen=True)
class HandOver:
    """How a window was joined to the one before it. Jumps are between the two windows' views of the shared frames."""

    frame_index: int  # of the first frame that the new window alone sees
    shared_frames: int
    scale: float  # of the new window's world to the first window's
    translation_jump: float  # most that the camera's centre moved at a shared frame, in world units
    rotation_jump: float  # likewise of its orientation, radians
    problem: str  # why the scale is that of the window before; empty: it was measured
    seconds: float = 0.0  # that the new window's start took
    # The newest shared frame as the new window sees it, mapped into the world [4, 4]: motion from it is of one window.
    last_index: int = -1
    last_T_world_camera: torch.Tensor | None = None


def align(
    previous: Sequence[Prediction], new: Sequence[Prediction], last_good: Similarity
) -> tuple[Similarity, float, float, str]:
    """Find the similarity that maps a new window into the world from the frames that it shares with the one before.

    previous: their predictions as mapped into the world. new: those of the new window. The scale is the median of the
    per-pixel ratios of depth over frames that are keyframes in both, where both windows are at least as confident as in
    half of the frame; rotation and translation come from the last such frame (of none, the first shared frame). Frames
    whose pose is not finite do not count. Where too few pixels tell the scale, or they contradict one another, it is
    `last_good`'s; without any finite frame the similarity is `last_good`, and the jumps are infinite.

    Returns the similarity, translation and rotation jump, and the problem, if any (see HandOver).
    """
    pairs = [
        (a, b) for a, b in zip(previous, new) if a.T_world_camera.isfinite().all() and b.T_world_camera.isfinite().all()
    ]
    if not pairs:
        return last_good, float("inf"), float("inf"), "no shared frame has a finite pose in both windows"
    in_both = [(a, b) for a, b in pairs if a.is_keyframe and b.is_keyframe] or pairs[:1]
    scale, problem = _scale(torch.cat([_ratios(a, b) for a, b in in_both]), last_good.scale)
    T_previous, T_new = (frame.T_world_camera.double() for frame in in_both[-1])
    rotation = T_previous[:3, :3] @ T_new[:3, :3].T
    R = Similarity.make(scale, rotation, torch.zeros_like(T_previous[:3, 3])).rotation
    similarity = Similarity.make(scale, R, T_previous[:3, 3] - scale * (R @ T_new[:3, 3]))
    jumps = [_jump(a.T_world_camera, similarity.map(b).T_world_camera) for a, b in pairs]
    return similarity, max(jump[0] for jump in jumps), max(jump[1] for jump in jumps), problem


def _ratios(previous: Prediction, new: Prediction) -> torch.Tensor:
    ratios = (previous.depth / new.depth).flatten()
    usable = ratios.isfinite() & (ratios > 0)
    for confidence in (previous.confidence.flatten(), new.confidence.flatten()):
        usable &= confidence >= confidence.median()
    return ratios[usable]


def _scale(ratios: torch.Tensor, fallback: float) -> tuple[float, str]:
    if len(ratios) < MIN_RATIOS:
        return fallback, f"only {len(ratios)} pixels of the shared keyframes have a depth in both windows"
    ratios = ratios.sort().values
    first, median, third = (float(ratios[int(part * (len(ratios) - 1))]) for part in (0.25, 0.5, 0.75))
    if third > MAX_SPREAD * first:
        return fallback, f"the depths of the two windows disagree: ratios from {first:.3g} to {third:.3g}"
    return min(max(median, MIN_SCALE), MAX_SCALE), ""


def _jump(T_before: torch.Tensor, T_after: torch.Tensor) -> tuple[float, float]:
    before, after = T_before.double().cpu(), T_after.double().cpu()
    distance = float((after[:3, 3] - before[:3, 3]).norm())
    # The chord of a rotation, which is exact where the arc cosine of a trace is not: near 0.
    chord = float((after[:3, :3] - before[:3, :3]).norm()) / (2 * 2**0.5)
    return distance, 2 * float(torch.asin(torch.tensor(min(chord, 1.0))))


def _product_with(p: torch.Tensor) -> torch.Tensor:
    """Return the matrix [4, 4] that turns a quaternion q (x, y, z, w) into that of the rotation q, then p."""
    x, y, z, w = p.tolist()
    return torch.tensor([[w, -z, y, x], [z, w, -x, y], [-y, x, w, z], [-x, -y, -z, w]], dtype=p.dtype, device=p.device)
