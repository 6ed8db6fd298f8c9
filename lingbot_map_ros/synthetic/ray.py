# SPDX-License-Identifier: Apache-2.0
"""Cast rays at scenes: the nearest surface, its colour and its light. Element-wise, so that torch.compile fuses it.

A view is one pinhole with one ray a pixel. A pixel's colour is the mean of several views of it, which differ by a part
of a pixel, by the moment (motion blur) and by the place on the lens (defocus).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.bounds import Window
from lingbot_map_ros.synthetic.scene import FIRST_BOX, FIRST_CYLINDER, FIRST_ELLIPSOID, PRIMITIVES, Scenes
from lingbot_map_ros.synthetic.texture import LEVELS, SIDE, fetch, fetch_modulation, take

TINY = 1e-12  # a direction's least component, so that no division gives a NaN
CLOUDS = 0.7  # repeats of the sky's texture to a height of the vault
HAZE_START, HAZE_END = 60.0, 150.0  # metres: the ground of an open scene fades into the sky's horizon

GROUPS = ((FIRST_BOX, FIRST_CYLINDER), (FIRST_CYLINDER, FIRST_ELLIPSOID), (FIRST_ELLIPSOID, PRIMITIVES))  # by kind

# Columns of `Views.surface`.
HALF, ROTATION, CENTRE, TILE, TEXTURE, MODULATION, STRENGTH, RATE, TINT = 0, 3, 12, 15, 21, 27, 28, 29, 30
SURFACE = 33


@dataclass
class Views:
    """v views: all that `cast` and `shade` need, in flat float32 tensors; n = PRIMITIVES."""

    origin: Tensor  # [v, 3] world
    ray: Tensor  # [v, 3, 3]: pixel index (x, y, 1) -> world direction whose part along the optical axis is 1
    local_origin: Tensor  # [v, n, 3] the origin in each primitive's unit frame
    local_ray: Tensor  # [v, n, 3, 3]: pixel index (x, y, 1) -> direction in each primitive's unit frame
    local_light: Tensor  # [v, n, 3] the light in each primitive's unit frame
    surface: Tensor  # [v, n, SURFACE]
    light: Tensor  # [v, 8]: x y z of the light, its strength, its falloff, ambient, open, pixels per unit slope
    sky: Tensor  # [v, 6]
    level_offset: Tensor  # [v] added to the mip level before rounding down: views dither between levels

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the fields in order, in one layout whatever they come from: compiled code is bound to it."""
        fields = (self.origin, self.ray, self.local_origin, self.local_ray, self.local_light, self.surface, self.light,
                  self.sky, self.level_offset)
        return tuple(field.contiguous() for field in fields)


def make_views(scenes: Scenes, T_world_camera: Tensor, intrinsics: Tensor, offset: Tensor, textures: int,
               lens: Tensor | None = None, focus: Tensor | None = None) -> Views:
    """Set up views, one for each scene given (repeat scenes for more).

    Args:
        scenes: v scenes.
        T_world_camera: [v, 4, 4].
        intrinsics: [v, 3, 3] in pixels, pixel centres at +0.5.
        offset: [v, 2] pixels (x right, y down) of the ray from the pixel's centre.
        textures: number of textures in the bank.
        lens: [v, 2] metres of the ray's origin from the lens's middle; None: a pinhole.
        focus: [v] metres to the plane that stays sharp.
    """
    rotation, origin = T_world_camera[:, :3, :3], T_world_camera[:, :3, 3]
    fx, fy, cx, cy = intrinsics[:, 0, 0], intrinsics[:, 1, 1], intrinsics[:, 0, 2], intrinsics[:, 1, 2]
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    slope_x, slope_y = (0.5 + offset[:, 0] - cx) / fx, (0.5 + offset[:, 1] - cy) / fy
    if lens is not None:
        slope_x, slope_y = slope_x - lens[:, 0] / focus, slope_y - lens[:, 1] / focus
        origin = origin + multiply(rotation[:, :, :2], lens[:, :, None])[..., 0]
    camera_ray = torch.stack([1 / fx, zero, slope_x, zero, 1 / fy, slope_y, zero, zero, one], -1).unflatten(-1, (3, 3))
    ray = multiply(rotation, camera_ray)

    to_unit = scenes.rotation.transpose(-1, -2) / scenes.half[..., None]  # [v, n, 3, 3]
    local_origin = multiply(to_unit, (origin[:, None] - scenes.centre)[..., None])[..., 0]
    local_light = multiply(to_unit, (scenes.light[:, None] - scenes.centre)[..., None])[..., 0]
    surface = torch.cat([
        scenes.half, scenes.rotation.flatten(-2), scenes.centre, scenes.tile, (scenes.texture % textures).float(),
        (scenes.modulation % textures)[..., None].float(), scenes.modulation_strength[..., None],
        scenes.modulation_rate[..., None], scenes.tint,
    ], dim=-1)
    light = torch.cat([scenes.light, torch.stack(
        [scenes.light_strength, scenes.light_falloff, scenes.ambient, scenes.open.float(), (fx * fy).sqrt()], -1)], -1)
    return Views(origin, ray, local_origin, multiply(to_unit, ray[:, None]), local_light, surface, light,
                 scenes.sky.flatten(1), torch.zeros_like(fx))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply small matrices in full float32, whatever the precision that GPUs are allowed for matmul."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def part(tensor: Tensor, *index: int | slice) -> Tensor:
    """Take one number of each view to broadcast over pixels: [v, 1, 1], or [v, k, 1, 1] with a slice."""
    return tensor[(slice(None), *index, None, None)]


