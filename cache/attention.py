# SPDX-License-Identifier: Apache-2.0
"""Attention from a frame's queries to the visible tokens of a block's K and V."""
from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F


class VisibleTokens:
    """The token slots that a query may attend to, as sorted runs [start, stop) that do not touch each other."""

    def __init__(self, runs: list[tuple[int, int]], device: torch.device) -> None:
        """Merge `runs`, given in any order; each slot may be in one run only."""
        self.runs: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if self.runs and self.runs[-1][1] == start:
                self.runs[-1] = (self.runs[-1][0], stop)
            elif stop > start:
                self.runs.append((start, stop))
        self.num_tokens = sum(stop - start for start, stop in self.runs)
        self._device = device

    @cached_property
    def indices(self) -> torch.Tensor:
        """The slots in ascending order, int64 [num_tokens]."""
        return torch.cat([torch.arange(start, stop, device=self._device) for start, stop in self.runs])

    def select(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the visible rows of tokens [slots, heads, head_dim]: a view when they lie side by side, else a copy."""
        if len(self.runs) == 1:
            start, stop = self.runs[0]
            return tokens[start:stop]
        return tokens.index_select(0, self.indices)


class AttentionBackend(Protocol):
    """Computes softmax(q k^T / sqrt(head_dim)) v over the visible tokens, in any order and without a mask."""

    name: str

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """Attend from q [n, heads, head_dim] over k and v [slots, heads, head_dim]; returns q's shape and dtype."""


class SdpaBackend:
    """torch's scaled dot product attention, on any device. On a CPU it computes in fp32 whatever the storage is."""

    name = "sdpa"

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        compute_dtype = torch.float32 if q.device.type == "cpu" else k.dtype
        queries, keys, values = (
            x.to(compute_dtype).transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, head_dim]
            for x in (q, visible.select(k), visible.select(v))
        )
        out = F.scaled_dot_product_attention(queries, keys, values)
        return out.squeeze(0).transpose(0, 1).to(q.dtype)


class FlashInferBackend:
    """FlashInfer's paged prefill with one-token pages, so that no slot but a visible one is ever read.

    The plan depends on the visible tokens and the number of queries alone: it is made once and serves every block that
    is in the same state.
    """

    WORKSPACE_BYTES = 128 * 1024 * 1024

    def __init__(self, device: torch.device, kernel: str = "auto") -> None:
        """Prepare FlashInfer's `kernel` (auto, fa2 or fa3). Raises ImportError when FlashInfer is not installed."""
        import flashinfer

        self.name = "flashinfer" if kernel == "auto" else f"flashinfer-{kernel}"
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
        self._planned: tuple[VisibleTokens, int] | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        if self._planned is None or self._planned[0] is not visible or self._planned[1] != len(q):
            self._plan(visible, q, k)
        out = self._wrapper.run(q.to(k.dtype), (k.unsqueeze(1), v.unsqueeze(1)))  # pages [slots, 1, heads, head_dim]
        return out.to(q.dtype)

    def _plan(self, visible: VisibleTokens, q: torch.Tensor, k: torch.Tensor) -> None:
        _, heads, head_dim = q.shape
        self._wrapper.plan(
            torch.tensor([0, len(q)], dtype=torch.int32),
            torch.tensor([0, visible.num_tokens], dtype=torch.int32),
            visible.indices.int(),
            torch.ones(1, dtype=torch.int32),
            heads,
            heads,
            head_dim,
            1,
            causal=False,
            q_data_type=k.dtype,
            kv_data_type=k.dtype,
        )
        self._planned = (visible, len(q))
