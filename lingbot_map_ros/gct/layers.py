# SPDX-License-Identifier: Apache-2.0
"""Transformer layers.

Matrix products run in the dtype of their own weights; the residual stream, normalisation and LayerScale stay in
float32. In float32 models the casts below are no-ops.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

Rotate = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")
MOST_VERSIONS = 64  # of a compiled function


class Linear(nn.Linear):
    """A linear layer that takes its input to its weights' dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def add_to(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return x + gamma * branch; x and the result are float32."""
        return torch.addcmul(x, branch.to(x.dtype), self.gamma)


class Mlp(nn.Module):
    """Two linear layers with an exact (erf) GELU between them."""

    def __init__(self, dim: int, hidden: int, out: int | None = None) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, out or dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Attention(nn.Module):
    """The projections of multi-head attention, with normalised queries and keys if asked for."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)  # rows: q, k, v, each [heads, head_dim]
        self.q_norm = nn.LayerNorm(dim // num_heads) if qk_norm else None
        self.k_norm = nn.LayerNorm(dim // num_heads) if qk_norm else None
        self.proj = Linear(dim, dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of x [n, tokens, dim], each [n, tokens, heads, head_dim]; q and k in float32 if normalised."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        if self.q_norm is not None:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        return q, k, v


class Block(nn.Module):
    """A pre-norm transformer block with LayerScale. Where it attends to a cache, the caller attends in between."""

    is_fused = False  # whether single frames run through code that torch.compile has made

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, *, qk_norm: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, qk_norm)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls2 = LayerScale(dim)

    def project(
        self, x: torch.Tensor, rotate: Rotate | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of x [n, tokens, dim], each [n, tokens, heads, head_dim], q and k rotated, in one dtype."""
        return self._fused_or_plain(Block._project, x)(self, x, rotate)

    def _project(
        self, x: torch.Tensor, rotate: Rotate | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.attn.project(self.norm1(x))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return q.to(v.dtype), k.to(v.dtype), v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add what the tokens x [n, tokens, dim] attended to, of any shape with as many values, and the MLP."""
        return self._fused_or_plain(Block._finish, x)(self, x, attended)

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = self.ls1.add_to(x, self.attn.proj(attended.reshape(x.shape)))
        return self.ls2.add_to(x, self.mlp(self.norm2(x)))

    def forward(self, x: torch.Tensor, rotate: Rotate | None = None) -> torch.Tensor:
        """Run on x [n, tokens, dim], float32; the tokens of each of the n attend to one another."""
        q, k, v = (tensor.transpose(1, 2) for tensor in self.project(x, rotate))
        return self.finish(x, F.scaled_dot_product_attention(q, k, v).transpose(1, 2))

    def _fused_or_plain(self, function: Callable[..., T], x: torch.Tensor) -> Callable[..., T]:
        # Not to be called _version: that is nn.Module's, and goes into what is saved.
        return _fused(function) if self.is_fused and x.is_cuda and len(x) == 1 else function


@lru_cache(maxsize=None)
def _fused(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function of a block compiled, once for all blocks of the same shapes."""
    return torch.compile(function, dynamic=False)


def allow_many_versions() -> None:
    """Let this thread compile a function for many shapes: there are four kinds of blocks for each size of images.

    Beyond torch's own limit of 8 nothing more is compiled.
    """
    torch._dynamo.config.recompile_limit = max(MOST_VERSIONS, torch._dynamo.config.recompile_limit)
