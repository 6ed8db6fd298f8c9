# SPDX-License-Identifier: Apache-2.0
"""The robot's transforms from /tf and /tf_static, for nodes where tf2_ros cannot be imported as well."""
from __future__ import annotations

import threading

import numpy as np
from rclpy.node import Node

from lingbot_map_ros.mapping.transforms import TransformError, Transforms
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.messages import nanoseconds, pose_matrix

WARN_PERIOD = 30.0  # seconds between two warnings of one kind


class TransformListener:
    """Remembers the transforms of the last seconds. For any thread."""

    def __init__(self, node: Node) -> None:
        """Know no frame."""
        self._node = node
        self._lock = threading.Lock()
        self._transforms = Transforms()

    def receive(self, message) -> None:
        """Take a message of /tf."""
        self._take(message, is_static=False)

    def receive_static(self, message) -> None:
        """Take a message of /tf_static."""
        self._take(message, is_static=True)

    def lookup(self, target: str, source: str, stamp_ns: int, tolerance: float) -> np.ndarray:
        """Return T_target_source [4, 4] at a time, or up to `tolerance` seconds from it. Raises TransformError."""
        if interfaces.TF.message is None:
            raise TransformError("tf2_msgs cannot be imported")
        with self._lock:
            return self._transforms.lookup(target, source, stamp_ns, tolerance * 1e9)

    def _take(self, message, is_static: bool) -> None:
        for transform in message.transforms:
            parent, child = transform.header.frame_id.lstrip("/"), transform.child_frame_id.lstrip("/")
            try:
                T = pose_matrix(transform.transform.translation, transform.transform.rotation)
                with self._lock:
                    self._transforms.set(parent, child, T, None if is_static else nanoseconds(transform.header.stamp))
            except ValueError as error:
                self._node.get_logger().warning(
                    f"{parent} -> {child} on {'/tf_static' if is_static else '/tf'} is not used: {error}",
                    throttle_duration_sec=WARN_PERIOD)
