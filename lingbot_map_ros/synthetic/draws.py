# SPDX-License-Identifier: Apache-2.0
"""Random numbers, drawn on a generator's device."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def uniform(generator: torch.Generator, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Draw from [low, high) on the generator's device."""
    return torch.rand(tuple(shape), generator=generator, device=generator.device) * (high - low) + low


def log_uniform(generator: torch.Generator, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Draw from [low, high) such that the logarithm is uniform."""
    return uniform(generator, shape, math.log(low), math.log(high)).exp()


def chance(generator: torch.Generator, shape: Sequence[int], share: float) -> Tensor:
    """Draw booleans that are true with probability `share`."""
    return torch.rand(tuple(shape), generator=generator, device=generator.device) < share
