# SPDX-License-Identifier: Apache-2.0
"""How many metres the model's unit is, from what is known of the robot."""
from __future__ import annotations

import statistics
from collections import deque

import numpy as np

MIN_RATIOS = 3  # that tell a scale
MAX_RATIOS = 30  # that it is the median of, the newest
MAX_SPREAD = 1.5  # third over first quartile: beyond, the two do not speak of the same motion
MIN_CHANGE = 0.05  # relative, that is worth rescaling everything

MIN_DISTANCE = 0.2  # metres that the robot drives from one ratio of distances to the next
BINS = 100  # of heights, from the camera down to the lowest point
PEAK = 0.3  # of the fullest bin, that the floor's has: it is the lowest such
MIN_FLOOR_SHARE = 0.05  # of a keyframe's points


class _Ratios:
    """The median of the newest ratios, once they agree; reported when it has changed."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)
        self._reported: float | None = None

    def add(self, ratio: float) -> float | None:
        """Take a ratio; return the scale if it is new."""
        if not (np.isfinite(ratio) and ratio > 0):
            return None
        self._ratios.append(float(ratio))
        low, high = np.quantile(self._ratios, (0.25, 0.75))
        if len(self._ratios) < MIN_RATIOS or high > MAX_SPREAD * low:
            return None
        scale = statistics.median(self._ratios)
        if self._reported is not None and abs(scale / self._reported - 1) < MIN_CHANGE:
            return None
        self._reported = scale
        return scale


class OdometryScale:
    """The scale from distances that odometry measures: the median of their newest ratios to the model's."""

    def __init__(self) -> None:
        """Start with nothing known, for one sequence."""
        self._ratios = _Ratios()
        self._start: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, in_model: np.ndarray, in_odometry: np.ndarray) -> float | None:
        """Take the positions [3] of one thing at one time, in the model's unit and in metres; return a new scale."""
        if self._start is None:
            self._start = in_model, in_odometry
            return None
        distance = np.linalg.norm(in_odometry - self._start[1])
        if distance < MIN_DISTANCE:
            return None
        in_units = np.linalg.norm(in_model - self._start[0])
        self._start = in_model, in_odometry
        return self._ratios.add(distance / in_units) if in_units > 0 else None


class FloorScale:
    """The scale from the camera's height over the floor: the median over the last keyframes that show it."""

    def __init__(self) -> None:
        """Start with nothing known, for one sequence."""
        self._ratios = _Ratios()

    def add(self, heights: np.ndarray, camera_height: float) -> float | None:
        """Take the heights [n] of a keyframe's points relative to the camera, level, in the model's unit.

        camera_height: of the camera over the floor, metres. Returns a new scale.
        """
        below = floor_below(heights)
        return None if below is None else self._ratios.add(camera_height / below)


def floor_below(heights: np.ndarray) -> float | None:
    """Return how far below the camera the floor is, in the unit of the heights [n] relative to it; None: not seen.

    A floor is what many points lie at one height of; tables are, too, but higher.
    """
    below = -heights[np.isfinite(heights) & (heights < 0)]
    if len(below) < BINS:
        return None
    counts, edges = np.histogram(below, BINS, (0.0, np.quantile(below, 0.995) * 1.02))
    smooth = np.convolve(counts, np.ones(3), "same")  # a plane may lie across an edge
    peak = int(np.flatnonzero(smooth >= PEAK * smooth.max()).max())
    peak = max(range(max(peak - 3, 0), peak + 1), key=smooth.__getitem__)  # its middle, not its foot
    near = below[(below >= edges[max(peak - 1, 0)]) & (below <= edges[min(peak + 2, BINS)])]
    return float(np.median(near)) if len(near) >= MIN_FLOOR_SHARE * len(heights) else None
