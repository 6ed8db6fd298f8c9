# SPDX-License-Identifier: Apache-2.0
"""What the images' time stamps say: a next image, the same one again, a late one, a camera that started anew, a gap."""
from __future__ import annotations

import enum
import statistics
from collections import deque

PERIODS = 30  # between images, that "usual" is measured on
MIN_PERIODS = 5  # fewer say nothing
LATE_NS = 1_000_000_000  # an image whose stamp is less than this before the newest one's is late
MAX_LATE = 5  # so many late images in a row mean that the camera's clock was set back
RATE_TOLERANCE = 0.1  # of the period that an image may come early, since stamps jitter
GAP = 3.0  # usual periods from one image to the next that are a gap


class Order(enum.Enum):
    """How an image stands to the one before it."""

    NEXT = "next"
    GAP = "gap"  # the next one, after a pause
    DUPLICATE = "duplicate"  # of the same stamp
    LATE = "late"  # of a slightly earlier stamp: it was overtaken by the one before
    BACK = "back"  # of an earlier stamp: a bag that loops, a simulation that started anew, a clock that was set back
    UNSTAMPED = "unstamped"  # the camera does not stamp its images; they count as next ones


class RateLimit:
    """Chooses images so that there are not more than some a second."""

    def __init__(self) -> None:
        """Start with the first image, which is taken."""
        self._slot = -float("inf")  # the time that the last image was taken for

    def takes(self, seconds: float, rate: float) -> bool:
        """Say whether an image of a time, not before the last one's, is taken at this rate a second; 0: every one is.
        """
        period = 1 / rate if rate else 0.0
        if seconds < self._slot + (1 - RATE_TOLERANCE) * period:
            return False
        # On from the slot, not from the image, so that one that is early does not let the next one come early, too.
        self._slot = self._slot + period if seconds < self._slot + 2 * period else seconds
        return True


class Stamps:
    """Follows the stamps of one camera, from image to image as they arrive."""

    def __init__(self) -> None:
        """Start with the first image."""
        self.seconds = 0.0  # of the newest image: its stamp, or without stamps as time has passed since the first
        self._stamp_ns: int | None = None  # the newest one
        self._arrival = 0.0
        self._late = 0  # images in a row
        self._periods: deque[int] = deque(maxlen=PERIODS)

    def judge(self, stamp_ns: int, arrival: float) -> Order:
        """Take the next image's stamp and its arrival in monotonic seconds.

        A stamp of 0 is a time like others for the first image (simulations begin there); later it says that an image
        has none. An image of less than a second before the newest is late, the MAX_LATE-th one in a row a new start.
        """
        last, since_last, self._arrival = self._stamp_ns, arrival - self._arrival, arrival
        if stamp_ns == 0 and last is not None:
            self.seconds += since_last
            return Order.UNSTAMPED
        if stamp_ns == last:
            return Order.DUPLICATE
        if last is not None and last - LATE_NS < stamp_ns < last:
            self._late += 1
            if self._late < MAX_LATE:
                return Order.LATE
        self._stamp_ns, self.seconds, self._late = stamp_ns, stamp_ns / 1e9, 0
        if last is None:
            return Order.NEXT
        if stamp_ns < last:
            self._periods.clear()
            return Order.BACK
        period = stamp_ns - last
        is_gap = len(self._periods) >= MIN_PERIODS and period > GAP * statistics.median(self._periods)
        self._periods.append(period)
        return Order.GAP if is_gap else Order.NEXT
