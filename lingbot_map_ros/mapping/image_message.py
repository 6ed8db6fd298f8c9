# SPDX-License-Identifier: Apache-2.0
"""From the content of `sensor_msgs/Image` to an RGB array, whichever library made the message."""
from __future__ import annotations

from typing import NamedTuple, Protocol

import cv2
import numpy as np


MAX_VALUE = 80  # characters of a bad value that an error shows


class ImageMessage(Protocol):
    """The fields of `sensor_msgs/Image` that matter here."""

    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int  # bytes of a row
    data: bytes  # or any other buffer


class ImageError(ValueError):
    """An image message that cannot be read: says which `field`, its `value` and what is wrong with it."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        text = repr(value)
        if len(text) > MAX_VALUE:
            text = f"{text[:MAX_VALUE]}... ({len(text)} characters)"
        super().__init__(f"{field} is {text}: {reason}")
        self.field = field
        self.value = value


class _Encoding(NamedTuple):
    channels: int
    sample_bytes: int
    to_rgb: int | None  # OpenCV conversion of 8-bit samples; None: they are RGB


# Names of sensor_msgs/image_encodings.hpp. The nameless 8UC3 is BGR, as OpenCV's bridge has it.
ENCODINGS: dict[str, _Encoding] = {
    "rgb8": _Encoding(3, 1, None),
    "bgr8": _Encoding(3, 1, cv2.COLOR_BGR2RGB),
    "rgba8": _Encoding(4, 1, cv2.COLOR_RGBA2RGB),
    "bgra8": _Encoding(4, 1, cv2.COLOR_BGRA2RGB),
    "8UC3": _Encoding(3, 1, cv2.COLOR_BGR2RGB),
    "mono8": _Encoding(1, 1, cv2.COLOR_GRAY2RGB),
    "8UC1": _Encoding(1, 1, cv2.COLOR_GRAY2RGB),
    "mono16": _Encoding(1, 2, cv2.COLOR_GRAY2RGB),
}


def to_rgb(message: ImageMessage) -> np.ndarray:
    """Return the message's pixels as RGB uint8 [height, width, 3].

    Padding at the rows' ends (`step`) and big-endian samples are handled; mono16 keeps its upper eight bits. The
    result may share the message's memory. Raises ImageError for an image without pixels, an unknown encoding, or a
    `step` or buffer that does not fit the size.
    """
    encoding = ENCODINGS.get(message.encoding)
    if encoding is None:
        raise ImageError("encoding", message.encoding, f"unknown, expected one of {', '.join(ENCODINGS)}")
    for field in ("width", "height"):
        if getattr(message, field) == 0:
            raise ImageError(field, 0, "the image has no pixels")
    pixel_bytes = encoding.channels * encoding.sample_bytes
    row_bytes = message.width * pixel_bytes
    if message.step < row_bytes:
        raise ImageError("step", message.step,
                         f"a row of {message.width} {message.encoding} pixels has {row_bytes} bytes")
    if len(message.data) != message.step * message.height:
        raise ImageError("data", f"{len(message.data)} bytes",
                         f"{message.height} rows of {message.step} bytes are {message.step * message.height} bytes")

    sample = np.dtype("u1" if encoding.sample_bytes == 1 else (">u2" if message.is_bigendian else "<u2"))
    pixels = np.ndarray((message.height, message.width, encoding.channels), sample, buffer=message.data,
                        strides=(message.step, pixel_bytes, encoding.sample_bytes))
    if encoding.sample_bytes == 2:
        pixels = (pixels >> 8).astype(np.uint8)
    if encoding.to_rgb is None:
        return np.ascontiguousarray(pixels)
    return cv2.cvtColor(pixels, encoding.to_rgb)


class CompressedImageMessage(Protocol):
    """The fields of `sensor_msgs/CompressedImage` that matter here."""

    format: str
    data: bytes  # or any other buffer


def compressed_to_rgb(message: CompressedImageMessage) -> np.ndarray:
    """Decode a JPEG, PNG or another image that OpenCV reads into RGB uint8 [height, width, 3].

    Samples of 16 bits keep their upper eight. Raises ImageError for data that is no such image.
    """
    data = np.frombuffer(message.data, np.uint8)
    pixels = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    if pixels is None:
        raise ImageError("data", f"{len(data)} bytes", f"no image that can be decoded (format {message.format!r})")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
