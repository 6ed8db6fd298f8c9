# SPDX-License-Identifier: Apache-2.0
"""Map a sequence end to end: replay process -> DDS -> node process -> DDS -> this recorder -> demo_output/."""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import PointCloud2

from lingbot_map_ros.mapping.export import write_ply
from lingbot_map_ros.mapping.topdown import write_topdown
from lingbot_map_ros.mapping.trajectory import write_tum
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.messages import POINT_TYPE, nanoseconds
from lingbot_map_ros.ros.replay import Frames, ReplayError

ROOM = Path(__file__).resolve().parent / "demo_room"
NODE = "lingbot_map_node"
MAX_POSES = 100_000  # recorded; the oldest are dropped beyond
MAP_PERIOD = 1.0  # seconds between the node's maps
LAST_MESSAGES = 2 * MAP_PERIOD  # seconds to wait for what the node says of the last image
EXIT_TIMEOUT = 20.0  # seconds for a process to end when asked to


class DemoError(Exception):
    """Why there is no result, in one line."""


class Interrupt:
    """Notes SIGINT and SIGTERM instead of raising at once: a process being started then would be left behind."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.came = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self.came:
            raise KeyboardInterrupt


class Recorder(Node):
    """Keeps what the node publishes."""

    def __init__(self) -> None:
        super().__init__("lingbot_map_demo")
        self.poses: deque[tuple[int, list[float]]] = deque(maxlen=MAX_POSES)  # nanoseconds; x y z qx qy qz qw
        self.map: PointCloud2 | None = None
        self.diagnostics: DiagnosticArray | None = None
        for topic, callback in ((interfaces.ODOMETRY, self._on_odometry), (interfaces.MAP, self._on_map),
                                (interfaces.DIAGNOSTICS, self._on_diagnostics)):
            self.create_subscription(topic.message, topic.name.replace("~", f"/{NODE}"), callback, topic.qos)

    def _on_odometry(self, message: Odometry) -> None:
        p, q = message.pose.pose.position, message.pose.pose.orientation
        self.poses.append((nanoseconds(message.header.stamp), [p.x, p.y, p.z, q.x, q.y, q.z, q.w]))

    def _on_map(self, message: PointCloud2) -> None:
        self.map = message

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        if any(status.name.lstrip("/").startswith(f"{NODE}:") for status in message.status):
            self.diagnostics = message

    def status(self) -> dict[str, dict]:
        """Return the newest diagnostics by part: level, message and values."""
        parts = {}
        for status in self.diagnostics.status if self.diagnostics else []:
            parts[status.name.split(": ")[-1]] = {
                "level": int.from_bytes(status.level, "little"), "message": status.message,
                "values": {entry.key: _number(entry.value) for entry in status.values}}
        return parts

    def complete(self) -> bool:
        """Tell whether the map and the diagnostics are those of the last pose."""
        processed = self.status().get("camera", {}).get("values", {}).get("frames_processed", 0)
        return (len(self.poses) > 0 and self.map is not None
                and nanoseconds(self.map.header.stamp) >= self.poses[-1][0] and processed >= len(self.poses))

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the newest map: positions [n, 3], colours uint8 [n, 3], confidences [n]."""
        if self.map is None:
            raise DemoError(f"no map came on /{NODE}/map")
        rows = np.frombuffer(self.map.data, dtype=POINT_TYPE)
        xyz = np.stack([rows["x"], rows["y"], rows["z"]], axis=1)
        rgb = rows["rgb"][:, None] >> np.array([16, 8, 0], dtype=np.uint32) & 0xFF
        return xyz, rgb.astype(np.uint8), rows["confidence"].copy()


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def start(module: str, *arguments: str, log: Path | None = None) -> subprocess.Popen:
    """Start one of the package's executables as a process of its own."""
    # In a session of its own a terminal's Ctrl-C reaches this process alone, which then ends the others in order.
    sink = open(log, "wb") if log else None
    try:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], start_new_session=True,
                                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink and subprocess.STDOUT)
    finally:
        if sink:
            sink.close()


