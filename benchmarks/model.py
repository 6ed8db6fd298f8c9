# SPDX-License-Identifier: Apache-2.0
"""Frames through the whole model and its caches: time a frame and memory, segment by segment; and hand-overs.

Random images and, without --checkpoint, untrained weights for the published model: time and memory do not depend on
either. Example: python benchmarks/model.py --frames 2000; on a CPU: python benchmarks/model.py --preset default
"""
from __future__ import annotations

import argparse
import json
import time

import torch

from lingbot_map_ros.gct import GCT, PRESETS, build_model
from lingbot_map_ros.mapping import MappingSession, SessionConfig

from machine import bounds, describe_machine, device_synchronize, print_segments, segment


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

    def run(start: int, stop: int) -> list[float]:
        seconds = []
        for index in range(start, stop):
            begin = time.perf_counter()
            model.step(images[index % 8 : index % 8 + 1], state, keep=index % interval == 0)
            device_synchronize(model.device)
            seconds.append(time.perf_counter() - begin)
        return seconds

    warm_up = state.cache.remembered_frames * interval + 40
    figures["segments"] = [
        segment(start, stop, run(start, stop), model.device) for start, stop in bounds(warm_up, arguments.frames)
    ]
    if model.device.type == "cuda":
        figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    state = None  # makes room for the session's
    figures["hand_over_ms"] = hand_overs(model, images, interval)

    print(f"\n{figures['machine']}; torch {figures['torch']}; FlashInfer {figures['flashinfer']}; {figures['backend']}")
    print(f"{arguments.preset} {size[1]}x{size[0]}, {str(model.dtype).removeprefix('torch.')}, weights "
          f"{figures['weights_mib']:.0f} MiB, caches {figures['cache_mib']:.0f} MiB, load {figures['load_s']:.1f} s, "
          f"start-up of the caches {figures['cache_start_up_s']:.1f} s")
    print_segments(figures["segments"])
    if "peak_mib" in figures:
        print(f"peak device memory: {figures['peak_mib']:.0f} MiB")
    print("hand-overs: " + ", ".join(f"{milliseconds:.0f}" for milliseconds in figures["hand_over_ms"]) + " ms")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)


def hand_overs(model: GCT, images: torch.Tensor, interval: int, count: int = 3) -> list[float]:
    """Return the milliseconds that one window's giving way to the next takes, with the model's own window."""
    config = SessionConfig(window_size=None, keyframe_interval=interval)
    session, found = MappingSession(model, config), []
    index = 0
    while len(found) < count:
        session.step(images[index % len(images)])
        index += 1
        hand_over = session.advance()
        if hand_over is not None:
            found.append(1000 * hand_over.seconds)
    return found


if __name__ == "__main__":
    main()
