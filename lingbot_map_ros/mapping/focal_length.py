# SPDX-License-Identifier: Apache-2.0
"""The focal length of an uncalibrated camera: what a model predicts, put right by how tracked corners move."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

FRAMES = 256  # whose predictions' median is taken, and over about which corners are remembered
PREDICTION_NOISE = 0.1  # deviation of the logarithm of a predicted focal length, which is off by as much for all frames
CORNER_TRUST = 0.1  # of what a frame's corners say: their errors have causes in common, such as a lens that distorts


@dataclass(frozen=True)
class CornerEvidence:
    """What corners say of the logarithm of the focal length, the mean of both axes' in pixels."""

    information: float = 0.0  # inverse of the variance
    moment: float = 0.0  # information times the value

    def and_later(self, information: float, value: float) -> CornerEvidence:
        """Return the evidence after one more frame. What is no number, or says nothing, changes nothing."""
        if not (np.isfinite(information) and np.isfinite(value) and information > 0):
            return self
        memory, information = 1 - 1 / FRAMES, CORNER_TRUST * information  # a lens may zoom
        return CornerEvidence(memory * self.information + information, memory * self.moment + information * value)


class FocalLength:
    """Predictions so far; what corners say is kept by the caller, who may have to go back on it."""

    def __init__(self) -> None:
        """Know nothing."""
        self._predicted: deque[np.ndarray] = deque(maxlen=FRAMES)

    def add(self, predicted: np.ndarray) -> None:
        """Take a frame's prediction [2], along x and y, in pixels."""
        self._predicted.append(predicted)

    def estimate(self, evidence: CornerEvidence) -> np.ndarray:
        """Return the focal lengths [2]: the predictions' median, both axes scaled alike by what corners say."""
        predicted = np.median(self._predicted, axis=0)
        value = np.log(predicted).mean()
        trust = 1 / PREDICTION_NOISE**2
        return predicted * np.exp((trust * value + evidence.moment) / (trust + evidence.information) - value)
