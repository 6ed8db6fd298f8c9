# SPDX-License-Identifier: Apache-2.0
"""The images that a sequence begins with, chosen so that the camera moved between them."""
from __future__ import annotations

import cv2
import numpy as np
import torch

FLOW_WIDTH = 160  # pixels of the images whose flow is measured


class ScaleFrames:
    """Gathers a sequence's first images until there are enough, or until waiting for motion has taken too long."""

    def __init__(self) -> None:
        self.images: list[tuple[torch.Tensor, object]] = []  # image, stamp
        self.timed_out = False  # the camera did not move enough in the time given
        self._first_seconds = 0.0
        self._last_grey: np.ndarray | None = None

    def add(
        self, image: torch.Tensor, stamp: object, seconds: float, count: int, min_motion: float, max_wait: float
    ) -> bool:
        """Take an image [3, h, w] if it shows motion; return whether the scale frames are complete.

        seconds: the image's time. count: images wanted. min_motion: median flow, in pixels of the image, from the last
        image taken; 0 takes every image. max_wait: seconds from the first image after which the images there are, and
        this one, have to do; 0: for ever.
        """
        if min_motion > 0:
            grey = _grey(image)
            if not self.images:
                self._first_seconds = seconds
            elif median_motion(self._last_grey, grey) * image.shape[2] / grey.shape[1] < min_motion:
                self.timed_out = 0 < max_wait <= seconds - self._first_seconds
                if not self.timed_out:
                    return False
            self._last_grey = grey
        self.images.append((image, stamp))
        return self.timed_out or len(self.images) >= count


def median_motion(before: np.ndarray, after: np.ndarray) -> float:
    """Return the median length, in pixels, of the optical flow (DIS) between two grey images uint8 [h, w]."""
    flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_ULTRAFAST).calc(before, after, None)
    return float(np.median(np.hypot(flow[..., 0], flow[..., 1])))


def _grey(image: torch.Tensor) -> np.ndarray:
    grey = (image.mean(0) * 255).clamp(0, 255).byte().cpu().numpy()
    height = round(grey.shape[0] * FLOW_WIDTH / grey.shape[1])
    return cv2.resize(grey, (FLOW_WIDTH, height), interpolation=cv2.INTER_AREA)
