# SPDX-License-Identifier: Apache-2.0
"""What the embedded model does differently from the published rules.

- Patches come from a small convolutional stem instead of DINOv2, on images of one size.
- The camera head normalises queries and keys and rotates them by time.
- The depth head's residual units skip from before the first ReLU.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lingbot_map_ros.gct.camera_head import CameraHead
from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.depth_head import DepthHead, ResidualConvUnit
from lingbot_map_ros.gct.layers import Rotate
from lingbot_map_ros.gct.rope import SpaceTimeRope

INPUT_MEAN = 0.45
INPUT_GAIN = 4.0


class ConvPatchEmbed(nn.Module):
    """Three convolutions down to patches, LayerNorm, a learned position embedding."""

    def __init__(self, config: GCTConfig) -> None:
        super().__init__()
        first, second = config.stem_channels
        rows, columns = config.grid_size((config.image_height, config.image_width))
        side = config.patch_size // 2  # the first convolution halves the image
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(second, config.embed_dim, side, stride=side),
        )
        self.norm = nn.LayerNorm(config.embed_dim)
        self.pos_embed = nn.Parameter(torch.empty(1, rows * columns, config.embed_dim))

    def tables(self, image_size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Nothing depends on the image size."""
        return {}

    def forward(self, images: torch.Tensor, tables: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embed images [n, 3, h, w] in [0, 1]. Returns float32 [n, patches, dim], patches row by row."""
        x = (images - INPUT_MEAN) * INPUT_GAIN
        x = self.stem(x.to(self.stem[0].weight.dtype)).flatten(2).transpose(1, 2)
        return self.norm(x.float()) + self.pos_embed


class CompactCameraHead(CameraHead):
    """A camera head with normalised queries and keys and rotary time."""

    QK_NORM = True

    def tables(self) -> SpaceTimeRope:
        """Return the rotary embedding of one token a frame at (t, 0, 0)."""
        return SpaceTimeRope((1, 1), 0, self.config.camera_head_dim, self.empty_pose_tokens.device)

    def rotation(self, tables: SpaceTimeRope, times: torch.Tensor) -> Rotate:
        """Rotate by the frames' times."""
        turn = tables.table(times)
        return lambda tensor: tables.rotate(tensor, turn)


class PlainResidualConvUnit(ResidualConvUnit):
    """Two convolutions and a skip connection around both and their ReLUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(F.relu(self.conv1(F.relu(x)))) + x


class CompactDepthHead(DepthHead):
    """A depth head of plain residual units."""

    RESIDUAL_UNIT = PlainResidualConvUnit
