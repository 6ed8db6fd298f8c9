# SPDX-License-Identifier: Apache-2.0
"""Scenes: a shell and a fixed number of primitives each, with their surfaces and one light."""
from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

BOXES, CYLINDERS, ELLIPSOIDS = 20, 9, 3
PRIMITIVES = 1 + BOXES + CYLINDERS + ELLIPSOIDS  # the shell comes first; a primitive's kind is told by its place
FIRST_BOX = 1
FIRST_CYLINDER = FIRST_BOX + BOXES
FIRST_ELLIPSOID = FIRST_CYLINDER + CYLINDERS
FACES = 6  # of a box: +x -x +y -y +z -z; a cylinder has its side as face 0 and its ends as face 4
NOWHERE = -1000.0  # height of a primitive that is not used: far below every floor


@dataclass
class Scenes:
    """b scenes of n = `PRIMITIVES` primitives. World: metres, z up, the floor at z = 0, the origin in its middle.

    A primitive is a unit shape (the cube of [-1, 1], the cylinder of radius 1 and |z| <= 1, the sphere of radius 1),
    scaled by `half`, turned by `rotation` and moved to `centre`. The shell is a cube seen from inside; an open one has
    only its floor, and sky elsewhere.
    """

    centre: Tensor  # [b, n, 3] metres
    half: Tensor  # [b, n, 3] metres
    rotation: Tensor  # [b, n, 3, 3] from the primitive's axes to the world's
    texture: Tensor  # [b, n, FACES] int32 draws; taken modulo the number of textures
    tile: Tensor  # [b, n, FACES] metres that a texture covers
    tint: Tensor  # [b, n, 3] that the texture's colours are multiplied by
    modulation: Tensor  # [b, n] int32 draws: the texture whose luminance modulates the colour
    modulation_strength: Tensor  # [b, n] in [0, 1]
    modulation_rate: Tensor  # [b, n] repeats of the modulation to one of the texture
    light: Tensor  # [b, 3] position, metres
    light_strength: Tensor  # [b] of a surface that faces the light from nearby
    light_falloff: Tensor  # [b] 1/metres^2; 0 for the sun
    ambient: Tensor  # [b]
    open: Tensor  # [b] bool
    sky: Tensor  # [b, 2, 3] colour at the horizon and overhead

    def __len__(self) -> int:
        return self.centre.shape[0]

    def to(self, device: torch.device | str) -> Scenes:
        """Return a copy on a device."""
        return Scenes(**{field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)})

    def __getitem__(self, index) -> Scenes:
        """Return the scenes that a tensor, list or slice of indices selects."""
        return Scenes(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @staticmethod
    def concatenate(parts: list[Scenes]) -> Scenes:
        """Return the scenes of all parts in order."""
        return Scenes(**{field.name: torch.cat([getattr(part, field.name) for part in parts])
                         for field in fields(Scenes)})


def turn_about_z(angle: Tensor) -> Tensor:
    """Return rotations [..., 3, 3] by angles [...] in radians, counter-clockwise seen from above."""
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], dim=-1).unflatten(-1, (3, 3))


def clearance(points: Tensor, centre: Tensor, half: Tensor, rotation: Tensor) -> Tensor:
    """Return the distance [..., k] from points [..., k, 3] to solid boxes.

    Their centres and halves are [..., 3], their rotations [..., 3, 3]. Cylinders and ellipsoids are no larger than
    their boxes, so that for them it is a lower bound.
    """
    local = (points - centre[..., None, :]) @ rotation
    return (local.abs() - half[..., None, :]).clamp_min(0).norm(dim=-1)
