# SPDX-License-Identifier: Apache-2.0
"""Publish a folder of images or a video as a camera: `lingbot_map_replay FOLDER|VIDEO`."""
from __future__ import annotations

import argparse
import math
import re
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import rclpy
import yaml
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Odometry
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, QoSReliabilityPolicy
from rclpy.utilities import remove_ros_args
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header

from lingbot_map_ros.image_files import NANOSECONDS, Frames, ReplayError, stamp_from_name

COUNTS = ("frames_received", "frames_processed", "frames_dropped", "frames_failed")  # the node's, on /diagnostics
START_TIMEOUT = 300.0  # seconds for the waited-for node to load its model and subscribe


# -- messages -------------------------------------------------------------------------------------------------------

def image_message(pixels: np.ndarray, header: Header) -> Image:
    """Return BGR pixels uint8 [height, width, 3] as a bgr8 message."""
    message = Image(header=header, height=pixels.shape[0], width=pixels.shape[1], encoding="bgr8", is_bigendian=0,
                    step=pixels.shape[1] * 3)
    message.data = array("B", np.ascontiguousarray(pixels).tobytes())
    return message


def load_camera_info(path: str | Path) -> CameraInfo:
    """Read a calibration file as ROS's camera calibrator writes it. Raises ReplayError if it is not one."""
    try:
        entries = yaml.safe_load(Path(path).read_text())
        return CameraInfo(
            width=int(entries["image_width"]), height=int(entries["image_height"]),
            distortion_model=str(entries.get("distortion_model", "plumb_bob")),
            d=[float(x) for x in entries.get("distortion_coefficients", {}).get("data", [])],
            k=_numbers(entries, "camera_matrix", 9),
            r=_numbers(entries, "rectification_matrix", 9) if "rectification_matrix" in entries else np.eye(3).ravel(),
            p=_numbers(entries, "projection_matrix", 12) if "projection_matrix" in entries
            else np.eye(3, 4).ravel() * 0)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ReplayError(f"{path} is no camera calibration ({reason})") from error


def _numbers(entries: dict, name: str, count: int) -> list[float]:
    numbers = [float(x) for x in entries[name]["data"]]
    if len(numbers) != count:
        raise ValueError(f"{name} has {len(numbers)} numbers, expected {count}")
    return numbers


def pinhole_camera_info(width: int, height: int, fov_degrees: float) -> CameraInfo:
    """Return an ideal camera with a horizontal field of view."""
    f = width / 2 / math.tan(math.radians(fov_degrees) / 2)
    cx, cy = width / 2, height / 2
    return CameraInfo(width=width, height=height, distortion_model="plumb_bob", d=[0.0] * 5,
                      k=[f, 0.0, cx, 0.0, f, cy, 0.0, 0.0, 1.0], r=np.eye(3).ravel(),
                      p=[f, 0.0, cx, 0.0, 0.0, f, cy, 0.0, 0.0, 0.0, 1.0, 0.0])


def scale_camera_info(info: CameraInfo, width: int, height: int) -> CameraInfo:
    """Return the calibration of the same camera's images resized to width x height pixels."""
    sx, sy = width / info.width, height / info.height
    rows = np.array([sx, sy, 1.0])[:, None]
    return CameraInfo(width=width, height=height, distortion_model=info.distortion_model, d=info.d,
                      k=(np.reshape(info.k, (3, 3)) * rows).ravel(), r=info.r,
                      p=(np.reshape(info.p, (3, 4)) * rows).ravel())


# -- pacing ---------------------------------------------------------------------------------------------------------

@dataclass
class Progress:
    """What the waited-for node has said of the images."""

    pose_stamp: int = -1  # nanoseconds, of the newest pose
    taken: int | None = None  # images that the node has received, and of these ...
    done: int | None = None  # ... those that it has processed, dropped or refused; None: nothing heard
    heard_at: float = -math.inf  # monotonic seconds of the report of these two


