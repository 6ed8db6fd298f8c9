# SPDX-License-Identifier: Apache-2.0
"""The memory of the cache: K and V of all blocks, and how kernels read them."""
from __future__ import annotations

import logging

import torch

from lingbot_map_ros.cache.attention import VisibleTokens, to_device
from lingbot_map_ros.cache.fp8 import DECODED_FP8, FP8, decode_on_device, triton
from lingbot_map_ros.cache.notice import first_line, warn_once

logger = logging.getLogger(__name__)

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


class TokenStore:
    """K and V of `num_tokens` tokens in each of `num_blocks` blocks, allocated once.

    In fp8 (float8_e4m3fn) they take half the memory of bf16. Kernels then read them from a buffer in fp16 of one block,
    into which it is decoded before it attends: decoding in a kernel would be done again for each tile of queries. For
    kernels that multiply by fp8 itself K stays as it is (`decodes_keys`), and its half of the buffer lies idle.
    """

    def __init__(
        self, num_blocks: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ValueError for a dtype that is none of CACHE_DTYPES."""
        check_cache_dtype("dtype", dtype)
        shape = (num_blocks, 2, num_tokens, num_heads, head_dim)
        # Filled, not only reserved, so that the process's memory is all taken here and not as the window fills.
        self._kv = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.blocks = [(kv[0], kv[1]) for kv in self._kv]  # k, v: [tokens, heads, head_dim]
        self._has_kernel = False
        self.decodes_keys = True  # as well as values, before a block attends
        self._decoded = torch.empty(shape[1:], dtype=DECODED_FP8, device=device).zero_() if dtype == FP8 else None

    @staticmethod
    def required_bytes(num_blocks: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that a store of these arguments allocates, without allocating anything."""
        block = 2 * num_tokens * num_heads * head_dim
        return num_blocks * block * dtype.itemsize + (block * DECODED_FP8.itemsize if dtype == FP8 else 0)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self._kv.nbytes + (0 if self._decoded is None else self._decoded.nbytes)

    def prepare(self) -> None:
        """Compile the kernel that decodes on a GPU, or do without it."""
        if self._decoded is None or triton is None:
            return
        try:
            decode_on_device(self._kv[0], self._decoded, to_device([1, 0, 1], self._kv.device))
            torch.cuda.synchronize(self._kv.device)
            self._has_kernel = True
        except Exception as error:  # see append.prepare_append
            warn_once(logger, f"Triton cannot compile here, decoding fp8 takes longer: {first_line(error)}")

    def readable(self, block_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v [tokens, heads, head_dim] as kernels take them: a block's own or, of fp8, what was decoded."""
        if self._decoded is None:
            return self.blocks[block_idx]
        return self._decoded[0] if self.decodes_keys else self.blocks[block_idx][0], self._decoded[1]

    def read(self, block_idx: int, visible: VisibleTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `readable` k and v of a block, in which what is visible is right until the next call."""
        if self._has_kernel:
            return self.read_on_device(block_idx, visible.counted_runs)
        if self._decoded is not None:
            start, stop = visible.runs[0][0], visible.runs[-1][1]
            self._decoded[self._parts, start:stop] = self._kv[block_idx, self._parts, start:stop]
        return self.readable(block_idx)

    def read_on_device(self, block_idx: int, runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `read` does for runs that only the device need know: VisibleTokens.counted_runs, or longer."""
        if self._has_kernel:
            decode_on_device(self._kv[block_idx, self._parts], self._decoded[self._parts], runs)
        elif self._decoded is not None:
            self._decoded[self._parts] = self._kv[block_idx, self._parts]
        return self.readable(block_idx)

    @property
    def _parts(self) -> slice:
        """What is decoded, of k and v."""
        return slice(0 if self.decodes_keys else 1, 2)

    def fill_random(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill what kernels read of the first block with random numbers, to try them out; return k and v."""
        k, v = self.readable(0)
        return k.normal_(), v.normal_()


def check_cache_dtype(name: str, dtype: object, optional: bool = False) -> None:
    """Raise ValueError, naming the argument, for what is none of CACHE_DTYPES (nor, if optional, None)."""
    if dtype not in CACHE_DTYPES and not (optional and dtype is None):
        names = ", ".join(map(str, CACHE_DTYPES)) + (" or None" if optional else "")
        raise ValueError(f"{name} must be one of {names}, not {dtype!r}")


def readable_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels read what is stored in `dtype`."""
    return DECODED_FP8 if dtype == FP8 else dtype
