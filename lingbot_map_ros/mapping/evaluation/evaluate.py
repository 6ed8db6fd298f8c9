# SPDX-License-Identifier: Apache-2.0
"""Replay recorded images through a session and measure the result: `lingbot_map_evaluate SOURCE --output FOLDER`."""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from lingbot_map_ros.cache.backends import BACKENDS
from lingbot_map_ros.gct import PRESETS, ImageGeometry, build_model, dtype_name, dtype_named, prepare_image
from lingbot_map_ros.image_files import NANOSECONDS, ReplayError
from lingbot_map_ros.mapping.evaluation.metrics import (
    DepthErrors, TrajectoryErrors, depth_errors, read_tum, sample_depth, trajectory_errors)
from lingbot_map_ros.mapping.evaluation.plots import write_plots
from lingbot_map_ros.mapping.evaluation.requirements import require
from lingbot_map_ros.mapping.evaluation.sources import Frame, Source, open_source, read_depth
from lingbot_map_ros.mapping.evaluation.trace import Trace, read_columns
from lingbot_map_ros.mapping.export import replace_file
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, quaternion_from_matrix
from lingbot_map_ros.mapping.prediction import Figures, figures_of
from lingbot_map_ros.mapping.session import FrameResult, MappingSession
from lingbot_map_ros.mapping.session_config import REFINE_POSES, SessionConfig
from lingbot_map_ros.mapping.tracking import Tracker
from lingbot_map_ros.mapping.trajectory import tum_line

PROGRAM = "lingbot_map_evaluate"
OUTPUTS = ("trajectory.txt", "trace.csv", "errors.csv", "metrics.json",
           "trajectory.png", "cache.png", "timings.png", "errors.png")


@dataclass(frozen=True)
class FrameTag:
    """What goes through the session with an image."""

    stamp_ns: int
    name: str
    geometry: ImageGeometry
    depth_file: Path | None


# -- the run --------------------------------------------------------------------------------------------------------

class Evaluation:
    """Replays frames and writes a row and a pose for each as it comes; only counts and sums stay in memory."""

    def __init__(
        self, session: MappingSession, prepare: Callable[[np.ndarray], tuple[torch.Tensor, ImageGeometry]],
        depth_factor: float = 5000.0,
    ) -> None:
        """prepare: turns a camera's image into the model's. depth_factor: steps a metre of depth images."""
        self._session = session
        self._prepare = prepare
        self._depth_factor = depth_factor
        self._tracker = Tracker()
        self._last_stamp: int | None = None
        self.counts = Counter(read=0, results=0, keyframes=0, not_newer=0, without_pose=0)
        self.tracking = Counter()  # frames by state
        self.hand_overs = Counter(count=0, with_problem=0)
        self.largest_jumps = {"translation": 0.0, "rotation_degrees": 0.0}
        self._depth_sums = Counter(frames=0)

    def run(self, frames: Iterator[Frame], trace: Trace, trajectory: TextIO) -> None:
        """Take every frame; a stamp that is not newer than the last is left out and counted. Raises ReplayError."""
        for frame in frames:
            self.counts["read"] += 1
            if self._last_stamp is not None and frame.stamp_ns <= self._last_stamp:
                self.counts["not_newer"] += 1
                continue
            self._last_stamp = frame.stamp_ns
            try:
                image, geometry = self._prepare(frame.rgb)
                tag = FrameTag(frame.stamp_ns, frame.name, geometry, frame.depth_file)
                self._take(lambda: self._session.step(image, tag, frame.stamp_ns / NANOSECONDS), trace, trajectory)
            except ValueError as error:
                raise ReplayError(f"{frame.name}: {error}") from error
        self._take(self._session.flush, trace, trajectory)

    def _take(self, step: Callable[[], list[FrameResult]], trace: Trace, trajectory: TextIO) -> None:
        begin = time.perf_counter()
        results = step()
        # The figures' way to the host is waited for, so that the time is the work's on a GPU, too.
        figures = [figures_of(result) for result in results]
        step_ms = 1000 * (time.perf_counter() - begin) / max(1, len(results))
        for result, its_figures in zip(results, figures):
            self._record(result, its_figures, step_ms, trace, trajectory)

    def _record(
        self, result: FrameResult, figures: Figures, step_ms: float, trace: Trace, trajectory: TextIO
    ) -> None:
        tag: FrameTag = result.stamp
        T_world_camera = figures.T_world_camera
        if np.isfinite(T_world_camera).all():
            T_map_camera = T_MAP_WORLD @ T_world_camera
            pose = np.concatenate([T_map_camera[:3, 3], quaternion_from_matrix(T_map_camera[:3, :3])])
            trajectory.write(tum_line(tag.stamp_ns, pose))
        else:
            self.counts["without_pose"] += 1
        self._tracker.judge(figures)
        tracking = self._tracker.tracking
        self.tracking[tracking.state.value] += 1
        self.counts["results"] += 1
        self.counts["keyframes"] += result.is_keyframe
        hand_over = result.hand_over
        if hand_over is not None:
            self.hand_overs["count"] += 1
            self.hand_overs["with_problem"] += bool(hand_over.problem)
            for name, jump in (("translation", hand_over.translation_jump),
                               ("rotation_degrees", math.degrees(hand_over.rotation_jump))):
                self.largest_jumps[name] = max(self.largest_jumps[name], jump)
        depth = self._depth_errors(result, tag)
        trace.write({
            "index": result.index,
            "stamp": f"{tag.stamp_ns // NANOSECONDS}.{tag.stamp_ns % NANOSECONDS:09d}",
            "window": result.window,
            "is_keyframe": int(result.is_keyframe),
            "tracking": tracking.state.value,
            "tracking_reasons": "; ".join(tracking.reasons),
            "step_ms": step_ms,
            "model_ms": 1000 * result.timings["model"],
            "refine_ms": 1000 * result.timings["refine"],
            "hand_over_ms": 1000 * result.timings["hand_over"],
            **{f"cache_{name}": value for name, value in self._session.cache_stats().items()},
            "hand_over_scale": hand_over and hand_over.scale,
            "hand_over_translation_jump": hand_over and hand_over.translation_jump,
            "hand_over_rotation_jump_degrees": hand_over and math.degrees(hand_over.rotation_jump),
            "hand_over_shared_frames": hand_over and hand_over.shared_frames,
            "hand_over_problem": hand_over and hand_over.problem,
            "depth_scale": depth and depth.scale,
            "depth_abs_rel": depth and depth.abs_rel,
            "depth_delta_1": depth and depth.delta_1,
            "name": tag.name,
        })

    def _depth_errors(self, result: FrameResult, tag: FrameTag) -> DepthErrors | None:
        if tag.depth_file is None:
            return None
        known = sample_depth(read_depth(tag.depth_file, self._depth_factor), tag.geometry)
        errors = depth_errors(result.depth.float().cpu().numpy(), known)
        if errors is not None:
            self._depth_sums.update(frames=1, abs_rel=errors.abs_rel, delta_1=errors.delta_1)
        return errors

    def depth_summary(self) -> dict[str, float] | None:
        """Return the means over all frames whose depth is known; None if there are none."""
        frames = self._depth_sums["frames"]
        if not frames:
            return None
        return {"frames": frames, **{name: self._depth_sums[name] / frames for name in ("abs_rel", "delta_1")}}


