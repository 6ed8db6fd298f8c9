# SPDX-License-Identifier: Apache-2.0
"""The images that a sequence begins with, chosen so that the camera moved between them."""
from __future__ import annotations

import cv2
import numpy as np
import torch

# Width and height of the images whose flow is measured: one size for all, since DIS crashes on flat ones.
FLOW_SIZE = (160, 120)


class ScaleFrames:
    """Gathers a sequence's first images until there are enough, or until waiting for motion has taken too long."""

    def __init__(self) -> None:
        self.images: list[tuple[torch.Tensor, object]] = []  # image, stamp
        self.timed_out = False  # the camera did not move enough in the time given
        self._waiting_since: float | None = None  # time of the first image

    def add(
        self, image: torch.Tensor, stamp: object, seconds: float, count: int, min_motion: float, max_wait: float
    ) -> bool:
        """Take an image [3, h, w] if it shows motion; return whether the scale frames are complete.

        seconds: the image's time. count: images wanted. min_motion: median flow, in pixels of the image, from the last
        image taken; 0 takes every image. max_wait: seconds from the first image after which the images there are, and
        this one, have to do; 0: for ever.
        """
        if self._waiting_since is None or seconds < self._waiting_since:  # a clock that was set back begins anew
            self._waiting_since = seconds
        if self.images and min_motion > 0 and median_motion(self.images[-1][0], image) < min_motion:
            self.timed_out = 0 < max_wait <= seconds - self._waiting_since
            if not self.timed_out:
                return False
        self.images.append((image, stamp))
        return self.timed_out or len(self.images) >= count


def median_motion(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the median length of the optical flow (DIS) between two images [3, h, w] in [0, 1], in their pixels."""
    flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_ULTRAFAST).calc(_grey(before), _grey(after), None)
    _, height, width = before.shape
    return float(np.median(np.hypot(flow[..., 0] * width / FLOW_SIZE[0], flow[..., 1] * height / FLOW_SIZE[1])))


def _grey(image: torch.Tensor) -> np.ndarray:
    grey = (image.mean(0) * 255).clamp(0, 255).byte().cpu().numpy()
    return cv2.resize(grey, FLOW_SIZE, interpolation=cv2.INTER_AREA)
