# SPDX-License-Identifier: Apache-2.0
"""Renders frames of scenes: many at once by compiled code, or one at a time with as few rays as will do."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lingbot_map_ros.synthetic import bounds, ray
from lingbot_map_ros.synthetic.scene import Scenes
from lingbot_map_ros.synthetic.texture import TextureBank

FRAMES_PER_CHUNK = 64  # rendered at once by compiled code, whatever the number of frames: it knows one size only


@dataclass
class Blur:
    """What each of r rays of a pixel sees differently."""

    T_world_camera: Tensor  # [f, r, 4, 4] the poses during the exposure
    lens: Tensor  # [f, r, 2] metres from the lens's middle
    focus: Tensor  # [f] metres to the plane that is sharp


class Renderer:
    """Renders frames of scenes with one bank of textures."""

    def __init__(self, bank: TextureBank, image_size: tuple[int, int], supersampling: int = 2,
                 compile: bool | None = None) -> None:
        """Prepare.

        Args:
            bank: on the device to render on.
            image_size: (height, width) in pixels.
            supersampling: rays a pixel along each side.
            compile: fuse with torch.compile and render frames in chunks of one size; None: on GPUs. Otherwise frames
                are rendered one at a time, and get more than one ray a pixel only where it shows.
        """
        self.bank = bank
        self.image_size = image_size
        self.supersampling = supersampling
        self.device = bank.texels.device
        self.compiled = compile if compile is not None else self.device.type != "cpu"
        if self.compiled:
            self._render_views = torch.compile(ray.render_views, dynamic=False)
            self._depth_views = torch.compile(ray.depth_views, dynamic=False)
        height, width = image_size
        self.x = torch.arange(width, dtype=torch.float32, device=self.device)[None, None, :]
        self.y = torch.arange(height, dtype=torch.float32, device=self.device)[None, :, None]
        place = (torch.arange(supersampling, device=self.device) + 0.5) / supersampling - 0.5
        self.offsets = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1).reshape(-1, 2)  # [r, 2]
        # A ray stands for a part of the pixel, and the rays of a pixel take finer and coarser mip levels in turn.
        rays = len(self.offsets)
        self.level_offsets = (torch.arange(rays, device=self.device) + 0.5) / rays - math.log2(supersampling)

    @torch.no_grad()
    def render(self, scenes: Scenes, scene: Tensor, T_world_camera: Tensor, intrinsics: Tensor, *,
               shadows: bool = True, blur: Blur | None = None) -> tuple[Tensor, Tensor]:
        """Render f frames.

        Args:
            scenes: on the renderer's device.
            scene: [f] int64, each frame's scene.
            T_world_camera: [f, 4, 4].
            intrinsics: [f, 3, 3].
            shadows: cast shadows.
            blur: poses and lens places of the rays of a pixel, r = supersampling^2; None: all alike.

        Returns:
            light [f, 3, h, w], linear; depth [f, h, w] at the pixels' centres, inf in the sky.
        """
        frames = len(T_world_camera)
        if frames == 0:
            raise ValueError("T_world_camera holds no poses")
        chunk = FRAMES_PER_CHUNK if self.compiled else 1
        lights, depths = [], []
        for start in range(0, frames, chunk):
            kept = min(chunk, frames - start)
            # A chunk that is not full repeats its last frame.
            index = torch.arange(start, start + chunk, device=self.device).clamp_max(frames - 1)
            arguments = scenes[scene[index]], T_world_camera[index], intrinsics[index], shadows
            blurred = None if blur is None else Blur(blur.T_world_camera[index], blur.lens[index], blur.focus[index])
            if self.compiled:
                light, depth = self._render_chunk(*arguments, blurred)
            elif blurred is not None:
                light, depth = self._render_blurred(*arguments, blurred)
            else:
                light, depth = self._render_sharp(*arguments)
            lights.append(light[:kept])
            depths.append(depth[:kept])
        return torch.cat(lights), torch.cat(depths)

    def _views(self, scenes: Scenes, T_world_camera: Tensor, intrinsics: Tensor, blur: Blur | None) -> ray.Views:
        """Return the views of all rays of f frames, frame by frame: v = f * r."""
        frames, rays = len(T_world_camera), len(self.offsets)
        repeat = torch.arange(frames, device=self.device).repeat_interleave(rays)
        poses, lens, focus = T_world_camera[repeat], None, None
        if blur is not None:
            poses, lens, focus = blur.T_world_camera.flatten(0, 1), blur.lens.flatten(0, 1), blur.focus[repeat]
        views = ray.make_views(scenes[repeat], poses, intrinsics[repeat], self.offsets.repeat(frames, 1),
                               self.bank.count, lens, focus)
        views.level_offset = self.level_offsets.repeat(frames)
        return views

    def _centre_views(self, scenes: Scenes, T_world_camera: Tensor, intrinsics: Tensor) -> ray.Views:
        """Return the views of the rays through the pixels' centres of f frames."""
        centre = self.offsets.new_zeros(len(T_world_camera), 2)
        views = ray.make_views(scenes, T_world_camera, intrinsics, centre, self.bank.count)
        views.level_offset = torch.full_like(views.level_offset, 0.3 - math.log2(self.supersampling) / 2)
        return views

    def _render_chunk(self, scenes: Scenes, T_world_camera: Tensor, intrinsics: Tensor, shadows: bool,
                      blur: Blur | None) -> tuple[Tensor, Tensor]:
        views = self._centre_views(scenes, T_world_camera, intrinsics)
        depth = self._depth_views(*views.tensors(), self.x, self.y)
        views = self._views(scenes, T_world_camera, intrinsics, blur)
        light = self._render_views(self.bank.texels.view(-1), *views.tensors(), self.x, self.y, shadows=shadows)
        return light.unflatten(0, (len(T_world_camera), -1)).mean(1), depth

    def _windows(self, scene: Scenes, T_world_camera: Tensor, intrinsics: Tensor, shadows: bool,
                 ) -> tuple[list[bounds.Window], list[bounds.Window] | None]:
        """Return the windows of the primitives and of their shadows in any of the poses [v, 4, 4]."""
        scene = scene.to("cpu")
        camera = scene, T_world_camera.cpu(), intrinsics[0].cpu(), self.image_size
        things = bounds.windows(bounds.corners(scene), *camera)
        return things, bounds.windows(bounds.shadow_corners(scene), *camera) if shadows else None

    def _trace(self, views: ray.Views, x: Tensor, y: Tensor, things: list[bounds.Window],
               shades: list[bounds.Window] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return light [v, 3, h, w], depth [v, h, w] and a number that tells surfaces apart [v, h, w]."""
        depth, number, point = ray.cast_within(views, x, y, things)
        reaches = None if shades is None else ray.light_reaches_within(views, x, y, depth, number, shades)
        light = torch.stack(ray.shade(self.bank.texels.view(-1), views, x, y, depth, number, point, reaches), 1)
        surface = number * 16 + ray.find_face(number, point)
        if reaches is not None:
            surface = surface + 8 * reaches
        return light, torch.where(ray.is_sky(views, number, point), torch.inf, depth), surface

    def _render_sharp(self, scene: Scenes, T_world_camera: Tensor, intrinsics: Tensor, shadows: bool,
                      ) -> tuple[Tensor, Tensor]:
        """Render one frame: one ray a pixel, and all rays at the edges of surfaces and shadows."""
        things, shades = self._windows(scene, T_world_camera, intrinsics, shadows)
        views = self._centre_views(scene, T_world_camera, intrinsics)
        light, depth, surface = self._trace(views, self.x, self.y, things, shades)
        if self.supersampling == 1:
            return light, depth
        edge = torch.zeros_like(surface[0], dtype=torch.bool)
        across, down = surface[0, :, 1:] != surface[0, :, :-1], surface[0, 1:] != surface[0, :-1]
        edge[:, 1:] |= across
        edge[:, :-1] |= across
        edge[1:] |= down
        edge[:-1] |= down
        rows, columns = edge.nonzero(as_tuple=True)
        if len(rows):
            things = bounds.list_windows(things, rows)
            shades = None if shades is None else bounds.list_windows(shades, rows)
            views = self._views(scene, T_world_camera, intrinsics, None)
            fine, _, _ = self._trace(views, columns.float()[None, None], rows.float()[None, None], things, shades)
            light[0][:, rows, columns] = fine.mean(0)[:, 0]
        return light, depth

    def _render_blurred(self, scene: Scenes, T_world_camera: Tensor, intrinsics: Tensor, shadows: bool, blur: Blur,
                        ) -> tuple[Tensor, Tensor]:
        """Render one frame with all rays of all pixels."""
        poses = torch.cat([T_world_camera, blur.T_world_camera[0]])
        things, shades = self._windows(scene, poses, intrinsics, shadows)
        views = self._centre_views(scene, T_world_camera, intrinsics)
        depth, number, point = ray.cast_within(views, self.x, self.y, things)
        depth = torch.where(ray.is_sky(views, number, point), torch.inf, depth)
        light, _, _ = self._trace(self._views(scene, T_world_camera, intrinsics, blur), self.x, self.y, things, shades)
        return light.mean(0, keepdim=True), depth
