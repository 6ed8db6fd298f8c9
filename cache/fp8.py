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
    def _decode_kernel(stored, decoded, runs, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """For numbers from BLOCK * the first program id on, of `count` in each of k and v, or in v alone."""
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        start = tl.load(runs + 1).to(tl.int64) * WIDTH
        stop = tl.load(runs + 2 * tl.load(runs)).to(tl.int64) * WIDTH
        if (begin < stop) & (begin + BLOCK > start):
            at = begin + tl.arange(0, BLOCK)
            inside = at < count
            at += tl.program_id(1).to(tl.int64) * count
            bits = tl.load(stored + at, mask=inside, other=0).to(tl.int32)
            rest = bits & 0x7F
            # Moved to where fp16 has them. Its exponents count from -15, these from -7: 2 to the 8th is missing.
            half = (((bits & 0x80) << 8) | (rest << 7)).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
            tl.store(decoded + at, tl.where(rest == 0x7F, float("nan"), half), mask=inside)


def knows_fp8(device: torch.device) -> bool:
    """Tell whether a GPU's own conversions and matrix products are used for fp8. (Those of compute capability 8.9 know
    it as well, but were never tried.)"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def encode(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens in fp8. What is beyond its range, infinity too, becomes its greatest value; NaN stays."""
    return tokens if tokens.dtype == FP8 else tokens.clamp(-MOST, MOST).to(FP8)


def decode_on_device(stored: torch.Tensor, decoded: torch.Tensor, runs: torch.Tensor) -> None:
    """Decode a block's k and v [2, tokens, heads, head_dim], or its v [1, ...], from the first visible token to the
    last, on a GPU.

    runs: VisibleTokens.counted_runs, or longer. Bits are moved, 16 bytes at a time: Triton itself knows the format on
    GPUs of compute capability 8.9 and later alone, and torch's conversion took 0.42 ms a block on an H200 (155 million
    numbers).
    """
    parts, tokens, heads, head_dim = stored.shape
    width = heads * head_dim
    _decode_kernel[(triton.cdiv(tokens * width, BLOCK), parts)](
        stored.view(torch.uint8), decoded, runs, tokens * width, WIDTH=width, BLOCK=BLOCK)
