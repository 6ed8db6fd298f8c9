# SPDX-License-Identifier: Apache-2.0
"""Attention from a frame's queries to the visible tokens of a block's K and V."""
from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class VisibleTokens:
    """The token slots that a query may attend to, as sorted runs [start, stop) that do not touch each other."""

    def __init__(self, runs: list[tuple[int, int]], device: torch.device) -> None:
        self.runs = runs
        self.num_tokens = sum(stop - start for start, stop in runs)
        self._device = device

    @cached_property
    def indices(self) -> torch.Tensor:
        """The slots in ascending order, int32 [num_tokens]."""
        runs = [torch.arange(start, stop, dtype=torch.int32, device=self._device) for start, stop in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    @property
    def counts(self) -> list[int]:
        """The number of runs, then the start and stop of each."""
        return [len(self.runs), *chain.from_iterable(self.runs)]

    @cached_property
    def counted_runs(self) -> torch.Tensor:
        """The `counts`, int32 [1 + 2 * runs]."""
        return to_device(self.counts, self._device)

    def select(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the visible rows of tokens [slots, heads, head_dim]: a view if they lie side by side, else a copy."""
        if len(self.runs) == 1:
            start, stop = self.runs[0]
            return tokens[start:stop]
        return tokens.index_select(0, self.indices)


def to_device(integers: list[int], device: torch.device) -> torch.Tensor:
    """Send a few integers to a device as int32, without waiting for it."""
    values = torch.tensor(integers, dtype=torch.int32)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class AttentionBackend(Protocol):
    """Computes softmax(q k^T / sqrt(head_dim)) v over the visible tokens, in any order and without a mask."""

    name: str

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """Attend from q [n, heads, head_dim] over k and v [slots, heads, head_dim]; returns q's shape and dtype."""


class SdpaBackend:
    """torch's scaled dot product attention, on any device. On a CPU it computes in fp32 whatever the storage is."""

    # Kernels that take any length at once. torch's own choice can be cuDNN, which builds a plan for each new length.
    ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def __init__(self, any_length: bool = False) -> None:
        """any_length: leave out kernels whose first call for a length is slow (cuDNN: 34 ms on an H200)."""
        self.name = "sdpa-any-length" if any_length else "sdpa"
        self._any_length = any_length

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        compute_dtype = torch.float32 if q.device.type == "cpu" else k.dtype
        queries, keys, values = (
            x.to(compute_dtype).transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, head_dim]
            for x in (q, visible.select(k), visible.select(v))
        )
        if self._any_length:
            with sdpa_kernel(self.ANY_LENGTH):
                out = F.scaled_dot_product_attention(queries, keys, values)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values)
        return out.squeeze(0).transpose(0, 1).to(q.dtype)


class FlashInferBackend:
    """FlashInfer's paged prefill with one-token pages, so that no slot but a visible one is ever read.

    FlashInfer lets only a sequence's last page be partly filled; a page of one token is never partly filled. The plan
    depends on the visible tokens and the number of queries alone: it is made once a frame and serves every block in
    the same state.
    """

    WORKSPACE_BYTES = 128 * 1024 * 1024
    _workspaces: dict[torch.device, torch.Tensor] = {}  # scratch of one call: shared by all caches of a device

    def __init__(self, device: torch.device, kernel: str) -> None:
        """Prepare FlashInfer's `kernel`, fa2 or fa3. Raises ImportError when FlashInfer is not installed."""
        import flashinfer

        self.name = f"flashinfer-{kernel}"
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[device], "NHD", backend=kernel)
        self._last_page_length = torch.ones(1, dtype=torch.int32)
        self._planned: tuple[VisibleTokens, int] | None = None
        self._plan_sent = torch.cuda.Event()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        if self._planned is None or self._planned[0] is not visible or self._planned[1] != len(q):
            self._plan(visible, q, k)
        out = self._wrapper.run(q.to(k.dtype), (k.unsqueeze(1), v.unsqueeze(1)))  # pages [slots, 1, heads, head_dim]
        return out.to(q.dtype)

    def _plan(self, visible: VisibleTokens, q: torch.Tensor, k: torch.Tensor) -> None:
        _, heads, head_dim = q.shape
        # A plan goes to the device from one pinned buffer, without waiting: the last one must be there first.
        self._plan_sent.synchronize()
        self._wrapper.plan(
            torch.tensor([0, len(q)], dtype=torch.int32),
            torch.tensor([0, visible.num_tokens], dtype=torch.int32),
            visible.indices,
            self._last_page_length,
            heads,
            heads,
            head_dim,
            1,
            causal=False,
            q_data_type=k.dtype,
            kv_data_type=k.dtype,
        )
        self._plan_sent.record()
        self._planned = (visible, len(q))


class SettlingBackend:
    """One backend while the number of visible tokens changes from frame to frame, another once it stays.

    The lengths grow until the ring of special tokens is full and stay the same from then on. A kernel that builds a
    plan for each new length is the fastest only then.
    """

    SETTLED_AFTER_FRAMES = 8
    LENGTHS_WATCHED = 8

    def __init__(self, changing: AttentionBackend, settled: AttentionBackend) -> None:
        """Use `changing` until a length has come in SETTLED_AFTER_FRAMES frames, then `settled` for that length."""
        self.name = f"{changing.name}, then {settled.name}"
        self._changing = changing
        self._settled = settled
        self._frames_with: dict[tuple[int, int], int] = {}  # (visible tokens, queries): frames seen, the newest last
        self._visible: VisibleTokens | None = None
        self._current = changing

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> torch.Tensor:
        """See AttentionBackend."""
        if visible is not self._visible:
            self._visible = visible
            length = (visible.num_tokens, len(q))
            frames = self._frames_with.pop(length, 0) + 1
            self._frames_with[length] = frames
            if len(self._frames_with) > self.LENGTHS_WATCHED:
                del self._frames_with[next(iter(self._frames_with))]
            self._current = self._settled if frames > self.SETTLED_AFTER_FRAMES else self._changing
        return self._current.attend(q, k, v, visible)
