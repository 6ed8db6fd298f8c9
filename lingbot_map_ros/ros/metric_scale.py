# SPDX-License-Identifier: Apache-2.0
"""How many metres the model's unit is, by the parameters and what comes on the odometry topic."""
from __future__ import annotations

import threading

import numpy as np
from nav_msgs.msg import Odometry
from rclpy.node import Node

from lingbot_map_ros.mapping.alignment import Alignment
from lingbot_map_ros.mapping.scale import FloorScale, OdometryScale
from lingbot_map_ros.mapping.transforms import TransformError, Transforms
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.mapped_frame import MappedFrame
from lingbot_map_ros.ros.messages import nanoseconds, pose_matrix
from lingbot_map_ros.ros.scope import Scope

WARN_PERIOD = 30.0  # seconds between two warnings of one kind
_ODOM, _BODY = "odometry", "body"


class RobotOdometry:
    """Remembers where the robot was in the last seconds. All cameras share it; for any thread."""

    def __init__(self, node: Node) -> None:
        """Know no place."""
        self.topic = node.resolve_topic_name(interfaces.ODOM.name)
        self._node = node
        self._lock = threading.Lock()
        self._transforms = Transforms()
        self._has_come = False

    def receive(self, message: Odometry) -> None:
        """Take where the robot is."""
        try:
            T = pose_matrix(message.pose.pose.position, message.pose.pose.orientation)
        except ValueError as error:
            self._node.get_logger().warning(f"a message on {self.topic} is not used: pose.pose.{error}",
                                            throttle_duration_sec=WARN_PERIOD)
            return
        with self._lock:
            self._transforms.set(_ODOM, _BODY, T, nanoseconds(message.header.stamp))
            self._has_come = True

    def lookup(self, stamp_ns: int, tolerance: float) -> np.ndarray:
        """Return T_odom_body [4, 4] at a time, or up to `tolerance` seconds from it. Raises TransformError."""
        with self._lock:
            if not self._has_come:
                raise TransformError("nothing has come there")
            return self._transforms.lookup(_ODOM, _BODY, stamp_ns, tolerance * 1e9)


class MetricScale:
    """Finds the scale of each sequence of a camera. For the worker."""

    def __init__(self, scope: Scope, odometry: RobotOdometry) -> None:
        """Know no scale."""
        self._scope = scope
        self._odometry = odometry
        self.start_sequence()

    def start_sequence(self) -> None:
        """Forget what was found: another sequence has another unit."""
        self.value: float | None = None  # metres per model unit; None: not known
        self._by_odometry, self._by_floor = OdometryScale(), FloorScale()

    def update(self, frame: MappedFrame | None, alignment: Alignment, mounting: np.ndarray | None) -> float | None:
        """Take a frame, None at the start of a sequence; return the scale if it has changed.

        mounting: T_body_camera [4, 4]; None: not known, and the camera is taken to be where the body is.
        """
        parameters = self._scope.parameters
        found = None
        if parameters.scale_source == "fixed":
            found = parameters.metric_scale if self.value != parameters.metric_scale else None
        elif frame is None:
            return None
        elif parameters.scale_source == "odometry":
            found = self._from_odometry(frame, mounting, parameters.transform_tolerance)
        elif parameters.scale_source == "height" and frame.points is not None:
            heights = alignment.level(frame.points.xyz.cpu().double().numpy() - frame.T_map_camera[:3, 3])[:, 2]
            found = self._by_floor.add(heights, parameters.camera_height)
        if found is not None:
            self.value = found
        return found

    def _from_odometry(self, frame: MappedFrame, mounting: np.ndarray | None, tolerance: float) -> float | None:
        try:
            T = self._odometry.lookup(nanoseconds(frame.header.stamp), tolerance)
        except TransformError as error:
            if self.value is None:
                self._scope.logger.warning(f"no scale from {self._odometry.topic}: {error}",
                                           throttle_duration_sec=WARN_PERIOD)
            return None
        position = T[:3, 3] if mounting is None else (T @ mounting)[:3, 3]
        return self._by_odometry.add(frame.T_map_camera[:3, 3], position)
