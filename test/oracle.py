# SPDX-License-Identifier: Apache-2.0
"""Exact predictions of a camera that drives a curve towards a wall: what is left is the geometry around them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from lingbot_map_ros.gct import GCTConfig, GCTOutput, decode_pose_encoding
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix

HEIGHT, WIDTH = SIZE = (42, 56)  # of the tiny model's images


def curve(count: int, still: tuple[int, int] = (0, 0)) -> tuple[list[np.ndarray], list[torch.Tensor]]:
    """Return T_scene_camera [4, 4] and depth [h, w] of each frame; the camera stands from still[0] to still[1]."""
    poses, depths, s = [], [], 0.0
    for index in range(count):
        s += 0.0 if still[0] <= index < still[1] else 0.02
        angle = 0.3 * np.sin(s)
        T = np.eye(4)
        T[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        T[:3, 3] = np.sin(s), 0.1 * np.cos(3 * s), s / 2
        poses.append(T)
        # A plane far ahead that the camera nears: z = 6 in the scene.
        columns = (torch.arange(WIDTH) - WIDTH / 2) / (WIDTH / 2 / np.tan(0.5))
        rows = (torch.arange(HEIGHT) - HEIGHT / 2) / (HEIGHT / 2 / np.tan(0.4))
        rays = torch.stack([columns.expand(SIZE), rows[:, None].expand(SIZE), torch.ones(SIZE)], -1).double()
        depths.append((6 - T[2, 3]) / (rays @ torch.from_numpy(T[2, :3])))
    return poses, depths


class Oracle:
    """Predicts what is true, in a world and a scale of each window's own."""

    def __init__(
        self, poses: Sequence[np.ndarray], depths: Sequence[torch.Tensor], index_of: Callable[[torch.Tensor], int]
    ) -> None:
        """index_of: which frame an image [3, h, w] shows."""
        self.poses, self.depths = poses, depths
        self._index_of = index_of
        self._generator = np.random.default_rng(1)

    def predict(self, images: torch.Tensor, starts_window: bool) -> GCTOutput:
        """Predict for images [n, 3, h, w]; a window's world is the camera of its first image."""
        indices = [self._index_of(image) for image in images]
        if starts_window:
            self._scale = self._generator.uniform(0.2, 5)
            self._T_window_scene = np.linalg.inv(self.poses[indices[0]])
        encodings = []
        for index in indices:
            T = self._T_window_scene @ self.poses[index]
            encodings.append([*(self._scale * T[:3, 3]), *quaternion_from_matrix(T[:3, :3]), 0.8, 1.0])
        depth = torch.stack([self._scale * self.depths[index] for index in indices])
        encodings = torch.tensor(encodings).float()
        return GCTOutput(encodings, *decode_pose_encoding(encodings, SIZE), depth.float(),
                         torch.full_like(depth, 2).float())


class OracleModel(Oracle):
    """An oracle in a model's place, without caches; an image's first value tells its frame, in thousandths."""

    def __init__(self, poses: Sequence[np.ndarray], depths: Sequence[torch.Tensor], config: GCTConfig) -> None:
        super().__init__(poses, depths, lambda image: round(float(image[0, 0, 0]) * 1000))
        self.config, self.dtype, self.device = config, torch.float32, torch.device("cpu")

    def new_state(self, image_size, **options):
        state = SimpleNamespace(
            num_kept=0, sizes=SimpleNamespace(
                image_size=image_size, scale_frames=3, sliding_window=4, remembered_frames=64, max_sliding_window=4
            )
        )  # fmt: skip

        def reset():
            state.num_kept = 0

        state.reset = reset
        state.keep_last = lambda: None
        state.rollback_last = lambda: setattr(state, "num_kept", state.num_kept - 1)
        return state

    def step(self, images, state, keep=True):
        output = self.predict(images, starts_window=state.num_kept == 0)
        state.num_kept += len(images) if keep is not False else 0
        return output