def evaluate(options: argparse.Namespace) -> dict[str, object]:
    """Run the evaluation and write its files; return what is in metrics.json.

    Raises ReplayError, ValueError or OSError, with the reason.
    """
    require("tqdm", "the progress bar")
    require("matplotlib", "plots")
    source = open_source(options.source, topic=options.topic, rate=options.rate,
                         max_time_difference=options.max_time_difference)
    ground_truth_file = options.ground_truth or source.ground_truth
    ground_truth = None
    if ground_truth_file is not None:
        require("evo", "comparing with the ground truth")
        ground_truth = read_tum(ground_truth_file)
    session, prepare = make_session(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:  # of an earlier run: they must not be taken for this one's if it fails
        (folder / name).unlink(missing_ok=True)

    evaluation = Evaluation(session, prepare, options.depth_factor)
    begin = time.perf_counter()
    interrupted = False
    with Trace(folder / "trace.csv") as trace, open(folder / "trajectory.txt", "w", encoding="ascii") as trajectory:
        try:
            evaluation.run(select(source, options.max_frames, options.every_nth), trace, trajectory)
        except KeyboardInterrupt:
            interrupted = True  # what has come until here is worth evaluating
    seconds = time.perf_counter() - begin
    if not evaluation.counts["results"]:
        raise ReplayError("interrupted before the first pose" if interrupted else f"{options.source} gave no pose: of "
                          f"{evaluation.counts['read']} frames none showed the motion that --init-motion asks for")

    errors, problem = None, "no ground truth"
    stamps, poses = read_tum(folder / "trajectory.txt")
    if ground_truth is not None:
        try:
            errors, problem = trajectory_errors((stamps, poses), ground_truth, options.max_time_difference), ""
        except ReplayError as error:
            problem = str(error)
    if errors is not None:
        write_errors(folder / "errors.csv", errors)
    columns = read_columns(folder / "trace.csv", ["step_ms", "window", "cache_bytes"])
    metrics = {
        "source": {"path": str(options.source), "kind": source.kind, "topic": getattr(source, "topic", None),
                   "ground_truth": ground_truth_file and str(ground_truth_file)},
        "model": {"preset": options.preset, "checkpoint": options.checkpoint, "device": str(session.config.device),
                  **{name: dtype_name(getattr(session.config, name)) for name in ("dtype", "cache_dtype")},
                  "image_size": session.image_size},
        "session": {name: value for name, value in asdict(session.config).items()
                    if name not in ("device", "dtype", "cache_dtype")},
        "frames": {**evaluation.counts, "windows": int(columns["window"].max()) + 1, "interrupted": interrupted},
        "tracking": dict(evaluation.tracking),
        "hand_overs": {**evaluation.hand_overs, "largest_jumps": evaluation.largest_jumps},
        "timing": {"seconds": seconds, "frames_per_second": evaluation.counts["results"] / seconds,
                   **{f"step_ms_{name}": float(value) for name, value in (
                       ("mean", columns["step_ms"].mean()), ("median", np.median(columns["step_ms"])),
                       ("p95", np.percentile(columns["step_ms"], 95)), ("max", columns["step_ms"].max()))}},
        "memory": {"cache_bytes": session.memory_bytes},
        "trajectory": errors and errors.summary,
        "trajectory_problem": problem,
        "depth": evaluation.depth_summary(),
    }
    with replace_file(folder / "metrics.json") as file:
        file.write((json.dumps(metrics, indent=2, allow_nan=False) + "\n").encode())
    write_plots(folder, folder / "trace.csv", poses[:, :3], errors)
    return metrics


def make_session(
    options: argparse.Namespace,
) -> tuple[MappingSession, Callable[[np.ndarray], tuple[torch.Tensor, ImageGeometry]]]:
    """Load the model; return the session, and what turns a camera's image into the model's.

    Raises ValueError or OSError for a model, device or window that cannot be.
    """
    if options.preset == "lingbot_map" and options.checkpoint is None:
        raise ValueError("preset lingbot_map has no weights of its own: give its file with --checkpoint")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {options.device!r} is none of auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {options.device} was asked for, but PyTorch finds no GPU")
    model = build_model(options.preset, checkpoint=options.checkpoint, device=device,
                        dtype=dtype_named(options.dtype))
    config = SessionConfig(**{field: getattr(options, field) for field in SESSION_OPTIONS},
                           cache_dtype=dtype_named(options.cache_dtype))
    return MappingSession(model, config), lambda rgb: prepare_image(rgb, model.config, options.image_width, device)


def select(source: Source, max_frames: int | None, every_nth: int) -> Iterator[Frame]:
    """Yield every n-th frame, at most `max_frames` of them, behind a progress bar (on a terminal)."""
    from tqdm import tqdm

    total = -(-len(source) // every_nth) if len(source) else None
    if max_frames is not None:
        total = min(total or max_frames, max_frames)
    with tqdm(total=total, unit="frame", disable=None, dynamic_ncols=True) as bar:
        for frame in islice(source, 0, None if max_frames is None else max_frames * every_nth, every_nth):
            yield frame
            bar.update()


def write_errors(path: Path, errors: TrajectoryErrors) -> None:
    """Write the absolute errors as a CSV file: a row a matched pose."""
    with Trace(path) as trace:
        for stamp, translation, rotation in zip(errors.stamps, errors.translation, errors.rotation):
            trace.write({"stamp": f"{stamp:.9f}", "translation": float(translation),
                         "rotation_degrees": float(rotation)})


# -- command line ---------------------------------------------------------------------------------------------------

def _number(kind: type, least: float, optional: bool = False) -> Callable[[str], float | int | None]:
    """Return a parser of numbers of at least `least`; `auto` is None if optional."""
    def parse(text: str) -> float | int | None:
        if optional and text == "auto":
            return None
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} of at least {least:g}" + " or auto" * optional)
        return value
    return parse


def _refine(text: str) -> bool | None:
    """Parse `always`, `never` or `auto`, which is None."""
    if text not in REFINE_POSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(REFINE_POSES)}")
    return REFINE_POSES[text]


