# SPDX-License-Identifier: Apache-2.0
"""A bank of textures: procedural ones and crops of photographs, as packed mip pyramids."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform

SIDE = 256  # texels of the finest level, a power of two: coordinates wrap by a mask
LEVELS = 7  # 256, 128, ... 4
TEXELS = sum((SIDE >> level) ** 2 for level in range(LEVELS))  # of one pyramid

MAX_TEXTURES = 16384  # texels are counted in int32

# A bank repeats this row of kinds, so that a scene can ask for a kind by a texture's number modulo the row's length.
PLAIN, NOISE, TILES, PLANKS, COLLAGE, FACADE, PHOTO = range(7)
KINDS = (PLAIN, PLAIN, PLAIN, NOISE, NOISE, TILES, TILES, PLANKS, PLANKS, COLLAGE, COLLAGE, FACADE) + 4 * (PHOTO,)
WITHOUT_PHOTOS = (NOISE, TILES, PLANKS, PLAIN)  # stand in for the photographs in a bank that has none


def draw_numbers(generator: torch.Generator, shape: Sequence[int], kinds: Sequence[int]) -> Tensor:
    """Draw int32 texture numbers of the given kinds, to be taken modulo the number of textures in a bank."""
    places = torch.tensor([place for place, kind in enumerate(KINDS) if kind in kinds], dtype=torch.int32)
    place = places[torch.randint(0, len(places), tuple(shape), generator=generator)]
    return place + len(KINDS) * torch.randint(0, 1 << 20, tuple(shape), generator=generator, dtype=torch.int32)


class TextureBank:
    """Square textures that tile the plane, each a mip pyramid of texels packed into int32.

    A texel holds red, green, blue and a modulation (see `pack`) in its bytes, lowest first. The memory is allocated
    once: `refresh` replaces textures in place.
    """

    def __init__(self, count: int, generator: torch.Generator, photos: Sequence[np.ndarray] = ()) -> None:
        """Fill the bank.

        Args:
            count: number of textures, rounded up to whole rows of `KINDS`.
            generator: draws them; its device is the bank's.
            photos: uint8 [h, w, 3] RGB images of any size from 32 x 32 to take crops from.
        """
        if not 1 <= count <= MAX_TEXTURES:
            raise ValueError(f"textures must be from 1 to {MAX_TEXTURES}, got {count}")
        for photo in photos:
            if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or min(photo.shape[:2]) < 32:
                raise ValueError(f"photos must be uint8 [h, w, 3] of at least 32 x 32, got {photo.dtype} {photo.shape}")
        row = len(KINDS)
        self.count = -(-count // row) * row
        self.generator = generator
        self.photos = [torch.from_numpy(np.ascontiguousarray(photo)) for photo in photos]
        stand_ins = (PHOTO,) * len(WITHOUT_PHOTOS) if self.photos else WITHOUT_PHOTOS
        self.kinds = KINDS[:row - len(WITHOUT_PHOTOS)] + stand_ins
        self._crop_generator = torch.Generator().manual_seed(generator.initial_seed())
        self.texels = torch.empty(self.count, TEXELS, dtype=torch.int32, device=generator.device)
        self._next = 0
        for start in range(0, self.count, 2 * row):
            self.refresh(min(2 * row, self.count - start))

    def refresh(self, count: int) -> None:
        """Draw `count` textures anew, the oldest first."""
        numbers = [(self._next + i) % self.count for i in range(min(count, self.count))]
        for kind in sorted(set(self.kinds)):
            chosen = [number for number in numbers if self.kinds[number % len(self.kinds)] == kind]
            if chosen:
                draw = self._crops if kind == PHOTO else DRAW[kind]
                # One at a time each write: a slice needs no upload and thus no wait for the device.
                for number, pyramid in zip(chosen, pack(draw(len(chosen), self.generator))):
                    self.texels[number] = pyramid
        self._next = (self._next + len(numbers)) % self.count

    def _crops(self, count: int, generator: torch.Generator) -> Tensor:
        """Cut random squares out of random photographs, [count, 3, SIDE, SIDE], mirrored so that they tile."""
        crops = []
        for which, scale, down, across, mirror in torch.rand(count, 5, generator=self._crop_generator).tolist():
            photo = self.photos[int(which * len(self.photos))]
            height, width = photo.shape[:2]
            side = max(32, int(min(height, width) * (0.25 + 0.75 * scale)))
            top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
            crop = photo[top:top + side, left:left + side].permute(2, 0, 1).float()[None] / 255
            half = F.interpolate(crop, size=(SIDE // 2, SIDE // 2), mode="bilinear", antialias=True)[0].clamp(0, 1)
            half = half.flip(-1) if mirror < 0.5 else half
            half = torch.cat([half, half.flip(-1)], dim=-1)
            crops.append(torch.cat([half, half.flip(-2)], dim=-2))
        return torch.stack(crops).to(generator.device)


def fractal_noise(count: int, channels: int, generator: torch.Generator, slope: Tensor | float, coarsest: float = 2,
                  finest: float = 128, stretch: Tensor | float = 1) -> Tensor:
    """Draw tiling noise [count, channels, SIDE, SIDE] of unit variance.

    White noise is shaped in the frequency domain: amplitude falls as frequency^-slope between `coarsest` and `finest`
    waves a side, and is nil elsewhere.

    Args:
        slope: a number or [count, 1, 1, 1]; 1 is fine grain, 2 clouds.
        stretch: how much longer the grain is along x than along y.
    """
    device = generator.device
    fy = torch.fft.fftfreq(SIDE, 1 / SIDE, device=device)[:, None]
    fx = torch.fft.rfftfreq(SIDE, 1 / SIDE, device=device)
    frequency = ((fx * stretch) ** 2 + fy ** 2).sqrt()
    band = (frequency >= coarsest) & (frequency <= finest)
    gain = torch.where(band, frequency.clamp_min(0.5) ** -slope, 0.0)
    white = torch.randn(count, channels, SIDE, SIDE // 2 + 1, 2, generator=generator, device=device)
    noise = torch.fft.irfft2(torch.view_as_complex(white) * gain, s=(SIDE, SIDE))
    return noise / noise.std((-2, -1), keepdim=True).clamp_min(1e-9)


def draw_colours(count: int, generator: torch.Generator, low: float = 0.06, high: float = 0.95, muted: float = 0.8,
                 ) -> Tensor:
    """Draw colours [count, 3, 1, 1]; a share of `muted` is nearly grey, a little warm, as paint, wood and stone are."""
    colour = uniform(generator, (count, 3, 1, 1), low, high)
    dull = torch.where(chance(generator, (count, 1, 1, 1), muted), uniform(generator, (count, 1, 1, 1), 0.6, 1),
                       uniform(generator, (count, 1, 1, 1), 0.1, 0.7))
    warm = torch.tensor([1.05, 1.0, 0.92], device=generator.device).reshape(1, 3, 1, 1)
    return torch.lerp(colour, colour.mean(1, keepdim=True) * warm, dull)


def texture_axes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return x [1, SIDE] and y [SIDE, 1] of the texels' centres in [0, 1]."""
    axis = (torch.arange(SIDE, device=generator.device) + 0.5) / SIDE
    return axis[None, :], axis[:, None]


