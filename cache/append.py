# SPDX-License-Identifier: Apache-2.0
"""Writing one frame's K and V into a block's buffers: one kernel on a GPU."""
from __future__ import annotations

import logging
from functools import cached_property

import torch

from lingbot_map_ros.cache.attention import to_device
from lingbot_map_ros.cache.fp8 import FP8, encode, knows_fp8
from lingbot_map_ros.cache.notice import first_line

logger = logging.getLogger(__name__)

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

if triton is not None:

    @triton.jit
    def _append_kernel(
        k, v, stored_k, stored_v, place, k_stride, v_stride,
        NUM_SPECIAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0)
        first_special, first_patch = tl.load(place), tl.load(place + 1)
        slot = tl.where(token < NUM_SPECIAL, first_special + token, first_patch + token - NUM_SPECIAL).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        # Into fp8: what is beyond its range becomes its greatest value.
        new_k = tl.load(k + token * k_stride + column, mask=inside).to(stored_k.dtype.element_ty)
        new_v = tl.load(v + token * v_stride + column, mask=inside).to(stored_v.dtype.element_ty)
        tl.store(stored_k + slot * WIDTH + column, new_k, mask=inside)
        tl.store(stored_v + slot * WIDTH + column, new_v, mask=inside)


_kernel_works = triton is not None  # until it turns out that nothing can be compiled here


def prepare_append(stored_k: torch.Tensor, stored_v: torch.Tensor, tokens: int, num_special: int) -> None:
    """Compile the kernel for buffers like these, whose first tokens are overwritten, or do without it."""
    global _kernel_works
    new = torch.zeros((tokens, *stored_k.shape[1:]), dtype=stored_k.dtype, device=stored_k.device)
    try:
        append_tokens(new, new, stored_k, stored_v, num_special, TokenPlace(0, num_special, stored_k.device))
        torch.cuda.synchronize(stored_k.device)
    except Exception as error:  # Triton needs a C compiler and Python's headers, and says so in many ways
        if not _kernel_works:
            raise
        _kernel_works = False
        logger.warning("Triton cannot compile here, storing a frame takes four copies instead of a kernel: %s",
                       first_line(error))


class TokenPlace:
    """Where a frame's tokens go: special ones to the slots from `first_special` on, others to those from `first_patch`.
    """

    def __init__(self, first_special: int, first_patch: int, device: torch.device) -> None:
        self.first_special = first_special
        self.first_patch = first_patch
        self._device = device

    @cached_property
    def tensor(self) -> torch.Tensor:
        """Both, int32 [2] on the device."""
        return to_device([self.first_special, self.first_patch], self._device)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    stored_k: torch.Tensor,
    stored_v: torch.Tensor,
    num_special: int,
    place: TokenPlace,
) -> None:
    """Copy one frame's k and v [tokens, heads, head_dim] to a place in stored_k and stored_v [slots, heads, head_dim].

    The first `num_special` tokens are the special ones. Beyond the range of fp8 its greatest value is stored.
    """
    if _kernel_works and k.is_cuda and has_whole_tokens(k) and has_whole_tokens(v):
        append_on_device(k, v, stored_k, stored_v, num_special, place.tensor)
        return
    for new, stored in ((k, stored_k), (v, stored_v)):
        if stored.dtype == FP8:
            new = encode(new)
        stored[place.first_special : place.first_special + num_special] = new[:num_special]
        stored[place.first_patch : place.first_patch + len(new) - num_special] = new[num_special:]


def append_on_device(
    k: torch.Tensor,
    v: torch.Tensor,
    stored_k: torch.Tensor,
    stored_v: torch.Tensor,
    num_special: int,
    place: torch.Tensor,
) -> None:
    """Do what `append_tokens` does, for a place that only the device need know: `TokenPlace.tensor`, or longer.

    Needs `can_append_on_device()`, and that each token's heads lie side by side.
    """
    if stored_k.dtype == FP8 and not knows_fp8(stored_k.device):
        k, v = (encode(tokens).view(torch.uint8) for tokens in (k, v))  # bytes: see fp8.decode_on_device
        stored_k, stored_v = stored_k.view(torch.uint8), stored_v.view(torch.uint8)
    tokens, heads, head_dim = k.shape
    width = heads * head_dim
    _append_kernel[(tokens,)](
        k, v, stored_k, stored_v, place, k.stride(0), v.stride(0),
        NUM_SPECIAL=num_special, WIDTH=width, BLOCK=1 << (width - 1).bit_length(),
    )  # fmt: skip


def can_append_on_device() -> bool:
    """Tell whether the kernel works, as far as is known."""
    return _kernel_works


def has_whole_tokens(tokens: torch.Tensor) -> bool:
    """Tell whether each token's heads lie side by side."""
    return tokens.stride()[1:] == (tokens.shape[2], 1)
