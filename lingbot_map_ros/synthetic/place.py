# SPDX-License-Identifier: Apache-2.0
"""One place with a loop through it, rendered frame by frame: for a camera that goes round for ever."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lingbot_map_ros.synthetic.corridor import draw_corridors
from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.exposure import BRIGHTNESS
from lingbot_map_ros.synthetic.generator import WALL_CLEARANCE, intrinsics_from_fov
from lingbot_map_ros.synthetic.interior import draw_interiors
from lingbot_map_ros.synthetic.office import draw_offices
from lingbot_map_ros.synthetic.options import DEMO, SceneOptions
from lingbot_map_ros.synthetic.path import camera_pose, draw_loop
from lingbot_map_ros.synthetic.renderer import Renderer
from lingbot_map_ros.synthetic.room import draw_rooms
from lingbot_map_ros.synthetic.scene import Scenes
from lingbot_map_ros.synthetic.street import draw_streets
from lingbot_map_ros.synthetic.texture import TextureBank

CUBE = [(0.0, 0.0), (90.0, 0.0), (180.0, 0.0), (270.0, 0.0), (0.0, 89.9), (0.0, -89.9)]  # yaw and pitch of six faces


@dataclass
class Place:
    """A scene, its textures, and a loop through it. World: metres, z up, the floor at z = 0."""

    scene: Scenes  # of one
    bank: TextureBank
    T_world_camera: Tensor  # [s, 4, 4] the loop: the frame after the last is the first
    shadows: bool = True
    gain: float = 1.0  # from rendered light to images

    def surface_points(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Sample the true surfaces, as far as they are seen from the loop in any direction, about evenly by area.

        Args:
            count: points wanted.
            seed: of the sampling.

        Returns:
            points [n, 3] float32 in the world, metres; colours [n, 3] uint8, lit. n is `count`, or all there are if
            that is less.
        """
        stops = 16
        T_world_camera = self.T_world_camera[torch.arange(stops) * len(self.T_world_camera) // stops]
        position = T_world_camera[:, None, :3, 3].expand(-1, len(CUBE), -1)
        yaw, pitch = torch.tensor(CUBE).deg2rad().expand(stops, -1, -1).unbind(-1)
        T = camera_pose(position, yaw, pitch, torch.zeros_like(yaw)).flatten(0, 1)
        side = 96
        intrinsics = intrinsics_from_fov(torch.tensor(math.pi / 2), (side, side))
        images, depth = render(self, T, intrinsics, (side, side), supersampling=1)
        slope = (torch.arange(side) + 0.5 - side / 2) / (side / 2)
        ray = torch.stack([slope.expand(side, -1), slope[:, None].expand(-1, side), torch.ones(side, side)], -1)
        seen = depth.isfinite()
        points = torch.where(seen, depth, 0.0)[..., None] * (ray @ T[:, None, :3, :3].transpose(-1, -2))
        points = (points + T[:, None, None, :3, 3])[seen]
        colours = (images.permute(0, 2, 3, 1)[seen] * 255).round().to(torch.uint8)
        # A pixel covers an area that grows with the square of the depth: a weighted draw without putting back.
        generator = torch.Generator().manual_seed(seed)
        keys = torch.rand(len(points), generator=generator).log() / depth[seen] ** 2
        chosen = keys.topk(min(count, len(points))).indices
        return points[chosen], colours[chosen]


def make_place(seed: int = 0, *, options: SceneOptions = DEMO, frames: int | None = None,
               photos: Sequence[np.ndarray] = (), textures: int = 64) -> Place:
    """Draw a place and a loop through it.

    Args:
        seed: of everything that is random.
        options: sizes, clutter and step are drawn within their ranges, and the place is outdoors, a floor with
            corridors, an office or a furnished room with their shares; kinds of motion and camera effects do not apply.
        frames: of the loop; None: as many as steps of the options' length make.
        photos: uint8 [h, w, 3] RGB, to take textures from.
        textures: size of the texture bank.
    """
    if frames is not None and frames < 8:
        raise ValueError(f"frames must be at least 8, got {frames}")
    generator = torch.Generator().manual_seed(seed)
    outdoors = bool(chance(generator, (1,), options.outdoors))
    # A share of 0 draws nothing: seeds keep their rooms.
    corridor = not outdoors and options.corridor > 0 and bool(chance(generator, (1,), options.corridor))
    office = not (outdoors or corridor) and options.office > 0 and bool(chance(generator, (1,), options.office))
    side = uniform(generator, (2,), *(options.place_size if outdoors else options.floor_size if corridor
                                      else options.room_size))
    height = uniform(generator, (1,), *options.room_height)
    # The loop leaves room for things along the walls, and its middle for others.
    reach = torch.minimum(0.26 * side, side / 2 - WALL_CLEARANCE)
    eye = torch.tensor([0.9, 1.3])
    low, high = torch.cat([-reach, eye[:1]]), torch.cat([reach, eye[1:]])
    step = log_uniform(generator, (1,), *options.step).item() * (max(1.0, side.min().item() / 8) if outdoors else 1)
    T_world_camera = draw_loop(low, high, generator, frames=frames, step=step)
    path = T_world_camera[None, :, :3, 3]
    room = torch.cat([side, height])[None]
    if outdoors:
        scene = draw_streets(side[None], path, generator, options.clutter)
    elif corridor:
        scene = draw_corridors(room, T_world_camera[None], generator, options.clutter)
    elif office:
        scene = draw_offices(room, T_world_camera[None], generator, options.clutter)
    elif options.furnished > 0 and chance(generator, (1,), options.furnished):
        scene = draw_interiors(room, T_world_camera[None], generator, options.clutter)
    else:
        scene = draw_rooms(room, path, generator, options.clutter)
    place = Place(scene, TextureBank(textures, generator, photos), T_world_camera, options.shadows)
    sample = T_world_camera[::max(1, len(T_world_camera) // 8)]
    light, _ = _render_light(place, sample, intrinsics_from_fov(torch.tensor(1.4), (48, 64)), (48, 64), 1)
    place.gain = BRIGHTNESS / light.mean().item()
    return place


def _render_light(place: Place, T_world_camera: Tensor, intrinsics: Tensor, image_size: tuple[int, int],
                  supersampling: int) -> tuple[Tensor, Tensor]:
    count = len(T_world_camera)
    renderer = Renderer(place.bank, image_size, supersampling)
    return renderer.render(place.scene, torch.zeros(count, dtype=torch.int64), T_world_camera,
                           intrinsics.expand(count, 3, 3), shadows=place.shadows)


def render(place: Place, T_world_camera: Tensor, intrinsics: Tensor, image_size: tuple[int, int], *,
           supersampling: int = 2) -> tuple[Tensor, Tensor]:
    """Render what cameras see in a place.

    Args:
        place: from `make_place`.
        T_world_camera: [n, 4, 4] float32, the optical frame's poses.
        intrinsics: [3, 3] pixels, no skew; the centre of the pixel in column u is at u + 0.5.
        image_size: (height, width) in pixels.
        supersampling: rays a pixel along each side.

    Returns:
        images [n, 3, h, w] float32 in [0, 1]; depth [n, h, w] along the optical axis at the pixels' centres, metres,
        inf in the sky.
    """
    light, depth = _render_light(place, T_world_camera, intrinsics, image_size, supersampling)
    return (light * place.gain).clamp(0, 1), depth
