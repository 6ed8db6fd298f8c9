# SPDX-License-Identifier: Apache-2.0
"""Attention over runs of tokens: one kernel on a GPU, whatever the length, which a CUDA graph can hold.

Scores are never stored: each tile of queries goes over the keys once, with a running maximum and sum of its softmax
(T. Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1).
"""
from __future__ import annotations

import torch

from lingbot_map_ros.cache.attention import VisibleTokens

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a CPU build of torch, or a Triton too old for descriptors
    triton = None

LOG2_E = 1.4426950408889634


# Of a tile; stages: of the pipeline that loads keys and values ahead. Two of these at once fill a multiprocessor of an
# H200: 0.66 ms where 128 queries take 0.83.
TILE_QUERIES, TILE_KEYS, TILE_WARPS, TILE_STAGES = 64, 128, 4, 3
ONE_QUERY_KEYS, ONE_QUERY_WARPS = 64, 8

if triton is not None:

    @triton.jit
    def _load(tokens, token, stop, column, rows, WIDTH: tl.constexpr, DIM: tl.constexpr, IS_COPIED: tl.constexpr):
        """Return a tile [rows, DIM] of tokens [slots, WIDTH]; with IS_COPIED, the GPU's own copying of tiles fetches it
        whole, what lies beyond `stop`, too."""
        if IS_COPIED:
            tile = tokens.load([token, column])
        else:
            at = token + rows
            places = at[:, None].to(tl.int64) * WIDTH + column + tl.arange(0, DIM)[None, :]
            tile = tl.load(tokens + places, mask=(at < stop)[:, None], other=0.0)
        return tile

    @triton.jit
    def _visit(
        query, maximum, total, sums, k, v, token, stop, column, scale,
        WIDTH: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, IS_COPIED: tl.constexpr, IS_LAST: tl.constexpr,
    ):  # fmt: skip
        rows = tl.arange(0, KEYS)
        keys = _load(k, token, stop, column, rows, WIDTH, DIM, IS_COPIED)
        values = _load(v, token, stop, column, rows, WIDTH, DIM, IS_COPIED)
        scores = tl.dot(query, keys.T)
        if IS_LAST:  # what lies beyond may be anything, NaN too
            is_key = token + rows < stop
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            values = tl.where(is_key[:, None], values, 0.0)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.math.exp2(maximum - new_maximum)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
        return new_maximum, total * shrink + tl.sum(weights, 1), sums

    @triton.jit(do_not_specialize=["num_queries"])
    def _attend_kernel(
        q, k, v, runs, out, parts, num_queries, scale,
        HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, IS_COPIED: tl.constexpr,
        QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        head, split = tl.program_id(1), tl.program_id(2)
        rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        column = head * DIM
        is_query = rows < num_queries
        places = rows[:, None] * (HEADS * DIM) + column + tl.arange(0, DIM)[None, :]
        query = tl.load(q + places, mask=is_query[:, None], other=0.0)
        maximum = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM], tl.float32)
        for run in range(tl.load(runs)):
            start, stop = tl.load(runs + 1 + 2 * run), tl.load(runs + 2 + 2 * run)
            if SPLITS > 1:
                share = tl.cdiv(tl.cdiv(stop - start, SPLITS), KEYS) * KEYS
                start += split * share
                stop = tl.minimum(stop, start + share)
            whole = start + tl.maximum(stop - start, 0) // KEYS * KEYS
            for token in tl.range(start, whole, KEYS, num_stages=STAGES):
                maximum, total, sums = _visit(query, maximum, total, sums, k, v, token, stop, column, scale,
                                              HEADS * DIM, DIM, KEYS, IS_COPIED, False)
            if whole < stop:
                maximum, total, sums = _visit(query, maximum, total, sums, k, v, whole, stop, column, scale,
                                              HEADS * DIM, DIM, KEYS, IS_COPIED, True)
        if SPLITS == 1:
            tl.store(out + places, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])
        else:  # for _merge_kernel: all sums, then each split's maxima and totals
            size = num_queries * HEADS
            tl.store(parts + split * size * DIM + places, sums, mask=is_query[:, None])
            ends = parts + SPLITS * size * DIM + 2 * split * size + rows * HEADS + head
            tl.store(ends, maximum, mask=is_query)
            tl.store(ends + size, total, mask=is_query)

    @triton.jit
    def _attend_one_kernel(q, k, v, runs, out, scale, WIDTH: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
        """For one query, in float32: without tensor cores."""
        channels = tl.program_id(0) * DIM + tl.arange(0, DIM)
        query = tl.load(q + channels) * scale
        maximum, total, sums = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
        for run in range(tl.load(runs)):
            start, stop = tl.load(runs + 1 + 2 * run), tl.load(runs + 2 + 2 * run)
            for token in range(start, stop, KEYS):
                at = token + tl.arange(0, KEYS)
                is_key = at < stop
                places = at[:, None].to(tl.int64) * WIDTH + channels[None, :]
                keys = tl.load(k + places, mask=is_key[:, None], other=0.0)
                values = tl.load(v + places, mask=is_key[:, None], other=0.0)
                scores = tl.where(is_key, tl.sum(keys * query[None, :], 1), float("-inf"))
                new_maximum = tl.maximum(maximum, tl.max(scores, 0))
                weights = tl.math.exp2(scores - new_maximum)
                shrink = tl.math.exp2(maximum - new_maximum)
                total = total * shrink + tl.sum(weights, 0)
                sums = sums * shrink + tl.sum(values * weights[:, None], 0)
                maximum = new_maximum
        tl.store(out + channels, sums / total)

    @triton.jit(do_not_specialize=["size"])
    def _merge_kernel(parts, out, size, DIM: tl.constexpr, SPLITS: tl.constexpr):
        row, split = tl.program_id(0), tl.arange(0, SPLITS)
        ends = parts + SPLITS * size * DIM + 2 * split * size + row
        maximum = tl.load(ends)  # finite in one split at least
        weight = tl.math.exp2(maximum - tl.max(maximum, 0))
        channel = tl.arange(0, DIM)
        sums = tl.load(parts + (split[:, None] * size + row) * DIM + channel[None, :])
        merged = tl.sum(sums * weight[:, None], 0) / tl.sum(tl.load(ends + size) * weight, 0)
        tl.store(out + row * DIM + channel, merged.to(out.dtype.element_ty))


def check_flash(device: torch.device, dtype: torch.dtype, num_queries: int, head_dim: int) -> str:
    """Return why the kernel is not for such attention; empty: it is, as far as one knows without trying."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return f"{device} is no GPU of compute capability 8 or later"
    if triton is None:
        return "Triton 3.4 or later is not installed"
    if dtype == torch.float32 and num_queries > 1:
        return "it takes one query at a time in float32"
    return "" if head_dim in (16, 32, 64, 128) else f"it has no tiles for heads of {head_dim} channels"


class FlashBackend:
    """The kernel of this file as an AttentionBackend."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._is_copied = properties.major >= 9
        self._tiles_at_once = 2 * properties.multi_processor_count
        self._descriptors: dict[int, TensorDescriptor] = {}  # by address: of a cache's blocks, k and v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        return self.attend_runs(q, k, v, visible.counted_runs, visible.num_tokens)

    def attend_runs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: torch.Tensor, most_tokens: int
    ) -> torch.Tensor:
        """Attend over runs that only the device need know: int32, their number, then start and stop of each.

        most_tokens: in all runs, about; how the work is divided depends on it. In float32 q is one query.
        """
        num_queries, heads, dim = q.shape
        queries = q.to(k.dtype).contiguous()
        out = torch.empty_like(queries)
        scale = LOG2_E * dim**-0.5
        if k.dtype == torch.float32:
            _attend_one_kernel[(heads,)](queries, k, v, runs, out, scale, WIDTH=heads * dim, DIM=dim,
                                         KEYS=ONE_QUERY_KEYS, num_warps=ONE_QUERY_WARPS)
            return out
        tiles = triton.cdiv(num_queries, TILE_QUERIES)
        splits = self._splits(tiles * heads, most_tokens // (8 * TILE_KEYS))
        parts = out if splits == 1 else torch.empty(
            splits * num_queries * heads * (dim + 2), dtype=torch.float32, device=q.device)
        keys, values = (self._descriptor(x) if self._is_copied else x for x in (k, v))
        _attend_kernel[(tiles, heads, splits)](
            queries, keys, values, runs, out, parts, num_queries, scale, HEADS=heads, DIM=dim, SPLITS=splits,
            IS_COPIED=self._is_copied, QUERIES=TILE_QUERIES, KEYS=TILE_KEYS, STAGES=TILE_STAGES, num_warps=TILE_WARPS,
        )  # fmt: skip
        if splits > 1:
            _merge_kernel[(num_queries * heads,)](parts, out, num_queries * heads, DIM=dim, SPLITS=splits, num_warps=1)
        return out.to(q.dtype)

    def _splits(self, tiles: int, most: int) -> int:
        """Return into how many parts to cut the keys, so that a few queries do not leave most of the GPU idle."""
        wanted = min(self._tiles_at_once // tiles, most, 16)
        return 1 << max(0, wanted.bit_length() - 1)  # powers of two alone: each is a kernel of its own

    def _descriptor(self, tokens: torch.Tensor) -> TensorDescriptor:
        """Return how to copy tiles of tokens [slots, heads, head_dim] in one piece."""
        found = self._descriptors.get(tokens.data_ptr())
        if found is None or found.shape[0] != len(tokens):
            found = TensorDescriptor.from_tensor(tokens.flatten(1), [TILE_KEYS, tokens.shape[2]])
            self._descriptors[tokens.data_ptr()] = found
        return found
