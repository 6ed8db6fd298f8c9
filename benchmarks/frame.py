# SPDX-License-Identifier: Apache-2.0
"""A frame's way from its pixels to the map: time by stage, share of the machine's matrix-product rate, memory.

Frames are timed as they run, waiting for the device only at their end; then some more stage by stage, waiting after
each, so that stages add up to more than a frame on a GPU. There the model's own parts cannot be told apart in what was
recorded: they are launched one by one for this. Random images: time and memory do not depend on what they show, but for
`refine` and `map`. Without --checkpoint the published model has untrained weights; without --windowed it never starts
anew, so that the window stays full.

    python benchmarks/frame.py --frames 2000                                # on a GPU: the published model's size
    python benchmarks/frame.py --preset default --threads 1                 # on a CPU
    python benchmarks/frame.py --reference my_module:make_step              # beside another implementation

The reference is a function of (image_size, scale_frames, sliding_window, device, dtype) that returns another one, which
takes the next image [3, h, w] and returns when its results are submitted.
"""
from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from lingbot_map_ros.gct import GCT, PRESETS, GCTConfig, build_model, dtype_name, dtype_named, prepare_image
from lingbot_map_ros.mapping import FrameResult, MappingSession, SessionConfig
from lingbot_map_ros.mapping.map_builder import MapBuilder

from machine import describe_machine, device_synchronize, matrix_product_rate, memory_bytes

CHECKPOINTS = (200, 2_000, 10_000)  # frames at which the time is told
AROUND = 50  # frames that such a time is the median of
STAGE_FRAMES = 30
WARM_FRAMES = 3  # before these
MODEL = "model"
IMAGES = 8  # different ones


class Pipeline:
    """What a node does with an image, apart from messages."""

    def __init__(self, model: GCT, config: SessionConfig, size: tuple[int, int]) -> None:
        self.model = model
        self.session = MappingSession(model, config)
        self.map = MapBuilder(device=model.device)
        height, width = size
        pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, height, width, 3), np.uint8)
        self._pixels, self._width, self._index = pixels, width, 0

    def prepare(self) -> torch.Tensor:
        """Return the next image on the device, from uint8 [h, w, 3]."""
        self._index += 1
        pixels = self._pixels[self._index % IMAGES]
        return prepare_image(pixels, self.model.config, self._width, self.model.device)[0]

    def step(self, image: torch.Tensor) -> list[FrameResult]:
        """Run the session."""
        return self.session.step(image, self._index, self._index / 10)

    def fuse(self, results: list[FrameResult]) -> None:
        """Put keyframes into the map."""
        self.map.add(results)

    def frame(self) -> None:
        """Do all of it, and wait for the device."""
        self.fuse(self.step(self.prepare()))
        device_synchronize(self.model.device)


class Stopwatch:
    """Times calls, waiting for the device before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)  # by stage, one entry a frame
        self._device = device
        self._frame: dict[str, float] = defaultdict(float)
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: object, name: str, stage: str) -> None:
        """Time the calls of an object's method from now on."""
        call = getattr(owner, name)

        def timed(*arguments: object, **options: object) -> object:
            device_synchronize(self._device)
            begin = time.perf_counter()
            result = call(*arguments, **options)
            device_synchronize(self._device)
            self._frame[stage] += time.perf_counter() - begin
            return result

        object.__setattr__(owner, name, timed)
        self._undo.append(lambda: object.__delattr__(owner, name))

    def end_frame(self) -> None:
        """Note what the stages took of one frame."""
        for stage, seconds in self._frame.items():
            self.seconds[stage].append(seconds)
        self._frame.clear()

    def drop_frame(self) -> None:
        """Forget what the stages took of one frame."""
        self._frame.clear()

    def stop(self) -> None:
        """Leave the objects as they were."""
        while self._undo:
            self._undo.pop()()


def stages(pipeline: Pipeline, frames: int) -> dict[str, list[float]]:
    """Return the seconds that each stage takes of some frames."""
    return watched(pipeline, frames, (
        (pipeline, "prepare", "prepare"), (pipeline.model, "step", MODEL),
        (pipeline.session._refiner, "refine", "refine"), (pipeline, "fuse", "map")))


