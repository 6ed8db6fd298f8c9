# SPDX-License-Identifier: Apache-2.0
"""From one window of the model to the next: the similarity that maps the new window into the world."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.mapping.prediction import Prediction

MIN_SCALE, MAX_SCALE = 1e-3, 1e3
MIN_RATIOS = 100  # pixels that must tell the scale
MAX_SPREAD = 2.0  # third over first quartile of the ratios: beyond, the two windows do not see the same scene


@dataclass(frozen=True)
class Similarity:
    """Maps a window's world into the first window's: x -> scale * R x + t. In float64, since windows chain."""

    scale: float
    rotation: torch.Tensor  # [3, 3]
    translation: torch.Tensor  # [3]

    @staticmethod
    def identity() -> Similarity:
        """Return the first window's."""
        return Similarity(1.0, torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))

    def map(self, prediction: Prediction) -> Prediction:
        """Map a window's prediction: centres by the similarity, rotations by its rotation, depths by its scale."""
        T = prediction.T_world_camera.double()
        rotation, translation = self.rotation.to(T.device), self.translation.to(T.device)
        mapped = T.clone()
        mapped[:3, :3] = rotation @ T[:3, :3]
        mapped[:3, 3] = self.scale * (rotation @ T[:3, 3]) + translation
        quaternion = torch.from_numpy(quaternion_from_matrix(mapped[:3, :3].cpu().numpy()))
        encoding = prediction.pose_encoding.clone()
        encoding[:3] = mapped[:3, 3]
        encoding[3:7] = quaternion
        return replace(
            prediction,
            pose_encoding=encoding,
            T_world_camera=mapped.to(prediction.T_world_camera),
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


def align(
    previous: Sequence[Prediction], new: Sequence[Prediction], last_good: Similarity
) -> tuple[Similarity, float, float, str]:
    """Find the similarity that maps a new window into the world from the frames that it shares with the one before.

    previous: their predictions as mapped into the world. new: those of the new window. The scale is the median of the
    per-pixel ratios of depth over frames that are keyframes in both, where both windows are at least as confident as in
    half of the frame; rotation and translation come from the last such frame (of none, the first shared frame). Where too
    few pixels tell the scale, or they contradict one another, it is `last_good`'s.

    Returns the similarity, translation and rotation jump, and the problem, if any (see HandOver).
    """
    in_both = [i for i, (a, b) in enumerate(zip(previous, new)) if a.is_keyframe and b.is_keyframe]
    ratios = torch.cat([_ratios(previous[i], new[i]) for i in in_both or [0]])
    scale, problem = _scale(ratios, last_good.scale)
    anchor = in_both[-1] if in_both else 0
    T_previous, T_new = previous[anchor].T_world_camera.double().cpu(), new[anchor].T_world_camera.double().cpu()
    if not (T_previous.isfinite().all() and T_new.isfinite().all()):
        return last_good, 0.0, 0.0, "the pose of the last shared keyframe is not finite"
    rotation = T_previous[:3, :3] @ T_new[:3, :3].T
    translation = T_previous[:3, 3] - scale * (rotation @ T_new[:3, 3])
    similarity = Similarity(scale, rotation, translation)
    jumps = [_jump(a.T_world_camera, similarity.map(b).T_world_camera) for a, b in zip(previous, new)]
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
