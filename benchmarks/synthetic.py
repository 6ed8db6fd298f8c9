# SPDX-License-Identifier: Apache-2.0
"""Frames a second of the rendered scenes: a training batch, or on a CPU also single frames of a place.

Prints a table and, with --json, writes the same figures. The first batch, which compiles on a GPU, is reported apart.
Example: python benchmarks/synthetic.py --batch 64 --frames 48
"""
from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from lingbot_map_ros.synthetic import (
    DEMO, KINDS, SceneGenerator, intrinsics_from_fov, make_place, render,
)

from machine import describe_machine, device_synchronize


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", default="mixed", choices=KINDS)
    parser.add_argument("--image-size", type=int, nargs=2, default=(112, 154), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batch", type=int, default=64 if cuda else 4)
    parser.add_argument("--frames", type=int, default=48 if cuda else 4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place-size", type=int, nargs=2, default=(224, 308), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", default=None, metavar="FILE")
    return parser.parse_args()


def time_sequences(arguments: argparse.Namespace) -> dict[str, float]:
    """Render batches; return the first's seconds and the others' median frames a second."""
    device = torch.device(arguments.device)
    generator = SceneGenerator(tuple(arguments.image_size), device=device)
    options = KINDS[arguments.options]
    seconds = []
    for _ in range(1 + arguments.repeats):
        device_synchronize(device)
        start = time.perf_counter()
        generator.sequences(arguments.batch, arguments.frames, options=options)
        device_synchronize(device)
        seconds.append(time.perf_counter() - start)
    frames = arguments.batch * arguments.frames
    return {"first_batch_s": seconds[0], "frames_per_s": frames / statistics.median(seconds[1:])}


def time_place(arguments: argparse.Namespace) -> dict[str, float]:
    """Render frames of a place on the CPU one at a time; return the median milliseconds, and the place's own."""
    start = time.perf_counter()
    place = make_place(0, options=DEMO)
    making = time.perf_counter() - start
    size = tuple(arguments.place_size)
    intrinsics = intrinsics_from_fov(torch.tensor(1.3), size)
    seconds = []
    for pose in place.T_world_camera[::10]:
        start = time.perf_counter()
        render(place, pose[None], intrinsics, size)
        seconds.append(time.perf_counter() - start)
    return {"make_place_s": making, "frame_ms": 1e3 * statistics.median(seconds)}


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    report = {"machine": describe_machine(torch.device(arguments.device)), "arguments": vars(arguments),
              "sequences": time_sequences(arguments)}
    if arguments.device == "cpu":
        report["place"] = time_place(arguments)
    for name in ("sequences", "place"):
        for key, value in report.get(name, {}).items():
            print(f"{name:10} {key:14} {value:10.2f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
