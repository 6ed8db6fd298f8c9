# SPDX-License-Identifier: Apache-2.0
"""Frames through the whole model and its caches: time a frame and memory, segment by segment.

Random images and, without --checkpoint, untrained weights for the published model: time and memory do not depend on
either. Example: python benchmarks/model.py --frames 2000; on a CPU: python benchmarks/model.py --preset default
"""
from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from lingbot_map_ros.gct import PRESETS, build_model

from machine import describe_machine, device_synchronize, memory_bytes


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    preset = "lingbot_map" if torch.cuda.is_available() else "default"
    parser.add_argument("--preset", default=preset, choices=sorted(PRESETS))
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--image-size", type=int, nargs=2, default=None, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--keyframe-interval", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", default=None, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    begin = time.perf_counter()
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    model = build_model(arguments.preset, checkpoint=arguments.checkpoint, device=arguments.device, dtype=dtype)
    config = model.config
    size = tuple(arguments.image_size or (config.image_height or 27 * 14, config.image_width))
    loaded = time.perf_counter()
    state = model.new_state(size)
    device_synchronize(model.device)
    figures = {
        **describe_machine(model.device),
        "arguments": vars(arguments),
        "load_s": loaded - begin,
        "cache_start_up_s": time.perf_counter() - loaded,
        "backend": state.cache.backend.name,
        "cache_mib": (state.cache.get_cache_stats()["bytes"] + state.camera_cache.get_cache_stats()["bytes"]) / 2**20,
        "weights_mib": sum(p.nbytes for p in model.state_dict().values()) / 2**20,
    }

    images = torch.rand((8, 3, *size), device=model.device)
    interval = arguments.keyframe_interval
    model.step(images[:1].expand(config.scale_frames, -1, -1, -1), state)
    segments = []
    warm_up = min(state.cache.remembered_frames * interval + 40, arguments.frames // 2)
    bounds = [0, warm_up, *(warm_up + (arguments.frames - warm_up) * part // 4 for part in range(1, 5))]
    for start, stop in zip(bounds, bounds[1:]):
        milliseconds = []
        for index in range(start, stop):
            begin = time.perf_counter()
            model.step(images[index % 8 : index % 8 + 1], state, keep=index % interval == 0)
            device_synchronize(model.device)
            milliseconds.append(1000 * (time.perf_counter() - begin))
        milliseconds.sort()
        segments.append({
            "frames": f"{start}-{stop}",
            "p50_ms": statistics.median(milliseconds),
            "p99_ms": milliseconds[min(len(milliseconds) - 1, int(0.99 * len(milliseconds)))],
            **memory_bytes(model.device),
        })  # fmt: skip
    figures["segments"] = segments
    if model.device.type == "cuda":
        figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20

    print(f"\n{figures['machine']}; torch {figures['torch']}; FlashInfer {figures['flashinfer']}; {figures['backend']}")
    print(f"{arguments.preset} {size[1]}x{size[0]}, {str(model.dtype).removeprefix('torch.')}, weights "
          f"{figures['weights_mib']:.0f} MiB, caches {figures['cache_mib']:.0f} MiB, load {figures['load_s']:.1f} s, "
          f"start-up of the caches {figures['cache_start_up_s']:.1f} s")
    print(f"{'frames':>14} {'p50 ms':>9} {'p99 ms':>9} {'device MiB':>11} {'RSS MiB':>9}")
    for row in segments:
        print(f"{row['frames']:>14} {row['p50_ms']:9.2f} {row['p99_ms']:9.2f} {row['device_bytes'] / 2**20:11.1f} "
              f"{row['rss_bytes'] / 2**20:9.1f}")
    if "peak_mib" in figures:
        print(f"peak device memory: {figures['peak_mib']:.0f} MiB")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
