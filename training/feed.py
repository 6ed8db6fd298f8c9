# SPDX-License-Identifier: Apache-2.0
"""Batches of rendered sequences, and how each is seen."""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from lingbot_map_ros.gct import GCTConfig
from lingbot_map_ros.synthetic import KINDS, SceneGenerator, Sequences

TIME_EVERY = 10  # rendered batches between two that are timed


@dataclass
class Draw:
    """How a batch is seen, drawn anew for each step."""

    scale_frames: Tensor  # int64
    window: Tensor  # int64
    times: Tensor  # [s], float64
    depth_frames: Tensor  # [n], int64


def draw(rng: np.random.Generator, batch: int, frames: int, device: torch.device) -> Draw:
    """Draw how a batch is seen: mostly 8 scale frames, any window; times with gaps, as non-keyframes leave them."""
    scale_frames = min(frames, 8 if rng.random() < 0.7 else int(rng.integers(2, 9)))
    window = int(round(np.exp(rng.uniform(np.log(4), np.log(frames)))))
    times = np.arange(frames, dtype=np.float64)
    if rng.random() < 0.25:
        times[scale_frames:] += np.cumsum(rng.integers(0, 4, frames - scale_frames))
    if rng.random() < 0.4 and frames > scale_frames:
        times[rng.integers(scale_frames, frames):] += rng.integers(1, 400)
    chosen = rng.permutation(batch * frames)[:max(1, batch * frames // 4)]
    return Draw(*(torch.as_tensor(value, device=device) for value in (scale_frames, window, times, chosen)))


def clock(device: torch.device) -> float:
    """Return the time in seconds after all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


class Feed:
    """Renders batches; each is used twice, the second time backwards and with colours exchanged."""

    def __init__(self, generator: SceneGenerator, rng: np.random.Generator, shares: Mapping[str, float]) -> None:
        """shares: of batches of each kind alone (a name in KINDS); the rest are mixed."""
        self._generator, self._rng = generator, rng
        self._kinds = [*shares, "mixed"]
        self._limits = np.cumsum(list(shares.values()))
        self._waiting: dict[tuple[int, int], Sequences] = {}
        self._rendered = 0
        self.seconds = 0.0  # that the last batch took which was timed

    def next(self, batch: int, frames: int) -> Sequences:
        """Return `batch` sequences of `frames` frames."""
        waiting = self._waiting.pop((batch, frames), None)
        if waiting is not None:
            return waiting
        self._waiting.clear()  # of a phase that has ended
        options = KINDS[self._kinds[int(np.searchsorted(self._limits, self._rng.random(), side="right"))]]
        is_timed = self._rendered % TIME_EVERY == 0
        started = clock(self._generator.device) if is_timed else 0.0
        sequences = self._generator.sequences(batch, frames, options=options)
        if is_timed:
            self.seconds = clock(self._generator.device) - started
        self._rendered += 1
        order = torch.from_numpy(self._rng.permutation(3)).to(sequences.images.device)
        self._waiting[batch, frames] = replace(
            sequences, images=sequences.images.flip(1).index_select(2, order), depth=sequences.depth.flip(1),
            T_world_camera=sequences.T_world_camera.flip(1))
        return sequences


def read_photos(folder: Path) -> list[np.ndarray]:
    """Read the photographs for textures: uint8 RGB. Raises FileNotFoundError where there are none."""
    paths = sorted(folder.glob("*.jpg"))
    if not paths:
        raise FileNotFoundError(f"no photographs (*.jpg) in {folder}")
    return [cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB) for path in paths]


def image_size(config: GCTConfig) -> tuple[int, int]:
    """Return (height, width) of the images to train on: the model's own; 4:3 where it takes any height."""
    width, patch = config.image_width, config.patch_size
    return config.image_height or width * 3 // 4 // patch * patch, width
