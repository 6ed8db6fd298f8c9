# SPDX-License-Identifier: Apache-2.0
"""The focal length of an uncalibrated camera: what a model predicts, put right by how tracked corners move."""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

FRAMES = 256  # whose predictions' median is taken, and over about which corners are remembered
PREDICTION_NOISE = 0.1  # deviation of the logarithm of a predicted focal length, which is off by as much for all frames
CORNER_TRUST = 0.05  # of what a frame's corners say: their errors have causes in common, such as depth that slopes
# The least deviation of what all corners say: a lens that distorts by a k1 of 0.04 (see Calibration) looks as if the
# focal length were another by 0.06.
CORNER_NOISE = 0.06
MOST_CHANGE = 0.25  # of the predicted logarithm


@dataclass(frozen=True)
class FocalLength:
    """An estimate of the focal lengths of a sequence; replaced, never changed."""

    predicted: tuple[np.ndarray, ...] = ()  # [2] each, along x and y, in pixels
    information: float = 0.0  # of corners, on the logarithm, the mean of both axes: inverse of the variance
    moment: float = 0.0  # information times the logarithm

    def with_prediction(self, focal_lengths: np.ndarray) -> FocalLength:
        """Return the estimate after one more prediction [2]."""
        return replace(self, predicted=(*self.predicted[-(FRAMES - 1):], focal_lengths))

    def with_corners(self, information: float, logarithm: float) -> FocalLength:
        """Return the estimate after one more frame's corners. What is no number, or says nothing, changes nothing."""
        if not (np.isfinite(information) and np.isfinite(logarithm) and information > 0):
            return self
        memory, added = 1 - 1 / FRAMES, CORNER_TRUST * information  # a lens may zoom
        total, moment = memory * self.information + added, memory * self.moment + added * logarithm
        share = min(1.0, 1 / CORNER_NOISE**2 / total)
        return replace(self, information=share * total, moment=share * moment)

    @property
    def value(self) -> np.ndarray:
        """The focal lengths [2]: the predictions' median, of which there must be one, both scaled alike by corners."""
        predicted = np.median(self.predicted, axis=0)
        change = self.moment - self.information * np.log(predicted).mean()
        change /= 1 / PREDICTION_NOISE**2 + self.information
        return predicted * np.exp(np.clip(change, -MOST_CHANGE, MOST_CHANGE))
