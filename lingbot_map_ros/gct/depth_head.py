# SPDX-License-Identifier: Apache-2.0
"""The depth head: a dense prediction transformer decoder (DPT, arXiv 2103.13413)."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lingbot_map_ros.gct.config import GCTConfig

PositionTable = tuple[torch.Tensor, torch.Tensor]  # [c / 2, 1, w] of columns, [c / 2, h, 1] of rows


def position_table(
    size: tuple[int, int], channels: int, aspect: float, device: torch.device | str
) -> PositionTable:
    """Return 0.1 times the sinusoidal embedding of the (u, v) of a map of (h, w), for c channels.

    u spans +-aspect / diagonal over the columns and v +-1 / diagonal over the rows, up to half a cell from the edges.
    Channels are sin u, cos u, sin v, cos v with frequencies 100^(-k / (c / 4)).
    """
    diagonal = (aspect**2 + 1) ** 0.5
    # All on the device: a CUDA graph may hold this.
    frequencies = 100.0 ** (-torch.arange(channels // 4, dtype=torch.float64, device=device) / (channels / 4))

    def embed(span: float, count: int) -> torch.Tensor:
        edge = span / diagonal * (count - 1) / count
        angles = frequencies[:, None] * torch.linspace(-edge, edge, count, dtype=torch.float64, device=device)
        return (0.1 * torch.cat([angles.sin(), angles.cos()])).float()

    height, width = size
    return embed(aspect, width)[:, None, :], embed(1.0, height)[:, :, None]


def add_positions(x: torch.Tensor, table: PositionTable) -> torch.Tensor:
    """Add a `position_table` to x [n, c, h, w] in place."""
    half = x.shape[1] // 2
    x[:, :half] += table[0]
    x[:, half:] += table[1]
    return x


def resize(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize x [n, c, h, w] bilinearly, corners on corners."""
    return F.interpolate(x, size=size, mode="bilinear", align_corners=True)


class ResidualConvUnit(nn.Module):
    """Two convolutions and a skip connection that starts after the first ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x)
        return self.conv2(F.relu(self.conv1(x))) + x


class FusionStage(nn.Module):
    """Joins a coarser map with the next finer input and upsamples."""

    def __init__(self, channels: int, unit: type[nn.Module], has_skip: bool) -> None:
        super().__init__()
        self.out_conv = nn.Conv2d(channels, channels, 1)
        if has_skip:
            self.resConfUnit1 = unit(channels)
        self.resConfUnit2 = unit(channels)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None, size: tuple[int, int]) -> torch.Tensor:
        if skip is not None:
            x = x + self.resConfUnit1(skip)
        return self.out_conv(resize(self.resConfUnit2(x), size))


class DepthHead(nn.Module):
    """Depth and confidence from four outputs of the aggregator. Runs in float32."""

    RESIDUAL_UNIT: type[nn.Module] = ResidualConvUnit

    def __init__(self, config: GCTConfig) -> None:
        super().__init__()
        channels, features = config.depth_channels, config.depth_features
        self.config = config
        self.norm = nn.LayerNorm(2 * config.embed_dim)
        self.projects = nn.ModuleList(nn.Conv2d(2 * config.embed_dim, c, 1) for c in channels)
        self.resize_layers = nn.ModuleList([
            nn.ConvTranspose2d(channels[0], channels[0], 4, stride=4),
            nn.ConvTranspose2d(channels[1], channels[1], 2, stride=2),
            nn.Identity(),
            nn.Conv2d(channels[3], channels[3], 3, stride=2, padding=1),
        ])
        scratch = nn.Module()  # the name under which published checkpoints hold the rest
        for level, c in enumerate(channels, start=1):
            scratch.add_module(f"layer{level}_rn", nn.Conv2d(c, features, 3, padding=1, bias=False))
        for level in (1, 2, 3, 4):
            scratch.add_module(f"refinenet{level}", FusionStage(features, self.RESIDUAL_UNIT, has_skip=level < 4))
        scratch.output_conv1 = nn.Conv2d(features, features // 2, 3, padding=1)
        scratch.output_conv2 = nn.Sequential(
            nn.Conv2d(features // 2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 1)
        )
        self.scratch = scratch

    def tables(self, image_size: tuple[int, int]) -> list[PositionTable]:
        """Return the position embeddings for images of (height, width): of the four inputs, then of the output."""
        height, width = image_size
        grid, device = self.config.grid_size(image_size), self.norm.weight.device
        tables = [position_table(grid, c, width / height, device) for c in self.config.depth_channels]
        return [*tables, position_table(image_size, self.config.depth_features // 2, width / height, device)]

    def forward(
        self, tokens: list[torch.Tensor], image_size: tuple[int, int], tables: list[PositionTable]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict depth and confidence, each [n, h, w], from four times patch tokens [n, patches, 2 * dim]."""
        log_depth, confidence = self.logits(tokens, image_size, tables).unbind(1)
        return log_depth.exp(), 1 + confidence.exp()

    def logits(
        self, tokens: list[torch.Tensor], image_size: tuple[int, int], tables: list[PositionTable]
    ) -> torch.Tensor:
        """Predict the logarithms of depth and of confidence - 1, [n, 2, h, w], from what `forward` takes."""
        grid = self.config.grid_size(image_size)
        scratch = self.scratch
        levels = []
        for index, patches in enumerate(tokens):
            x = self.norm(patches).transpose(1, 2).unflatten(2, grid)
            x = self.resize_layers[index](add_positions(self.projects[index](x), tables[index]))
            levels.append(scratch.get_submodule(f"layer{index + 1}_rn")(x))

        x = scratch.refinenet4(levels[3], None, levels[2].shape[-2:])
        x = scratch.refinenet3(x, levels[2], levels[1].shape[-2:])
        x = scratch.refinenet2(x, levels[1], levels[0].shape[-2:])
        x = scratch.refinenet1(x, levels[0], tuple(2 * side for side in levels[0].shape[-2:]))
        x = resize(scratch.output_conv1(x), image_size)
        return scratch.output_conv2(add_positions(x, tables[4]))