# Fields of SessionConfig: parser, default, help. The session checks them further.
SESSION_OPTIONS: dict[str, tuple[Callable[[str], object], object, str]] = {
    "scale_frames": (_number(int, 1, True), None, "frames that begin a sequence together"),
    "sliding_window": (_number(int, 1, True), None, "newest keyframes that are visible in full"),
    "remembered_frames": (_number(int, 1, True), None, "keyframes whose special tokens are remembered"),
    "max_sliding_window": (_number(int, 1, True), None, "keyframes that memory is reserved for"),
    "cache_memory_mib": (_number(int, 1, True), None, "memory of the caches, which sizes the window; auto: no budget"),
    "window_size": (_number(int, 0, True), None, "kept frames after which the model starts anew; 0: never"),
    "overlap_keyframes": (_number(int, 1, True), None, "keyframes that two windows share"),
    "flow_threshold": (_number(float, 0, True), None, "pixels of motion that make a keyframe; 0: by interval"),
    "max_keyframe_gap": (_number(int, 0), 0, "with --flow-threshold: most frames between keyframes; 0: any number"),
    "keyframe_interval": (_number(int, 1), 1, "with --flow-threshold 0: every n-th frame is a keyframe"),
    "init_motion": (_number(float, 0), 0.0, "pixels of image motion between scale frames; 0: take every frame"),
    "max_init_wait": (_number(float, 0), 0.0, "seconds to wait for that motion, in the recording's time; 0: for ever"),
    "refine_poses": (_refine, None, "correct poses by how the image has moved: always, never or auto, as recommended"),
    "camera_iterations": (_number(int, 1, True), None, "refinement passes of a pose"),
    "backend": (str, "auto", f"attention over the cache: {', '.join(BACKENDS)}"),
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exits with status 2 and one line on a bad one."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Replay recorded images through a mapping session, without ROS, and measure the result.")
    parser.add_argument("source", metavar="SOURCE",
                        help="folder of images, video, ROS 2 bag (mcap or sqlite3) or dataset in TUM format")
    parser.add_argument("--output", "-o", default="evaluation_output", metavar="FOLDER",
                        help="where the results go (evaluation_output); those of an earlier run are replaced")
    parser.add_argument("--topic", help="of a bag: sensor_msgs/msg/Image or CompressedImage (the only image topic)")
    parser.add_argument("--ground-truth", type=Path, metavar="FILE",
                        help="trajectory of the camera's optical frame in TUM format (a TUM dataset's groundtruth.txt)")
    parser.add_argument("--max-time-difference", type=_number(float, 0), default=0.02,
                        help="seconds between an image and its true pose or depth image, at most (0.02)")
    parser.add_argument("--depth-factor", type=_number(float, 1e-6), default=5000.0,
                        help="steps of the depth images a metre (5000)")
    parser.add_argument("--rate", type=_number(float, 1e-3), default=30.0,
                        help="images a second, where file names or video do not tell (30)")
    parser.add_argument("--max-frames", type=_number(int, 1), help="stop after so many frames")
    parser.add_argument("--every-nth", type=_number(int, 1), default=1, help="take every n-th frame (1)")
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=tuple(PRESETS), default="default", help="(default)")
    model.add_argument("--checkpoint", metavar="FILE", help="weights (the preset's own)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(auto)")
    model.add_argument("--cache-dtype", choices=("auto", "bfloat16", "float8_e4m3fn"), default="auto",
                       help="of the kept keys and values; auto: the model's (auto)")
    model.add_argument("--image-width", type=_number(int, 1, True), default=None, metavar="PIXELS",
                       help="width that images are resized to (the model's own)")
    session = parser.add_argument_group("session", "auto is the model's own value")
    for name, (parse, default, text) in SESSION_OPTIONS.items():
        shown = "auto" if default is None else f"{default:g}" if isinstance(default, float) else default
        session.add_argument(f"--{name.replace('_', '-')}", type=parse, default=default,
                             metavar="NAME" if parse in (str, _refine) else "N", help=f"{text} ({shown})")
    return parser.parse_args(arguments)


