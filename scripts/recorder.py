# SPDX-License-Identifier: Apache-2.0
"""What the demo hears: the mapping node's results and, of a synthetic camera, the truth."""
from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.node import Node
from sensor_msgs.msg import Image, PointCloud2

from lingbot_map_ros.mapping.evaluation.metrics import DepthErrors, depth_errors
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.messages import POINT_TYPE, nanoseconds

NODE = "lingbot_map_node"
CAMERA = "synthetic_camera"
MAX_POSES = 100_000  # recorded; the oldest are dropped beyond
MAX_DEPTHS = 50  # true ones that wait for the node's
DEPTH_STEP = 2  # every second pixel of every second row tells the errors, and leaves the processor to the node

Poses = tuple[np.ndarray, np.ndarray]  # stamps in nanoseconds [n]; x y z qx qy qz qw [n, 7]


@dataclass(frozen=True)
class DepthError:
    """Errors of one frame's depths, and the share of pixels that have one."""

    errors: DepthErrors
    coverage: float


class Recorder(Node):
    """Keeps what the mapping node and, with `truth`, the synthetic camera publish."""

    def __init__(self, truth: bool) -> None:
        super().__init__("lingbot_map_demo")
        self._poses: deque[tuple[int, list[float]]] = deque(maxlen=MAX_POSES)
        self._true_poses: deque[tuple[int, list[float]]] = deque(maxlen=MAX_POSES)
        self._true_depths: dict[int, np.ndarray] = {}
        self.depth_errors: deque[DepthError] = deque(maxlen=MAX_POSES)
        self.latencies: deque[float] = deque(maxlen=MAX_POSES)  # seconds from an image's stamp to its pose
        self.arrivals: deque[float] = deque(maxlen=MAX_POSES)  # monotonic seconds of the poses
        self.map: PointCloud2 | None = None
        self._statuses: dict[str, dict] = {}
        for topic, callback in ((interfaces.ODOMETRY, self._on_odometry), (interfaces.MAP, self._on_map),
                                (interfaces.DIAGNOSTICS, self._on_diagnostics)):
            self.create_subscription(topic.message, topic.name.replace("~", f"/{NODE}"), callback, topic.qos)
        if truth:
            depth = interfaces.DEPTH
            self.create_subscription(depth.message, depth.name.replace("~", f"/{NODE}"), self._on_depth, depth.qos)
            self.create_subscription(Odometry, "ground_truth/odometry", self._on_true_pose, 100)
            self.create_subscription(Image, "ground_truth/depth", self._on_true_depth, 10)

    # -- what came --------------------------------------------------------------------------------------------------

    @property
    def pose_count(self) -> int:
        """Return how many poses came."""
        return len(self._poses)

    def poses(self) -> Poses:
        """Return the node's poses, oldest first."""
        return _arrays(self._poses)

    def true_poses(self) -> Poses:
        """Return the camera's true poses, oldest first."""
        return _arrays(self._true_poses)

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the newest map: positions [n, 3], colours uint8 [n, 3], confidences [n]."""
        if self.map is None:
            return None
        rows = np.frombuffer(self.map.data, dtype=POINT_TYPE)
        xyz = np.stack([rows["x"], rows["y"], rows["z"]], axis=1)
        rgb = rows["rgb"][:, None] >> np.array([16, 8, 0], dtype=np.uint32) & 0xFF
        return xyz, rgb.astype(np.uint8), rows["confidence"].copy()

    def status(self, node: str = NODE) -> dict[str, dict]:
        """Return a node's newest diagnostics by part: level, message and values."""
        prefix = f"{node}: "
        return {name.removeprefix(prefix): status for name, status in self._statuses.items() if name.startswith(prefix)}

    def complete(self) -> bool:
        """Tell whether the map and the diagnostics are those of the last pose."""
        processed = self.status().get("camera", {}).get("values", {}).get("frames_processed", 0)
        return (self.pose_count > 0 and self.map is not None
                and nanoseconds(self.map.header.stamp) >= self._poses[-1][0] and processed >= self.pose_count)

    # -- figures ----------------------------------------------------------------------------------------------------

    def depth_summary(self) -> dict[str, float] | None:
        """Return the means of the depth errors over all frames; None where there are none."""
        if not self.depth_errors:
            return None
        rows = [asdict(entry.errors) | {"coverage": entry.coverage} for entry in self.depth_errors]
        return {"frames": len(rows), **{name: float(np.mean([row[name] for row in rows]))
                                        for name in ("abs_rel", "delta_1", "coverage")}}

    def latency_summary(self) -> dict[str, float]:
        """Return the milliseconds from an image's stamp to its pose, without the first ones, which waited together."""
        steady = 1e3 * np.array(self.latencies)[self.pose_count // 10:]
        return {"median": float(np.median(steady)), "p95": float(np.percentile(steady, 95)), "max": float(steady.max())}

    def rate(self) -> float:
        """Return the poses a second, from the first to the last one's arrival."""
        return (len(self.arrivals) - 1) / max(self.arrivals[-1] - self.arrivals[0], 1e-9)

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _on_odometry(self, message: Odometry) -> None:
        self._poses.append(_row(message))
        self.arrivals.append(time.monotonic())
        self.latencies.append(1e-9 * (self.get_clock().now().nanoseconds - self._poses[-1][0]))

    def _on_true_pose(self, message: Odometry) -> None:
        self._true_poses.append(_row(message))

    def _on_true_depth(self, message: Image) -> None:
        self._true_depths[nanoseconds(message.header.stamp)] = _depth(message)
        if len(self._true_depths) > MAX_DEPTHS:
            del self._true_depths[next(iter(self._true_depths))]

    def _on_depth(self, message: Image) -> None:
        known = self._true_depths.pop(nanoseconds(message.header.stamp), None)
        if known is None:
            return
        predicted, known = (values[::DEPTH_STEP, ::DEPTH_STEP] for values in (_depth(message), known))
        covered = np.isfinite(predicted)
        errors = depth_errors(predicted, np.where(covered, known, np.nan))
        if errors is not None:
            self.depth_errors.append(DepthError(errors, float(covered.mean())))

    def _on_map(self, message: PointCloud2) -> None:
        self.map = message

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self._statuses[status.name.lstrip("/")] = {
                "level": int.from_bytes(status.level, "little"), "message": status.message,
                "values": {entry.key: _number(entry.value) for entry in status.values}}


def _row(message: Odometry) -> tuple[int, list[float]]:
    p, q = message.pose.pose.position, message.pose.pose.orientation
    return nanoseconds(message.header.stamp), [p.x, p.y, p.z, q.x, q.y, q.z, q.w]


def _arrays(rows: deque[tuple[int, list[float]]]) -> Poses:
    return np.array([stamp for stamp, _ in rows], dtype=np.int64), np.array([row for _, row in rows]).reshape(-1, 7)


def _depth(message: Image) -> np.ndarray:
    return np.frombuffer(message.data, "<f4").reshape(message.height, message.step // 4)[:, :message.width]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
