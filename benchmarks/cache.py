# SPDX-License-Identifier: Apache-2.0
"""Traffic of the KV cache without a model: append, evict and attention of every block, frame after frame.

Prints a table and, with --json, writes the same figures. The published model's size by default; on a CPU use
--preset tiny. Example: python benchmarks/cache.py --frames 10000
"""
from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from lingbot_map_ros.cache import FlashInferKVCacheManager
from lingbot_map_ros.gct import PRESETS

from machine import bounds, describe_machine, device_synchronize, print_segments, segment


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="lingbot_map", choices=sorted(PRESETS))
    parser.add_argument("--image-size", type=int, nargs=2, default=(378, 518), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--keyframe-interval", type=int, default=1)
    parser.add_argument("--remembered-frames", type=int, default=0, help="0: the model's trained range")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32",
                        help="float8_e4m3fn, too")
    parser.add_argument("--json", default=None, metavar="FILE")
    return parser.parse_args()


def make_cache(arguments: argparse.Namespace) -> FlashInferKVCacheManager:
    """Make the cache of the preset's global blocks."""
    config = PRESETS[arguments.preset]
    rows, columns = (size // config.patch_size for size in arguments.image_size)
    spare = 0 if arguments.keyframe_interval == 1 else 1
    return FlashInferKVCacheManager(
        num_blocks=config.depth,
        max_num_frames=config.scale_frames + config.sliding_window + spare,
        tokens_per_frame=config.num_special_tokens + rows * columns,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        num_special_tokens=config.num_special_tokens,
        scale_frames=config.scale_frames,
        sliding_window=config.sliding_window,
        max_total_frames=arguments.remembered_frames or config.trained_frames,
        backend=arguments.backend,
    )


class Bookkeeping:
    """A backend that plans as the real one does and computes no attention."""

    name = "bookkeeping"

    def __init__(self, backend: object) -> None:
        self.real = getattr(backend, "_changing", backend)
        self.visible = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: object) -> torch.Tensor:
        if visible is not self.visible and hasattr(self.real, "_plan"):
            self.real._plan(visible, q, k)
        self.visible = visible
        return q


def run(cache: FlashInferKVCacheManager, frames: int, interval: int, tensors: list) -> list[float]:
    """Push frames through every block; return the seconds of each frame, device work included."""
    seconds = []
    for index in range(frames):
        q, k, v = tensors[index % len(tensors)]
        keep = index < cache.scale_frames or (index - cache.scale_frames) % interval == 0
        begin = time.perf_counter()
        for block in range(cache.num_blocks):
            cache.attend_frame(block, q, k, v, keep=keep)
        device_synchronize(cache.device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def attention_milliseconds(cache: FlashInferKVCacheManager, q: torch.Tensor, calls: int = 200) -> float:
    """Return the median of single attention calls over the full window, by device events where there are any."""
    if cache.device.type != "cuda":
        times = []
        for index in range(calls):
            begin = time.perf_counter()
            cache.compute_attention(index % cache.num_blocks, q)
            times.append(1000 * (time.perf_counter() - begin))
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    for index in range(20):
        cache.compute_attention(index % cache.num_blocks, q)
    events[0].record()
    for index in range(calls):
        cache.compute_attention(index % cache.num_blocks, q)
        events[index + 1].record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    begin = time.perf_counter()
    cache = make_cache(arguments)
    tensors = [
        [torch.randn(cache._frame_shape, device=cache.device, dtype=cache._read_dtype) for _ in range(3)]
        for _ in range(4)
    ]  # four frames in turn
    figures = {
        **describe_machine(cache.device),
        "arguments": vars(arguments),
        "start_up_s": time.perf_counter() - begin,
        "backend": cache.backend.name,
        "tokens_per_frame": cache.tokens_per_frame,
        "cache_mib": cache.get_cache_stats(0)["bytes"] / 2**20,
    }

    warm_up = cache.remembered_frames * arguments.keyframe_interval + 40
    figures["segments"] = [
        segment(start, stop, run(cache, stop - start, arguments.keyframe_interval, tensors), cache.device)
        for start, stop in bounds(warm_up, arguments.frames)
    ]
    figures["attention_ms_a_block"] = attention_milliseconds(cache, tensors[0][0])

    cache.backend = Bookkeeping(cache.backend)
    run(cache, 50, arguments.keyframe_interval, tensors)
    figures["bookkeeping_ms_a_frame"] = 1000 * statistics.median(
        run(cache, 200, arguments.keyframe_interval, tensors)
    )

    print(f"\n{figures['machine']}; torch {figures['torch']}; {cache.backend.real.name} of {figures['backend']}")
    print(f"{cache.num_blocks} blocks, {cache.tokens_per_frame} tokens a frame, window {cache.scale_frames} + "
          f"{cache.sliding_window}, {cache.remembered_frames} frames remembered, {arguments.dtype}, "
          f"cache {figures['cache_mib']:.0f} MiB, start-up {figures['start_up_s']:.1f} s")
    print_segments(figures["segments"])
    print(f"attention, one block, full window: {figures['attention_ms_a_block']:.3f} ms (median of 200)")
    print(f"plan, append and bookkeeping: {figures['bookkeeping_ms_a_frame']:.3f} ms a frame (median of 200)")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