def model_stages(pipeline: Pipeline, frames: int) -> dict[str, list[float]]:
    """Return the seconds that each stage of the model takes of some frames, launched one by one."""
    model, state = pipeline.model, pipeline.session._state
    aggregator, recorded, state.frame_graph = model.aggregator, state.frame_graph, None
    seconds = watched(pipeline, frames, (
        (aggregator.patch_embed, "forward", "patch embedding"),
        *((block, "forward", "frame blocks") for block in aggregator.frame_blocks),
        *((state.cache, name, "attention over the cache")
          for name in ("attend_frame", "append_frame", "compute_attention")),
        (aggregator, "forward", "aggregator"),
        (model.camera_head, "forward", "camera head"),
        (model.depth_head, "forward", "depth head"),
    ))
    state.frame_graph = recorded
    inner = ("patch embedding", "frame blocks", "attention over the cache")
    rest = [total - sum(parts) for total, *parts in zip(
        seconds.pop("aggregator"), *(seconds[stage] for stage in inner))]
    return seconds | {"rest of the global blocks": rest}


def watched(
    pipeline: Pipeline, frames: int, calls: Sequence[tuple[object, str, str]]
) -> dict[str, list[float]]:
    """Return the seconds that calls (owner, method, stage) take of some frames, by stage."""
    watch = Stopwatch(pipeline.model.device)
    for owner, name, stage in calls:
        watch.watch(owner, name, stage)
    for index in range(WARM_FRAMES + frames):
        pipeline.frame()
        if index >= WARM_FRAMES:
            watch.end_frame()
        else:
            watch.drop_frame()
    watch.stop()
    return dict(watch.seconds)


def operations(model: GCT, image: torch.Tensor, visible: int) -> dict[str, float]:
    """Return the floating-point operations of matrix products and convolutions of one frame, by stage.

    visible: tokens that a frame attends to in the cache, its own included. Attention takes 4 * queries * keys *
    channels a block, and is counted by that formula, since torch does not count it on all devices.
    """
    config: GCTConfig = model.config
    size = (image.shape[1], image.shape[2])
    state = model.new_state(size, scale_frames=1, sliding_window=1, remembered_frames=2, backend="sdpa", graph=False)
    model.step(image[None], state)
    counter = FlopCounterMode(display=False)
    with counter:
        model.step(image[None], state, keep=False)
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    rows, columns = config.grid_size(size)
    queries = rows * columns + config.num_special_tokens
    attention = 4 * config.depth * queries * config.embed_dim  # for each key
    products = {kind: sum(counts[f"Aggregator.{kind}.{i}.{part}"] for i in range(config.depth)
                          for part in ("attn.qkv", "attn.proj", "mlp")) for kind in ("frame_blocks", "global_blocks")}
    return {
        "patch embedding": counts["Aggregator.patch_embed"],
        "frame blocks": products["frame_blocks"] + attention * queries,
        "attention over the cache": attention * visible,
        "rest of the global blocks": products["global_blocks"],
        "camera head": counts[type(model.camera_head).__name__],
        "depth head": counts[type(model.depth_head).__name__],
    }


