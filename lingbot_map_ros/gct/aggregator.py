# SPDX-License-Identifier: Apache-2.0
"""The aggregator: frame blocks and global blocks in turn over a stream of frames."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.layers import Block
from lingbot_map_ros.gct.rope import PlanarRope, SpaceTimeRope


# Attend in one block, numbered from 0, from q to what the frames see. q, k, v: [n, tokens, heads, head_dim]. Returns
# any shape with as many values in the same order.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AggregatorTables:
    """What depends on the weights and the image size alone, made once for a state."""

    patch_embed: dict[str, torch.Tensor]
    special: torch.Tensor  # [3, special tokens, dim]: of the first frame, of a scale frame, of every other
    planar_rope: PlanarRope
    space_time_rope: SpaceTimeRope


class Aggregator(nn.Module):
    """Turns images into tokens that have seen their own frame and the frames in the cache."""

    def __init__(self, config: GCTConfig, patch_embed: nn.Module) -> None:
        super().__init__()
        dim = config.embed_dim
        self.config = config
        # Each has two variants. Camera and registers: first frame, every other. Scale: scale frames, every other.
        self.camera_token = nn.Parameter(torch.empty(1, 2, 1, dim))
        self.register_token = nn.Parameter(torch.empty(1, 2, config.register_tokens, dim))
        self.scale_token = nn.Parameter(torch.empty(1, 2, 1, dim))
        self.patch_embed = patch_embed

        def blocks() -> nn.ModuleList:
            return nn.ModuleList(
                Block(dim, config.num_heads, config.mlp_ratio, qk_norm=True) for _ in range(config.depth)
            )

        self.frame_blocks = blocks()
        self.global_blocks = blocks()

    def tables(self, image_size: tuple[int, int]) -> AggregatorTables:
        """Return the tables for images of (height, width)."""
        config, device = self.config, self.camera_token.device
        grid = config.grid_size(image_size)

        def special(first: int, scale: int) -> torch.Tensor:
            return torch.cat([self.camera_token[0, first], self.register_token[0, first], self.scale_token[0, scale]])

        return AggregatorTables(
            patch_embed=self.patch_embed.tables(image_size),
            special=torch.stack([special(0, 0), special(1, 0), special(1, 1)]),
            planar_rope=PlanarRope(grid, config.num_special_tokens, config.head_dim, device),
            space_time_rope=SpaceTimeRope(grid, config.num_special_tokens, config.head_dim, device),
        )

    def forward(
        self,
        images: torch.Tensor,
        tables: AggregatorTables,
        attend: Attend,
        *,
        special: torch.Tensor,
        times: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Aggregate images [n, 3, h, w] in [0, 1].

        attend: over the frames that each of the n sees, itself among them. special: the frames' rows of
        `tables.special`, [n, special tokens, dim]. times: [n], float64, positions in the order of kept frames.

        Returns the outputs of the configuration's `output_groups`: frame and global block side by side, float32
        [n, tokens, 2 * dim].
        """
        x = torch.cat([special, self.patch_embed(images, tables.patch_embed)], dim=1)  # [n, tokens, dim]
        turn = tables.space_time_rope.table(times)

        outputs = []
        for index, (frame_block, global_block) in enumerate(zip(self.frame_blocks, self.global_blocks)):
            x = in_frame = frame_block(x, tables.planar_rope.rotate)
            q, k, v = global_block.project(x, lambda tensor: tables.space_time_rope.rotate(tensor, turn))
            x = global_block.finish(x, attend(index, q, k, v))
            if index in self.config.output_groups:
                outputs.append(torch.cat([in_frame, x], dim=-1))
        return outputs
