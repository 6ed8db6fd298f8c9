# SPDX-License-Identifier: Apache-2.0
"""What a block of the KV cache should hold and answer, from the rules alone and in float64."""
from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch


def dense_attention(q, k, v):
    """Softmax attention in float64, written out. q: [n, heads, d]; k, v: [m, heads, d]."""
    q, k, v = (x.double() for x in (q, k, v))
    weights = torch.softmax(torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def poison(cache):
    """Fill all that a cache may read with NaN."""
    for tokens in (cache._store._kv, cache._store._decoded):
        if tokens is not None:
            tokens.fill_(float("nan"))


@dataclass
class DenseFrame:
    number: int
    k: torch.Tensor
    v: torch.Tensor
    whole: bool = True  # its patches are visible
    remembered: bool = True  # its special tokens are visible


@dataclass
class DenseBlock:
    """What a block should hold, frame by frame, from the rules alone."""

    num_special: int
    frames: list[DenseFrame] = field(default_factory=list)
    undo: list[DenseFrame] | None = None

    def append(self, k, v):
        self.undo = [copy.copy(frame) for frame in self.frames]
        self.frames.append(DenseFrame(len(self.frames), k, v))

    def evict(self, scale_frames, sliding_window, remembered_frames):
        for frame in self.frames:
            age = len(self.frames) - 1 - frame.number  # 0: the newest
            others_remembered = remembered_frames - min(scale_frames, len(self.frames))
            if frame.number >= scale_frames:
                frame.whole &= age < sliding_window
                frame.remembered &= age < others_remembered

    def rollback(self):
        self.frames = self.undo if self.undo is not None else self.frames[:-1]
        self.undo = None

    def visible(self):
        parts = [(f, slice(0, self.num_special)) for f in self.frames if f.remembered]
        parts += [(f, slice(self.num_special, None)) for f in self.frames if f.whole]
        return torch.cat([f.k[s] for f, s in parts]), torch.cat([f.v[s] for f, s in parts])
