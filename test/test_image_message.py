# SPDX-License-Identifier: Apache-2.0
"""Image messages to RGB arrays."""
from __future__ import annotations

import array
import sys

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

from lingbot_map_ros.mapping.image_message import ENCODINGS, ImageError, compressed_to_rgb, to_rgb

HEIGHT, WIDTH = 4, 6
RGB = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
GREY = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH), np.uint8)
GREY16 = np.random.default_rng(3).integers(0, 65536, (HEIGHT, WIDTH), np.uint16)
ALPHA = np.full((HEIGHT, WIDTH, 1), 7, np.uint8)


def message(encoding: str, pixels: np.ndarray, padding: int = 0, big_endian: bool = False) -> Image:
    count = len(pixels)  # more than the image's rows where planes follow one another
    rows = pixels.reshape(count, -1).view(np.uint8)
    rows = np.concatenate([rows, np.full((count, padding), 99, np.uint8)], axis=1)
    return Image(height=HEIGHT, width=WIDTH, encoding=encoding, step=rows.shape[1], is_bigendian=big_endian,
                 data=array.array("B", rows.tobytes()))


def grey3(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, axis=2)


def mosaic(pattern: str, rgb: np.ndarray) -> np.ndarray:
    """Return what a sensor behind a mosaic of filters sees: one sample of each pixel [height, width]."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    channel = np.array(["rgb".index(name) for name in pattern])[rows % 2 * 2 + columns % 2]
    return np.take_along_axis(rgb, channel[..., None], 2)[..., 0]


def yuv(u: np.ndarray, v: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return RGB of samples (ITU-R BT.601, limited range)."""
    y, u, v = 1.164 * (y.astype(float) - 16).clip(0), u.astype(float) - 128, v.astype(float) - 128
    rgb = np.stack([y + 1.596 * v, y - 0.813 * v - 0.391 * u, y + 2.018 * u], axis=-1)
    return rgb.round().clip(0, 255).astype(np.uint8)


