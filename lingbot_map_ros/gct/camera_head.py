# SPDX-License-Identifier: Apache-2.0
"""The camera head: refines the pose encoding of frames from their camera tokens."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lingbot_map_ros.gct.aggregator import Attend
from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.layers import Block, Linear, Mlp, Rotate

POSE_DIM = 9  # tx ty tz qx qy qz qw fov_h fov_w


class CameraHead(nn.Module):
    """Iterative refinement by transformer blocks that see the camera tokens of earlier frames. Runs in float32."""

    QK_NORM = False

    def __init__(self, config: GCTConfig) -> None:
        super().__init__()
        dim = 2 * config.embed_dim
        self.config = config
        self.empty_pose_tokens = nn.Parameter(torch.empty(1, 1, POSE_DIM))
        self.trunk = nn.ModuleList(
            Block(dim, config.camera_heads, config.camera_mlp_ratio, qk_norm=self.QK_NORM)
            for _ in range(config.camera_depth)
        )
        self.token_norm = nn.LayerNorm(dim)
        self.trunk_norm = nn.LayerNorm(dim)
        self.embed_pose = Linear(POSE_DIM, dim)
        self.poseLN_modulation = nn.Sequential(nn.SiLU(), Linear(dim, 3 * dim))
        self.adaln_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.pose_branch = Mlp(dim, dim // 2, POSE_DIM)

    def tables(self) -> object:
        """Return what `rotation` needs, made once for a state."""
        return None

    def rotation(self, tables: object, times: torch.Tensor) -> Rotate | None:
        """Return how to rotate q and k [n, 1, heads, head_dim] of frames at times [n], float64. None: not at all."""
        return None

    def forward(
        self, tokens: torch.Tensor, tables: object, attend: Attend, *, times: torch.Tensor, iterations: int
    ) -> list[torch.Tensor]:
        """Predict pose encodings [n, 9] of camera tokens [n, 2 * dim], after each of the iterations.

        attend: as in `Aggregator.forward`, over one token a frame in iterations * camera_depth blocks.
        """
        tokens = self.token_norm(tokens)[:, None]  # [n, 1, 2 * dim]
        normalised = self.adaln_norm(tokens)
        rotate = self.rotation(tables, times)
        pose = None
        encodings = []
        for iteration in range(iterations):
            # Each iteration learns to correct the pose that it is given, not to shape the one before.
            given = self.empty_pose_tokens if pose is None else pose.detach()
            shift, scale, gate = self.poseLN_modulation(self.embed_pose(given)).chunk(3, dim=-1)
            x = gate * (normalised * (1 + scale) + shift) + tokens
            for index, block in enumerate(self.trunk):
                q, k, v = block.project(x, rotate)
                x = block.finish(x, attend(iteration * len(self.trunk) + index, q, k, v))
            increment = self.pose_branch(self.trunk_norm(x))
            pose = increment if pose is None else given + increment
            encoding = pose[:, 0]
            # Only the outputs' fields of view are cut off.
            encodings.append(torch.cat([encoding[:, :7], F.relu(encoding[:, 7:])], dim=-1))
        return encodings
