# SPDX-License-Identifier: Apache-2.0
"""Map a sequence end to end: camera process -> DDS -> node process -> DDS -> this recorder -> demo_output/."""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import rclpy
from rclpy.signals import SignalHandlerOptions
from recorder import CAMERA, NODE, Poses, Recorder

from lingbot_map_ros.mapping.evaluation.metrics import TrajectoryErrors, trajectory_errors
from lingbot_map_ros.mapping.export import write_ply
from lingbot_map_ros.mapping.topdown import write_comparison, write_topdown
from lingbot_map_ros.mapping.trajectory import write_tum
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.replay import ReplayError, open_frames
from lingbot_map_ros.ros.synthetic_camera import PLACES, SyntheticCameraParameters

MAP_PERIOD = 1.0  # seconds between the node's maps
LAST_MESSAGES = 2 * MAP_PERIOD  # seconds to wait for what the node says of the last image
EXIT_TIMEOUT = 20.0  # seconds for a process to end when asked to
SYNTHETIC_RATE, REPLAY_RATE = 10.0, 30.0  # images a second unless asked otherwise
TRUE_POINTS, TRUE_POINT_SIZE = 600_000, 0.045  # of the true surfaces, for the picture; metres


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


# -- processes ------------------------------------------------------------------------------------------------------

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


def start_camera(options: argparse.Namespace, log: Path) -> subprocess.Popen:
    """Start what publishes the images: they come in real time, or each after the one before has been mapped."""
    if options.source is None:
        # All is rendered before the first image goes out: two processor cores are then the node's. Twice the size of
        # the model's images, so that they need no more than one ray a pixel.
        return start("lingbot_map_ros.ros.synthetic_camera", "--ros-args", *_overrides({
            "seed": options.seed, "place": options.place, "loop_frames": options.frames, "supersampling": 1,
            "render_ahead": options.frames, "rate": float(options.rate or SYNTHETIC_RATE), "loops": 1,
            "wait_for_subscriber": True}), log=log)
    topic = ["--topic", options.topic] if options.topic else []
    return start("lingbot_map_ros.ros.replay", options.source, *topic, "--wait", f"/{NODE}/odometry",
                 "--stamps", "zero", "--rate", str(options.rate or REPLAY_RATE), log=log)


