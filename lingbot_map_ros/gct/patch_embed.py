# SPDX-License-Identifier: Apache-2.0
"""DINOv2 patch embedding (arXiv 2304.07193) with register tokens (arXiv 2309.16588)."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.layers import Block

EPS = 1e-6  # of every LayerNorm here
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PatchProjection(nn.Module):
    """A linear map of each patch, as a convolution."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [n, 3, h, w] to float32 [n, patches, dim], patches row by row."""
        return self.proj(images.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2).float()


class DINOv2PatchEmbed(nn.Module):
    """A vision transformer whose normalised patch tokens are the embedding."""

    def __init__(self, config: GCTConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.config = config
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + config.patch_embed_grid**2, dim))
        self.register_tokens = nn.Parameter(torch.empty(1, config.patch_embed_registers, dim))
        self.mask_token = nn.Parameter(torch.empty(1, dim))  # part of published checkpoints, without use here
        self.patch_embed = PatchProjection(config.patch_size, dim)
        self.blocks = nn.ModuleList(
            Block(dim, config.patch_embed_heads, 4.0, qk_norm=False, eps=EPS) for _ in range(config.patch_embed_depth)
        )
        self.norm = nn.LayerNorm(dim, eps=EPS)

    def tables(self, image_size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Return what depends on the weights and the image size (height, width) alone."""
        rows, columns = self.config.grid_size(image_size)
        side = self.config.patch_embed_grid
        grid = self.pos_embed[:, 1:].float()
        if (rows, columns) != (side, side):
            grid = grid.unflatten(1, (side, side)).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=True)
            grid = grid.flatten(2).transpose(1, 2)
        device = self.pos_embed.device
        return {
            "prefix": torch.cat([self.cls_token + self.pos_embed[:, :1], self.register_tokens], dim=1),
            "positions": grid,  # [1, patches, dim]
            "mean": torch.tensor(IMAGENET_MEAN, device=device)[:, None, None],
            "std": torch.tensor(IMAGENET_STD, device=device)[:, None, None],
        }

    def forward(self, images: torch.Tensor, tables: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embed images [n, 3, h, w] in [0, 1]. Returns float32 [n, patches, dim], patches row by row."""
        x = self.patch_embed((images - tables["mean"]) / tables["std"]) + tables["positions"]
        prefix = tables["prefix"]
        x = torch.cat([prefix.expand(len(images), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, prefix.shape[1]:])