def weather(colours: Tensor, generator: torch.Generator, least: float, most: float) -> Tensor:
    """Add fine grain and faint large blotches to textures [count, 3, SIDE, SIDE]."""
    count = len(colours)
    grain = fractal_noise(count, 1, generator, uniform(generator, (count, 1, 1, 1), 0.7, 1.6), coarsest=4)
    blotches = fractal_noise(count, 3, generator, 1.8, coarsest=1, finest=12)
    blotches = torch.lerp(blotches.mean(1, keepdim=True), blotches, 0.3)
    return (colours * (1 + grain * log_uniform(generator, (count, 1, 1, 1), least, most))
            + blotches * uniform(generator, (count, 1, 1, 1), 0, 0.035)).clamp(0.02, 1)


def draw_plain(count: int, generator: torch.Generator) -> Tensor:
    """Draw painted surfaces with faint structure."""
    bright = chance(generator, (count, 1, 1, 1), 0.7)
    paint = draw_colours(count, generator, 0.05, 0.9)
    paint = torch.where(bright, 0.55 + 0.42 * paint, paint)
    return weather(paint.expand(-1, -1, SIDE, SIDE), generator, 0.006, 0.04)


def draw_noise(count: int, generator: torch.Generator) -> Tensor:
    """Draw plaster, stone, earth, carpet: two colours that mingle."""
    shape = (count, 1, 1, 1)
    noise = fractal_noise(count, 1, generator, uniform(generator, shape, 1.1, 2.2))
    first, second = draw_colours(count, generator), draw_colours(count, generator)
    second = torch.lerp(first, second, uniform(generator, shape, 0.3, 1))  # alike more often than not
    return weather(torch.lerp(first, second, torch.sigmoid(noise * log_uniform(generator, shape, 0.5, 15))), generator,
                   0.01, 0.1)


