# SPDX-License-Identifier: Apache-2.0
"""Whether a session's poses can be believed."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import numpy as np

from lingbot_map_ros.mapping.geometry import is_rigid
from lingbot_map_ros.mapping.prediction import Figures

MAX_DISTANCE = 1e5  # of a pose from the origin; scenes of the model are a few units deep, so more is a lost track
HISTORY = 30  # steps and confidences that "usual" is measured on
MIN_HISTORY = 5  # fewer say nothing
MIN_CONFIDENCE = 0.1  # usual confidence (what exceeds 1) of a model that can be said to be less sure than usual
MAX_ROTATION = np.radians(60)  # from one frame to the next


class TrackingState(enum.Enum):
    """How good the poses are."""

    INITIALIZING = "INITIALIZING"  # scale frames gather: there are no poses yet
    TRACKING = "TRACKING"
    DEGRADED = "DEGRADED"  # poses come, and something about them is wrong
    LOST = "LOST"  # poses are not to be used


@dataclass(frozen=True)
class Tracking:
    """A state and its reasons; none when all is well."""

    state: TrackingState
    reasons: tuple[str, ...] = ()


class Tracker:
    """Judges the frames of a sequence in their order, by their figures.

    A frame is implausible when its pose, its intrinsics, or the median of its depth or confidence (see Figures) is not
    finite, when
    the pose is no rigid motion or is absurdly far away, or when the camera jumped: by more than `jump_factor` times its
    usual step and a good part of the scene's depth, or by a large rotation. Implausible frames, and confidence that has
    fallen far below the usual, degrade tracking; `lost_after` implausible frames in a row lose it. `relocated` says
    that the sequence was anchored anew.
    """

    def __init__(self, jump_factor: float = 10.0, confidence_drop: float = 0.25, lost_after: int = 5) -> None:
        """confidence_drop: share of the usual confidence (what exceeds 1) below which tracking is degraded."""
        self.jump_factor = jump_factor
        self.confidence_drop = confidence_drop
        self.lost_after = lost_after
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.tracking = Tracking(TrackingState.INITIALIZING)
        self._steps: deque[float] = deque(maxlen=HISTORY)
        self._confidences: deque[float] = deque(maxlen=HISTORY)
        self._last: np.ndarray | None = None  # pose of the last plausible frame, [4, 4]
        self._implausible = 0  # frames in a row

    @property
    def is_lost(self) -> bool:
        """Whether poses are not to be used."""
        return self.tracking.state is TrackingState.LOST

    def relocated(self) -> None:
        """Take the next frame's pose as it comes: the sequence was anchored anew and goes on degraded."""
        self.tracking = Tracking(TrackingState.DEGRADED, ("anchored anew after tracking was lost",))
        self._implausible = 0
        self._last = None

    def judge(self, figures: Figures, also: tuple[str, ...] = ()) -> bool:
        """Take the next frame; return whether its pose may be used. `also`: further reasons for degraded tracking.

        A pose that may be used is plausible and the track is not lost.
        """
        T, intrinsics, median_depth, confidence = figures
        confidence -= 1  # the least that it can be
        names = ("pose", "intrinsics", "depth", "confidence")
        broken = [name for name, figure in zip(names, figures) if not np.isfinite(figure).all()]
        problem = f"not finite: {', '.join(broken)}" if broken else self._problem(T, median_depth)
        if problem:
            self._implausible += 1
            is_lost = self.is_lost or self._implausible >= self.lost_after
            self.tracking = Tracking(TrackingState.LOST if is_lost else TrackingState.DEGRADED, (problem,))
            return False
        if self.is_lost:  # a plausible pose does not tell that the track is the old one
            return False
        if self._last is not None:
            self._steps.append(float(np.linalg.norm(T[:3, 3] - self._last[:3, 3])))
        self._last, self._implausible = T, 0
        reasons = list(also)
        if len(self._confidences) >= MIN_HISTORY:
            usual = float(np.median(self._confidences))
            if usual >= MIN_CONFIDENCE and confidence < self.confidence_drop * usual:
                reasons.append(f"confidence fell to {1 + confidence:.3f}, usual is {1 + usual:.3f}")
        if not reasons or len(self._confidences) < MIN_HISTORY:
            self._confidences.append(confidence)
        self.tracking = Tracking(TrackingState.DEGRADED if reasons else TrackingState.TRACKING, tuple(reasons))
        return True

    def _problem(self, T: np.ndarray, median_depth: float) -> str:
        if not is_rigid(T):
            return "the pose is no rigid motion"
        if np.abs(T[:3, 3]).max() > MAX_DISTANCE:
            return f"the pose is {np.abs(T[:3, 3]).max():.3g} units from the origin"
        if self._last is None:
            return ""
        step = float(np.linalg.norm(T[:3, 3] - self._last[:3, 3]))
        angle = np.arccos(np.clip((np.trace(self._last[:3, :3].T @ T[:3, :3]) - 1) / 2, -1, 1))
        if angle > MAX_ROTATION:
            return f"the camera turned by {np.degrees(angle):.0f} degrees from one frame to the next"
        if len(self._steps) >= MIN_HISTORY:
            usual = float(np.median(self._steps))
            if step > self.jump_factor * usual and step > 0.5 * median_depth:
                return f"the camera jumped by {step:.3g} units, its usual step is {usual:.3g}"
        return ""
