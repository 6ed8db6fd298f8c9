# SPDX-License-Identifier: Apache-2.0
"""What each setting of the window costs and buys: memory, time a frame and errors, on rendered rooms.

One setting is changed at a time, the others are the node's own. The embedded model, on one thread of the CPU; time is
the processor's, not the wall's. Example: python benchmarks/window.py --only sliding_window --places 3
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from math import radians

import numpy as np
import torch

from lingbot_map_ros.gct import GCT, build_model
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from lingbot_map_ros.mapping.evaluation.metrics import depth_errors, trajectory_errors
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.synthetic import intrinsics_from_fov, make_place, render

from machine import describe_machine

FIRST_SEED = 100  # not the demo's
FOV = 75.0  # degrees
DEPTH_EVERY = 8  # frames between those whose depth is measured
SETTINGS = {
    "scale_frames": (2, 4, 16),
    "sliding_window": (4, 8, 16, 64),
    "remembered_frames": (40,),
    "window_size": (24, 48, 64),
    "overlap_keyframes": (2, 4, 16),
    "flow_threshold": (4.0, 8.0, 16.0),
    "keyframe_interval": (1, 3),
    "camera_iterations": (2, 4),
    "refine_poses": (False,),
}


def session_config(name: str, value: float) -> SessionConfig:
    """Return the node's own configuration with one value changed. keyframe_interval is of the policy `interval`."""
    own = {"window_size": None, "flow_threshold": None, "refine_poses": None}
    if name == "keyframe_interval":
        own["flow_threshold"] = 0.0
    return SessionConfig(**own | ({name: value} if name else {}))


def rooms(model: GCT, count: int, frames: int, loop_frames: int) -> list[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
    """Render the first frames of a round through each room.

    Returns images [n, 3, h, w], T_world_camera [n, 4, 4] and depth [n, h, w] of each, in metres.
    """
    size = (model.config.image_height, model.config.image_width)
    intrinsics = intrinsics_from_fov(torch.tensor(radians(FOV)), size)
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        place = make_place(seed, frames=loop_frames)
        T_world_camera = place.T_world_camera[:frames]
        images, depth = render(place, T_world_camera, intrinsics, size)
        found.append((images, T_world_camera.double().numpy(), depth.numpy()))
    return found


def measure(model: GCT, config: SessionConfig, places: list) -> dict[str, float]:
    """Run every place through one session; return medians over places, and of times over the later half of frames."""
    session = MappingSession(model, config)
    milliseconds, rows = [], []
    for images, T_true, depth_true in places:
        session.reset()
        results, hand_overs, times = [], [], []
        for index, image in enumerate(images):
            begin = time.process_time()
            hand_over = session.advance()
            between = time.process_time()
            results += session.step(image, index)
            times.append(1000 * (time.process_time() - between))
            if hand_over is not None:
                hand_overs.append((1000 * (between - begin), hand_over.translation_jump))
        milliseconds += times[len(times) // 2 :]
        T = np.stack([result.T_world_camera.double().numpy() for result in results])
        stamps = np.arange(len(T), dtype=float)
        errors = trajectory_errors((stamps, _poses(T)), (stamps, _poses(T_true)))
        depths = [depth_errors(result.depth.numpy(), depth_true[result.index]).abs_rel
                  for result in results[::DEPTH_EVERY]]
        rows.append({
            "keyframes": sum(result.is_keyframe for result in results),
            "hand_overs": len(hand_overs),
            "hand_over_ms": statistics.fmean(ms for ms, _ in hand_overs) if hand_overs else 0.0,
            "ate_percent": errors.summary["ate"]["translation"]["rmse_percent_of_path"],
            "heading_degrees": abs(errors.final_heading),
            "abs_rel_percent": 100 * statistics.fmean(depths),
        })
    frame = statistics.median(milliseconds)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    medians["hand_over_frames"] = medians.pop("hand_over_ms") / frame
    return {"cache_mib": session.memory_bytes / 2**20, "held_mib": session.held_bytes / 2**20, "frame_ms": frame,
            **medians}


def _poses(T: np.ndarray) -> np.ndarray:
    return np.hstack([T[:, :3, 3], np.stack([quaternion_from_matrix(R) for R in T[:, :3, :3]])])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--places", type=int, default=2)
    parser.add_argument("--frames", type=int, default=180)
    parser.add_argument("--loop-frames", type=int, default=360, help="of a whole round through a place")
    parser.add_argument("--json", default=None, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model("default")
    places = rooms(model, arguments.places, arguments.frames, arguments.loop_frames)
    report = {**describe_machine(model.device), "arguments": vars(arguments), "settings": {}}
    print(f"{report['machine']}; torch {report['torch']}; {arguments.places} rooms of {arguments.frames} frames\n\n"
          "| setting | caches MiB | shared MiB | frame ms | hand-over, frames | hand-overs | keyframes | ATE % | "
          "heading, degrees | AbsRel % |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, value in [("", 0.0), *((name, value) for name in arguments.only for value in SETTINGS[name])]:
        figures = measure(model, session_config(name, value), places)
        setting = f"`{name}` {value:g}" if name else "the node's own"
        report["settings"][setting] = figures
        print(f"| {setting} | {figures['cache_mib']:.0f} | {figures['held_mib']:.1f} | {figures['frame_ms']:.0f} | "
              f"{figures['hand_over_frames']:.1f} | {figures['hand_overs']:g} | {figures['keyframes']:g} | "
              f"{figures['ate_percent']:.1f} | {figures['heading_degrees']:.1f} | {figures['abs_rel_percent']:.1f} |",
              flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
