# SPDX-License-Identifier: Apache-2.0
"""The two-stream paged KV cache."""
from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial

import torch

from lingbot_map_ros.cache.append import (
    TokenPlace,
    append_on_device,
    append_tokens,
    can_append_on_device,
    has_whole_tokens,
    prepare_append,
)
from lingbot_map_ros.cache.attention import AttentionBackend, VisibleTokens
from lingbot_map_ros.cache.backends import check_backend, make_backend
from lingbot_map_ros.cache.flash import FlashBackend, check_flash
from lingbot_map_ros.cache.fp8 import FP8
from lingbot_map_ros.cache.frame_table import FrameTable, TokenLayout
from lingbot_map_ros.cache.notice import first_line, warn_once
from lingbot_map_ros.cache.token_store import TokenStore, readable_dtype

logger = logging.getLogger(__name__)


class FlashInferKVCacheManager:
    """K and V of the kept frames of one sequence, in pages that are allocated once and recycled.

    A frame's tokens are its special tokens, then its patches, in this order. A block sees every token of the first
    `scale_frames` frames and of the last `sliding_window`, and the special tokens of the others. So a frame's tokens go
    two ways: patches fill one page a frame, recycled as the window slides; special tokens go to a ring of
    `max_total_frames` frames, which the scale frames never leave. Memory is allocated by the constructor alone.

    A cache whose frames have special tokens only (tokens_per_frame == num_special_tokens) is what a camera head needs.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_frames: int,
        tokens_per_frame: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_special_tokens: int = 6,
        scale_frames: int = 8,
        sliding_window: int = 64,
        max_total_frames: int = 2048,
        backend: str = "auto",
    ) -> None:
        """Allocate the cache.

        num_blocks: attention layers. max_num_frames: pages, at least scale_frames + sliding_window; one more is needed
        for frames that are not kept, or kept after they have attended, and as many more as `resize` may add to the
        window. tokens_per_frame: special tokens and patches. max_total_frames: frames whose special tokens are
        remembered, scale frames and window included. backend: one of backends.BACKENDS; "auto" takes the fastest that
        works, and what is neither that nor "sdpa" needs CUDA and a dtype of 16 bits or fewer. dtype: one of
        token_store.CACHE_DTYPES.

        On a GPU the current CUDA device must be `device`. Raises ValueError, naming the argument, for sizes that do not
        fit together.
        """
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("num_heads", num_heads, 1),
            ("head_dim", head_dim, 1),
            ("num_special_tokens", num_special_tokens, 1),
            ("tokens_per_frame", tokens_per_frame, num_special_tokens),
        ):
            _check_count(name, value, least)
        self.device = torch.device(device)
        self._read_dtype = readable_dtype(dtype)
        check_backend(backend, self.device, dtype)
        self.num_blocks = num_blocks
        self.max_num_frames = max_num_frames
        self.max_total_frames = max_total_frames
        self.tokens_per_frame = tokens_per_frame
        self.num_special_tokens = num_special_tokens
        self._set_window(scale_frames, sliding_window, max_total_frames)

        self._layout = TokenLayout.of(max_num_frames, max_total_frames, tokens_per_frame, num_special_tokens)
        self._store = TokenStore(num_blocks, self._layout.num_tokens, num_heads, head_dim, dtype, self.device)
        self._frame_shape = (tokens_per_frame, num_heads, head_dim)

        self._empty_table = FrameTable.empty(max_num_frames, self._layout.num_special_slots)
        # Blocks go through the same states one after the other: the first computes, the others find the result here.
        # A block may take as many steps as there are pages before the next one follows (the scale frames' appends).
        steps = max_num_frames + 8
        self._append = lru_cache(maxsize=steps)(FrameTable.append)
        self._evict = lru_cache(maxsize=steps)(FrameTable.evict)
        self._drop_last = lru_cache(maxsize=steps)(FrameTable.drop_last)
        self._visible = lru_cache(maxsize=8)(partial(_visible_tokens, self._layout, self.device))
        self._place = lru_cache(maxsize=8)(partial(_newest_place, self._layout, self.device))
        self._asked_backend = backend
        self.backend = self._make_backend(backend)
        if dtype == FP8:
            self._leave_keys_in_fp8()
        self._most_tokens = self._full_window().num_tokens
        self._flash: FlashBackend | None = None
        if self.can_place:
            self._flash = FlashBackend(self.device)
            # Of a frame, as `attend_placed` needs it: first special token, first patch, runs of visible tokens.
            most_runs = self._layout.num_special_slots + self._layout.num_pages
            self._placed = torch.zeros(3 + 2 * most_runs, dtype=torch.int32, device=self.device)
        self.num_resizes = 0
        self.reset()

    @staticmethod
    def required_bytes(
        *,
        num_blocks: int,
        max_num_frames: int,
        tokens_per_frame: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_special_tokens: int = 6,
        max_total_frames: int = 2048,
    ) -> int:
        """Return the bytes that a cache of these arguments allocates, without allocating anything."""
        layout = TokenLayout.of(max_num_frames, max_total_frames, tokens_per_frame, num_special_tokens)
        return TokenStore.required_bytes(num_blocks, layout.num_tokens, num_heads, head_dim, dtype)

    def reset(self) -> None:
        """Forget every frame. No memory is freed or allocated."""
        self._tables = [self._empty_table] * self.num_blocks
        self._undo: list[FrameTable | None] = [None] * self.num_blocks
        self._peak_pages = [0] * self.num_blocks
        self._num_unkept = [0] * self.num_blocks

    def resize(
        self,
        *,
        scale_frames: int | None = None,
        sliding_window: int | None = None,
        remembered_frames: int | None = None,
    ) -> None:
        """Change the window between two frames, within what the constructor reserved; None leaves a value as it is.

        The newest frames that fit stay, in the pages where they are; a wider window fills again as frames come. Raises
        ValueError, naming the reserved size that is too small, and changes nothing then.
        """
        self._set_window(
            self.scale_frames if scale_frames is None else scale_frames,
            self.sliding_window if sliding_window is None else sliding_window,
            self.remembered_frames if remembered_frames is None else remembered_frames,
        )
        for block_idx in range(self.num_blocks):
            self.evict_frames(block_idx, self.scale_frames, self.sliding_window)
        self._undo = [None] * self.num_blocks
        self.num_resizes += 1

    def append_frame(self, block_idx: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one frame's k and v [tokens_per_frame, heads, head_dim] as the newest kept frame of a block.

        Raises RuntimeError when all pages are taken (evict first), ValueError for another shape.
        """
        self._check_frame(k, v)
        self._write(block_idx, self._take_place(block_idx, keep=None), k, v)

    def evict_frames(self, block_idx: int, scale_frames: int, sliding_window: int) -> None:
        """Free the pages of all frames of a block but the first `scale_frames` and the last `sliding_window`.

        Special tokens beyond the remembered frames go too, the oldest first, those of scale frames never.
        """
        _check_window(scale_frames, sliding_window)
        table = self._tables[block_idx]
        self._tables[block_idx] = self._evict(table, scale_frames, sliding_window, self.remembered_frames)

    def compute_attention(self, block_idx: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q to every visible token of a block.

        q: [n, heads, head_dim], the queries of one frame or of several. Returns the same shape and dtype.
        Raises RuntimeError when the block holds no frame, ValueError for another shape.
        """
        self._check_queries(q)
        if not self._tables[block_idx].specials:
            raise RuntimeError("there is no frame to attend to")
        return self._attend(block_idx, self._tables[block_idx], q)

    def rollback_last_frame(self, block_idx: int) -> None:
        """Remove the newest frame of a block.

        After `append_frame` it is as if that had not been called: what was evicted since comes back. After
        `attend_frame`, or twice in a row, the frame goes and what it displaced is gone. Raises RuntimeError when the
        block has no frame.
        """
        before = self._undo[block_idx]
        self._tables[block_idx] = self._drop_last(self._tables[block_idx]) if before is None else before
        self._undo[block_idx] = None

    def attend_frame(
        self, block_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool = True
    ) -> torch.Tensor:
        """Do one frame's whole step in one block, with the constructor's window.

        A kept frame is appended, the window evicts, the frame attends; it takes over the page of the frame that it
        displaces, so that no spare page is needed. Another frame attends to what is visible and to itself, and leaves
        no trace; it needs a free page. q, k, v and the result: [tokens_per_frame, heads, head_dim].
        """
        self._check_queries(q)
        self._check_frame(k, v)
        table = self._take_place(block_idx, bool(keep))
        self._write(block_idx, table, k, v)
        return self._attend(block_idx, table, q)

    @property
    def why_not_placed(self) -> str:
        """Why `place_frame` and `attend_placed` cannot be used; empty: they can."""
        if self._asked_backend not in ("auto", FlashBackend.name):
            return f"the attention backend is {self._asked_backend}"
        reason = check_flash(self.device, self._read_dtype, self.tokens_per_frame, self._frame_shape[2])
        return reason or ("" if can_append_on_device() else "Triton cannot compile here")

    @property
    def can_place(self) -> bool:
        """Whether `place_frame` and `attend_placed` can be used."""
        return not self.why_not_placed

    def place_frame(self, keep: bool | None) -> None:
        """Take the next frame's place in every block and tell the device of it, for `attend_placed`.

        As attend_frame does block by block; with keep None as append_frame, which evicts nothing yet. The blocks must
        be in one state. Raises RuntimeError when they are not, when all pages are taken, and without `can_place`.
        """
        if self._flash is None:
            raise RuntimeError(f"frames cannot be placed: {self.why_not_placed}")
        table = None
        for block_idx in range(self.num_blocks):
            before, table = table, self._take_place(block_idx, keep)
            if before is not None and before is not table:
                raise RuntimeError(f"blocks {block_idx - 1} and {block_idx} hold different frames")
        place, visible = self._place(table), self._visible(table)
        values = [place.first_special, place.first_patch, *visible.counts]
        self._placed[: len(values)].copy_(torch.tensor(values, dtype=torch.int32).pin_memory(), non_blocking=True)

    def attend_placed(self, block_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store a frame's k and v in a block and attend, where the last `place_frame` said, on the device alone.

        It launches the same kernels for every frame, so that a CUDA graph may hold it. q, k, v and the result:
        [tokens_per_frame, heads, head_dim].
        """
        if not (has_whole_tokens(k) and has_whole_tokens(v)):
            raise ValueError(f"k and v of a frame must have whole tokens, not strides {k.stride()} and {v.stride()}")
        append_on_device(k, v, *self._store.blocks[block_idx], self.num_special_tokens, self._placed)
        runs = self._placed[2:]
        return self._flash.attend_runs(q, *self._store.read_on_device(block_idx, runs), runs, self._most_tokens)

    def get_cache_stats(self, block_idx: int = 0) -> dict[str, int]:
        """Return the state of a block as a flat dict; pages count frames. Cheap enough for every frame.

        frame_count: frames kept since the reset. scale_pages, live_pages, free_pages: pages of scale frames, of other
        frames, of none; peak_pages: the most that were taken at once. special_tokens: remembered ones, those of
        special_frames frames of at most special_slots. evicted_pages, evicted_specials: frames whose patches or special
        tokens are gone. unkept_frames: frames that attended and were not kept. resizes: of the cache. bytes: of all
        blocks, and of what one is decoded into.
        """
        table = self._tables[block_idx]
        scale_pages = sum(frame < self.scale_frames for frame, _ in table.pages[: self.scale_frames])
        return {
            "frame_count": table.frame_count,
            "scale_pages": scale_pages,
            "live_pages": len(table.pages) - scale_pages,
            "free_pages": len(table.free_pages),
            "peak_pages": self._peak_pages[block_idx],
            "special_tokens": len(table.specials) * self.num_special_tokens,
            "special_frames": len(table.specials),
            "special_slots": self.remembered_frames,
            "evicted_pages": table.frame_count - len(table.pages),
            "evicted_specials": table.frame_count - len(table.specials),
            "unkept_frames": self._num_unkept[block_idx],
            "resizes": self.num_resizes,
            "bytes": self._store.nbytes,
        }

    def describe_pages(self, block_idx: int = 0) -> str:
        """Return the page table of a block as text, for debugging: a line a page, then the special slots' frames."""
        table = self._tables[block_idx]
        frame_of_page = {page: frame for frame, page in table.pages}
        width = len(str(max(self.max_num_frames - 1, table.frame_count)))
        runs = ", ".join(f"[{start}, {stop})" for start, stop in self._visible(table).runs)
        lines = [
            f"block {block_idx}: {table.frame_count} frames kept, window {self.scale_frames} + {self.sliding_window}, "
            f"{len(table.specials)} of {self.remembered_frames} frames remembered, visible tokens {runs or 'none'}"
        ]
        for page in range(self.max_num_frames):
            frame = frame_of_page.get(page)
            holder = "free" if frame is None else f"frame {frame:{width}}"
            is_scale = frame is not None and frame < self.scale_frames
            lines.append(f"page {page:{width}}: {holder}{' scale' if is_scale else ''}")
        slots = " ".join(f"{slot}:{frame}" for frame, slot in sorted(table.specials, key=lambda pair: pair[1]))
        lines.append(f"special slots (slot:frame): {slots or 'none'}")
        return "\n".join(lines)

    def _check_frame(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape != self._frame_shape:
                raise ValueError(f"{name} must have the shape {self._frame_shape}, not {tuple(tensor.shape)}")

    def _take_place(self, block_idx: int, keep: bool | None) -> FrameTable:
        """Note a frame in a block; return the block's table with that frame, which attends by it.

        keep: True evicts first what it displaces; None evicts nothing and can be undone; False leaves the block as it
        was.
        """
        before = self._tables[block_idx]
        table = before
        if keep:
            # The same frames stay as by evicting after the append: the new one takes the last place in both.
            table = self._evict(table, self.scale_frames, self.sliding_window - 1, self.remembered_frames - 1)
        table = self._append(table)
        # Otherwise what an undo would bring back may be overwritten.
        self._undo[block_idx] = before if keep is None else None
        if keep is False:
            self._num_unkept[block_idx] += 1
        else:
            self._tables[block_idx] = table
        self._peak_pages[block_idx] = max(self._peak_pages[block_idx], len(table.pages))
        return table

    @torch.no_grad()
    def _write(self, block_idx: int, table: FrameTable, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write a frame where `table` has its newest one."""
        append_tokens(k, v, *self._store.blocks[block_idx], self.num_special_tokens, self._place(table))

    def _attend(self, block_idx: int, table: FrameTable, q: torch.Tensor) -> torch.Tensor:
        visible = self._visible(table)
        return self.backend.attend(q, *self._store.read(block_idx, visible), visible)

    def _check_queries(self, q: torch.Tensor) -> None:
        if q.ndim != 3 or q.shape[1:] != self._frame_shape[1:]:
            raise ValueError(
                f"q must have the shape (n, {self._frame_shape[1]}, {self._frame_shape[2]}), not {tuple(q.shape)}"
            )

    def _set_window(self, scale_frames: int, sliding_window: int, remembered_frames: int) -> None:
        _check_window(scale_frames, sliding_window)
        frames = scale_frames + sliding_window
        reason = f"scale_frames {scale_frames} and sliding_window {sliding_window}"
        if self.max_num_frames < frames:
            raise ValueError(f"max_num_frames must be at least {frames} for {reason}, not {self.max_num_frames}")
        if remembered_frames < frames:
            raise ValueError(f"the remembered frames must be at least {frames} for {reason}, not {remembered_frames}")
        if remembered_frames > self.max_total_frames:
            raise ValueError(f"max_total_frames must be at least {remembered_frames}, not {self.max_total_frames}")
        self.scale_frames = scale_frames
        self.sliding_window = sliding_window
        self.remembered_frames = remembered_frames

    def _make_backend(self, name: str) -> AttentionBackend:
        """Try the backend out on a frame with a full window and a full ring, of random tokens."""
        if self.device.type != "cuda":
            k, v = self._store.readable(0)
            return make_backend(name, k[:0], k, v, VisibleTokens([], self.device))
        self._store.prepare()
        prepare_append(*self._store.blocks[0], self.tokens_per_frame, self.num_special_tokens)
        q = torch.randn(self._frame_shape, dtype=self._read_dtype, device=self.device)
        return make_backend(name, q, *self._store.fill_random(), self._full_window())

    def _leave_keys_in_fp8(self) -> None:
        """Let attention multiply by keys as they are stored, where it can.

        Queries are rounded to fp8 as well then, which adds little to the error that the keys have already, and half of
        the decoding need not be done.
        """
        backend, head_dim = self.backend, self._frame_shape[2]
        if not (isinstance(backend, FlashBackend) and backend.multiplies_fp8(head_dim)):
            return
        self._store.decodes_keys = False
        visible = self._full_window()  # as it will be: how the work is divided makes a kernel of its own
        q = torch.zeros(self._frame_shape, dtype=self._read_dtype, device=self.device)
        try:
            backend.attend(q, *self._store.read(0, visible), visible)
            torch.cuda.synchronize(self.device)
        except Exception as error:  # see append.prepare_append
            self._store.decodes_keys = True
            warn_once(logger, f"keys are decoded before they are multiplied, which takes longer: {first_line(error)}")

    def _full_window(self) -> VisibleTokens:
        """Return what is visible once window and ring are full."""
        full = self._empty_table
        for _ in range(self.scale_frames + self.sliding_window):
            full = full.append()
        specials = tuple((frame, frame) for frame in range(self.remembered_frames))
        return VisibleTokens(self._layout.visible_runs(replace(full, specials=specials)), self.device)


def _newest_place(layout: TokenLayout, device: torch.device, table: FrameTable) -> TokenPlace:
    return TokenPlace(layout.slot_start(table.specials[-1][1]), layout.page_start(table.pages[-1][1]), device)


def _visible_tokens(layout: TokenLayout, device: torch.device, table: FrameTable) -> VisibleTokens:
    return VisibleTokens(layout.visible_runs(table), device)


def _check_window(scale_frames: int, sliding_window: int) -> None:
    _check_count("scale_frames", scale_frames, 1)
    _check_count("sliding_window", sliding_window, 1)


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value}")
