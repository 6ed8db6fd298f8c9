# SPDX-License-Identifier: Apache-2.0
"""The aggregator: frame blocks and global blocks in turn over a stream of frames."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lingbot_map_ros.cache import FlashInferKVCacheManager
from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.layers import Block
from lingbot_map_ros.gct.rope import PlanarRope, SpaceTimeRope


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
        cache: FlashInferKVCacheManager,
        *,
        time: int,
        scale_frames: int,
        keep: bool | None,
    ) -> list[torch.Tensor]:
        """Aggregate images [n, 3, h, w] in [0, 1]: the scale frames together at time 0, one frame later.

        Returns the outputs of the configuration's `output_groups`: frame and global block side by side, float32
        [n, tokens, 2 * dim].
        """
        n = len(images)
        kinds = [0 if t == 0 else 1 if t < scale_frames else 2 for t in range(time, time + n)]
        special = torch.stack([tables.special[kind] for kind in kinds])
        x = torch.cat([special, self.patch_embed(images, tables.patch_embed)], dim=1)  # [n, tokens, dim]
        turn = tables.space_time_rope.table(time, n)

        outputs = []
        for index, (frame_block, global_block) in enumerate(zip(self.frame_blocks, self.global_blocks)):
            x = in_frame = frame_block(x, tables.planar_rope.rotate)
            q, k, v = global_block.project(x, lambda tensor: tables.space_time_rope.rotate(tensor, turn))
            x = global_block.finish(x, attend(cache, index, q, k, v, is_first=time == 0, keep=keep))
            if index in self.config.output_groups:
                outputs.append(torch.cat([in_frame, x], dim=-1))
        return outputs


def attend(
    cache: FlashInferKVCacheManager,
    block: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_first: bool,
    keep: bool | None,
) -> torch.Tensor:
    """Attend from frames' q to the cache and to their own k and v, all [n, tokens, heads, head_dim].

    is_first: the n frames start the sequence and all see one another. Otherwise n is 1. keep: None leaves the frame in
    the cache with nothing evicted, to be kept or rolled back. Returns [n * tokens, heads, head_dim].
    """
    if not is_first and keep is not None:
        return cache.attend_frame(block, q[0], k[0], v[0], keep=keep)
    for frame_k, frame_v in zip(k, v):
        cache.append_frame(block, frame_k, frame_v)
    return cache.compute_attention(block, q.flatten(0, 1))