def draw_tiles(count: int, generator: torch.Generator) -> Tensor:
    """Draw tiles, bricks and checkerboards, most with joints."""
    shape = (count, 1, 1, 1)
    device = generator.device
    x, y = texture_axes(generator)
    columns = torch.randint(2, 13, shape, generator=generator, device=device)
    rows = torch.randint(2, 17, shape, generator=generator, device=device)
    cell_y = y * rows  # [count, 1, SIDE, 1]
    bond = chance(generator, shape, 0.5) * 0.5 * (cell_y.floor() % 2)
    cell_x = (x * columns + bond) % columns  # [count, 1, SIDE, SIDE]
    row, column = cell_y.long().clamp_max(15), cell_x.long().clamp_max(15)
    first, second = draw_colours(count, generator), draw_colours(count, generator)
    shades = uniform(generator, (count, 3, 16 * 16), -0.5, 0.5)
    shades = torch.lerp(shades.mean(1, keepdim=True), shades, uniform(generator, (count, 1, 1), 0, 0.4))
    cell = (row * 16 + column).reshape(count, 1, -1).expand(-1, 3, -1)
    varied = first + shades.gather(2, cell).reshape(count, 3, SIDE, SIDE) * uniform(generator, shape, 0.04, 0.6)
    checks = torch.where((row + column) % 2 == 0, first, torch.lerp(first, second, uniform(generator, shape, 0.2, 1)))
    even = (rows % 2 == 0) & (columns % 2 == 0)  # others do not continue across the texture's edge
    tiles = torch.where(chance(generator, shape, 0.5) & even, checks, varied)
    width = uniform(generator, shape, 0.02, 0.1)
    joint = (((cell_x % 1) < width) | ((cell_y % 1) < width)) & chance(generator, shape, 0.8)
    return weather(torch.where(joint, second, tiles), generator, 0.01, 0.08)


def draw_planks(count: int, generator: torch.Generator) -> Tensor:
    """Draw boards with grain along x, or stripes."""
    shape = (count, 1, 1, 1)
    _, y = texture_axes(generator)
    boards = torch.randint(2, 15, shape, generator=generator, device=generator.device)
    cell = y * boards
    grain = fractal_noise(count, 1, generator, 1.1, coarsest=6, stretch=12.0)
    wood = torch.tensor([0.62, 0.44, 0.28], device=generator.device).reshape(1, 3, 1, 1)
    colour = torch.where(chance(generator, shape, 0.5), wood * uniform(generator, shape, 0.4, 1.4),
                         draw_colours(count, generator))
    shade = uniform(generator, (count, 1, 16, 1), -0.5, 0.5).gather(2, cell.long().clamp_max(15))
    planks = colour * (1 + shade * uniform(generator, shape, 0.1, 0.8))
    planks = planks * (1 + grain * uniform(generator, shape, 0.02, 0.16))
    gap = (cell % 1) < 0.06
    return weather(torch.where(gap, planks * uniform(generator, shape, 0.3, 0.9), planks), generator, 0.01, 0.06)


def draw_collage(count: int, generator: torch.Generator) -> Tensor:
    """Draw rectangles and ellipses one over another, as on a poster, a full shelf or a notice board."""
    shape = (count, 1, 1, 1)
    x, y = texture_axes(generator)
    collage = draw_colours(count, generator).expand(-1, -1, SIDE, SIDE)
    for _ in range(32):
        centre = torch.rand(count, 2, 1, 1, 1, generator=generator, device=generator.device)
        size = log_uniform(generator, (count, 2, 1, 1, 1), 0.02, 0.25)
        angle = uniform(generator, shape, 0, math.pi) * chance(generator, shape, 0.3)
        dx, dy = (x - centre[:, 0] + 0.5) % 1 - 0.5, (y - centre[:, 1] + 0.5) % 1 - 0.5
        along = (dx * angle.cos() + dy * angle.sin()) / size[:, 0]
        across = (dy * angle.cos() - dx * angle.sin()) / size[:, 1]
        inside = torch.where(chance(generator, shape, 0.3), along ** 2 + across ** 2 < 1,
                             (along.abs() < 1) & (across.abs() < 1))
        collage = torch.where(inside, draw_colours(count, generator, muted=0.5), collage)
    return weather(collage, generator, 0.01, 0.06)