def direction(ray: Tensor, x: Tensor, y: Tensor, *index: int | slice) -> list[Tensor]:
    """Apply matrices [v, (n,) 3, 3] to pixel indices (x, y, 1): three components [v, h, w], or [v, k, h, w]."""
    return [part(ray, *index, k, 0) * x + (part(ray, *index, k, 1) * y + part(ray, *index, k, 2))
            for k in range(3)]


def slabs(origin: list[Tensor], ray: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return where a ray enters and leaves the cube [-1, 1]^3; it misses where it leaves before it enters."""
    enter = leave = None
    for o, d in zip(origin, ray):
        inverse = 1 / d.abs().clamp_min(TINY)
        middle = -o * torch.copysign(inverse, d)
        near, far = middle - inverse, middle + inverse
        enter = near if enter is None else torch.maximum(enter, near)
        leave = far if leave is None else torch.minimum(leave, far)
    return enter, leave


def intersect(number: int, origin: list[Tensor], ray: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return where a ray enters and leaves the unit shape of a primitive; enter >= leave where it misses.

    With the ray's direction d and its origin o, half the chord through a circle is sqrt(d.d - (o x d)^2) / d.d, which
    keeps its digits for thin far things where the usual discriminant cancels.
    """
    if number < FIRST_CYLINDER:
        return slabs(origin, ray)
    ox, oy, oz = origin
    dx, dy, dz = ray
    if number < FIRST_ELLIPSOID:
        square = (dx * dx + dy * dy).clamp_min(TINY)
        cross = ox * dy - oy * dx
        chord = square - cross * cross
        along = -(ox * dx + oy * dy)
        half = chord.clamp_min(0).sqrt()
        inverse = 1 / dz.abs().clamp_min(TINY)
        middle = -oz * torch.copysign(inverse, dz)
        enter = torch.maximum((along - half) / square, middle - inverse)
        leave = torch.minimum((along + half) / square, middle + inverse)
        return enter, torch.where(chord > 0, leave, enter)
    square = dx * dx + dy * dy + dz * dz
    cx, cy, cz = oy * dz - oz * dy, oz * dx - ox * dz, ox * dy - oy * dx
    chord = square - (cx * cx + cy * cy + cz * cz)
    along = -(ox * dx + oy * dy + oz * dz)
    half = chord.clamp_min(0).sqrt()
    return (along - half) / square, torch.where(chord > 0, along + half, along - half) / square


def cast_shell(views: Views, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return what `cast` returns in scenes that have nothing but their shells."""
    ray = direction(views.local_ray, x, y, 0)
    origin = [part(views.local_origin, 0, k) for k in range(3)]
    _, depth = slabs(origin, ray)  # the shell is seen from inside
    return depth, torch.zeros_like(depth, dtype=torch.int32), [o + depth * d for o, d in zip(origin, ray)]


def cast(views: Views, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Find the nearest surface along each ray.

    Written as reductions over the primitives of one kind, which a compiler turns into short loops over them; without a
    compiler `cast_within` is far cheaper.

    Args:
        views: v views.
        x, y: pixel indices (float32) of shapes [1, 1, w] and [1, h, 1].

    Returns:
        depth [v, h, w], along the optical axis; the primitive's number [v, h, w] int32; the point in the primitive's
        unit frame, three [v, h, w].
    """
    depth, number, _ = cast_shell(views, x, y)
    for first, last in GROUPS:
        ray = direction(views.local_ray, x, y, slice(first, last))
        origin = [part(views.local_origin, slice(first, last), k) for k in range(3)]
        enter, leave = intersect(first, origin, ray)
        met, which = torch.where((enter < leave) & (enter > 0), enter, torch.inf).min(1)
        nearest = met < depth
        depth, number = torch.where(nearest, met, depth), torch.where(nearest, which.to(torch.int32) + first, number)
    rows = rows_of(number)
    origins, rays = views.local_origin.reshape(-1), views.local_ray.reshape(-1)
    ray = [take(rays, rows * 9 + 3 * k) * x + (take(rays, rows * 9 + 3 * k + 1) * y + take(rays, rows * 9 + 3 * k + 2))
           for k in range(3)]
    return depth, number, [take(origins, rows * 3 + k) + depth * d for k, d in enumerate(ray)]


def rows_of(number: Tensor) -> Tensor:
    """Return the row of each pixel's primitive in tables [v * n, ...], int32 [v, h, w]."""
    views = torch.arange(number.shape[0], dtype=torch.int32, device=number.device)
    return views[:, None, None] * PRIMITIVES + number


def cast_within(views: Views, x: Tensor, y: Tensor, windows: list[Window]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return what `cast` returns, testing each primitive in its window only.

    Args:
        views: v views.
        x, y: pixel indices; x may also be [1, 1, p] with y alike, a list of pixels.
        windows: for each primitive the pixels that it can touch.
    """
    depth, number, point = cast_shell(views, x, y)
    for i in range(FIRST_BOX, PRIMITIVES):
        if windows[i] is None:
            continue
        window = (slice(None), *windows[i])
        ray = direction(views.local_ray, *crop(x, y, windows[i]), i)
        origin = [part(views.local_origin, i, k) for k in range(3)]
        enter, leave = intersect(i, origin, ray)
        nearest = (enter < leave) & (enter > 0) & (enter < depth[window])
        depth[window] = torch.where(nearest, enter, depth[window])
        number[window] = number[window].masked_fill(nearest, i)
        for whole, o, d in zip(point, origin, ray):
            whole[window] = torch.where(nearest, o + enter * d, whole[window])
    return depth, number, point


def crop(x: Tensor, y: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the pixel indices within a window; a list of pixels has x and y of the same shape."""
    rows, columns = window
    return x[:, :, columns], y[:, rows] if y.shape[2] == 1 else y[:, :, columns]


def is_sky(views: Views, number: Tensor, point: list[Tensor]) -> Tensor:
    """Tell where a ray of an open scene leaves it: it meets a face of the shell other than the floor."""
    floor = (-point[2] >= point[0].abs()) & (-point[2] >= point[1].abs())
    return (part(views.light, 6) > 0) & (number == 0) & ~floor


def cast_depth(views: Views, x: Tensor, y: Tensor) -> Tensor:
    """Return the depth [v, h, w] along the optical axis, inf in the sky."""
    depth, number, point = cast(views, x, y)
    return torch.where(is_sky(views, number, point), float("inf"), depth)


def blocks(i: int | slice, views: Views, x: Tensor, y: Tensor, depth: Tensor) -> Tensor:
    """Tell where primitives i, of one kind, stand between the surface and the light.

    Args:
        i: number of a primitive, or a slice of k numbers.
        views, x, y: as given to `cast`.
        depth: [v, h, w], or [v, 1, h, w] with a slice.

    Returns:
        [v, h, w] bool, or [v, k, h, w].
    """
    ray = direction(views.local_ray, x, y, i)
    start = [part(views.local_origin, i, k) + depth * d for k, d in enumerate(ray)]
    towards = [part(views.local_light, i, k) - s for k, s in enumerate(start)]
    enter, leave = intersect(i.start if isinstance(i, slice) else i, start, towards)
    return (enter < leave) & (leave > 1e-4) & (enter < 1)


def light_reaches(views: Views, x: Tensor, y: Tensor, depth: Tensor, number: Tensor) -> Tensor:
    """Tell where nothing stands between the surface and the light, [v, h, w].

    A primitive does not shade itself here: the side that is turned away from the light is dark anyway.

    Args:
        views, x, y: as given to `cast`.
        depth, number: what it returned.
    """
    blocked = torch.zeros_like(depth, dtype=torch.bool)
    for first, last in GROUPS:
        others = number[:, None] != torch.arange(first, last, device=number.device)[:, None, None]
        blocked = blocked | (blocks(slice(first, last), views, x, y, depth[:, None]) & others).any(1)
    return ~blocked


def light_reaches_within(views: Views, x: Tensor, y: Tensor, depth: Tensor, number: Tensor, windows: list[Window],
                         ) -> Tensor:
    """Return what `light_reaches` returns, testing each primitive's shadow in its window only."""
    reaches = torch.ones_like(depth, dtype=torch.bool)
    for i in range(FIRST_BOX, PRIMITIVES):
        if windows[i] is not None:
            window = (slice(None), *windows[i])
            reaches[window] &= ~(blocks(i, views, *crop(x, y, windows[i]), depth[window]) & (number[window] != i))
    return reaches


def find_face(number: Tensor, point: list[Tensor]) -> Tensor:
    """Return the face (see `FACES`) that a point of the unit shape lies on."""
    px, py, pz = point
    ax, ay, az = px.abs(), py.abs(), pz.abs()
    is_box = number < FIRST_CYLINDER
    on_end = (az >= torch.where(is_box, torch.maximum(ax, ay), (px * px + py * py).sqrt())) & (number < FIRST_ELLIPSOID)
    side = torch.where(ax >= ay, torch.where(px > 0, 0, 1), torch.where(py > 0, 2, 3))
    face = torch.where(on_end, torch.where((pz > 0) | ~is_box, 4, 5), torch.where(is_box, side, 0))
    return face.to(torch.int32)


def shade(texels: Tensor, views: Views, x: Tensor, y: Tensor, depth: Tensor, number: Tensor, point: list[Tensor],
          reaches: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Colour the surfaces that `cast` found: red, green and blue [v, h, w], linear, not limited to 1.

    Args:
        texels: the texture bank in one row.
        views, x, y: as given to `cast`.
        depth, number, point: what it returned.
        reaches: where the light is not blocked; None: everywhere.
    """
    rows = rows_of(number) * SURFACE
    flat = views.surface.reshape(-1)

    def surface(column: int | Tensor) -> Tensor:
        return take(flat, rows + column)

    px, py, pz = point
    hx, hy, hz = (surface(HALF + k) for k in range(3))
    face = find_face(number, point)
    is_box, is_ball = number < FIRST_CYLINDER, number >= FIRST_ELLIPSOID
    is_round = ~is_box
    on_end = face >= 4
    on_x = is_box & (face < 2)
    zero = torch.zeros_like(px)

    # Texture coordinates in metres on the face: round a cylinder and a ball, along the other two axes of a box.
    lx, ly, lz = px * hx, py * hy, pz * hz
    u = torch.where(on_end | (is_box & ~on_x), lx, ly)
    u = torch.where(is_round & ~on_end, torch.atan2(py, px) * hx, u)
    v = torch.where(on_end, ly, lz)
    tile = surface(TILE + face)
    u, v = u / tile + 0.37 * face, v / tile + 0.21 * face
    # The sky has no place: clouds are looked up by direction, on a low vault.
    dx, dy, dz = direction(views.ray, x, y)
    distance = (dx * dx + dy * dy + dz * dz).sqrt()
    sky = is_sky(views, number, point)
    vault = CLOUDS / (dz.abs() + 0.3 * distance)
    u, v = torch.where(sky, dx * vault, u), torch.where(sky, dy * vault, v)

    # The outward normal in the primitive's axes, then in the world's. The shell's faces look inwards.
    sign = torch.where(number == 0, -1.0, 1.0)
    nx = torch.where(is_round, px / hx, torch.where(on_x, torch.sign(px) * sign, zero))
    ny = torch.where(is_round, py / hy, torch.where(on_x, zero, torch.sign(py) * sign))
    nz = torch.where(is_ball, pz / hz, zero)
    nx, ny = torch.where(on_end, zero, nx), torch.where(on_end, zero, ny)
    nz = torch.where(on_end, torch.sign(pz) * sign, nz)
    length = torch.rsqrt((nx * nx + ny * ny + nz * nz).clamp_min(TINY))
    nx, ny, nz = nx * length, ny * length, nz * length
    wx, wy, wz = (surface(ROTATION + 3 * k) * nx + surface(ROTATION + 3 * k + 1) * ny
                  + surface(ROTATION + 3 * k + 2) * nz for k in range(3))

    # The size of a pixel on the surface, in texels, chooses the mip level.
    facing = ((wx * dx + wy * dy + wz * dz) / distance).abs().clamp(0.06, 1)
    footprint = depth * distance / (part(views.light, 7) * facing.sqrt() * tile) * SIDE
    footprint = torch.where(sky, vault * distance * SIDE / part(views.light, 7), footprint)
    offset = part(views.level_offset)
    level = (torch.log2(footprint.clamp_min(1e-3)) + offset).floor().clamp(0, LEVELS - 1).to(torch.int32)
    colours = fetch(texels, surface(TEXTURE + face).to(torch.int32), u, v, level)
    rate = surface(RATE)
    level = (torch.log2((footprint * rate).clamp_min(1e-3)) + offset).floor().clamp(0, LEVELS - 1).to(torch.int32)
    modulation = fetch_modulation(texels, surface(MODULATION).to(torch.int32), u * rate + 0.13, v * rate + 0.71, level)
    modulation = 1 + surface(STRENGTH) * modulation

    # One light with Lambert's cosine, and ambient light that is somewhat directed so that edges show in the shade.
    sx, sy, sz = (part(views.origin, k) + depth * d for k, d in enumerate((dx, dy, dz)))
    tx, ty, tz = part(views.light, 0) - sx, part(views.light, 1) - sy, part(views.light, 2) - sz
    square = tx * tx + ty * ty + tz * tz
    cosine = ((wx * tx + wy * ty + wz * tz) * torch.rsqrt(square + 1e-4)).clamp_min(0)
    if reaches is not None:
        cosine = torch.where(reaches, cosine, 0.0)
    light = part(views.light, 3) * cosine / (1 + part(views.light, 4) * square)
    light = (light + part(views.light, 5) * (1 + 0.14 * wx + 0.06 * wy + 0.1 * wz)) * modulation

    open_scene = part(views.light, 6)
    height = (dz / distance).clamp(0, 1).sqrt()
    cloud = 1 + (modulation - 1) * height
    haze = torch.where(sky, 1.0, ((depth - HAZE_START) / (HAZE_END - HAZE_START)).clamp(0, 1) * open_scene)
    mixed = []
    for k, colour in enumerate(colours):
        horizon, overhead = part(views.sky, k), part(views.sky, k + 3)
        lit = colour * surface(TINT + k) * light
        mixed.append(torch.lerp(lit, torch.lerp(horizon, overhead, height) * cloud, haze))
    return tuple(mixed)


def render_views(texels: Tensor, *tensors_and_pixels, shadows: bool = True) -> Tensor:
    """Return colours [v, 3, h, w] (linear, not limited to 1). Arguments: `Views.tensors()`, then x and y."""
    *tensors, x, y = tensors_and_pixels
    views = Views(*tensors)
    depth, number, point = cast(views, x, y)
    reaches = light_reaches(views, x, y, depth, number) if shadows else None
    return torch.stack(shade(texels, views, x, y, depth, number, point, reaches), dim=1)


def depth_views(*tensors_and_pixels) -> Tensor:
    """Return depths [v, h, w], inf in the sky. Arguments: `Views.tensors()`, then x and y."""
    *tensors, x, y = tensors_and_pixels
    return cast_depth(Views(*tensors), x, y)
