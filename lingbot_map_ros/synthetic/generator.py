# SPDX-License-Identifier: Apache-2.0
"""Sequences of images of random scenes, with their depth, poses and intrinsics."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lingbot_map_ros.synthetic.exposure import expose
from lingbot_map_ros.synthetic.options import MIXED, SceneOptions
from lingbot_map_ros.synthetic.path import GROUND, Motion, draw_paths
from lingbot_map_ros.synthetic.renderer import Renderer
from lingbot_map_ros.synthetic.room import draw_rooms
from lingbot_map_ros.synthetic.scene import Scenes
from lingbot_map_ros.synthetic.texture import TextureBank, chance, log_uniform, uniform

@dataclass
class Sequences:
    """b sequences of s frames of h x w pixels, on one device."""

    images: Tensor  # [b, s, 3, h, w] float32 in [0, 1]
    depth: Tensor  # [b, s, h, w] float32 along the optical axis, metres; inf where nothing is hit (sky)
    T_world_camera: Tensor  # [b, s, 4, 4] float32; world: metres, z up; camera: x right, y down, z forward
    intrinsics: Tensor  # [b, 3, 3] float32, pixels; the centre of the pixel in column u is at u + 0.5


def intrinsics_from_fov(fov: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Return intrinsics [..., 3, 3] of square pixels and a principal point in the middle.

    Args:
        fov: [...] radians across the image's width.
        image_size: (height, width) in pixels.
    """
    height, width = image_size
    K = fov.new_zeros(*fov.shape, 3, 3)
    K[..., 0, 0] = K[..., 1, 1] = width / 2 / torch.tan(fov / 2)
    K[..., 0, 2], K[..., 1, 2], K[..., 2, 2] = width / 2, height / 2, 1
    return K


class SceneGenerator:
    """Draws random scenes and renders sequences through them.

    The scenes and paths are drawn on the CPU, and only they decide on depth, poses and intrinsics, which are thus the
    same on every device; textures and noise are drawn on the device.
    """

    def __init__(self, image_size: tuple[int, int] = (112, 154), *, seed: int = 0, device: str | torch.device = "cpu",
                 photos: Sequence[np.ndarray] = (), textures: int = 512, supersampling: int = 2,
                 compile: bool | None = None) -> None:
        """Draw the textures.

        Args:
            image_size: (height, width) in pixels.
            seed: of everything that is random.
            device: to render on.
            photos: uint8 [h, w, 3] RGB, to take textures from.
            textures: size of the bank.
            supersampling: rays a pixel along each side.
            compile: fuse the ray-caster with torch.compile; None: on GPUs.
        """
        if min(image_size) < 8:
            raise ValueError(f"image_size must be at least 8 x 8, got {image_size}")
        if supersampling < 1:
            raise ValueError(f"supersampling must be at least 1, got {supersampling}")
        self.image_size = tuple(image_size)
        self.device = torch.device(device)
        self._scene_generator = torch.Generator().manual_seed(seed)
        self._texture_generator = torch.Generator(device=self.device).manual_seed(seed)
        self.bank = TextureBank(textures, self._texture_generator, photos)
        self.renderer = Renderer(self.bank, self.image_size, supersampling, compile)

    def refresh(self, count: int = 32) -> None:
        """Replace `count` textures of the bank, the oldest first."""
        self.bank.refresh(count)

    @torch.no_grad()
    def sequences(self, batch: int, frames: int, *, options: SceneOptions = MIXED) -> Sequences:
        """Render `batch` sequences of `frames` frames, each through a scene of its own."""
        if batch < 1 or frames < 1:
            raise ValueError(f"batch and frames must be at least 1, got {batch} and {frames}")
        scenes, T_world_camera, fov = draw_scenes(batch, frames, options, self._scene_generator)
        intrinsics = intrinsics_from_fov(fov, self.image_size).to(self.device)
        scenes, T_world_camera = scenes.to(self.device), T_world_camera.to(self.device)
        sequence = torch.arange(batch, device=self.device).repeat_interleave(frames)
        light, depth = self.renderer.render(scenes, sequence, T_world_camera.flatten(0, 1), intrinsics[sequence],
                                            shadows=options.shadows)
        images = expose(light.unflatten(0, (batch, frames)), self._scene_generator, self._texture_generator,
                        options.effects)
        return Sequences(images, depth.unflatten(0, (batch, frames)), T_world_camera, intrinsics)


def draw_scenes(batch: int, frames: int, options: SceneOptions, generator: torch.Generator,
                ) -> tuple[Scenes, Tensor, Tensor]:
    """Draw scenes, T_world_camera [b, s, 4, 4] and fields of view [b] in radians, all on the CPU."""
    size = torch.cat([uniform(generator, (batch, 2), *options.room_size),
                      uniform(generator, (batch, 1), *options.room_height)], -1)
    margin = 0.45
    low = torch.cat([margin - size[:, :2] / 2, torch.full((batch, 1), 0.2)], -1)
    high = torch.cat([size[:, :2] / 2 - margin, (size[:, 2:] - 0.4).clamp_max(2.0)], -1)
    step = log_uniform(generator, (batch,), *options.step)
    motion = Motion(low, high, step, math.radians(options.max_yaw), torch.full((batch,), GROUND))
    T_world_camera = draw_paths(motion, frames, generator)
    scenes = draw_rooms(size, T_world_camera[..., :3, 3], generator, options.clutter)
    fov = uniform(generator, (batch,), *options.fov).deg2rad()
    return scenes, T_world_camera, fov
