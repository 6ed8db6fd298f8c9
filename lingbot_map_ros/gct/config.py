# SPDX-License-Identifier: Apache-2.0
"""Configuration of the model, and named presets."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GCTConfig:
    """Dimensions of a model, the images that it takes and the range that it was trained on."""

    name: str
    image_width: int  # pixels
    image_height: int | None  # pixels; None: any multiple of the patch size up to image_width, from the camera's shape
    trained_frames: int  # kept frames seen in training; predictions degrade beyond
    scale_frames: int  # recommended
    sliding_window: int  # recommended
    patch_size: int = 14
    # ... dimensions of the layers


PRESETS: dict[str, GCTConfig] = {}