U, V = np.random.default_rng(4).integers(60, 200, (2, HEIGHT, WIDTH // 2), np.uint8)
Y = np.random.default_rng(5).integers(30, 220, (HEIGHT, WIDTH), np.uint8)
PAIRS = np.stack([U, Y[:, ::2], V, Y[:, 1::2]], axis=-1)  # U, Y0, V, Y1
YUV = yuv(U.repeat(2, 1), V.repeat(2, 1), Y)
YUV420 = yuv(U[::2].repeat(2, 0).repeat(2, 1), V[::2].repeat(2, 0).repeat(2, 1), Y)
NV12 = np.concatenate([Y, np.stack([U[::2], V[::2]], axis=-1).reshape(HEIGHT // 2, WIDTH)])
NV21 = np.concatenate([Y, np.stack([V[::2], U[::2]], axis=-1).reshape(HEIGHT // 2, WIDTH)])
RGB16 = np.random.default_rng(6).integers(0, 65536, (HEIGHT, WIDTH, 3), np.uint16)
FLAT = np.full((HEIGHT, WIDTH, 3), (200, 120, 40), np.uint8)
TOLERANCE = {"yuv422": 2, "uyvy": 2, "yuv422_yuy2": 2, "yuyv": 2, "nv12": 2, "nv21": 2}  # OpenCV's are whole numbers

CASES = {
    **{name: (PAIRS, YUV) for name in ("yuv422", "uyvy")},
    **{name: (PAIRS[..., [1, 0, 3, 2]], YUV) for name in ("yuv422_yuy2", "yuyv")},
    "nv12": (NV12, YUV420),
    "nv21": (NV21, YUV420),
    **{f"bayer_{name}8": (mosaic(name, FLAT), FLAT) for name in ("rggb", "bggr", "gbrg", "grbg")},
    **{f"bayer_{name}16": (mosaic(name, FLAT).astype(np.uint16) << 8, FLAT)
       for name in ("rggb", "bggr", "gbrg", "grbg")},
    "rgb16": (RGB16, (RGB16 >> 8).astype(np.uint8)),
    "bgr16": (RGB16[..., ::-1], (RGB16 >> 8).astype(np.uint8)),
    "16UC3": (RGB16[..., ::-1], (RGB16 >> 8).astype(np.uint8)),
    "rgba16": (np.concatenate([RGB16, RGB16[..., :1]], 2), (RGB16 >> 8).astype(np.uint8)),
    "bgra16": (np.concatenate([RGB16[..., ::-1], RGB16[..., :1]], 2), (RGB16 >> 8).astype(np.uint8)),
    "8UC4": (np.concatenate([RGB[..., ::-1], ALPHA], 2), RGB),
    "16UC1": (GREY16, grey3((GREY16 >> 8).astype(np.uint8))),
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
    assert rgb.dtype == np.uint8 and rgb.flags.c_contiguous and rgb.shape == (HEIGHT, WIDTH, 3)
    if encoding.startswith("bayer"):  # whose outermost pixels are guesses
        rgb, expected = rgb[1:-1, 1:-1], expected[1:-1, 1:-1]
    np.testing.assert_allclose(rgb.astype(int), expected.astype(int), atol=TOLERANCE.get(encoding, 0))


@pytest.mark.parametrize("padding", [0, 3])
def test_big_endian_samples(padding):
    order = GREY16.byteswap() if sys.byteorder == "little" else GREY16
    np.testing.assert_array_equal(to_rgb(message("mono16", order, padding, big_endian=True)), CASES["mono16"][1])


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "mono8"])
def test_endianness_of_single_bytes_does_not_matter(encoding):
    pixels, expected = CASES[encoding]
    np.testing.assert_array_equal(to_rgb(message(encoding, np.ascontiguousarray(pixels), big_endian=True)), expected)


@pytest.mark.parametrize(("changes", "field", "value"), [
    ({"encoding": "yuv444"}, "encoding", "yuv444"),
    ({"encoding": "yuv422", "width": 5}, "width", 5),
    ({"encoding": "nv12", "height": 3}, "height", 3),
    ({"encoding": "bayer_rggb8", "width": 7}, "width", 7),
    ({"encoding": "nv12", "step": 18}, "data", "72 bytes"),
    ({"encoding": ""}, "encoding", ""),
    ({"width": 0}, "width", 0),
    ({"height": 0}, "height", 0),
    ({"step": 17}, "step", 17),
    ({"step": 0}, "step", 0),
    ({"step": 19}, "data", "72 bytes"),
    ({"height": 5}, "data", "72 bytes"),
    ({"data": array.array("B", bytes(71))}, "data", "71 bytes"),
    ({"data": array.array("B")}, "data", "0 bytes"),
    ({"data": array.array("B", bytes(73))}, "data", "73 bytes"),
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


def test_pixels_are_those_of_cv_bridge():
    cv_bridge = pytest.importorskip("cv_bridge")
    compared = []
    for encoding, (pixels, _) in CASES.items():
        image = message(encoding, np.ascontiguousarray(pixels))
        try:
            expected = cv_bridge.CvBridge().imgmsg_to_cv2(image, "rgb8")
        except cv_bridge.CvBridgeError:  # it does not read all of them as colour images
            continue
        # It rounds samples of 16 bits by 255 / 65535.
        np.testing.assert_allclose(to_rgb(image).astype(int), expected.astype(int), atol=1 if "16" in encoding else 0,
                                   err_msg=encoding)
        compared.append(encoding)
    assert {"rgb8", "bgr8", "mono8", "mono16", "yuv422", "bayer_rggb8"} <= set(compared)


def compressed(pixels: np.ndarray, kind: str, cut: int | None = None, padding: int = 0) -> CompressedImage:
    data = cv2.imencode(f".{kind}", pixels)[1].tobytes()
    return CompressedImage(format=f"rgb8; {kind} compressed bgr8", data=data[:cut] + bytes(padding))


def test_compressed_images():
    photo = cv2.resize(RGB, (60, 40), interpolation=cv2.INTER_LINEAR)
    png = compressed(photo[..., ::-1], "png")
    np.testing.assert_array_equal(compressed_to_rgb(png), photo)
    np.testing.assert_array_equal(compressed_to_rgb(compressed(GREY16, "png")), grey3((GREY16 >> 8).astype(np.uint8)))
    for padding in (0, 100):
        jpeg = compressed_to_rgb(compressed(photo[..., ::-1], "jpeg", padding=padding))
        assert np.abs(jpeg.astype(int) - photo).mean() < 8


@pytest.mark.parametrize(("kind", "cut"), [(kind, cut) for kind in ("jpeg", "png") for cut in (0, 1, 20, 300, -40)])
def test_compressed_images_that_are_cut_off(kind, cut):
    noise = np.random.default_rng(7).integers(0, 256, (40, 60, 3), np.uint8)
    with pytest.raises(ImageError) as caught:
        compressed_to_rgb(compressed(noise, kind, cut=cut))
    assert caught.value.field == "data" and kind in str(caught.value)
