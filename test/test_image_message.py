# SPDX-License-Identifier: Apache-2.0
"""Image messages to RGB arrays."""
from __future__ import annotations

import array
import sys

import numpy as np
import pytest
from sensor_msgs.msg import Image

from lingbot_map_ros.mapping.image_message import ENCODINGS, ImageError, to_rgb

HEIGHT, WIDTH = 3, 5
RGB = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
GREY = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH), np.uint8)
GREY16 = np.random.default_rng(3).integers(0, 65536, (HEIGHT, WIDTH), np.uint16)
ALPHA = np.full((HEIGHT, WIDTH, 1), 7, np.uint8)


def message(encoding: str, pixels: np.ndarray, padding: int = 0, big_endian: bool = False) -> Image:
    rows = pixels.reshape(HEIGHT, -1).view(np.uint8)
    rows = np.concatenate([rows, np.full((HEIGHT, padding), 99, np.uint8)], axis=1)
    return Image(height=HEIGHT, width=WIDTH, encoding=encoding, step=rows.shape[1], is_bigendian=big_endian,
                 data=array.array("B", rows.tobytes()))


def grey3(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, axis=2)


CASES = {
    "rgb8": (RGB, RGB),
    "bgr8": (RGB[..., ::-1], RGB),
    "8UC3": (RGB[..., ::-1], RGB),
    "rgba8": (np.concatenate([RGB, ALPHA], 2), RGB),
    "bgra8": (np.concatenate([RGB[..., ::-1], ALPHA], 2), RGB),
    "mono8": (GREY, grey3(GREY)),
    "8UC1": (GREY, grey3(GREY)),
    "mono16": (GREY16, grey3((GREY16 >> 8).astype(np.uint8))),
}


def test_every_encoding_has_a_case():
    assert set(CASES) == set(ENCODINGS)


@pytest.mark.parametrize("padding", [0, 1, 16])
@pytest.mark.parametrize("encoding", CASES)
def test_encodings_with_and_without_padding(encoding, padding):
    pixels, expected = CASES[encoding]
    rgb = to_rgb(message(encoding, np.ascontiguousarray(pixels), padding))
    assert rgb.dtype == np.uint8 and rgb.flags.c_contiguous
    np.testing.assert_array_equal(rgb, expected)


@pytest.mark.parametrize("padding", [0, 3])
def test_big_endian_samples(padding):
    order = GREY16.byteswap() if sys.byteorder == "little" else GREY16
    np.testing.assert_array_equal(to_rgb(message("mono16", order, padding, big_endian=True)), CASES["mono16"][1])


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "mono8"])
def test_endianness_of_single_bytes_does_not_matter(encoding):
    pixels, expected = CASES[encoding]
    np.testing.assert_array_equal(to_rgb(message(encoding, np.ascontiguousarray(pixels), big_endian=True)), expected)


@pytest.mark.parametrize(("changes", "field", "value"), [
    ({"encoding": "yuv422"}, "encoding", "yuv422"),
    ({"encoding": ""}, "encoding", ""),
    ({"width": 0}, "width", 0),
    ({"height": 0}, "height", 0),
    ({"step": 14}, "step", 14),
    ({"step": 0}, "step", 0),
    ({"step": 16}, "data", "45 bytes"),
    ({"height": 4}, "data", "45 bytes"),
    ({"data": array.array("B", bytes(44))}, "data", "44 bytes"),
    ({"data": array.array("B")}, "data", "0 bytes"),
    ({"data": array.array("B", bytes(46))}, "data", "46 bytes"),
    ({"width": 2**31, "step": 2**32 - 1}, "step", 2**32 - 1),
])
def test_unreadable_image_names_field_and_value(changes, field, value):
    image = message("rgb8", RGB)
    for name, new in changes.items():
        setattr(image, name, new)
    with pytest.raises(ImageError) as caught:
        to_rgb(image)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert field in str(caught.value) and repr(value) in str(caught.value)


def test_a_long_value_is_cut():
    with pytest.raises(ImageError) as caught:
        to_rgb(message("x" * 20_000, RGB))
    assert len(str(caught.value)) < 400 and "xxx... (20002 characters): unknown" in str(caught.value)
