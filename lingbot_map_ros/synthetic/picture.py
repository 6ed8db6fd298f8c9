# SPDX-License-Identifier: Apache-2.0
"""Pictures of a loop through a place: rendered ahead, and blurred by the camera's motion."""
from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

BLUR_SAMPLES = 9  # of the image along the motion


@dataclass(frozen=True)
class Picture:
    """What the camera sees from one pose."""

    rgb: np.ndarray  # uint8 [height, width, 3]
    depth: np.ndarray  # float32 [height, width], metres along the optical axis; inf in the sky


class RenderedLoop:
    """The pictures of a loop, rendered ahead by a thread into memory of a fixed size."""

    def __init__(self, render_one: Callable[[int], Picture], length: int, capacity: int) -> None:
        """render_one: called with 0 to length - 1. capacity: pictures that are kept, 1 or more."""
        self._render_one = render_one
        self._length = length
        self._capacity = min(capacity, length)
        self._pictures: dict[int, Picture] = {}  # by their place in the loop
        self._position = self._rendered = 0  # numbers, counted on from loop to loop
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self.seconds_each = math.nan  # mean rendering time, of the newest pictures
        self._thread = threading.Thread(target=self._run, name="render", daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        """Say whether the whole loop stays in memory."""
        return self._capacity == self._length

    @property
    def ahead(self) -> int:
        """Return how many pictures there are from the position on; all, once a loop that stays is complete."""
        with self._changed:
            if self.is_whole and self._rendered == self._length:
                return self._length
            return self._rendered - self._position

    @property
    def capacity(self) -> int:
        """Return how many pictures are kept."""
        return self._capacity

    def take(self, number: int) -> Picture | None:
        """Return a picture if it is there. Those before are given up, unless the whole loop stays.

        Numbers count on from loop to loop and must not decrease. Raises what rendering has raised.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self.is_whole:
                for past in range(self._position, number):
                    self._pictures.pop(past % self._length, None)
                self._rendered = max(self._rendered, number)
            self._position = number
            self._changed.notify()
            return self._pictures.get(number % self._length)

    def close(self) -> None:
        """End rendering."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                end = self._length if self.is_whole else None
                self._changed.wait_for(lambda: self._ended or self._rendered < (end or self._position + self._capacity))
                if self._ended:
                    return
                number = self._rendered
            begin = time.monotonic()
            try:
                picture = self._render_one(number % self._length)
            except BaseException as error:  # told where pictures are taken
                with self._changed:
                    self._error = error
                return
            seconds = time.monotonic() - begin
            self.seconds_each = seconds if math.isnan(self.seconds_each) else 0.9 * self.seconds_each + 0.1 * seconds
            with self._changed:
                if number >= self._position or self.is_whole:  # else it came too late
                    self._pictures[number % self._length] = picture
                self._rendered = max(self._rendered, number + 1)


def motion_blur(picture: Picture, K: np.ndarray, T_next_camera: np.ndarray, exposure: float) -> np.ndarray:
    """Return a picture as a long exposure around its moment shows it, uint8 [height, width, 3].

    Every pixel is the mean along the way that its surface takes over the image, which is right except at the edges of
    things.

    Args:
        picture: at the middle of the exposure.
        K: [3, 3] in pixels, their centres at +0.5.
        T_next_camera: [4, 4], maps this camera's points into that of the next picture.
        exposure: as a share of the time to the next picture.
    """
    height, width = picture.depth.shape
    u, v = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    depth = np.minimum(picture.depth, 1e4)
    camera = np.stack([(u - K[0, 2]) / K[0, 0] * depth, (v - K[1, 2]) / K[1, 1] * depth, depth], axis=-1)
    x, y, z = np.moveaxis(camera @ T_next_camera[:3, :3].T + T_next_camera[:3, 3], -1, 0)
    z = np.maximum(z, 1e-3)
    flow_u, flow_v = K[0, 0] * x / z + K[0, 2] - u, K[1, 1] * y / z + K[1, 2] - v
    total = np.zeros((height, width, 3), np.float32)
    for share in np.linspace(-exposure / 2, exposure / 2, BLUR_SAMPLES):
        total += cv2.remap(picture.rgb, (u - 0.5 + share * flow_u).astype(np.float32),
                           (v - 0.5 + share * flow_v).astype(np.float32), cv2.INTER_LINEAR,
                           borderMode=cv2.BORDER_REPLICATE)
    return np.round(total / BLUR_SAMPLES).astype(np.uint8)
