# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings against their formulas, and at any time."""
import cmath

import torch

from lingbot_map_ros.gct.rope import PlanarRope, SpaceTimeRope

GRID, SPECIAL = (2, 3), 6
TOKENS = SPECIAL + 6


def times(first, count):
    return torch.arange(first, first + count, dtype=torch.float64)


def test_planar_rotation_follows_its_formula():
    x = torch.randn(1, TOKENS, 2, 64, generator=torch.Generator().manual_seed(0))
    rotated = PlanarRope(GRID, SPECIAL, 64, "cpu").rotate(x)
    torch.testing.assert_close(rotated[:, :SPECIAL], x[:, :SPECIAL])
    token, row, column = SPECIAL + 5, 1, 2
    for half, position in ((0, row + 1), (32, column + 1)):
        for i in (0, 3, 15):
            pair = complex(x[0, token, 1, half + i], x[0, token, 1, half + 16 + i])
            pair *= cmath.exp(1j * position * 100 ** (-2 * i / 32))
            actual = rotated[0, token, 1, [half + i, half + 16 + i]]
            torch.testing.assert_close(actual, torch.tensor([pair.real, pair.imag]))


def test_space_time_rotation_follows_its_formula():
    rope = SpaceTimeRope(GRID, SPECIAL, 64, "cpu")
    x = torch.randn(2, TOKENS, 2, 64, generator=torch.Generator().manual_seed(0))
    rotated = rope.rotate(x, rope.table(times(7, 2)))
    for token, row, column in ((4, 4, 4), (SPECIAL + 5, SPECIAL + 1, SPECIAL + 2)):
        for start, channels, position in ((0, 20, 8), (20, 22, row), (42, 22, column)):
            for i in (0, 2, channels // 2 - 1):
                first = start + 2 * i
                pair = complex(x[1, token, 0, first], x[1, token, 0, first + 1])
                pair *= cmath.exp(1j * position * 10000 ** (-2 * i / channels))
                actual = rotated[1, token, 0, first : first + 2]
                torch.testing.assert_close(actual, torch.tensor([pair.real, pair.imag]))


def test_attention_depends_on_time_differences_alone_however_late():
    rope = SpaceTimeRope(GRID, SPECIAL, 128, "cpu")
    q, k = torch.randn(2, 1, TOKENS, 1, 128, generator=torch.Generator().manual_seed(0))

    def score(t):
        return (rope.rotate(q, rope.table(times(t + 5, 1))) * rope.rotate(k, rope.table(times(t, 1)))).sum(-1)

    torch.testing.assert_close(score(0), score(1_000_000), rtol=0, atol=1e-4)
    assert (score(0) - (q * k).sum(-1)).abs().max() > 0.1