def stop(process: subprocess.Popen) -> int:
    """Interrupt a process as Ctrl-C would, and return its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _overrides(parameters: dict[str, object]) -> list[str]:
    return [word for name, value in parameters.items()
            for word in ("-p", f"{name}:={str(value).lower() if isinstance(value, bool) else value}")]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(it said nothing)"


# -- the run --------------------------------------------------------------------------------------------------------

def record(
    recorder: Recorder, node: subprocess.Popen, camera: subprocess.Popen, images: int | None, logs: tuple[Path, Path],
    interrupt: Interrupt,
) -> None:
    """Take in messages and print progress until the camera has ended and the last map has come.

    logs: the node's and the camera's. Raises DemoError where a process failed, KeyboardInterrupt after a signal.
    """
    started = shown = time.monotonic()
    camera_ended = None
    while True:
        rclpy.spin_once(recorder, timeout_sec=0.1)
        interrupt.check()
        now = time.monotonic()
        if node.poll() is not None:
            raise DemoError(f"the node ended with status {node.returncode}: {_last_line(logs[0])}")
        if now - shown >= 1.0:
            shown = now
            print(progress(recorder, images, now - started), flush=True)
        if camera_ended is None and camera.poll() is not None:
            if camera.returncode:
                raise DemoError(f"the camera ended with status {camera.returncode} after {recorder.pose_count} poses: "
                                f"{_last_line(logs[1])}; the node's last words: {_last_line(logs[0])}")
            camera_ended = now
        if camera_ended is not None and (recorder.complete() or now - camera_ended > LAST_MESSAGES):
            print(progress(recorder, images, now - started), flush=True)
            return


def progress(recorder: Recorder, images: int | None, seconds: float) -> str:
    """Return one line on how far things are."""
    parts = recorder.status()
    camera, cache, model = (parts.get(part, {}).get("values", {}) for part in ("camera", "cache", "model"))
    done = camera.get("frames_processed", 0)
    points = recorder.map.width * recorder.map.height if recorder.map else 0
    line = f"demo: {seconds:5.1f} s  images {done}{f'/{images}' if images else ''}  poses {recorder.pose_count}  "
    line += f"map points {points:,}"
    if "live_pages" in cache:
        line += f"  cache pages {cache['live_pages']} live, {cache['free_pages']} free"
    if model.get("frames_per_second"):
        line += f"  {model['frames_per_second']} frames/s"
    rendering = recorder.status(CAMERA).get("camera", {}).get("values", {})
    if not parts:
        line += "  (the node is loading its model)"
    elif not done and rendering.get("rendered_ahead"):
        line += f"  ({rendering['rendered_ahead']} images rendered ahead)"
    return line


# -- the result -----------------------------------------------------------------------------------------------------

def check(recorder: Recorder) -> None:
    """Raise DemoError where there is no result."""
    points, (_, poses) = recorder.points(), recorder.poses()
    if points is None:
        raise DemoError(f"no map came on /{NODE}/map")
    if len(poses) < 2:
        raise DemoError(f"{len(poses)} poses came: is the sequence shorter than the scale frames are many?")
    if len(points[0]) == 0:
        raise DemoError("the map is empty: no pixel reaches the node's confidence_threshold")
    if not np.isfinite(poses).all() or not np.isfinite(points[0]).all():
        raise DemoError("a pose or a point is not finite")


def write_output(folder: Path, recorder: Recorder, options: argparse.Namespace, seconds: float) -> list[str]:
    """Write the result's files; return the lines that tell of it. Raises DemoError where there is no result."""
    check(recorder)
    xyz, rgb, confidence = recorder.points()
    stamps, poses = recorder.poses()
    steps = np.linalg.norm(np.diff(poses[:, :3], axis=0), axis=1)
    run = {
        "poses": len(poses), "map_points": len(xyz), "seconds": round(seconds, 2),  # loading included
        "poses_per_second": recorder.rate(),
        "path_length": float(steps.sum()), "step_median": float(np.median(steps)), "step_max": float(steps.max()),
    }
    lines = [f"{run['poses']} poses, {run['map_points']:,} map points, path {run['path_length']:.2f} model units, "
             f"step {run['step_median']:.4f} (median) to {run['step_max']:.4f} (most)"]
    report = {"run": run, "status": recorder.status()}
    write_ply(folder / "map.ply", xyz, rgb, confidence)
    write_tum(folder / "trajectory.txt", stamps, poses)
    if options.source is None:
        errors = compare(recorder.poses(), recorder.true_poses())
        report |= {"place": {"kind": options.place, "seed": options.seed, "frames": options.frames},
                   "trajectory": errors.summary,
                   "depth": recorder.depth_summary(), "latency_ms": recorder.latency_summary(),
                   "camera": recorder.status(CAMERA)}
        lines += accuracy(errors, report)
        write_tum(folder / "ground_truth.txt", *recorder.true_poses())
        draw_comparison(folder / "topdown.png", options, errors, (xyz, rgb), recorder.true_poses(), poses)
    else:
        write_topdown(folder / "topdown.png", xyz, rgb, poses)
    (folder / "diagnostics.json").write_text(json.dumps(report, indent=2) + "\n")
    return lines


def compare(poses: Poses, true_poses: Poses) -> TrajectoryErrors:
    """Return the errors of the poses. Raises DemoError where they cannot be told."""
    origin = poses[0][0]  # seconds since the epoch would leave no digits for what is below a microsecond
    estimate, truth = (((stamps - origin) / 1e9, rows) for stamps, rows in (poses, true_poses))
    try:
        return trajectory_errors(estimate, truth, max_time_difference=1e-6)
    except ReplayError as error:
        raise DemoError(f"no trajectory errors: {error}") from error


def accuracy(errors: TrajectoryErrors, report: dict) -> list[str]:
    """Return the lines that tell how good the result is, and how fast it came."""
    ate, rotation = errors.summary["ate"]["translation"], errors.summary["rpe_one_pose"]["rotation_degrees"]
    depth, latency, cache = report["depth"], report["latency_ms"], report["status"].get("cache", {}).get("values", {})
    lines = [f"ATE {ate['rmse']:.3f} m, {ate['rmse_percent_of_path']:.2f} % of a path of {errors.path_length:.1f} m; "
             f"rotation error {rotation['mean']:.2f} degrees a frame, final heading off by {errors.final_heading:+.1f} "
             "degrees"]
    if depth:
        lines.append(f"depth AbsRel {depth['abs_rel']:.3f}, {100 * depth['delta_1']:.1f} % within a factor of 1.25, "
                     f"over {depth['frames']} frames and {100 * depth['coverage']:.0f} % of their pixels")
    late = report["camera"].get("camera", {}).get("values", {}).get("late", 0)
    lines.append(f"{report['run']['poses_per_second']:.1f} frames/s; from an image's stamp to its pose "
                 f"{latency['median']:.0f} ms (median) to {latency['p95']:.0f} ms (95 %); {late} images were late")
    if "live_pages" in cache:
        lines.append(f"cache: {cache['live_pages']} pages live, {cache['free_pages']} free, {cache['frame_count']} "
                     "keyframes in the window")
    return lines


