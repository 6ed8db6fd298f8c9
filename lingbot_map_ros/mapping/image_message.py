# SPDX-License-Identifier: Apache-2.0
"""From the content of `sensor_msgs/Image` to an RGB array, whichever library made the message."""
from __future__ import annotations

from typing import NamedTuple, Protocol

import cv2
import numpy as np


JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
JPEG_TAIL = 4096  # bytes in which a JPEG's end is looked for, since cameras pad it
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
    columns: int = 1  # the width is a multiple of this
    rows: int = 1  # likewise the height
    planes: float = 1  # rows of data for each of the image


_UYVY = _Encoding(2, 1, cv2.COLOR_YUV2RGB_UYVY, columns=2)
_YUYV = _Encoding(2, 1, cv2.COLOR_YUV2RGB_YUY2, columns=2)
# OpenCV names a mosaic by the pixels 2 and 3 of its second row, ROS by the first ones of both.
_MOSAICS = {"rggb": cv2.COLOR_BayerBG2RGB, "bggr": cv2.COLOR_BayerRG2RGB, "gbrg": cv2.COLOR_BayerGR2RGB,
            "grbg": cv2.COLOR_BayerGB2RGB}

# Names of sensor_msgs/image_encodings.hpp, and nv12. The nameless 8UC3 and so on are BGR, as OpenCV's bridge has it.
ENCODINGS: dict[str, _Encoding] = {
    "rgb8": _Encoding(3, 1, None),
    "bgr8": _Encoding(3, 1, cv2.COLOR_BGR2RGB),
    "rgba8": _Encoding(4, 1, cv2.COLOR_RGBA2RGB),
    "bgra8": _Encoding(4, 1, cv2.COLOR_BGRA2RGB),
    "rgb16": _Encoding(3, 2, None),
    "bgr16": _Encoding(3, 2, cv2.COLOR_BGR2RGB),
    "rgba16": _Encoding(4, 2, cv2.COLOR_RGBA2RGB),
    "bgra16": _Encoding(4, 2, cv2.COLOR_BGRA2RGB),
    "8UC3": _Encoding(3, 1, cv2.COLOR_BGR2RGB),
    "8UC4": _Encoding(4, 1, cv2.COLOR_BGRA2RGB),
    "16UC3": _Encoding(3, 2, cv2.COLOR_BGR2RGB),
    "mono8": _Encoding(1, 1, cv2.COLOR_GRAY2RGB),
    "8UC1": _Encoding(1, 1, cv2.COLOR_GRAY2RGB),
    "mono16": _Encoding(1, 2, cv2.COLOR_GRAY2RGB),
    "16UC1": _Encoding(1, 2, cv2.COLOR_GRAY2RGB),
    "yuv422": _UYVY,
    "uyvy": _UYVY,
    "yuv422_yuy2": _YUYV,
    "yuyv": _YUYV,
    "nv12": _Encoding(1, 1, cv2.COLOR_YUV2RGB_NV12, columns=2, rows=2, planes=1.5),
    "nv21": _Encoding(1, 1, cv2.COLOR_YUV2RGB_NV21, columns=2, rows=2, planes=1.5),
    **{f"bayer_{name}{8 * size}": _Encoding(1, size, code, columns=2, rows=2)
       for name, code in _MOSAICS.items() for size in (1, 2)},
}


def to_rgb(message: ImageMessage) -> np.ndarray:
    """Return the message's pixels as RGB uint8 [height, width, 3].

    Padding at the rows' ends (`step`) and big-endian samples are handled; samples of 16 bits keep their upper eight.
    The result may share the message's memory. Raises ImageError for an image without pixels, an unknown encoding, or a
    `step` or buffer that does not fit the size.
    """
    encoding = ENCODINGS.get(message.encoding)
    if encoding is None:
        raise ImageError("encoding", message.encoding, f"unknown, expected one of {', '.join(ENCODINGS)}")
    for field in ("width", "height"):
        if getattr(message, field) == 0:
            raise ImageError(field, 0, "the image has no pixels")
    for field, multiple in (("width", encoding.columns), ("height", encoding.rows)):
        if getattr(message, field) % multiple:
            raise ImageError(field, getattr(message, field), f"{message.encoding} has it a multiple of {multiple}")
    pixel_bytes = encoding.channels * encoding.sample_bytes
    row_bytes = message.width * pixel_bytes
    if message.step < row_bytes:
        raise ImageError("step", message.step,
                         f"a row of {message.width} {message.encoding} pixels has {row_bytes} bytes")
    rows = int(message.height * encoding.planes)
    if len(message.data) != message.step * rows:
        raise ImageError("data", f"{len(message.data)} bytes",
                         f"{rows} rows of {message.step} bytes are {message.step * rows} bytes")

    sample = np.dtype("u1" if encoding.sample_bytes == 1 else (">u2" if message.is_bigendian else "<u2"))
    pixels = np.ndarray((rows, message.width, encoding.channels), sample, buffer=message.data,
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
    data, why = np.frombuffer(message.data, np.uint8), ""
    try:
        pixels = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    except cv2.error as error:  # of absurd size, for example
        pixels, why = None, f": {error.err}"
    if pixels is None:
        raise ImageError("data", f"{len(data)} bytes", f"no image that can be decoded (format {message.format!r}){why}")
    if data[:2].tobytes() == JPEG_START and JPEG_END not in data[-JPEG_TAIL:].tobytes():
        # OpenCV 4 fills it up with grey.
        raise ImageError("data", f"{len(data)} bytes", f"the JPEG is cut off (format {message.format!r})")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
