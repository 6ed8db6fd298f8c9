# SPDX-License-Identifier: Apache-2.0
"""Writing one frame's K and V into a block's buffers: one kernel on a GPU."""
from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

if triton is not None:

    @triton.jit(do_not_specialize=["first_special", "first_patch"])
    def _append_kernel(
        k, v, stored_k, stored_v, first_special, first_patch, k_stride, v_stride,
        NUM_SPECIAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0)
        slot = tl.where(token < NUM_SPECIAL, first_special + token, first_patch + token - NUM_SPECIAL).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        tl.store(stored_k + slot * WIDTH + column, tl.load(k + token * k_stride + column, mask=inside), mask=inside)
        tl.store(stored_v + slot * WIDTH + column, tl.load(v + token * v_stride + column, mask=inside), mask=inside)


_kernel_works = triton is not None  # until it turns out that nothing can be compiled here


def prepare_append(stored_k: torch.Tensor, stored_v: torch.Tensor, tokens: int, num_special: int) -> None:
    """Compile the kernel for buffers like these, whose first tokens are overwritten, or do without it."""
    global _kernel_works
    new = torch.zeros((tokens, *stored_k.shape[1:]), dtype=stored_k.dtype, device=stored_k.device)
    try:
        append_tokens(new, new, stored_k, stored_v, num_special, 0, num_special)
        torch.cuda.synchronize(stored_k.device)
    except Exception as error:  # Triton needs a C compiler and Python's headers, and says so in many ways
        if not _kernel_works:
            raise
        _kernel_works = False
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        logger.warning("Triton cannot compile here, storing a frame takes four copies instead of a kernel: %s", reason)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    stored_k: torch.Tensor,
    stored_v: torch.Tensor,
    num_special: int,
    first_special: int,
    first_patch: int,
) -> None:
    """Copy one frame's k and v [tokens, heads, head_dim] into stored_k and stored_v [slots, heads, head_dim].

    The first `num_special` tokens go to the slots from `first_special` on, the others to those from `first_patch` on.
    """
    if _kernel_works and k.is_cuda:
        tokens, heads, head_dim = k.shape
        k_stride, v_stride = k.stride(), v.stride()
        if k_stride[1:] == v_stride[1:] == (head_dim, 1):  # each token's heads side by side
            width = heads * head_dim
            _append_kernel[(tokens,)](
                k, v, stored_k, stored_v, first_special, first_patch, k_stride[0], v_stride[0],
                NUM_SPECIAL=num_special, WIDTH=width, BLOCK=1 << (width - 1).bit_length(),
            )  # fmt: skip
            return
    for new, stored in ((k, stored_k), (v, stored_v)):
        stored[first_special : first_special + num_special] = new[:num_special]
        stored[first_patch : first_patch + len(new) - num_special] = new[num_special:]