def draw_comparison(
    path: Path, options: argparse.Namespace, errors: TrajectoryErrors, mapped: tuple[np.ndarray, np.ndarray],
    true_poses: Poses, poses: np.ndarray,
) -> None:
    """Draw the place as it is and as it was mapped, in the true place's frame, metres."""
    T = errors.T_truth_estimate
    (xyz, rgb), positions = mapped, poses[:, :3]
    place = SyntheticCameraParameters(seed=options.seed, place=options.place, loop_frames=options.frames).make_place()
    true_xyz, true_rgb = (values.numpy() for values in place.surface_points(TRUE_POINTS))
    low, high = true_poses[1][:, :2].min(axis=0), true_poses[1][:, :2].max(axis=0)
    reach = max(5.0, (high - low).max())  # of the picture beyond the path: not as far as one sees outdoors
    near = ((true_xyz[:, :2] > low - reach) & (true_xyz[:, :2] < high + reach)).all(axis=1)
    ate = errors.summary["ate"]["translation"]
    write_comparison(
        path, (true_xyz[near], true_rgb[near]), (xyz @ T[:3, :3].T + T[:3, 3], rgb), true_poses[1][:, :3],
        positions @ T[:3, :3].T + T[:3, 3], true_point_size=TRUE_POINT_SIZE,
        titles=("the place", f"as mapped: {len(xyz):,} points, {len(poses)} poses, ATE {ate['rmse']:.2f} m "
                f"({ate['rmse_percent_of_path']:.1f} %)"))


# -- command line ---------------------------------------------------------------------------------------------------

def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments for the node that follow --ros-args."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Map a rendered place in real time and compare with the truth, or map a "
        "folder of images, a video or a ROS 2 bag; write map.ply, trajectory.txt, topdown.png and diagnostics.json. "
        "What follows --ros-args goes to the node.")
    parser.add_argument("source", nargs="?", metavar="FOLDER|VIDEO|BAG",
                        help="what the camera sees (default: a place that is rendered meanwhile)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder to write")
    parser.add_argument("--rate", type=float, help=f"images a second of the rendered place ({SYNTHETIC_RATE:g}); most "
                        f"of another source ({REPLAY_RATE:g}), which waits for the node")
    parser.add_argument("--seed", type=int, default=7, help="which place is rendered (7)")
    parser.add_argument("--place", choices=PLACES, default="room", help="its kind (room)")
    parser.add_argument("--frames", type=int, default=300, help="images of the round through the rendered place (300)")
    parser.add_argument("--topic", help="of a bag (its only image topic)")
    parser.add_argument("--checkpoint", help="weights, of the published model unless the file says of which; without, "
                        "the embedded model runs")
    cut = arguments.index("--ros-args") if "--ros-args" in arguments else len(arguments)
    return parser.parse_args(arguments[:cut]), arguments[cut + 1:]


def main() -> int:
    """Run the demo: status 0 with all files written, 1 with the reason, 2 on a bad argument."""
    options, node_arguments = parse_arguments(sys.argv[1:])
    try:
        images = options.frames if options.source is None else open_frames(options.source, options.topic).count
        options.output.mkdir(parents=True, exist_ok=True)
    except (ReplayError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    if interfaces.TFMessage is None:
        print("demo: tf2_msgs is not here, so the node runs without /tf", flush=True)
    logs = options.output / "node.log", options.output / "camera.log"
    parameters = {"publish_tf": True, "map_period": MAP_PERIOD, "diagnostics_period": 0.5}
    if options.checkpoint:
        parameters |= {"preset": "lingbot_map", "checkpoint": os.path.abspath(options.checkpoint)}
    started = time.monotonic()
    processes: list[subprocess.Popen] = []
    interrupt = Interrupt()
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    recorder = Recorder(truth=options.source is None)
    try:
        node = start("lingbot_map_ros.ros.node", "--ros-args", *_overrides(parameters), *node_arguments, log=logs[0])
        processes.append(node)
        camera = start_camera(options, logs[1])
        processes.append(camera)
        record(recorder, node, camera, images, logs, interrupt)
        status = stop(node)
        if status:
            raise DemoError(f"the node ended with status {status} when interrupted: {_last_line(logs[0])}")
        for line in write_output(options.output, recorder, options, time.monotonic() - started):
            print(f"demo: {line}")
        print(f"demo: wrote map.ply, trajectory.txt, topdown.png and diagnostics.json to {options.output}/")
        return 0
    except DemoError as error:
        print(f"demo: {error} (all of it: {logs[0]}, {logs[1]})", file=sys.stderr)
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
