# SPDX-License-Identifier: Apache-2.0
"""Sequences of images in files: a folder, or a video. Light: imports neither ROS nor the model."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
NANOSECONDS = 1_000_000_000


class ReplayError(Exception):
    """Input that cannot be replayed, or a pose that did not come; the message says which."""


class Frames:
    """The images of a folder in the order of their names, or of a video."""

    def __init__(self, path: str | Path) -> None:
        """Raises ReplayError if there is nothing to read there."""
        self.path = Path(path)
        self.files: list[Path] = []
        self.count: int | None = None  # of images, where it is known beforehand
        if self.path.is_dir():
            self.files = sorted((file for file in self.path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES),
                                key=lambda file: _natural_order(file.name))
            if not self.files:
                raise ReplayError(f"no images in {self.path}")
            self.count = len(self.files)
        elif not self.path.exists():
            raise ReplayError(f"{self.path} does not exist")
        elif not cv2.VideoCapture(str(self.path)).isOpened():
            raise ReplayError(f"{self.path} is neither a folder of images nor a video that OpenCV can read")

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each frame's name and its pixels, BGR uint8 [height, width, 3]."""
        if self.files:
            for file in self.files:
                pixels = cv2.imread(str(file), cv2.IMREAD_COLOR)
                if pixels is None:
                    raise ReplayError(f"{file} cannot be read as an image")
                yield file.stem, pixels
            return
        video = cv2.VideoCapture(str(self.path))
        try:
            index = 0
            while True:
                read, pixels = video.read()
                if not read:
                    break
                yield str(index), pixels
                index += 1
        finally:
            video.release()
        if index == 0:
            raise ReplayError(f"{self.path} holds no frame that OpenCV can read")


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts frame9 before frame10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)]


def stamp_from_name(name: str) -> int:
    """Return the time that a file is named after, in nanoseconds.

    `1305031102.175304` is seconds (as in TUM's sequences); whole numbers are nanoseconds with 19 digits (as in
    EuRoC's), microseconds with 16, milliseconds with 13. Raises ReplayError for any other name.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", name)
    if match:
        return int(match[1]) * NANOSECONDS + int(match[2][:9].ljust(9, "0"))
    factor = {19: 1, 16: 1_000, 13: 1_000_000}.get(len(name)) if name.isdigit() else None
    if factor is None:
        raise ReplayError(f"the name {name!r} is no time stamp (seconds with a point, or 13, 16 or 19 digits)")
    return int(name) * factor
