# SPDX-License-Identifier: Apache-2.0
"""Publish a folder of images, a video or a bag as a camera: `lingbot_map_replay FOLDER|VIDEO|BAG`."""
from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import rclpy
import yaml
from builtin_interfaces.msg import Time
from rclpy.utilities import remove_ros_args
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header

from lingbot_map_ros.image_files import NANOSECONDS, Frames, ReplayError, stamp_from_name
from lingbot_map_ros.ros.camera import Camera, CameraRun
from lingbot_map_ros.ros.image_messages import camera_info, image


# -- messages -------------------------------------------------------------------------------------------------------

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
    """Return an ideal camera with a horizontal field of view. Pixels have their centres at integers."""
    f = width / 2 / math.tan(math.radians(fov_degrees) / 2)
    cx, cy = (width - 1) / 2, (height - 1) / 2
    return camera_info(np.array([[f, 0.0, cx], [0.0, f, cy], [0.0, 0.0, 1.0]]), (height, width), Header())


def scale_camera_info(info: CameraInfo, width: int, height: int) -> CameraInfo:
    """Return the calibration of the same camera's images resized to width x height pixels."""
    sx, sy = width / info.width, height / info.height
    # It is the edges of pixels that scale, half a pixel from their centres.
    resize = np.array([[sx, 0.0, (sx - 1) / 2], [0.0, sy, (sy - 1) / 2], [0.0, 0.0, 1.0]])
    return CameraInfo(width=width, height=height, distortion_model=info.distortion_model, d=info.d,
                      k=(resize @ np.reshape(info.k, (3, 3))).ravel(), r=info.r,
                      p=(resize @ np.reshape(info.p, (3, 4))).ravel())


# -- images ---------------------------------------------------------------------------------------------------------

class BagFrames:
    """The images on a topic of a ROS 2 bag, named after their stamps in nanoseconds."""

    def __init__(self, path: str | Path, topic: str | None) -> None:
        """Raises ReplayError for a bag that cannot be read, also where the modules for that are missing."""
        try:  # not needed, and perhaps not there, for other sources
            from lingbot_map_ros.mapping.evaluation.sources import BagSource
        except ImportError as error:
            raise ReplayError(f"reading bags needs {error.name}; `ros2 bag play {path}` plays them, too") from error
        self._source = BagSource(Path(path), topic)
        self.count = len(self._source)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each image's name and its pixels, BGR uint8 [height, width, 3]."""
        for frame in self._source:
            yield f"{frame.stamp_ns:019d}", cv2.cvtColor(frame.rgb, cv2.COLOR_RGB2BGR)


def open_frames(path: str | Path, topic: str | None = None) -> Frames | BagFrames:
    """Open a folder of images, a video or a bag (then `topic` may choose one). Raises ReplayError."""
    path = Path(path)
    if path.suffix in (".mcap", ".db3") or (path / "metadata.yaml").is_file():
        return BagFrames(path, topic)
    if topic:
        raise ReplayError(f"a topic was given, but {path} is no bag (a folder with metadata.yaml)")
    return Frames(path)


# -- the camera -----------------------------------------------------------------------------------------------------

class Replay(Camera):
    """Plays images."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.calibration = load_camera_info(options.camera_info) if options.camera_info else None
        super().__init__("lingbot_map_replay", calibrated=bool(self.calibration or options.fov))
        self.options = options
        if options.wait:
            self.wait_for(options.wait, options.timeout)

    def run(self, frames: Iterable[tuple[str, np.ndarray]]) -> int:
        """Publish all frames `loop` times (0: for ever) and return their number. Raises ReplayError."""
        if self.options.wait:
            self.wait_for_node()
        period = 1.0 / self.options.rate
        due = time.monotonic()
        loop = 0
        while not self.options.loop or loop < self.options.loop:
            for name, pixels in frames:
                self.spin_for(due - time.monotonic())
                message = self._message(name, pixels)
                self.publish_image(message, self._camera_info(message.width, message.height))
                due = max(due + period, time.monotonic())  # a late frame does not hurry those after it
                if self.options.wait:
                    self.wait_for_pose(message)
            loop += 1
        self.spin_for(0.5)  # let the middleware deliver the last one
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
        return image(pixels, Header(stamp=stamp, frame_id=self.options.frame_id), "bgr8")

    def _camera_info(self, width: int, height: int) -> CameraInfo | None:
        if self.options.fov:
            return pinhole_camera_info(width, height, self.options.fov)
        return self.calibration and scale_camera_info(self.calibration, width, height)


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
        description="Publish a folder of images, a video or a ROS 2 bag's images on the topic `image`, as a camera "
                    "would. ROS arguments (remapping, parameters) follow --ros-args.")
    parser.add_argument("source", metavar="FOLDER|VIDEO|BAG")
    parser.add_argument("--topic", help="of a bag (its only image topic)")
    parser.add_argument("--rate", type=_between(0, 1000), default=10.0, help="images a second, at most (10)")
    parser.add_argument("--loop", type=int, default=1, help="how often to play it; 0: until interrupted (1)")
    parser.add_argument("--stamps", choices=("now", "names", "zero"), default="now",
                        help="time stamps: the clock's, the files' names or a bag's own, or from 0 at the rate (now)")
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
    status = 0
    with CameraRun() as run:
        try:
            frames = open_frames(options.source, options.topic)
            if options.stamps == "names" and isinstance(frames, Frames):
                for file in frames.files or [Path("0")]:
                    stamp_from_name(file.stem)
            rclpy.init(args=sys.argv)
            run.camera = node = Replay(options)
            sent = node.run(frames)
            node.get_logger().info(f"{sent} images published on {node.images.topic_name}")
        except ReplayError as error:
            print(f"lingbot_map_replay: {error}", file=sys.stderr)
            status = 2 if run.camera is None or not run.camera.sent else 1
    sys.exit(status)


if __name__ == "__main__":
    main()