def reference_milliseconds(
    name: str, model: GCT, size: tuple[int, int], config: SessionConfig, frames: int
) -> list[float]:
    """Return the milliseconds a frame of another implementation, after its window is full."""
    module, _, function = name.partition(":")
    step = getattr(importlib.import_module(module), function)(
        size, config.scale_frames, config.sliding_window, model.device, model.dtype)
    images = torch.rand((IMAGES, 3, *size), device=model.device)
    found = []
    for index in range(config.scale_frames + config.sliding_window + frames):
        begin = time.perf_counter()
        with torch.no_grad():
            step(images[index % IMAGES])
        device_synchronize(model.device)
        found.append(1000 * (time.perf_counter() - begin))
    return found[-frames:]


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile."""
    return {f"p{part}_ms": float(np.percentile(milliseconds, part)) for part in (50, 90, 99)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--preset", default="lingbot_map" if on_gpu else "default", choices=sorted(PRESETS))
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--image-size", type=int, nargs=2, default=None, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--frames", type=int, default=300, help="timed ones")
    parser.add_argument("--windowed", action="store_true", help="start the model anew as it recommends")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--cache-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float8_e4m3fn"),
                        help="of the kept keys and values; auto: the model's")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--reference", default=None, metavar="MODULE:FUNCTION",
                        help="another implementation, see above")
    parser.add_argument("--json", default=None, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    model = build_model(arguments.preset, checkpoint=arguments.checkpoint, device=arguments.device, dtype=dtype)
    own = model.config
    size = tuple(arguments.image_size or (own.image_height or own.image_width * 27 // 37 // 14 * 14, own.image_width))
    windows = {} if arguments.windowed else {"window_size": 0}
    settings = SessionConfig(refine_poses=None, cache_dtype=dtype_named(arguments.cache_dtype), **windows)
    pipeline = Pipeline(model, settings, size)
    config = pipeline.session.config
    for _ in range(config.scale_frames + config.sliding_window):
        pipeline.frame()
    times = []
    for _ in range(arguments.frames):
        begin = time.perf_counter()
        pipeline.frame()
        times.append(1000 * (time.perf_counter() - begin))
    frames = min(STAGE_FRAMES, arguments.frames)
    by_stage = stages(pipeline, frames) | model_stages(pipeline, frames)

    rate = matrix_product_rate(model.device, model.dtype)
    stats = pipeline.session.cache_stats()
    pages = stats["scale_pages"] + stats["live_pages"]
    rows, columns = own.grid_size(size)
    visible = pages * rows * columns + stats["special_tokens"]
    work = operations(model, pipeline.prepare(), visible)
    work[MODEL] = total = sum(work.values())
    table = {}
    for stage, seconds in by_stage.items():
        figures = percentiles([1000 * s for s in seconds])
        if work.get(stage):
            figures |= {"gflop": work[stage] / 1e9,
                        "share_of_rate": work[stage] / rate / (figures["p50_ms"] / 1000)}
        table[stage] = figures
    report = {
        **describe_machine(model.device), "arguments": vars(arguments), "image_size": size,
        "dtype": dtype_name(model.dtype),
        "cache_dtype": dtype_name(config.cache_dtype), "backend": pipeline.session.attention_backend,
        "window": [config.scale_frames, config.sliding_window], "matrix_product_tflops": rate / 1e12,
        "frame": percentiles(times) | {
            "frames_per_second": 1000 / statistics.fmean(times), "gflop": total / 1e9,
            "share_of_rate": total / rate / (statistics.median(times) / 1000)},
        "stages": table,
        "at_frame_ms": {frame: statistics.median(times[max(0, frame - AROUND):frame]) for frame in CHECKPOINTS
                        if frame <= len(times)},
        **memory_bytes(model.device),
    }
    if model.device.type == "cuda":
        report["peak_device_bytes"] = torch.cuda.max_memory_allocated(model.device)
        report["predicted_device_bytes"] = model.peak_bytes(pipeline.session._state.sizes)
    if arguments.reference:
        found = reference_milliseconds(arguments.reference, model, size, config, arguments.frames)
        report["reference"] = percentiles(found)
        report["times_as_fast"] = report["reference"]["p50_ms"] / report["frame"]["p50_ms"]
    show(report)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def show(report: dict) -> None:
    """Print a report as text and a table."""
    height, width = report["image_size"]
    print(f"\n{report['machine']}; torch {report['torch']}; FlashInfer {report['flashinfer']}; {report['backend']}\n"
          f"{report['arguments']['preset']} {width}x{height}, {report['dtype']}, cache in {report['cache_dtype']}, "
          f"window {report['window'][0]} + {report['window'][1]}; matrix products at "
          f"{report['matrix_product_tflops']:.3g} TFLOP/s\n\n"
          "| stage | p50 ms | p90 ms | p99 ms | GFLOP | % of the rate |\n|---|---|---|---|---|---|")
    for stage, figures in (*report["stages"].items(), ("**a frame, all of it**", report["frame"])):
        work = (f"{figures['gflop']:.3g} | {100 * figures['share_of_rate']:.0f}" if "gflop" in figures else " | ")
        print(f"| {stage} | {figures['p50_ms']:.2f} | {figures['p90_ms']:.2f} | {figures['p99_ms']:.2f} | {work} |")
    print(f"\n{report['frame']['frames_per_second']:.1f} frames/s; resident {report['rss_bytes'] / 2**20:.0f} MiB"
          + (f"; device {report['device_bytes'] / 2**20:.0f} MiB, peak {report['peak_device_bytes'] / 2**20:.0f} MiB, "
             f"predicted at most {report['predicted_device_bytes'] / 2**20:.0f} MiB with one camera and no map"
             if "peak_device_bytes" in report else ""))
    if report["at_frame_ms"]:
        print("median around frame "
              + ", ".join(f"{frame:,}: {ms:.1f} ms" for frame, ms in report["at_frame_ms"].items()))
    if "reference" in report:
        print(f"{report['arguments']['reference']}: {report['reference']['p50_ms']:.1f} ms a frame; this is "
              f"{report['times_as_fast']:.2f} times as fast")


if __name__ == "__main__":
    main()
