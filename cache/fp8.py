# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits, float8_e4m3fn: a sign, 4 bits of exponent and 3 of fraction, up to 448 (P. Micikevicius et al.,
"FP8 Formats for Deep Learning", arXiv 2209.05433)."""
from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

FP8 = torch.float8_e4m3fn
DECODED_FP8 = torch.float16  # holds every value of it
MOST = torch.finfo(FP8).max
BLOCK = 4096

if triton is not None:

    @triton.jit
    def _decode_kernel(stored, decoded, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(stored + at, mask=at < count, other=0).to(tl.int32)
        rest = bits & 0x7F
        # Moved to where fp16 has them. Its exponents are counted from -15, these from -7: 2 to the 8th is missing.
        half = (((bits & 0x80) << 8) | (rest << 7)).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        tl.store(decoded + at, tl.where(rest == 0x7F, float("nan"), half), mask=at < count)


def encode(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens in fp8; its greatest value for what is beyond its range."""
    return tokens if tokens.dtype == FP8 else tokens.clamp(-MOST, MOST).to(FP8)


def decode_on_device(stored: torch.Tensor, decoded: torch.Tensor) -> None:
    """Do what decoded.copy_(stored) does for a whole block on a GPU, several times as fast.

    Triton itself knows the format on GPUs of compute capability 8.9 and later alone.
    """
    count = stored.numel()
    _decode_kernel[(triton.cdiv(count, BLOCK),)](stored.view(torch.uint8), decoded, count, BLOCK=BLOCK)
