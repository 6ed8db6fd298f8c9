# SPDX-License-Identifier: Apache-2.0
"""An image's way through the node, over the middleware: from when it is sent to when its pose arrives.

Starts the node as a process, sends images of noise that moves at a steady rate, and compares with the time that the
node itself tells of (from an image's arrival to its pose). With --cameras it maps several in one node. The map
is subscribed to, as RViz would. Example: python benchmarks/node.py --rate 30 --seconds 60
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
PROFILE = Path(__file__).resolve().parent.parent / "config" / "fastdds.xml"
# Fast DDS reads one of these, by its version.
os.environ.setdefault(f"{'FASTRTPS' if os.environ.get('ROS_DISTRO') == 'jazzy' else 'FASTDDS'}_DEFAULT_PROFILES_FILE",
                      str(PROFILE))

import numpy as np  # noqa: E402 - after what the middleware reads from the environment
import rclpy  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from geometry_msgs.msg import PoseStamped  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, qos_profile_sensor_data  # noqa: E402
from rclpy.serialization import deserialize_message  # noqa: E402
from sensor_msgs.msg import Image, PointCloud2  # noqa: E402
from std_msgs.msg import Header  # noqa: E402

from lingbot_map_ros.ros.image_messages import image  # noqa: E402
from lingbot_map_ros.ros.messages import nanoseconds, time as to_stamp  # noqa: E402

NODE = "lingbot_map_node"
START_TIMEOUT = 600.0  # seconds: kernels may have to be compiled
STOP_TIMEOUT = 30.0  # seconds
IMAGES = 32  # different ones


class Bench:
    """Sends images of each camera and notes when their poses come."""

    def __init__(self, cameras: list[str], size: tuple[int, int], clouds: dict[str, QoSProfile]) -> None:
        rclpy.init(args=[])
        self.node = rclpy.create_node("node_benchmark")
        self.sent: dict[tuple[str, int], float] = {}  # by camera and stamp, monotonic seconds
        self.latencies: list[float] = []  # seconds
        self.told: list[float] = []  # the node's own mean latency a second, milliseconds
        self.clouds = 0  # that came
        self._largest_cloud = b""
        self._lock = threading.Lock()
        self.publishers = {}
        for camera in cameras:
            prefix = f"{camera}/" if camera else ""
            self.publishers[camera] = self.node.create_publisher(Image, f"{prefix}image", 5)
            self.node.create_subscription(
                PoseStamped, f"{NODE}/{prefix}pose", lambda message, camera=camera: self._on_pose(camera, message), 50)
            for cloud, qos in clouds.items():  # raw: what is done with them here must not hold up poses
                self.node.create_subscription(PointCloud2, f"{NODE}/{prefix}{cloud}", self._on_cloud, qos, raw=True)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)
        noise = np.random.default_rng(0).integers(0, 256, (size[0] // 8 + 1, size[1] // 8 + 1, 3), np.uint8)
        wall = noise.repeat(8, 0).repeat(8, 1)[: size[0], : size[1]]
        self._images = [image(np.roll(wall, 4 * index, axis=1), Header(frame_id="camera")) for index in range(IMAGES)]
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin)
        self._ended = False
        self._thread.start()

    def send(self, index: int) -> None:
        """Send an image of each camera."""
        message = self._images[index % IMAGES]
        for camera, publisher in self.publishers.items():
            stamp = time.time_ns()
            message.header.stamp = to_stamp(stamp)
            with self._lock:
                self.sent[camera, stamp] = time.monotonic()
            publisher.publish(message)

    def clear(self) -> None:
        """Forget what was measured so far."""
        with self._lock:
            self.latencies.clear()
            self.told.clear()
            self.clouds, self._largest_cloud = 0, b""
            self.sent.clear()

    @property
    def largest_cloud(self) -> int:
        """Points of the largest cloud that came."""
        return deserialize_message(self._largest_cloud, PointCloud2).width if self._largest_cloud else 0

    def close(self) -> None:
        """Take everything down."""
        self._ended = True
        self._thread.join()
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.shutdown()

    def _spin(self) -> None:
        while not self._ended:
            self._executor.spin_once(timeout_sec=0.1)

    def _on_pose(self, camera: str, message: PoseStamped) -> None:
        now = time.monotonic()
        with self._lock:
            sent = self.sent.pop((camera, nanoseconds(message.header.stamp)), None)
            if sent is not None:
                self.latencies.append(now - sent)

    def _on_cloud(self, message: bytes) -> None:
        with self._lock:
            self.clouds += 1
            if len(message) > len(self._largest_cloud):
                self._largest_cloud = message

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == f"{NODE}: model":
                values = {entry.key: entry.value for entry in status.values}
                if values.get("latency_mean_ms"):
                    with self._lock:
                        self.told.append(float(values["latency_mean_ms"]))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=30.0, help="images a second of each camera")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds that do not count")
    parser.add_argument("--image-size", type=int, nargs=2, default=(480, 640), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--cameras", type=int, default=1)
    parser.add_argument("--points", action="store_true", help="subscribe to each keyframe's points, too")
    parser.add_argument("--parameters", nargs="*", default=[], metavar="NAME:=VALUE", help="of the node")
    parser.add_argument("--json", default=None, metavar="FILE")
    arguments = parser.parse_args()
    cameras = [f"camera{i}" for i in range(arguments.cameras)] if arguments.cameras > 1 else [""]
    parameters = [*arguments.parameters, f"cameras:=[{', '.join(cameras)}]"] if len(cameras) > 1 else (
        arguments.parameters)

    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lingbot_map_ros.ros.node", "--ros-args",
             *(word for parameter in parameters for word in ("-p", parameter))], stdout=log, stderr=subprocess.STDOUT)
        clouds = {"map": QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)}
        if arguments.points:
            clouds["points"] = qos_profile_sensor_data
        bench = Bench(cameras, tuple(arguments.image_size), clouds)
        try:
            end = started + START_TIMEOUT
            while not all(publisher.get_subscription_count() for publisher in bench.publishers.values()):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"the node does not start:\n{Path(log.name).read_text()}")
                time.sleep(0.1)
            begin = time.monotonic()
            start_up = begin - started
            count = round((arguments.warm_up + arguments.seconds) * arguments.rate)
            first = round(arguments.warm_up * arguments.rate)
            for index in range(count):
                time.sleep(max(0.0, begin + index / arguments.rate - time.monotonic()))
                if index == first:
                    bench.clear()
                bench.send(index)
            time.sleep(1.0)
            show(bench, arguments, start_up, (count - first) * len(cameras))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                print(f"the node did not stop within {STOP_TIMEOUT:.0f} s and was killed")
                process.kill()
                process.wait()
            bench.close()


def show(bench: Bench, arguments: argparse.Namespace, start_up: float, sent: int) -> None:
    """Print what was measured, and write it to the file that was asked for."""
    latencies, told = 1000 * np.array(bench.latencies), bench.told
    if not len(latencies):
        sys.exit("no pose came")
    report = {"arguments": vars(arguments), "sent": sent, "poses": len(latencies),
              "poses_per_second": len(latencies) / arguments.seconds,
              **{f"p{part}_ms": float(np.percentile(latencies, part)) for part in (50, 90, 99)},
              "start_seconds": start_up, "node_mean_ms": float(np.mean(told)) if told else None,
              "clouds": bench.clouds, "largest_cloud": bench.largest_cloud}
    height, width = arguments.image_size
    print(f"ready after {start_up:.1f} s\n{arguments.cameras} x {width}x{height} at {arguments.rate:g} Hz: "
          f"{report['poses']} poses of {sent} images, {report['poses_per_second']:.1f} a second\n"
          f"from sending to pose: p50 {report['p50_ms']:.1f}, p90 {report['p90_ms']:.1f}, p99 {report['p99_ms']:.1f} ms"
          + (f"; the node itself tells of {report['node_mean_ms']:.1f} ms on average" if told else "")
          + (f"\n{bench.clouds} clouds of up to {report['largest_cloud']:,} points came" if bench.clouds else ""),
          flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
