# SPDX-License-Identifier: Apache-2.0
"""The two-stream paged KV cache."""
from __future__ import annotations

import torch


class FlashInferKVCacheManager:
    """K and V of the kept frames of one sequence, in pages that are allocated once and recycled.

    A frame's tokens are its `num_special_tokens` special tokens, then its patches, in this order. Patches fill one
    page a frame; special tokens go to a ring of `max_total_frames` frames. With tokens_per_frame ==
    num_special_tokens there are no patches (the camera head's cache).
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
    ) -> None:
        raise NotImplementedError

    def append_frame(self, block_idx: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one frame's k and v [tokens, heads, head_dim] as the newest kept frame of a block."""
        raise NotImplementedError

    def evict_frames(self, block_idx: int, scale_frames: int, sliding_window: int) -> None:
        """Free the pages of all frames but the first `scale_frames` and the last `sliding_window`."""
        raise NotImplementedError

    def compute_attention(self, block_idx: int, q: torch.Tensor) -> torch.Tensor:
        """Attend from q [n, heads, head_dim] to every visible token of the block. Returns [n, heads, head_dim]."""
        raise NotImplementedError

    def rollback_last_frame(self, block_idx: int) -> None:
        """Undo the last append of a block, and the eviction that followed it, as if it had never been."""
        raise NotImplementedError

    def attend_frame(
        self, block_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool = True
    ) -> torch.Tensor:
        """One frame's whole step in one block, on the window given to the constructor.

        keep: append, evict, attend. Otherwise attend to the cache and the frame itself, leaving no trace.
        q, k, v and the result are [tokens, heads, head_dim].
        """
        raise NotImplementedError

    def get_cache_stats(self, block_idx: int = 0) -> dict[str, int]:
        """Return frame_count, scale_pages, live_pages, free_pages, special_tokens and bytes (of all blocks)."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every frame. No memory is freed or allocated."""
        raise NotImplementedError
