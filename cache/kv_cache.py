# SPDX-License-Identifier: Apache-2.0
"""The two-stream paged KV cache."""
from __future__ import annotations

import logging
from functools import lru_cache

import torch

from lingbot_map_ros.cache.attention import AttentionBackend, FlashInferBackend, SdpaBackend, VisibleTokens
from lingbot_map_ros.cache.frame_table import FrameTable

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "flashinfer")


class FlashInferKVCacheManager:
    """K and V of the kept frames of one sequence, in pages that are allocated once and recycled.

    A frame's tokens are its special tokens, then its patches, in this order. A block sees every token of the first
    `scale_frames` frames and of the last `sliding_window`, and the special tokens of the others. So a frame's tokens go
    two ways: patches fill one page a frame, recycled as the window slides; special tokens go to a ring of
    `max_total_frames` frames, which the scale frames never leave. Memory is allocated by the constructor alone.

    In a block's buffer the special slots lie before the pages, the first slot next to the first page, and both are
    taken lowest first: what is visible is one run of tokens whenever the window is filling or slides by `attend_frame`.

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

        num_blocks: attention layers. max_num_frames: pages, at least scale_frames + sliding_window; one more is needed for
        frames that are not kept, or kept after they have attended. tokens_per_frame: special tokens and patches.
        max_total_frames: frames whose special tokens are remembered, scale frames and window included.
        backend: "sdpa", "flashinfer" (CUDA, bf16 or fp16) or "auto", FlashInfer where it works.

        Raises ValueError, naming the argument, for sizes that do not fit together.
        """
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("num_heads", num_heads, 1),
            ("head_dim", head_dim, 1),
            ("num_special_tokens", num_special_tokens, 1),
            ("tokens_per_frame", tokens_per_frame, num_special_tokens),
            ("max_num_frames", max_num_frames, scale_frames + sliding_window),
            ("max_total_frames", max_total_frames, scale_frames + sliding_window),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        _check_window(scale_frames, sliding_window)
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")

        self.num_blocks = num_blocks
        self.tokens_per_frame = tokens_per_frame
        self.num_special_tokens = num_special_tokens
        self.scale_frames = scale_frames
        self.sliding_window = sliding_window
        self.remembered_frames = max_total_frames
        self.device = torch.device(device)

        # A frame that is not evicted yet needs a slot beside the remembered ones, as it needs a page beside the window.
        num_special_slots = max_total_frames + max(1, max_num_frames - scale_frames - sliding_window)
        self._num_patches = tokens_per_frame - num_special_tokens
        self._first_page_token = num_special_slots * num_special_tokens
        num_tokens = self._first_page_token + max_num_frames * self._num_patches
        # Filled, not only reserved, so that the process's memory is all taken here and not as the window fills.
        self._kv = torch.empty((num_blocks, 2, num_tokens, num_heads, head_dim), dtype=dtype, device=self.device).zero_()
        self._blocks_kv = [(kv[0], kv[1]) for kv in self._kv]  # k, v: [tokens, heads, head_dim]

        self._empty_table = FrameTable.empty(max_num_frames, num_special_slots)
        # Blocks go through the same states one after the other: the first computes, the others find the result here.
        self._append = lru_cache(maxsize=8)(FrameTable.append)
        self._evict = lru_cache(maxsize=8)(FrameTable.evict)
        self._visible = lru_cache(maxsize=8)(self._visible_tokens)
        self.backend = _choose_backend(backend, self.device, dtype)
        self.reset()

    def reset(self) -> None:
        """Forget every frame. No memory is freed or allocated."""
        self._tables = [self._empty_table] * self.num_blocks
        self._undo: list[FrameTable | None] = [None] * self.num_blocks

    def append_frame(self, block_idx: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one frame's k and v [tokens_per_frame, heads, head_dim] as the newest kept frame of a block.

        Raises RuntimeError when all pages are taken (evict first), ValueError for another shape.
        """
        before = self._tables[block_idx]
        self._tables[block_idx] = self._store(block_idx, before, k, v)
        self._undo[block_idx] = before

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
        return self._attend(block_idx, self._tables[block_idx], q)

    def rollback_last_frame(self, block_idx: int) -> None:
        """Remove the newest frame of a block, as if it had never been appended.

        What was evicted since comes back, as long as no other frame was written in between. Raises RuntimeError
        when the block holds no frame.
        """
        before, self._undo[block_idx] = self._undo[block_idx], None
        self._tables[block_idx] = before if before is not None else self._tables[block_idx].drop_last()

    def attend_frame(
        self, block_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool = True
    ) -> torch.Tensor:
        """Do one frame's whole step in one block, with the constructor's window.

        A kept frame is appended, the window evicts, the frame attends; it takes over the page of the frame that it
        displaces, so that no spare page is needed. Another frame attends to what is visible and to itself, and leaves no
        trace; it needs a free page. q, k, v and the result: [tokens_per_frame, heads, head_dim].
        """
        table = self._tables[block_idx]
        if keep:
            # The same frames stay as by evicting after the append: the new one takes the last place in both.
            table = self._evict(table, self.scale_frames, self.sliding_window - 1, self.remembered_frames - 1)
        table = self._store(block_idx, table, k, v)
        self._undo[block_idx] = None  # what an undo would bring back may just have been overwritten
        if keep:
            self._tables[block_idx] = table
        return self._attend(block_idx, table, q)

    def get_cache_stats(self, block_idx: int = 0) -> dict[str, int]:
        """Return the state of a block as a flat dict; pages count frames.

        frame_count: frames kept since the reset. scale_pages, live_pages, free_pages: pages of scale frames, of other
        frames, of none. special_tokens: remembered ones. bytes: the allocation of all blocks together.
        """
        table = self._tables[block_idx]
        scale_pages = sum(frame < self.scale_frames for frame, _ in table.pages[: self.scale_frames])
        return {
            "frame_count": table.frame_count,
            "scale_pages": scale_pages,
            "live_pages": len(table.pages) - scale_pages,
            "free_pages": len(table.free_pages),
            "special_tokens": len(table.specials) * self.num_special_tokens,
            "bytes": self._kv.nbytes,
        }

    def _store(self, block_idx: int, table: FrameTable, k: torch.Tensor, v: torch.Tensor) -> FrameTable:
        """Write a frame into the next free page and special slot of `table`, and return the table with that frame."""
        frame_shape = (self.tokens_per_frame, *self._kv.shape[3:])
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != frame_shape:
                raise ValueError(f"{name} must have the shape {frame_shape}, not {tuple(tensor.shape)}")
        table = self._append(table)
        special_start = self._special_run(table.specials[-1][1])[0]
        page_start = self._page_run(table.pages[-1][1])[0]
        for stored, new in zip(self._blocks_kv[block_idx], (k, v)):
            stored[special_start : special_start + self.num_special_tokens] = new[: self.num_special_tokens]
            if self._num_patches:
                stored[page_start : page_start + self._num_patches] = new[self.num_special_tokens :]
        return table

    def _attend(self, block_idx: int, table: FrameTable, q: torch.Tensor) -> torch.Tensor:
        if q.ndim != 3 or q.shape[1:] != self._kv.shape[3:]:
            raise ValueError(f"q must have the shape (n, {', '.join(map(str, self._kv.shape[3:]))}), not {tuple(q.shape)}")
        if not table.specials:
            raise RuntimeError("there is no frame to attend to")
        k, v = self._blocks_kv[block_idx]
        return self.backend.attend(q, k, v, self._visible(table))

    def _visible_tokens(self, table: FrameTable) -> VisibleTokens:
        specials = [self._special_run(slot) for _, slot in table.specials]
        pages = [self._page_run(page) for _, page in table.pages]
        return VisibleTokens(specials + pages, self.device)

    def _special_run(self, slot: int) -> tuple[int, int]:
        stop = self._first_page_token - slot * self.num_special_tokens
        return stop - self.num_special_tokens, stop

    def _page_run(self, page: int) -> tuple[int, int]:
        start = self._first_page_token + page * self._num_patches
        return start, start + self._num_patches


def _check_window(scale_frames: int, sliding_window: int) -> None:
    for name, value in (("scale_frames", scale_frames), ("sliding_window", sliding_window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend called `name`; "auto" is FlashInfer where it can be used, else SDPA."""
    usable = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name == "flashinfer" and not usable:
        raise ValueError(f"the flashinfer backend needs a CUDA device and bf16 or fp16, not {device} and {dtype}")
    if name == "sdpa" or not usable:
        return SdpaBackend()
    try:
        return FlashInferBackend(device)
    except ImportError as error:
        if name == "flashinfer":
            raise
        logger.warning("FlashInfer is not installed (%s): attention runs on torch's SDPA, which is slower", error)
        return SdpaBackend()