def stop(process: subprocess.Popen) -> int:
    """Interrupt a process as Ctrl-C would, and return its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def record(
    recorder: Recorder, node: subprocess.Popen, replay: subprocess.Popen, images: int | None, log: Path,
    interrupt: Interrupt,
) -> None:
    """Take in messages and print progress until the replay has ended and the last map has come.

    Raises DemoError where a process failed, KeyboardInterrupt after a signal.
    """
    started = shown = time.monotonic()
    replay_ended = None
    while True:
        rclpy.spin_once(recorder, timeout_sec=0.1)
        interrupt.check()
        now = time.monotonic()
        if node.poll() is not None:
            raise DemoError(f"the node ended with status {node.returncode}: {_last_line(log)}")
        if now - shown >= 1.0:
            shown = now
            print(progress(recorder, images, now - started), flush=True)
        if replay_ended is None and replay.poll() is not None:
            if replay.returncode:
                raise DemoError(f"the replay ended with status {replay.returncode} after {len(recorder.poses)} "
                                f"poses; the node's last words: {_last_line(log)}")
            replay_ended = now
        if replay_ended is not None and (recorder.complete() or now - replay_ended > LAST_MESSAGES):
            print(progress(recorder, images, now - started), flush=True)
            return


def progress(recorder: Recorder, images: int | None, seconds: float) -> str:
    """Return one line on how far things are."""
    parts = recorder.status()
    camera, cache, model = (parts.get(part, {}).get("values", {}) for part in ("camera", "cache", "model"))
    done = camera.get("frames_processed", 0)
    points = recorder.map.width * recorder.map.height if recorder.map else 0
    line = f"demo: {seconds:5.1f} s  images {done}{f'/{images}' if images else ''}  poses {len(recorder.poses)}  "
    line += f"map points {points:,}"
    if "live_pages" in cache:
        line += f"  cache pages {cache['live_pages']} live, {cache['free_pages']} free"
    if model.get("frames_per_second"):
        line += f"  {model['frames_per_second']} frames/s"
    if not parts:
        line += "  (the node is loading its model)"
    return line


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(it said nothing)"


def write_output(folder: Path, recorder: Recorder, seconds: float) -> str:
    """Write the result's files; return a summary. Raises DemoError where there is no result."""
    if len(recorder.poses) < 2:
        raise DemoError(f"{len(recorder.poses)} poses came: is the sequence shorter than the scale frames are many?")
    xyz, rgb, confidence = recorder.points()
    stamps = np.array([stamp for stamp, _ in recorder.poses])
    poses = np.array([pose for _, pose in recorder.poses])
    if len(xyz) == 0:
        raise DemoError("the map is empty: no pixel reaches the node's confidence_threshold")
    if not np.isfinite(poses).all() or not np.isfinite(xyz).all():
        raise DemoError("a pose or a point is not finite")
    steps = np.linalg.norm(np.diff(poses[:, :3], axis=0), axis=1)
    run = {
        "poses": len(poses), "map_points": len(xyz), "seconds": round(seconds, 2),  # loading included
        "path_length": float(steps.sum()), "step_median": float(np.median(steps)), "step_max": float(steps.max()),
    }
    write_ply(folder / "map.ply", xyz, rgb, confidence)
    write_tum(folder / "trajectory.txt", stamps, poses)
    write_topdown(folder / "topdown.png", xyz, rgb, poses)
    (folder / "diagnostics.json").write_text(json.dumps({"run": run, "status": recorder.status()}, indent=2) + "\n")
    return (f"{run['poses']} poses, {run['map_points']:,} map points, path {run['path_length']:.2f} model units, "
            f"step {run['step_median']:.4f} (median) to {run['step_max']:.4f} (most)")


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments for the node that follow --ros-args."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Map a folder of images or a video with the node; write map.ply, "
        "trajectory.txt, topdown.png and diagnostics.json. What follows --ros-args goes to the node.")
    parser.add_argument("source", nargs="?", default=str(ROOM), metavar="FOLDER|VIDEO",
                        help="what the camera sees (default: a rendered room that comes with the project)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder to write")
    parser.add_argument("--rate", type=float, default=30.0, help="most images a second (30); the node is waited for")
    parser.add_argument("--checkpoint", help="weights of the published model; without, the embedded model runs")
    cut = arguments.index("--ros-args") if "--ros-args" in arguments else len(arguments)
    return parser.parse_args(arguments[:cut]), arguments[cut + 1:]


def main() -> int:
    """Run the demo: status 0 with all files written, 1 with the reason, 2 on a bad argument."""
    options, node_arguments = parse_arguments(sys.argv[1:])
    try:
        images = len(Frames(options.source).files) or None
        options.output.mkdir(parents=True, exist_ok=True)
    except (ReplayError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    if interfaces.TFMessage is None:
        print("demo: tf2_msgs is not here, so the node runs without /tf", flush=True)
    log = options.output / "node.log"
    parameters = {"publish_tf": "true", "map_period": str(MAP_PERIOD), "diagnostics_period": "0.5"}
    if options.checkpoint:
        parameters |= {"preset": "lingbot_map", "checkpoint": os.path.abspath(options.checkpoint)}
    overrides = [word for name, value in parameters.items() for word in ("-p", f"{name}:={value}")]
    started = time.monotonic()
    processes: list[subprocess.Popen] = []
    interrupt = Interrupt()
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    recorder = Recorder()
    try:
        node = start("lingbot_map_ros.ros.node", "--ros-args", *overrides, *node_arguments, log=log)
        processes.append(node)
        replay = start("lingbot_map_ros.ros.replay", options.source, "--wait", f"/{NODE}/odometry",
                       "--stamps", "zero", "--rate", str(options.rate))
        processes.append(replay)
        record(recorder, node, replay, images, log, interrupt)
        status = stop(node)
        if status:
            raise DemoError(f"the node ended with status {status} when interrupted: {_last_line(log)}")
        print(f"demo: {write_output(options.output, recorder, time.monotonic() - started)}")
        print(f"demo: wrote map.ply, trajectory.txt, topdown.png and diagnostics.json to {options.output}/")
        return 0
    except DemoError as error:
        print(f"demo: {error} (all of it: {log})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    finally:
        for process in reversed(processes):
            stop(process)
        recorder.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    sys.exit(main())
