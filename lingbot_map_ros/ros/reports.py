# SPDX-License-Identifier: Apache-2.0
"""The publishers of what the node says of itself while it maps: the tracking state and events."""
from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from diagnostic_msgs.msg import DiagnosticStatus

from lingbot_map_ros.ros import diagnostics, interfaces
from lingbot_map_ros.ros.diagnostics import TrackingReport
from lingbot_map_ros.ros.scope import Scope

REASONS_PERIOD = 0.5  # seconds at least between two messages of one state, since reasons may hold figures that flicker


class Reports:
    """Publishes the tracking state whenever it changes, and events as they come. For any thread."""

    def __init__(self, scope: Scope) -> None:
        """Create the publishers, which last as long as the node: late subscribers get the newest messages."""
        self._scope = scope
        self._tracking_state = self._publisher(interfaces.TRACKING_STATE)
        self._events = self._publisher(interfaces.EVENTS)
        self._lock = threading.Lock()
        self._published: TrackingReport | None = None
        self._published_at = 0.0  # monotonic seconds

    def tracking(self, report: TrackingReport) -> None:
        """Publish the tracking state if it, or a reason, has changed."""
        with self._lock:
            last, now = self._published, time.monotonic()
            if last is not None and last.state == report.state and (
                    last.reasons == report.reasons or now - self._published_at < REASONS_PERIOD):
                return
            self._published, self._published_at = report, now
            self._tracking_state.publish(diagnostics.tracking_status(
                self._scope.node_name, self._scope.part("tracking"), self._scope.image_topic, report))

    def event(
        self, kind: str, message: str, values: Mapping[str, object], level: bytes = DiagnosticStatus.OK,
        is_logged: bool = True,
    ) -> None:
        """Publish, and log unless told otherwise, that something has happened."""
        self._events.publish(diagnostics.status(
            self._scope.node_name, self._scope.part(kind), self._scope.image_topic, level, message, values))
        if not is_logged:
            return
        logger = self._scope.logger
        if level == DiagnosticStatus.OK:
            logger.info(message)
        else:
            logger.warning(message)

    def _publisher(self, topic: interfaces.Topic):
        return self._scope.topic(topic).create(self._scope.node.create_publisher)
