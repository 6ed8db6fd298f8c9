# SPDX-License-Identifier: Apache-2.0
"""Attention over runs of tokens: one kernel on a GPU, whatever the length, which a CUDA graph can hold.

Scores are never stored: each tile of queries goes over the keys once, with a running maximum and sum of its softmax
(T. Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1).
"""
from __future__ import annotations

import torch

from lingbot_map_ros.cache.attention import VisibleTokens
from lingbot_map_ros.cache.fp8 import FP8, knows_fp8

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
MOST_PARTS = 32  # of a tile's keys
PART_COST = 2e-5  # of storing and merging one more part, as a share of what a tile takes with a full window's keys
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

    @triton.jit(do_not_specialize=["num_queries", "num_whole"])
    def _attend_kernel(
        q, k, v, runs, out, parts, num_queries, num_whole, scale,
        HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, IS_COPIED: tl.constexpr,
        KEYS_ARE_FP8: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Of the tiles, which are numbered head by head, the first `num_whole` go over all keys, a program each; the
        others' keys are cut into SPLITS parts, a program each."""
        program, num_tiles = tl.program_id(0), tl.cdiv(num_queries, QUERIES)
        is_whole = program < num_whole
        piece = program - num_whole
        tile = tl.where(is_whole, program, num_whole + piece // SPLITS)
        splits, split = tl.where(is_whole, 1, SPLITS), tl.where(is_whole, 0, piece % SPLITS)
        lines = tl.arange(0, QUERIES)
        rows = tile % num_tiles * QUERIES + lines
        column = tile // num_tiles * DIM
        is_query = rows < num_queries
        places = rows[:, None] * (HEADS * DIM) + column + tl.arange(0, DIM)[None, :]
        query = tl.load(q + places, mask=is_query[:, None], other=0.0)
        if KEYS_ARE_FP8:  # factors are of one kind; what is beyond the range becomes its greatest value
            query = query.to(tl.float8e4nv)
        maximum = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM], tl.float32)
        for run in range(tl.load(runs)):
            start, stop = tl.load(runs + 1 + 2 * run), tl.load(runs + 2 + 2 * run)
            if SPLITS > 1:
                share = tl.cdiv(tl.cdiv(stop - start, splits), KEYS) * KEYS
                start += split * share
                stop = tl.minimum(stop, start + share)
            whole = start + tl.maximum(stop - start, 0) // KEYS * KEYS
            for token in tl.range(start, whole, KEYS, num_stages=STAGES):
                maximum, total, sums = _visit(query, maximum, total, sums, k, v, token, stop, column, scale,
                                              HEADS * DIM, DIM, KEYS, IS_COPIED, False)
            if whole < stop:
                maximum, total, sums = _visit(query, maximum, total, sums, k, v, whole, stop, column, scale,
                                              HEADS * DIM, DIM, KEYS, IS_COPIED, True)
        tl.store(out + places, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None] & is_whole)
        if SPLITS > 1:  # for _merge_kernel: the sums of all pieces' lines, then their maxima and totals
            line = piece * QUERIES + lines
            is_piece = is_query & (piece >= 0)
            tl.store(parts + line[:, None] * DIM + tl.arange(0, DIM)[None, :], sums, mask=is_piece[:, None])
            ends = parts + (num_tiles * HEADS - num_whole) * SPLITS * QUERIES * DIM + 2 * line
            tl.store(ends, maximum, mask=is_piece)
            tl.store(ends + 1, total, mask=is_piece)

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

    @triton.jit(do_not_specialize=["num_queries", "num_whole"])
    def _merge_kernel(
        parts, out, num_queries, num_whole,
        HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
    ):  # fmt: skip
        """For one line of a tile that was cut."""
        num_tiles = tl.cdiv(num_queries, QUERIES)
        cut, line = tl.program_id(0) // QUERIES, tl.program_id(0) % QUERIES
        tile = num_whole + cut
        row, head = tile % num_tiles * QUERIES + line, tile // num_tiles
        if row < num_queries:
            lines = (cut * SPLITS + tl.arange(0, SPLITS)) * QUERIES + line
            ends = parts + (num_tiles * HEADS - num_whole) * SPLITS * QUERIES * DIM + 2 * lines
            maximum = tl.load(ends)  # finite in one part at least
            weight = tl.math.exp2(maximum - tl.max(maximum, 0))
            channel = tl.arange(0, DIM)
            sums = tl.load(parts + lines[:, None] * DIM + channel[None, :])
            merged = tl.sum(sums * weight[:, None], 0) / tl.sum(tl.load(ends + 1) * weight, 0)
            tl.store(out + (row * HEADS + head) * DIM + channel, merged.to(out.dtype.element_ty))