def summary(metrics: dict[str, object], folder: str) -> str:
    """Return the lines that tell a person how it went."""
    frames, timing = metrics["frames"], metrics["timing"]
    interrupted = "interrupted: " if frames["interrupted"] else ""
    lines = [f"{interrupted}{frames['results']} poses of {frames['read']} frames, {frames['keyframes']} keyframes, "
             f"{frames['windows']} windows, {timing['frames_per_second']:.1f} frames/s"]
    if metrics["trajectory"]:
        ate, rpe = metrics["trajectory"]["ate"], metrics["trajectory"]["rpe_one_pose"]
        share = ate["translation"].get("rmse_percent_of_path")
        lines.append(f"ATE rmse {ate['translation']['rmse']:.4g}"
                     + (f" ({share:.2f} % of the path)" if share is not None else "")
                     + f", {ate['rotation_degrees']['rmse']:.3g} degrees; RPE rmse {rpe['translation']['rmse']:.4g}, "
                     f"{rpe['rotation_degrees']['rmse']:.3g} degrees a pose")
    else:
        lines.append(f"no trajectory errors: {metrics['trajectory_problem']}")
    if metrics["depth"]:
        lines.append(f"depth AbsRel {metrics['depth']['abs_rel']:.4f}, "
                     f"{100 * metrics['depth']['delta_1']:.1f} % within a factor of 1.25")
    return "\n".join([*lines, f"written to {folder}"])


def main(arguments: list[str] | None = None) -> int:
    """Run the executable: status 0, or 2 with one line on what is wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        metrics = evaluate(options)
    except (ReplayError, ValueError, OSError, MemoryError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(summary(metrics, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
