# SPDX-License-Identifier: Apache-2.0
"""What the images' time stamps say: a next image, the same one again, a camera that started anew, a gap."""
from __future__ import annotations

import enum
import statistics
from collections import deque

PERIODS = 30  # between images, that "usual" is measured on
MIN_PERIODS = 5  # fewer say nothing
GAP = 3.0  # usual periods from one image to the next that are a gap


class Order(enum.Enum):
    """How an image stands to the one before it."""

    NEXT = "next"
    GAP = "gap"  # the next one, after a pause
    DUPLICATE = "duplicate"  # of the same stamp
    BACK = "back"  # of an earlier stamp: a bag that loops, a simulation that started anew
    UNSTAMPED = "unstamped"  # the camera does not stamp its images; they count as next ones


class Stamps:
    """Follows the stamps of one camera, from image to image as they arrive."""

    def __init__(self) -> None:
        """Start with the first image."""
        self.seconds = 0.0  # of the newest image: its stamp, or without stamps as time has passed since the first
        self._stamp_ns: int | None = None  # as it came
        self._arrival = 0.0
        self._periods: deque[int] = deque(maxlen=PERIODS)

    def judge(self, stamp_ns: int, arrival: float) -> Order:
        """Take the next image's stamp and its arrival in monotonic seconds.

        One stamp of 0 is a time like others (simulations begin there); a second one says that there are none.
        """
        last, self._stamp_ns = self._stamp_ns, stamp_ns
        since_last, self._arrival = arrival - self._arrival, arrival
        if stamp_ns == 0 and last == 0:
            self.seconds += since_last
            return Order.UNSTAMPED
        if last == stamp_ns:
            return Order.DUPLICATE
        self.seconds = stamp_ns / 1e9
        if last is None:
            return Order.NEXT
        if stamp_ns < last:
            self._periods.clear()
            return Order.BACK
        period = stamp_ns - last
        is_gap = len(self._periods) >= MIN_PERIODS and period > GAP * statistics.median(self._periods)
        self._periods.append(period)
        return Order.GAP if is_gap else Order.NEXT