def check_flash(device: torch.device, dtype: torch.dtype, num_queries: int, head_dim: int) -> str:
    """Return why the kernel is not for such attention; empty: it is, as far as one knows without trying."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return f"{device} is no GPU of compute capability 8 or later"
    if triton is None:
        return "Triton 3.4 or later is not installed"
    if dtype == torch.float32 and num_queries > 1:
        return "it takes one query at a time in float32"
    return "" if head_dim in (16, 32, 64, 128) else f"it has no tiles for heads of {head_dim} channels"


def divide(tiles: int, at_once: int, most: int) -> tuple[int, int]:
    """Return how many tiles go over all keys, and into how many parts (at most `most`) those of the others are cut.

    As many tiles as fill the GPU `at_once`, time and again, stay whole. The rest would leave most of it idle for as
    long as any: cut into parts it takes hardly more than its share. (A frame of 518x392 has 272 tiles; an H200 takes
    264 at once.)
    """
    rest = tiles % at_once
    # Powers of two alone, since each is a kernel of its own.
    choices = [1 << n for n in range(MOST_PARTS.bit_length()) if n == 0 or 1 << n <= most]

    def cost(parts: int) -> float:
        return -(-rest * parts // at_once) / parts + PART_COST * rest * (parts - 1)

    parts = min(choices, key=cost)
    return (tiles - rest, parts) if parts > 1 else (tiles, 1)


class FlashBackend:
    """The kernel of this file as an AttentionBackend."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._is_copied = properties.major >= 9
        self._knows_fp8 = knows_fp8(device)
        self._tiles_at_once = 2 * properties.multi_processor_count
        self._descriptors: dict[int, TensorDescriptor] = {}  # by address: of a cache's blocks, k and v

    def multiplies_fp8(self, head_dim: int) -> bool:
        """Tell whether k may be in fp8, as far as one knows without trying."""
        return self._knows_fp8 and head_dim >= 32  # at least so many numbers of 8 bits are multiplied at once

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        return self.attend_runs(q, k, v, visible.counted_runs, visible.num_tokens)

    def attend_runs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: torch.Tensor, most_tokens: int
    ) -> torch.Tensor:
        """Attend over runs that only the device need know: int32, their number, then start and stop of each.

        most_tokens: in all runs, about; how the work is divided depends on it. In float32 q is one query. k may be in
        fp8 where it `multiplies_fp8`, beside a v of 16 bits: q is then rounded to fp8, too.
        """
        num_queries, heads, dim = q.shape
        queries = q.to(v.dtype).contiguous()
        out = torch.empty_like(queries)
        scale = LOG2_E * dim**-0.5
        if k.dtype == torch.float32:
            _attend_one_kernel[(heads,)](queries, k, v, runs, out, scale, WIDTH=heads * dim, DIM=dim,
                                         KEYS=ONE_QUERY_KEYS, num_warps=ONE_QUERY_WARPS)
            return out
        tiles = heads * triton.cdiv(num_queries, TILE_QUERIES)
        whole, splits = divide(tiles, self._tiles_at_once, most_tokens // (8 * TILE_KEYS))
        parts = out if splits == 1 else torch.empty(
            (tiles - whole) * splits * TILE_QUERIES * (dim + 2), dtype=torch.float32, device=q.device)
        keys, values = (self._descriptor(x) if self._is_copied else x for x in (k, v))
        _attend_kernel[(whole + (tiles - whole) * splits,)](
            queries, keys, values, runs, out, parts, num_queries, whole, scale, HEADS=heads, DIM=dim, SPLITS=splits,
            IS_COPIED=self._is_copied, KEYS_ARE_FP8=k.dtype == FP8, QUERIES=TILE_QUERIES, KEYS=TILE_KEYS,
            STAGES=TILE_STAGES, num_warps=TILE_WARPS,
        )  # fmt: skip
        if splits > 1:
            _merge_kernel[((tiles - whole) * TILE_QUERIES,)](
                parts, out, num_queries, whole, HEADS=heads, DIM=dim, SPLITS=splits, QUERIES=TILE_QUERIES, num_warps=1)
        return out.to(q.dtype)

    def _descriptor(self, tokens: torch.Tensor) -> TensorDescriptor:
        """Return how to copy tiles of tokens [slots, heads, head_dim] in one piece."""
        found = self._descriptors.get(tokens.data_ptr())
        if found is None or found.shape[0] != len(tokens):
            found = TensorDescriptor.from_tensor(tokens.flatten(1), [TILE_KEYS, tokens.shape[2]])
            self._descriptors[tokens.data_ptr()] = found
        return found
