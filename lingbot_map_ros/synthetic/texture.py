# SPDX-License-Identifier: Apache-2.0
"""A bank of textures: procedural ones and crops of photographs, as packed mip pyramids."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 256  # texels of the finest level, a power of two: coordinates wrap by a mask
LEVELS = 7  # 256, 128, ... 4
TEXELS = sum((SIDE >> level) ** 2 for level in range(LEVELS))  # of one pyramid
PLAIN_SHARE = 0.22  # of a bank: painted surfaces with hardly any structure


def uniform(generator: torch.Generator, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Draw from [low, high) on the generator's device."""
    return torch.rand(tuple(shape), generator=generator, device=generator.device) * (high - low) + low


def log_uniform(generator: torch.Generator, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Draw from [low, high) such that the logarithm is uniform."""
    return uniform(generator, shape, math.log(low), math.log(high)).exp()


def chance(generator: torch.Generator, shape: Sequence[int], share: float) -> Tensor:
    """Draw booleans that are true with probability `share`."""
    return torch.rand(tuple(shape), generator=generator, device=generator.device) < share


class TextureBank:
    """`count` square textures that tile the plane, each a mip pyramid of texels packed into int32.

    A texel holds red, green, blue and a luminance of its own (see `fetch`) in its bytes, lowest first. The memory is
    allocated once: `refresh` replaces textures in place.
    """

    def __init__(self, count: int, generator: torch.Generator, photos: Sequence[np.ndarray] = (),
                 photo_share: float = 0.5) -> None:
        """Fill the bank.

        Args:
            count: number of textures.
            generator: draws them; its device is the bank's.
            photos: uint8 [h, w, 3] RGB images of any size from 32 x 32 to take crops from.
            photo_share: of the textures that are crops, if there are photos.
        """
        if count < 1:
            raise ValueError(f"textures must be at least 1, got {count}")
        for photo in photos:
            if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or min(photo.shape[:2]) < 32:
                raise ValueError(f"photos must be uint8 [h, w, 3] of at least 32 x 32, got {photo.dtype} {photo.shape}")
        self.count = count
        self.generator = generator
        self.photos = [torch.from_numpy(np.ascontiguousarray(photo)) for photo in photos]
        self.photo_share = photo_share if len(self.photos) else 0.0
        self.texels = torch.empty(count, TEXELS, dtype=torch.int32, device=generator.device)
        self._next = 0
        for start in range(0, count, 32):
            self.refresh(min(32, count - start))

    def refresh(self, count: int) -> None:
        """Draw `count` textures anew, in turn."""
        count = min(count, self.count)
        crops = sum(math.floor((self._next + i + 1) * self.photo_share) - math.floor((self._next + i) * self.photo_share)
                    for i in range(count))
        colours = draw_textures(count - crops, self.generator) if count > crops else None
        if crops:
            photographs = torch.stack([self._crop() for _ in range(crops)])
            colours = photographs if colours is None else torch.cat([photographs, colours])
        places = (torch.arange(count) + self._next) % self.count
        self.texels[places.to(self.texels.device)] = pack(colours)
        self._next = (self._next + count) % self.count

    def _crop(self) -> Tensor:
        """Return a random square of a random photograph, [3, SIDE, SIDE], mirrored so that it tiles."""
        draws = torch.rand(6, generator=self.generator, device=self.generator.device).tolist()
        photo = self.photos[int(draws[0] * len(self.photos))]
        height, width = photo.shape[:2]
        shorter = min(height, width)
        size = int(min(max(32, shorter * (0.25 + 0.75 * draws[1])), shorter))
        top, left = int(draws[2] * (height - size + 1)), int(draws[3] * (width - size + 1))
        crop = photo[top:top + size, left:left + size].to(self.generator.device).permute(2, 0, 1).float() / 255
        half = F.interpolate(crop[None], size=(SIDE // 2, SIDE // 2), mode="area")[0]
        if draws[4] < 0.5:
            half = half.flip(-1)
        half = torch.cat([half, half.flip(-1)], dim=-1)
        return torch.cat([half, half.flip(-2)], dim=-2)


def fractal_noise(count: int, channels: int, generator: torch.Generator, finest: int, coarsest: int, decay: Tensor,
                  ) -> Tensor:
    """Draw tiling noise [count, channels, SIDE, SIDE] of unit variance.

    Octave o has 2^o cells along a side and `decay` ([count, 1, 1, 1]) times the amplitude of the coarser one.
    """
    device = generator.device
    total = torch.zeros(count, channels, SIDE, SIDE, device=device)
    amplitude = torch.ones_like(decay)
    for octave in range(coarsest, finest + 1):
        cells = 2 ** octave
        grid = torch.randn(count, channels, cells, cells, generator=generator, device=device)
        if cells < SIDE:
            step = SIDE // cells
            grid = F.pad(grid, (2, 2, 2, 2), mode="circular")  # so that the left edge continues the right one
            grid = F.interpolate(grid, scale_factor=step, mode="bicubic", align_corners=False)
            grid = grid[..., 2 * step:2 * step + SIDE, 2 * step:2 * step + SIDE]
        total += amplitude * grid
        amplitude = amplitude * decay
    return total / total.flatten(2).std(-1)[..., None, None].clamp_min(1e-5)


def draw_palette(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw two colours each, [count, 3, 1, 1]: mostly muted, as paint and wood and stone are."""
    first = uniform(generator, (count, 3, 1, 1), 0.08, 0.95)
    second = uniform(generator, (count, 3, 1, 1), 0.05, 0.95)
    muted = chance(generator, (count, 1, 1, 1), 0.65) * uniform(generator, (count, 1, 1, 1), 0.5, 1)
    tint = torch.tensor([1.06, 1.0, 0.92], device=generator.device).reshape(1, 3, 1, 1)
    return tuple(colour * (1 - muted) + colour.mean(1, keepdim=True) * tint * muted for colour in (first, second))


def draw_textures(count: int, generator: torch.Generator) -> Tensor:
    """Draw procedural textures [count, 3, SIDE, SIDE] in [0, 1]: noise, tiles, planks, collages and plain paint."""
    device = generator.device
    one = (count, 1, 1, 1)
    axis = (torch.arange(SIDE, device=device) + 0.5) / SIDE
    y, x = axis[:, None], axis[None, :]
    first, second = draw_palette(count, generator)

    noise = fractal_noise(count, 1, generator, 7, 2, uniform(generator, one, 0.4, 0.95))
    clouds = first + (second - first) * torch.sigmoid(noise * log_uniform(generator, one, 0.5, 15))

    # Tiles: cells of one colour each or a checkerboard, some shifted row by row (bricks), some with joints.
    columns = torch.randint(2, 17, one, generator=generator, device=device)
    rows = torch.randint(2, 17, one, generator=generator, device=device)
    cell_y = y * rows  # [count, 1, SIDE, 1]
    shift = chance(generator, one, 0.4) * 0.5 * (cell_y.floor() % 2)
    cell_x = (x * columns + shift) % columns  # [count, 1, SIDE, SIDE]
    row, column = cell_y.long().clamp_max(15), cell_x.long().clamp_max(15)
    shades = uniform(generator, (count, 3, 16 * 16), -0.5, 0.5)
    shades = torch.lerp(shades, shades.mean(1, keepdim=True), uniform(generator, (count, 1, 1), 0.3, 1))
    cell = (row * 16 + column).reshape(count, 1, -1).expand(-1, 3, -1)
    varied = first + shades.gather(2, cell).reshape(count, 3, SIDE, SIDE) * uniform(generator, one, 0.04, 0.8)
    checks = torch.where((row + column) % 2 == 0, first, second)
    tiles = torch.where(chance(generator, one, 0.3), checks, varied)
    width = uniform(generator, one, 0.02, 0.1)
    joint = (((cell_x % 1) < width) | ((cell_y % 1) < width)) & chance(generator, one, 0.7)
    tiles = torch.where(joint, second, tiles)

    # Planks: long cells with a grain along them.
    grain = fractal_noise(count, 1, generator, 7, 4, torch.full(one, 0.9, device=device))
    grain = F.avg_pool2d(F.pad(grain, (24, 24, 0, 0), mode="circular"), (1, 49), stride=1)
    grain = grain / grain.flatten(1).std(-1).reshape(one).clamp_min(1e-5)
    boards = shades.gather(2, (row * 16).expand(-1, -1, SIDE, SIDE).reshape(count, 1, -1).expand(-1, 3, -1))
    planks = first + boards.reshape(count, 3, SIDE, SIDE).mean(1, keepdim=True) * uniform(generator, one, 0.05, 0.4)
    planks = planks * (1 + grain * uniform(generator, one, 0.02, 0.16))
    planks = torch.where((cell_y % 1) < 0.05, planks * uniform(generator, one, 0.3, 0.9), planks)

    # Collage: rectangles and ellipses, as on a poster, a shelf or a notice board.
    collage = first.expand(-1, -1, SIDE, SIDE)
    for _ in range(24):
        centre = torch.rand(count, 2, 1, 1, 1, generator=generator, device=device)
        size = log_uniform(generator, (count, 2, 1, 1, 1), 0.025, 0.28)
        angle = uniform(generator, one, 0, math.pi) * chance(generator, one, 0.4)
        dx, dy = (x - centre[:, 0] + 0.5) % 1 - 0.5, (y - centre[:, 1] + 0.5) % 1 - 0.5
        along = (dx * angle.cos() + dy * angle.sin()) / size[:, 0]
        across = (dy * angle.cos() - dx * angle.sin()) / size[:, 1]
        inside = torch.where(chance(generator, one, 0.35), along ** 2 + across ** 2 < 1,
                             (along.abs() < 1) & (across.abs() < 1))
        collage = torch.where(inside, uniform(generator, (count, 3, 1, 1), 0.03, 0.97), collage)

    kind = torch.rand(one, generator=generator, device=device)
    plain = kind > 1 - PLAIN_SHARE
    kind = kind / (1 - PLAIN_SHARE)
    colours = torch.where(kind < 0.3, clouds, torch.where(kind < 0.55, tiles, torch.where(kind < 0.75, planks, collage)))
    paint = first * 0.6 + 0.4  # most walls are bright
    colours = torch.where(plain, paint, colours)
    fine = fractal_noise(count, 1, generator, 7, 3, uniform(generator, one, 0.6, 1.1))
    blotches = fractal_noise(count, 3, generator, 4, 1, torch.full(one, 0.7, device=device))
    strength = torch.where(plain, uniform(generator, one, 0.006, 0.03), log_uniform(generator, one, 0.012, 0.12))
    colours = colours * (1 + fine * strength * 1.6) + blotches * uniform(generator, one, 0.0, 0.035)
    return colours.clamp(0.02, 1)


def pack(colours: Tensor) -> Tensor:
    """Pack [n, 3, SIDE, SIDE] in [0, 1] into pyramids [n, TEXELS] int32, the finest level first."""
    levels = []
    luminance = colours.mean(1, keepdim=True)
    # The fourth byte: luminance about 1/2 whatever the texture's brightness, for use as a modulation.
    contrast = (luminance - luminance.mean((-2, -1), keepdim=True)) / (4 * luminance.std((-2, -1), keepdim=True) + 0.02)
    values = torch.cat([colours, (contrast + 0.5).clamp(0, 1)], dim=1)
    for level in range(LEVELS):
        if level:
            values = F.avg_pool2d(values, 2)
        red, green, blue, modulation = (values * 255).round().to(torch.int32).unbind(1)
        signed = torch.where(modulation > 127, modulation - 256, modulation)
        levels.append((red | (green << 8) | (blue << 16) | (signed << 24)).flatten(1))
    return torch.cat(levels, dim=1)


def locate(texture: Tensor, u: Tensor, v: Tensor, level: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Find the four texels around texture coordinates: flat indices (int32) and the weights across and down.

    Args:
        texture: int32, number in the bank.
        u, v: texture coordinates; the texture repeats at whole numbers.
        level: int32 mip level.
    """
    side = torch.bitwise_right_shift(torch.full_like(level, SIDE), level)
    start = texture * TEXELS + (SIDE * SIDE - side * side) * 4 // 3  # the finer levels' texels: a geometric series
    x, y = (u - u.floor()) * side - 0.5, (v - v.floor()) * side - 0.5
    left, top = x.floor(), y.floor()
    mask = side - 1
    x0, y0 = left.to(torch.int32) & mask, top.to(torch.int32) & mask
    x1, y1 = (x0 + 1) & mask, (y0 + 1) & mask
    row0, row1 = start + y0 * side, start + y1 * side
    return [row0 + x0, row0 + x1, row1 + x0, row1 + x1], x - left, y - top


def fetch(texels: Tensor, texture: Tensor, u: Tensor, v: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Look a colour up with bilinear interpolation in one mip level: red, green and blue in [0, 1].

    Args:
        texels: [count * TEXELS] int32, the bank's texels in one row.
        texture, u, v, level: as in `locate`.
    """
    indices, across, down = locate(texture, u, v, level)
    samples = [texels[index] for index in indices]

    def blend(shift: int) -> Tensor:
        a, b, c, d = (((sample >> shift) & 255).float() for sample in samples)
        above = a + (b - a) * across
        return (above + (c + (d - c) * across - above) * down) * (1 / 255)

    return blend(0), blend(8), blend(16)


def fetch_modulation(texels: Tensor, texture: Tensor, u: Tensor, v: Tensor, level: Tensor) -> Tensor:
    """Look a texture's luminance about its mean up, in [-1, 1]; the arguments are those of `fetch`."""
    indices, across, down = locate(texture, u, v, level)
    a, b, c, d = (((texels[index] >> 24) & 255).float() for index in indices)
    above = a + (b - a) * across
    return (above + (c + (d - c) * across - above) * down) * (2 / 255) - 1
