# SPDX-License-Identifier: Apache-2.0
"""What cameras made of software share: they publish at a rate, or in step with the node that maps their images."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Odometry
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image

from lingbot_map_ros.image_files import NANOSECONDS, ReplayError

COUNTS = ("frames_received", "frames_processed", "frames_dropped", "frames_failed")  # the node's, on /diagnostics
START_TIMEOUT = 300.0  # seconds for the waited-for node to load its model and subscribe
QOS = QoSProfile(depth=10, reliability=QoSReliabilityPolicy.RELIABLE)  # serves both kinds of subscription


@dataclass
class Progress:
    """What the waited-for node has said of the images."""

    pose_stamp: int = -1  # nanoseconds, of the newest pose
    taken: int | None = None  # images that the node has received, and of these ...
    done: int | None = None  # ... those that it has processed, dropped or refused; None: nothing heard
    heard_at: float = -math.inf  # monotonic seconds of the report of these two


class Camera(Node):
    """Publishes images on `image` and, where it is known, the calibration on `camera_info`."""

    def __init__(self, name: str, calibrated: bool, **options) -> None:
        """calibrated: whether there is a `camera_info`. options: of rclpy's Node."""
        super().__init__(name, **options)
        self.images = self.create_publisher(Image, "image", QOS)
        self.camera_infos = self.create_publisher(CameraInfo, "camera_info", QOS) if calibrated else None
        self.sent = 0
        self.progress = Progress()
        self.wait_topic = ""
        self.timeout = math.inf
        self.base: tuple[int, int] | None = None  # the node's counts (taken, done) before the first image
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self)

    def wait_for(self, topic: str, timeout: float) -> None:
        """From now on wait for the pose on an odometry or pose topic after each image, for up to `timeout` seconds."""
        self.wait_topic = self.resolve_topic_name(topic)
        self.timeout = timeout
        kind = PoseStamped if self.wait_topic.endswith("/pose") else Odometry
        self.create_subscription(kind, self.wait_topic, self._on_pose, QOS)
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QOS)

    def publish_image(self, message: Image, info: CameraInfo | None) -> None:
        """Publish an image and, of a calibrated camera, its calibration with the image's header."""
        if self.camera_infos is not None:
            info.header = message.header
            self.camera_infos.publish(info)
        self.images.publish(message)
        self.sent += 1

    def spin_until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Handle messages until the condition holds or the time is over; tell which."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.context.ok():
                raise ExternalShutdownException()
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._executor.spin_once(timeout_sec=min(left, 0.1))
        return True

    def spin_for(self, seconds: float) -> None:
        """Handle messages for a time."""
        self.spin_until(lambda: False, seconds)

    def wait_for_node(self) -> None:
        """Wait until the node subscribes, its poses can arrive and its counts are known."""
        def matched() -> bool:
            return self.images.get_subscription_count() > 0 and self.count_publishers(self.wait_topic) > 0

        if not self.spin_until(matched, START_TIMEOUT):
            raise ReplayError(f"within {START_TIMEOUT:g} s nobody subscribed to {self.images.topic_name} "
                              f"and published {self.wait_topic}")
        matched_at = time.monotonic()
        if self.spin_until(lambda: self.progress.heard_at > matched_at, 3.0):
            self.base = (self.progress.taken, self.progress.done)
        else:
            self.get_logger().warning("no counts of this node on /diagnostics: until the first pose, images go out at "
                                      "the rate")

    def wait_for_pose(self, message: Image) -> None:
        """Wait for the last image's pose, or for the node's word that it is done with it.

        A node gives no pose while its first frames gather, nor for a frame whose pose it does not trust; its counts on
        /diagnostics tell. They tell too when an image never arrived: then it is sent again.
        """
        if self.base is None and self.progress.pose_stamp < 0:
            return
        end = time.monotonic() + self.timeout
        sent_at = time.monotonic()
        stamp = message.header.stamp.sec * NANOSECONDS + message.header.stamp.nanosec

        def finished() -> bool:
            return self.progress.pose_stamp == stamp or (
                self.base is not None and self.progress.done - self.base[1] >= self.sent)

        def lost() -> bool:  # a report from well after the sending that does not know of the image
            return (self.base is not None and self.progress.heard_at > sent_at + 1.0
                    and self.progress.taken - self.base[0] < self.sent)

        while not finished():
            if not self.spin_until(lambda: finished() or lost(), end - time.monotonic()):
                raise ReplayError(f"no pose for image {self.sent} on {self.wait_topic} within {self.timeout:g} s")
            if not finished():
                self.get_logger().warning(f"image {self.sent} did not arrive: sending it again")
                self.images.publish(message)
                sent_at = time.monotonic()

    def _on_pose(self, message: Odometry | PoseStamped) -> None:
        stamp = message.header.stamp
        self.progress.pose_stamp = stamp.sec * NANOSECONDS + stamp.nanosec

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        folder = self.wait_topic.rsplit("/", 1)[0].lstrip("/")
        node, _, camera = folder.rpartition("/")  # should the node have several cameras: its name, the camera's
        for status in message.status:
            if status.name.lstrip("/") in (f"{folder}: camera", f"{node}: {camera}/camera"):
                values = {entry.key: entry.value for entry in status.values}
                if all(values.get(key, "").isdigit() for key in COUNTS):
                    self.progress.taken = int(values[COUNTS[0]])
                    self.progress.done = sum(int(values[key]) for key in COUNTS[1:])
                    self.progress.heard_at = time.monotonic()


class CameraRun:
    """A context in which a camera publishes; at its end the camera and ROS are taken down.

    Signals, which end ROS, end it quietly, with whatever they interrupt.
    """

    def __init__(self) -> None:
        self.camera: Camera | None = None  # to be set once there is one

    def __enter__(self) -> CameraRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        is_signal = isinstance(error, (KeyboardInterrupt, ExternalShutdownException)) or (
            # A message was on its way out when the signal came.
            isinstance(error, Exception) and self.camera is not None and not rclpy.ok())
        if self.camera is not None:
            self.camera.destroy_node()
        rclpy.try_shutdown()
        return is_signal
