# SPDX-License-Identifier: Apache-2.0
"""Sequences of images of random scenes, with their depth, poses and intrinsics."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lingbot_map_ros.synthetic.corridor import draw_corridors
from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.exposure import draw_camera, even_out, expose
from lingbot_map_ros.synthetic.interior import draw_interiors
from lingbot_map_ros.synthetic.office import draw_offices
from lingbot_map_ros.synthetic.options import MIXED, SceneOptions
from lingbot_map_ros.synthetic.path import DRONE, GROUND, HAND, Motion, between, draw_paths
from lingbot_map_ros.synthetic.renderer import Blur, Renderer
from lingbot_map_ros.synthetic.room import draw_rooms
from lingbot_map_ros.synthetic.scene import Scenes
from lingbot_map_ros.synthetic.street import draw_streets
from lingbot_map_ros.synthetic.texture import TextureBank

LONGEST_BLUR = 3.0  # pixels, times the rays along a side of a pixel
WALL_CLEARANCE = 0.45  # metres between a camera and the walls
OVER_TABLES = 1.1  # metres, the lowest that hands hold a camera in furnished rooms and offices


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
        generator = self._scene_generator
        scenes, T_world_camera, fov = draw_scenes(batch, frames, options, generator)
        intrinsics = intrinsics_from_fov(fov, self.image_size)
        camera = draw_camera(batch, frames, options, generator) if options.effects else None
        blur = None
        if camera is not None and (options.motion_blur or options.defocus):
            blur = draw_blur(T_world_camera, intrinsics, len(self.renderer.offsets), options, generator)
            blur = Blur(*(tensor.to(self.device, non_blocking=True) for tensor in
                          (blur.T_world_camera, blur.lens, blur.focus)))
        scenes, T_world_camera, intrinsics = (value.to(self.device) for value in (scenes, T_world_camera, intrinsics))
        sequence = torch.arange(batch, device=self.device).repeat_interleave(frames)
        light, depth = self.renderer.render(scenes, sequence, T_world_camera.flatten(0, 1), intrinsics[sequence],
                                            shadows=options.shadows, blur=blur)
        light, depth = light.unflatten(0, (batch, frames)), depth.unflatten(0, (batch, frames))
        images = even_out(light) if camera is None else expose(light, camera, self._texture_generator)
        return Sequences(images, depth, T_world_camera, intrinsics)


def draw_scenes(batch: int, frames: int, options: SceneOptions, generator: torch.Generator,
                ) -> tuple[Scenes, Tensor, Tensor]:
    """Draw scenes, T_world_camera [b, s, 4, 4] and fields of view [b] in radians, all on the CPU."""
    open_air = chance(generator, (batch,), options.outdoors)
    room = torch.cat([uniform(generator, (batch, 2), *options.room_size),
                      uniform(generator, (batch, 1), *options.room_height)], -1)
    # What a share of 0 leaves out draws nothing, so that seeds keep their scenes.
    corridor = office = torch.zeros_like(open_air)
    if options.corridor:
        corridor = ~open_air & chance(generator, (batch,), options.corridor)
        floor = torch.cat([log_uniform(generator, (batch, 2), *options.floor_size), room[:, 2:]], -1)
        room = torch.where(corridor[:, None], floor, room)
    if options.office:
        office = ~open_air & ~corridor & chance(generator, (batch,), options.office)
    side = log_uniform(generator, (batch, 1), *options.place_size)
    street = (side * log_uniform(generator, (batch, 2), 0.6, 1.6)).clamp(*options.place_size)
    manner = torch.rand(batch, generator=generator)
    kind = torch.where(manner < options.drone, DRONE, torch.where(manner < options.drone + options.hand, HAND, GROUND))

    plane = torch.where(open_air[:, None], street, room[:, :2]) / 2 - WALL_CLEARANCE
    ceiling = torch.where(open_air, 8.0, room[:, 2] - 0.4)
    lowest = torch.where(kind == GROUND, 0.25, torch.where(kind == HAND, 1.0, 0.4))
    highest = torch.where(kind == GROUND, 1.3, torch.where(kind == HAND, 1.8, ceiling)).minimum(ceiling)
    step = log_uniform(generator, (batch,), *options.step)
    step = step * torch.where(open_air, (street.amin(-1) / 8).clamp(1, 4), 1.0)
    motion = Motion(torch.cat([-plane, lowest[:, None]], -1), torch.cat([plane, highest[:, None]], -1), step,
                    math.radians(options.max_yaw), kind, chance(generator, (batch,), options.look_down), corridor)
    T_world_camera = draw_paths(motion, frames, generator)

    furnished = chance(generator, (batch,), options.furnished) & ~open_air & ~corridor & ~office
    path = T_world_camera[..., :3, 3]
    over = (furnished | office) & (kind == HAND)
    path[..., 2] = torch.where(over[:, None], path[..., 2].clamp_min(OVER_TABLES), path[..., 2])
    parts, chosen = [], []
    for draw, size, way, which in ((draw_rooms, room, path, ~(open_air | corridor | office | furnished)),
                                   (draw_interiors, room, T_world_camera, furnished),
                                   (draw_offices, room, T_world_camera, office),
                                   (draw_corridors, room, T_world_camera, corridor),
                                   (draw_streets, street, path, open_air)):
        index = which.nonzero()[:, 0]
        if len(index):
            parts.append(draw(size[index], way[index], generator, options.clutter))
            chosen.append(index)
    order = torch.cat(chosen).argsort()
    fov = uniform(generator, (batch,), *options.fov).deg2rad()
    return Scenes.concatenate(parts)[order], T_world_camera, fov


def image_motion(T_world_camera: Tensor) -> Tensor:
    """Return how far things about 2 m away move in the image from frame to frame, [b, s], in focal lengths."""
    change = T_world_camera.diff(dim=1)
    motion = change[..., :3, 2].norm(dim=-1) + change[..., :3, 3].norm(dim=-1) / 2
    return torch.cat([motion, motion[:, -1:]], 1) if motion.shape[1] else motion.new_zeros(T_world_camera.shape[:2])


def draw_blur(T_world_camera: Tensor, intrinsics: Tensor, rays: int, options: SceneOptions, generator: torch.Generator,
              ) -> Blur:
    """Draw the exposure times and lenses of b cameras on paths [b, s, 4, 4]: what f = b * s frames blur by."""
    batch, frames = T_world_camera.shape[:2]
    exposure = uniform(generator, (batch, 1, 1), 0, 1) ** 2 * options.motion_blur
    # A few rays cannot blur far: as many poses would show one beside another.
    longest = LONGEST_BLUR * rays ** 0.5 / (intrinsics[:, :1, 0] * image_motion(T_world_camera)).clamp_min(1e-3)
    exposure = torch.minimum(exposure, longest[..., None])
    # The rays of a pixel are spread over the time in an order that does not go with their places in the pixel.
    order = torch.rand(batch, frames, rays, generator=generator).argsort(-1)
    poses = between(T_world_camera, exposure * ((order + 0.5) / rays - 0.5))
    focus = log_uniform(generator, (batch,), 0.7, 15)
    circle = uniform(generator, (batch,), 0, 1) ** 2 * options.defocus  # pixels across, of a point far away
    radius = circle / 2 * focus / intrinsics[:, 0, 0]
    angle = (torch.arange(rays) + torch.rand(batch, frames, 1, generator=generator)) * (2 * math.pi / rays)
    lens = radius[:, None, None, None] * torch.stack([angle.cos(), angle.sin()], -1)
    return Blur(poses.flatten(0, 1), lens.flatten(0, 1), focus.repeat_interleave(frames))