def draw_facade(count: int, generator: torch.Generator) -> Tensor:
    """Draw walls with rows of framed windows; v grows upwards."""
    shape = (count, 1, 1, 1)
    x, y = texture_axes(generator)
    columns = torch.randint(2, 6, shape, generator=generator, device=generator.device)
    rows = torch.randint(2, 5, shape, generator=generator, device=generator.device)
    cell_x, cell_y = x * columns, y * rows
    across, up = (cell_x % 1 - 0.5).abs(), (cell_y % 1 - 0.55).abs()
    half_width, half_height = uniform(generator, shape, 0.18, 0.36), uniform(generator, shape, 0.22, 0.36)
    frame = uniform(generator, shape, 0.015, 0.05)
    opening = (across < half_width) & (up < half_height)
    glass = (across < half_width - frame) & (up < half_height - frame) & ~(across < frame * 0.4)
    number = (cell_y.long() * 8 + cell_x.long()).reshape(count, 1, -1)
    pane = log_uniform(generator, (count, 1, 64), 0.03, 0.6).gather(2, number).reshape(count, 1, SIDE, SIDE)
    tint = torch.tensor([0.85, 0.95, 1.1], device=generator.device).reshape(1, 3, 1, 1)
    wall = draw_tiles(count, generator) * 0.25 + draw_colours(count, generator, 0.2, 0.9) * 0.75
    facade = torch.where(opening, draw_colours(count, generator), wall)
    facade = torch.where(glass, pane * tint * (0.7 + 0.6 * y), facade)
    ledge = (cell_y % 1) < 0.04
    return weather(torch.where(ledge & ~opening, wall * 0.7, facade), generator, 0.01, 0.05)


DRAW = {PLAIN: draw_plain, NOISE: draw_noise, TILES: draw_tiles, PLANKS: draw_planks, COLLAGE: draw_collage,
        FACADE: draw_facade}


def pack(colours: Tensor) -> Tensor:
    """Pack [n, 3, SIDE, SIDE] in [0, 1] into pyramids [n, TEXELS] int32, the finest level first.

    The fourth byte is the luminance with its mean at 1/2 and a contrast of its own, to modulate other textures.
    """
    levels = []
    luminance = colours.mean(1, keepdim=True)
    contrast = (luminance - luminance.mean((-2, -1), keepdim=True)) / (4 * luminance.std((-2, -1), keepdim=True) + 0.02)
    values = torch.cat([colours, (contrast + 0.5).clamp(0, 1)], dim=1)
    for level in range(LEVELS):
        if level:
            values = F.avg_pool2d(values, 2)
        red, green, blue, modulation = (values * 255).round().to(torch.int32).unbind(1)
        signed = torch.where(modulation > 127, modulation - 256, modulation)
        levels.append((red | (green << 8) | (blue << 16) | (signed << 24)).flatten(1))
    return torch.cat(levels, dim=1)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return values[index] of a row of values; plain indexing would first copy int32 indices to int64."""
    return values.index_select(0, index.reshape(-1)).reshape(index.shape)


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
    samples = [take(texels, index) for index in indices]

    def blend(shift: int) -> Tensor:
        a, b, c, d = (((sample >> shift) & 255).float() for sample in samples)
        above = a + (b - a) * across
        return (above + (c + (d - c) * across - above) * down) * (1 / 255)

    return blend(0), blend(8), blend(16)


def fetch_modulation(texels: Tensor, texture: Tensor, u: Tensor, v: Tensor, level: Tensor) -> Tensor:
    """Look a texture's luminance about its mean up, in [-1, 1]; the arguments are those of `fetch`."""
    indices, across, down = locate(texture, u, v, level)
    a, b, c, d = (((take(texels, index) >> 24) & 255).float() for index in indices)
    above = a + (b - a) * across
    return (above + (c + (d - c) * across - above) * down) * (2 / 255) - 1
