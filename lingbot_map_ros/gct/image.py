# SPDX-License-Identifier: Apache-2.0
"""From a camera's image to the model's."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from lingbot_map_ros.gct.config import GCTConfig

MAX_ASPECT = 8  # of the camera's image, wide or tall


@dataclass(frozen=True)
class ImageGeometry:
    """Where the pixels of the model's image lie in the camera's.

    A camera pixel (u, v), its centre at integers, is model pixel ((u + 0.5) * scale_x - offset_x - 0.5, likewise v).
    """

    camera_size: tuple[int, int]  # height, width
    image_size: tuple[int, int]  # height, width of the model's image
    scale_x: float  # model pixels per camera pixel
    scale_y: float
    offset_x: float  # model pixels cut off at the left
    offset_y: float  # and at the top

    def to_image_intrinsics(self, intrinsics: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        """Turn intrinsics [..., 3, 3] in camera pixels into pixels of the model's image."""
        return self._affine(intrinsics, self.scale_x, self.scale_y, self.offset_x, self.offset_y)

    def to_camera_intrinsics(self, intrinsics: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        """Turn intrinsics [..., 3, 3] in pixels of the model's image into camera pixels."""
        return self._affine(intrinsics, 1 / self.scale_x, 1 / self.scale_y,
                            -self.offset_x / self.scale_x, -self.offset_y / self.scale_y)

    def to_camera_image(self, values: torch.Tensor, max_step: float = float("inf")) -> torch.Tensor:
        """Resample values [h, w] of the model's image at the camera's pixels: [H, W], NaN where the model saw nothing.

        Linear between the centres of pixels. Where one of the four around is not finite, or they differ by more than
        the share `max_step` of the least, the nearest one is taken: a mean of two surfaces' depths belongs to neither.
        """
        (x0, x1, xn, fx), (y0, y1, yn, fy) = (
            _samples(camera, size, scale, offset, values) for camera, size, scale, offset in (
                (self.camera_size[1], self.image_size[1], self.scale_x, self.offset_x),
                (self.camera_size[0], self.image_size[0], self.scale_y, self.offset_y)))
        # As much as possible in the model's resolution: there is less to do.
        is_smooth = _smooth_cells(values, max_step)[:, x0]
        rows, nearest = values[:, x0].lerp(values[:, x1], fx), values[:, xn]
        out = rows[y0].lerp_(rows[y1], fy[:, None])
        out = torch.where(is_smooth[y0], out, nearest[yn])
        out[:, torch.isnan(fx)] = torch.nan
        out[torch.isnan(fy)] = torch.nan
        return out

    @staticmethod
    def _affine(intrinsics, scale_x, scale_y, offset_x, offset_y):
        out = intrinsics.clone() if isinstance(intrinsics, torch.Tensor) else np.array(intrinsics, dtype=np.float64)
        out[..., 0, :] *= scale_x
        out[..., 1, :] *= scale_y
        out[..., 0, 2] += 0.5 * scale_x - offset_x - 0.5
        out[..., 1, 2] += 0.5 * scale_y - offset_y - 0.5
        return out


def image_geometry(
    config: GCTConfig, camera_size: tuple[int, int], image_width: int | None = None
) -> ImageGeometry:
    """Return the geometry of the model's image for a camera image of (height, width).

    A model of one image size takes the middle of the camera's image, cropped to its own aspect ratio. Other models take
    the whole width, `image_width` (None: the configuration's) model pixels, and as many rows as keep the aspect ratio
    to the nearest multiple of the patch size; of an image taller than wide, the middle rows.

    Raises ValueError for a width that the model does not take, an empty camera image, or one of an absurd shape.
    """
    camera_height, camera_width = camera_size
    if camera_height < 1 or camera_width < 1:
        raise ValueError(f"camera image is empty: {camera_width}x{camera_height}")
    if max(camera_size) > MAX_ASPECT * min(camera_size):  # resized to the model's width it might fill the memory
        raise ValueError(f"camera image of {camera_width}x{camera_height} is beyond an aspect ratio of {MAX_ASPECT}:1")
    width = config.image_width if image_width is None else image_width
    patch = config.patch_size

    if config.image_height is not None:
        height = config.image_height
        if width != config.image_width:
            raise ValueError(f"model {config.name!r} takes an image_width of {config.image_width} only, not {width}")
        left, top, crop_width, crop_height = _centre_crop(camera_size, width / height)
        scale_x, scale_y = width / crop_width, height / crop_height
        return ImageGeometry(camera_size, (height, width), scale_x, scale_y, left * scale_x, top * scale_y)

    if width < patch or width % patch or width > config.image_width:
        raise ValueError(f"image_width must be a multiple of {patch} from {patch} to {config.image_width}, not {width}")
    full_height = max(1, round(camera_height * width / camera_width / patch)) * patch
    height = min(full_height, width)
    return ImageGeometry(camera_size, (height, width), width / camera_width, full_height / camera_height,
                         0.0, float((full_height - height) // 2))


def prepare_image(
    rgb: np.ndarray | torch.Tensor,
    config: GCTConfig,
    image_width: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ImageGeometry]:
    """Turn a camera's image, uint8 RGB [H, W, 3], into the model's: float32 [3, h, w] in [0, 1] on `device`.

    Resizes with antialiased bicubic interpolation to 8 bits, as PIL does (to within one level). See `image_geometry`
    for the size and the errors; raises ValueError for another shape, TypeError for another dtype.
    """
    if rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"image must have the shape [height, width, 3], not {list(rgb.shape)}")
    if rgb.dtype not in (np.uint8, torch.uint8):
        raise TypeError(f"image must be uint8, not {rgb.dtype}")
    geometry = image_geometry(config, (int(rgb.shape[0]), int(rgb.shape[1])), image_width)
    height, width = geometry.image_size

    if config.image_height is not None:
        left, top, crop_width, crop_height = _centre_crop(geometry.camera_size, width / height)
        rgb = rgb[top : top + crop_height, left : left + crop_width]
        resized = (height, width)
    else:
        resized = (round(geometry.scale_y * geometry.camera_size[0]), width)
    if isinstance(rgb, np.ndarray):
        # A copy where need be: torch takes neither negative strides (a flipped view) nor, silently, read-only memory.
        rgb = np.ascontiguousarray(rgb)
        rgb = torch.from_numpy(rgb if rgb.flags.writeable else rgb.copy())

    image = _resize(rgb.to(device).permute(2, 0, 1).float(), resized)
    top = int(geometry.offset_y) if config.image_height is None else 0
    image = image[:, top : top + height].contiguous()
    return image.div_(255), geometry


def _resize(image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize image [3, H, W], whole numbers in 0 .. 255, to (height, width), rounding after each axis as PIL does."""
    for pass_size in ((image.shape[1], size[1]), size):
        if image.shape[1:] != pass_size:
            image = F.interpolate(image[None], size=pass_size, mode="bicubic", antialias=True)[0]
            image = image.round_().clamp_(0, 255)
    return image


def _smooth_cells(values: torch.Tensor, max_step: float) -> torch.Tensor:
    """Say of each pixel [h, w] whether it and those right, below and both differ by a share of max_step at most."""
    padded = F.pad(values[None, None], (0, 1, 0, 1), mode="replicate")[0, 0]
    corners = torch.stack((padded[:-1, :-1], padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]))
    low, high = corners.amin(dim=0), corners.amax(dim=0)
    is_finite = torch.isfinite(high - low)
    return is_finite if max_step == float("inf") else is_finite & (high - low <= max_step * low.abs())


def _samples(
    camera: int, size: int, scale: float, offset: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where an axis of `camera` pixels lies on one of `size`: both neighbours, the nearest one, and a share.

    Each is [camera]. The share is that of the second neighbour, NaN beyond the model's image.
    """
    x = (torch.arange(camera, dtype=torch.float64) + 0.5) * scale - offset - 0.5
    is_inside = (x >= -0.5) & (x < size - 0.5)
    x = x.clamp(0, size - 1)
    first = x.floor()
    share = torch.where(is_inside, x - first, torch.nan)
    indices = (first, (first + 1).clamp(max=size - 1), x.round())
    return *(index.long().to(like.device) for index in indices), share.to(like)


def _centre_crop(size: tuple[int, int], aspect: float) -> tuple[int, int, int, int]:
    """Return left, top, width, height of the largest centred crop of (height, width) that has the aspect."""
    height, width = size
    crop_width = min(width, max(1, round(height * aspect)))
    crop_height = min(height, max(1, round(width / aspect)))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height
