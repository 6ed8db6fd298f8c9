# SPDX-License-Identifier: Apache-2.0
"""Which of a camera's images are mapped, as they arrive."""
from __future__ import annotations

import time
from typing import NamedTuple

from sensor_msgs.msg import CompressedImage, Image

from lingbot_map_ros.ros import diagnostics
from lingbot_map_ros.ros.diagnostics import Monitor
from lingbot_map_ros.ros.messages import nanoseconds
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.stamps import Order, RateLimit, Stamps
from lingbot_map_ros.ros.worker import Mailbox


class Arrival(NamedTuple):
    """An image that waits to be processed."""

    message: Image | CompressedImage
    time: float  # of its arrival, monotonic seconds
    seconds: float  # the image's own time
    starts: int  # how often the camera had started anew by then


class Intake:
    """Leaves images in the worker's mailbox. `receive` is the executor's, all else for any thread."""

    def __init__(self, scope: Scope, monitor: Monitor, mailbox: Mailbox[Arrival]) -> None:
        """Start with the first image."""
        self.is_paused = False  # whether images are let pass unmapped, by the service
        self._scope = scope
        self._monitor = monitor
        self._mailbox = mailbox
        self._topic = scope.image_topic
        self._stamps = Stamps()
        self._rate_limit = RateLimit()
        self._starts = 0  # of the camera

    def receive(self, message: Image | CompressedImage) -> None:
        """Leave an image in the mailbox, unless it has come before, is late, or is one too many for `max_rate`."""
        now = time.monotonic()
        order = self._stamps.judge(nanoseconds(message.header.stamp), now)
        if order is Order.LATE:
            self._monitor.image_dropped("late")
            return
        if order is Order.DUPLICATE:
            self._monitor.image_dropped("duplicates")
            if self._monitor.repeats >= diagnostics.MANY_REPEATS:
                text = diagnostics.repeats_text(self._monitor.repeats)
                self._scope.logger.warning(f"{self._topic}: {text}", throttle_duration_sec=30.0)
            return
        if order is Order.BACK:
            self._monitor.count("stamps_back")
            self._starts += 1
            self._rate_limit = RateLimit()
        elif order is Order.GAP:
            self._monitor.count("gaps")
        if self.is_paused or not self._rate_limit.takes(self._stamps.seconds, self._scope.parameters.max_rate):
            self._monitor.image_skipped()
            return
        self._monitor.image_received()
        if order is Order.UNSTAMPED:
            self._stamp(message)
        self._mailbox.put(Arrival(message, now, self._stamps.seconds, self._starts))

    def next_in(self) -> float:
        """Return the seconds until an image of any camera is to be expected; see Inbox.next_in."""
        return self._mailbox.next_in()

    def clear(self) -> None:
        """Forget the image that waits, if any."""
        self._mailbox.clear()

    def _stamp(self, message: Image | CompressedImage) -> None:
        message.header.stamp = self._scope.node.get_clock().now().to_msg()
        carried = ("outputs carry the time of arrival" if nanoseconds(message.header.stamp)
                   else "and simulated time is 0, because nothing comes on /clock: so are the outputs' stamps")
        self._scope.logger.warning(
            f"the images' header.stamp on {self._topic} is 0: {carried}; let the camera's driver stamp its images",
            throttle_duration_sec=60.0)
