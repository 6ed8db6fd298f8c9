# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: over the image plane in frame blocks, over time and plane in global blocks.

Tables are made once for an image size; a frame's time enters without a table, so that no time is too late. Angles,
cosines and sines are computed in float64, then kept in float32.
"""
from __future__ import annotations

import torch


def _frequencies(base: float, dim: int, device: torch.device | str) -> torch.Tensor:
    """Return base^(-2 i / dim) for i = 0 .. dim / 2 - 1, in float64."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _grid_positions(grid: tuple[int, int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of every patch, row by row, in float64: each [rows * columns]."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=device) for size in grid)
    return rows.repeat_interleave(grid[1]), columns.repeat(grid[0])


class PlanarRope:
    """Positions of a frame's tokens in its image: patches at (row + 1, column + 1), special tokens at (0, 0).

    The first half of the head's channels turns by row, the second by column, each half paired with the other half of
    itself (channel i with i + head_dim / 4). Frequencies 100^(-2 i / (head_dim / 2)).
    """

    def __init__(self, grid: tuple[int, int], num_special: int, head_dim: int, device: torch.device | str) -> None:
        positions = torch.stack(_grid_positions(grid, device), dim=-1) + 1  # [patches, 2]
        positions = torch.cat([positions.new_zeros(num_special, 2), positions])
        angles = positions[:, :, None] * _frequencies(100.0, head_dim // 2, device)  # [tokens, 2, head_dim / 4]
        self.cos = angles.cos().float()[:, None]  # [tokens, 1, 2, head_dim / 4]
        self.sin = angles.sin().float()[:, None]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate x [..., tokens, heads, head_dim], in float32."""
        first, second = x.float().unflatten(-1, (2, 2, -1)).unbind(-2)  # [..., tokens, heads, 2, head_dim / 4]
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.stack(turned, dim=-2).flatten(-3)


class SpaceTimeRope:
    """Positions of tokens in (time, row, column): special token i at (t, i, i), patches at (t, s + row, s + column)
    with s special tokens.

    Channels are split into time, row, column: 20 + 22 + 22 of 64, 40 + 44 + 44 of 128. Frequencies
    10000^(-2 i / d) of each axis's own d channels; channels 2 i and 2 i + 1 are a pair.
    """

    def __init__(self, grid: tuple[int, int], num_special: int, head_dim: int, device: torch.device | str) -> None:
        plane = 2 * -(-head_dim // 6)  # channels of row and of column, even
        rows, columns = _grid_positions(grid, device)
        special = torch.arange(num_special, dtype=torch.float64, device=device)
        plane_frequencies = _frequencies(10000.0, plane, device)
        angles = [torch.cat([special, axis + num_special])[:, None] * plane_frequencies for axis in (rows, columns)]
        self._plane = torch.polar(torch.ones((), dtype=torch.float64, device=device), torch.cat(angles, dim=-1))
        self._time_frequencies = _frequencies(10000.0, head_dim - 2 * plane, device)

    def table(self, times: torch.Tensor) -> torch.Tensor:
        """Return exp(i angle) of frames at times [frames], float64: complex64 [frames, tokens, 1, head_dim / 2]."""
        angles = times[:, None, None] * self._time_frequencies  # [frames, 1, time channels / 2]
        turn = torch.complex(angles.cos(), angles.sin()).expand(-1, self._plane.shape[0], -1)
        return torch.cat([turn, self._plane.expand(len(times), -1, -1)], dim=-1)[:, :, None].to(torch.complex64)

    @staticmethod
    def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rotate x [frames, tokens, heads, head_dim] by a `table`, in float32."""
        pairs = x.float().unflatten(-1, (-1, 2))
        if not x.is_cuda:
            return torch.view_as_real(torch.view_as_complex(pairs) * table).flatten(-2)
        # The same in real numbers, which compilers fuse with what comes before and after.
        (first, second), (cos, sin) = pairs.unbind(-1), torch.view_as_real(table).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
