# SPDX-License-Identifier: Apache-2.0
"""Measure a model through the real session and cache, frame by frame, on sequences whose truth is known.

    python -m training.evaluate                        # the embedded model, on rendered places of each kind
    python -m training.evaluate runs/second --frames 240 --output runs/second
    python -m training.evaluate --sequences-file some.pt
"""
from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from lingbot_map_ros.gct import GCT, build_model, dtype_named
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from lingbot_map_ros.mapping.session_config import REFINE_POSES
from lingbot_map_ros.synthetic import KINDS, SceneGenerator, Sequences
from training.checkpoint import join
from training.feed import image_size
from training.metrics import confidence_errors, depth_errors, medians, pose_errors
from training.plots import plot_confidence

SEED = 3_000_000_037  # no stage trains or measures its progress on these
DEPTH_EVERY = 4  # frames between those whose depth is measured
DEPTH_STRIDE = 3  # pixels


def read_sequences(path: Path) -> Sequences:
    """Read a file written by `torch.save` of a dict with the fields of `Sequences`; images may be uint8."""
    content = torch.load(path, weights_only=True)
    images = content["images"]
    content["images"] = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    return Sequences(**{field.name: content[field.name].float() for field in fields(Sequences)})


def run(model: GCT, sequences: Sequences, config: SessionConfig) -> tuple[list[dict], dict[str, np.ndarray], float]:
    """Run each sequence through a session of its own.

    Returns: the errors of each; depth, confidence and truth of all measured pixels; the mean seconds a frame takes.
    """
    rows, pixels = [], {"depth": [], "confidence": [], "truth": []}
    seconds = 0.0
    frames = sequences.images.shape[1]
    session = MappingSession(model, config)
    for i, images in enumerate(sequences.images):
        session.reset()
        started = time.perf_counter()
        results = []
        for index, image in enumerate(images):
            results += session.step(image, index / 10)
        results += session.flush()
        seconds += time.perf_counter() - started
        order = [result.index for result in results]
        T = torch.stack([result.T_world_camera for result in results]).double().cpu().numpy()
        some = [result for result in results if result.index % DEPTH_EVERY == 0]
        depth, confidence = (
            torch.stack([getattr(result, name) for result in some])[:, ::DEPTH_STRIDE, ::DEPTH_STRIDE].cpu().numpy()
            for name in ("depth", "confidence"))
        truth = sequences.depth[i, [result.index for result in some], ::DEPTH_STRIDE, ::DEPTH_STRIDE].numpy()
        row = pose_errors(T, sequences.T_world_camera[i, order].double().numpy()) | depth_errors(depth, truth)
        rows.append(row | {"poses": len(results)})
        scale = np.median((truth / depth)[np.isfinite(truth)])
        for name, values in (("depth", depth * scale), ("confidence", confidence), ("truth", truth)):
            pixels[name].append(values)
    return rows, {name: np.concatenate(values) for name, values in pixels.items()}, seconds / (len(rows) * frames)


def main() -> None:
    """Print medians over sequences; write evaluation.json and confidence.png where asked to."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="folder that training wrote, in which its weights are joined to "
        "model.safetensors, or a file of weights; none: the embedded one")
    add("--places", choices=KINDS, nargs="+", default=list(KINDS))
    add("--sequences-file", type=Path, nargs="+", default=[], help="measure on these instead of rendered places")
    add("--sequences", type=int, default=8, help="of each kind")
    add("--frames", type=int, default=48)
    add("--window-size", type=int, help="kept frames a window; 0: one window; none: the model's own")
    add("--refine-poses", choices=REFINE_POSES, default="auto", help="correct poses by how the image has moved; auto: "
        "as the model recommends; never: measure the model's own poses")
    add("--cache-dtype", choices=("auto", "bfloat16", "float8_e4m3fn"), default="auto", help="auto: the model's")
    add("--device", default="cpu")
    add("--output", type=Path, help="folder to write")
    options = parser.parse_args()

    weights = options.model
    if weights is not None and weights.is_dir():
        weights = options.model / "model.safetensors"
        join(options.model, weights)
    model = build_model("default", checkpoint=weights, device=options.device)
    config = SessionConfig(window_size=options.window_size, refine_poses=REFINE_POSES[options.refine_poses],
                           device=options.device, cache_dtype=dtype_named(options.cache_dtype))

    if options.sequences_file:
        kinds = {path.stem: read_sequences(path) for path in options.sequences_file}
    else:
        # A generator each, so that a kind's sequences do not depend on which others are asked for.
        kinds = {name: SceneGenerator(image_size(model.config), seed=SEED, textures=128).sequences(
            options.sequences, options.frames, options=KINDS[name]) for name in options.places}
    report = {}
    for name, sequences in kinds.items():
        rows, pixels, seconds = run(model, sequences, config)
        report[name] = {"medians": medians(rows), "sequences": rows, "confidence": confidence_errors(**pixels),
                        "seconds_a_frame": seconds}
        print(f"{name}: {len(rows)} sequences of {sequences.images.shape[1]} frames, {1000 * seconds:.0f} ms a frame")
        for figure, value in report[name]["medians"].items():
            print(f"  {figure:20} {value:8.3f}")
        print("  confidence          ", "  ".join(f"{value:.2f}" for value in report[name]["confidence"]["confidence"]))
        print("  abs_rel at it, %    ", "  ".join(f"{value:.1f}" for value in report[name]["confidence"]["abs_rel"]))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
        plot_confidence({name: part["confidence"] for name, part in report.items()}, options.output / "confidence.png")


if __name__ == "__main__":
    main()