class Replay(Node):
    """The camera."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("lingbot_map_replay")
        self.options = options
        self.progress = Progress()
        qos = QoSProfile(depth=10, reliability=QoSReliabilityPolicy.RELIABLE)  # serves both kinds of subscription
        self.images = self.create_publisher(Image, "image", qos)
        self.camera_infos = None
        self.camera_info = load_camera_info(options.camera_info) if options.camera_info else None
        if options.camera_info or options.fov:
            self.camera_infos = self.create_publisher(CameraInfo, "camera_info", qos)
        self.sent = 0
        self.base: tuple[int, int] | None = None  # the node's counts (taken, done) before the first image
        if options.wait:
            self.wait_topic = self.resolve_topic_name(options.wait)
            kind = PoseStamped if self.wait_topic.endswith("/pose") else Odometry
            self.create_subscription(kind, self.wait_topic, self._on_pose, qos)
            self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, qos)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self)

    def run(self, frames: Frames) -> int:
        """Publish all frames `loop` times (0: for ever) and return their number. Raises ReplayError."""
        if self.options.wait:
            self._wait_for_node()
        period = 1.0 / self.options.rate
        due = time.monotonic()
        loop = 0
        while not self.options.loop or loop < self.options.loop:
            for name, pixels in frames:
                self._spin_until(lambda: False, due - time.monotonic())
                message = self._message(name, pixels)
                self._publish(message)
                due = max(due + period, time.monotonic())  # a late frame does not hurry those after it
                if self.options.wait:
                    self._wait_for_pose(message)
            loop += 1
        self._spin_until(lambda: False, 0.5)  # let the middleware deliver the last one
        return self.sent

    def _message(self, name: str, pixels: np.ndarray) -> Image:
        if self.options.size:
            pixels = cv2.resize(pixels, self.options.size, interpolation=cv2.INTER_AREA)
        if self.options.stamps == "now":
            nanoseconds = self.get_clock().now().nanoseconds
        elif self.options.stamps == "zero":
            nanoseconds = round(self.sent * NANOSECONDS / self.options.rate)
        else:
            nanoseconds = stamp_from_name(name)
        stamp = Time(sec=nanoseconds // NANOSECONDS, nanosec=nanoseconds % NANOSECONDS)
        return image_message(pixels, Header(stamp=stamp, frame_id=self.options.frame_id))

    def _publish(self, message: Image) -> None:
        if self.camera_infos is not None:
            size = (message.width, message.height)
            info = self.camera_info or pinhole_camera_info(*size, self.options.fov)
            info = scale_camera_info(info, *size)
            info.header = message.header
            self.camera_infos.publish(info)
        self.images.publish(message)
        self.sent += 1

    def _spin_until(self, condition: Callable[[], bool], seconds: float) -> bool:
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

    def _wait_for_node(self) -> None:
        """Wait until the node subscribes, its poses can arrive and its counts are known."""
        def matched() -> bool:
            return self.images.get_subscription_count() > 0 and self.count_publishers(self.wait_topic) > 0

        if not self._spin_until(matched, START_TIMEOUT):
            raise ReplayError(f"within {START_TIMEOUT:g} s nobody subscribed to {self.images.topic_name} "
                              f"and published {self.wait_topic}")
        matched_at = time.monotonic()
        if self._spin_until(lambda: self.progress.heard_at > matched_at, 3.0):
            self.base = (self.progress.taken, self.progress.done)
        else:
            self.get_logger().warning("no counts of this node on /diagnostics: until the first pose, images go out at "
                                      "the rate")

    def _wait_for_pose(self, message: Image) -> None:
        """Wait for the last image's pose, or for the node's word that it is done with it.

        A node gives no pose while its first frames gather, nor for a frame whose pose it does not trust; its counts on
        /diagnostics tell. They tell too when an image never arrived: then it is sent again.
        """
        if self.base is None and self.progress.pose_stamp < 0:
            return
        end = time.monotonic() + self.options.timeout
        sent_at = time.monotonic()
        stamp = message.header.stamp.sec * NANOSECONDS + message.header.stamp.nanosec

        def finished() -> bool:
            return self.progress.pose_stamp == stamp or (
                self.base is not None and self.progress.done - self.base[1] >= self.sent)

        def lost() -> bool:  # a report from well after the sending that does not know of the image
            return (self.base is not None and self.progress.heard_at > sent_at + 1.0
                    and self.progress.taken - self.base[0] < self.sent)

        while not finished():
            if not self._spin_until(lambda: finished() or lost(), end - time.monotonic()):
                raise ReplayError(f"no pose for image {self.sent} on {self.wait_topic} "
                                  f"within {self.options.timeout:g} s")
            if not finished():
                self.get_logger().warning(f"image {self.sent} did not arrive: sending it again")
                self.images.publish(message)
                sent_at = time.monotonic()

    def _on_pose(self, message: Odometry | PoseStamped) -> None:
        stamp = message.header.stamp
        self.progress.pose_stamp = stamp.sec * NANOSECONDS + stamp.nanosec

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        node = self.wait_topic.rsplit("/", 1)[0].lstrip("/")
        for status in message.status:
            if status.name.lstrip("/") == f"{node}: camera":
                values = {entry.key: entry.value for entry in status.values}
                if all(values.get(key, "").isdigit() for key in COUNTS):
                    self.progress.taken = int(values[COUNTS[0]])
                    self.progress.done = sum(int(values[key]) for key in COUNTS[1:])
                    self.progress.heard_at = time.monotonic()


# -- command line ---------------------------------------------------------------------------------------------------

def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 640x480")
    return int(match[1]), int(match[2])


def _between(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least < value < most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value
    return number


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exits with status 2 and one line on a bad one."""
    parser = argparse.ArgumentParser(
        prog="lingbot_map_replay",
        description="Publish a folder of images or a video on the topic `image`, as a camera would. ROS arguments "
                    "(remapping, parameters) follow --ros-args.")
    parser.add_argument("source", metavar="FOLDER|VIDEO")
    parser.add_argument("--rate", type=_between(0, 1000), default=10.0, help="images a second, at most (10)")
    parser.add_argument("--loop", type=int, default=1, help="how often to play it; 0: until interrupted (1)")
    parser.add_argument("--stamps", choices=("now", "names", "zero"), default="now",
                        help="time stamps: the clock's, the files' names, or from 0 at the rate (now)")
    parser.add_argument("--frame-id", default="camera_optical_frame", help="of the images (camera_optical_frame)")
    parser.add_argument("--size", type=_size, help="resize to WIDTHxHEIGHT pixels")
    parser.add_argument("--camera-info", metavar="FILE", help="calibration (YAML) to publish on `camera_info`")
    parser.add_argument("--fov", type=_between(0, 180),
                        help="horizontal field of view in degrees: publishes an ideal camera on `camera_info`")
    parser.add_argument("--wait", metavar="TOPIC",
                        help="pose or odometry topic: the next image goes out after the last one's pose has come, so "
                             "that no image is dropped and a run can be repeated (/lingbot_map_node/odometry)")
    parser.add_argument("--timeout", type=_between(0, 1e6), default=60.0, help="seconds to wait for a pose (60)")
    options = parser.parse_args(arguments)
    if options.loop < 0:
        parser.error("--loop cannot be negative")
    if options.camera_info and options.fov:
        parser.error("--camera-info and --fov exclude each other")
    return options


def main() -> None:
    """Run the executable: status 0 at the end or when interrupted, 1 if a pose does not come, 2 on bad input."""
    options = parse_arguments(remove_ros_args(sys.argv)[1:])
    node = None
    status = 0
    try:
        frames = Frames(options.source)
        if options.stamps == "names":
            for file in frames.files or [Path("0")]:
                stamp_from_name(file.stem)
        rclpy.init(args=sys.argv)
        node = Replay(options)
        sent = node.run(frames)
        node.get_logger().info(f"{sent} images published on {node.images.topic_name}")
    except ReplayError as error:
        print(f"lingbot_map_replay: {error}", file=sys.stderr)
        status = 2 if node is None or not node.sent else 1
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except Exception:  # a message was on its way out when the signal came
        if node is None or rclpy.ok():
            raise
    finally:
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
