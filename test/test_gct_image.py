# SPDX-License-Identifier: Apache-2.0
"""From camera images to the model's: sizes, pixels, geometry."""
import numpy as np
import pytest
import torch

from lingbot_map_ros.gct import PRESETS, image_geometry, prepare_image


@pytest.fixture(scope="module")
def photo():
    """An image [480, 640, 3] with edges and fine texture."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:480, :640]
    base = 127 + 80 * np.sin(rows / 9) * np.cos(columns / 13) + 60 * ((rows // 40 + columns // 40) % 2)
    return np.clip(base[..., None] + rng.normal(0, 25, (480, 640, 3)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("preset, camera_size, image_width, expected", [
    ("lingbot_map", (480, 640), None, (392, 518)),
    ("lingbot_map", (294, 518), None, (294, 518)),
    ("lingbot_map", (1080, 1920), 252, (140, 252)),
    ("lingbot_map", (640, 480), None, (518, 518)),
    ("lingbot_map", (640, 480), 252, (252, 252)),
    ("lingbot_map", (50, 400), 56, (14, 56)),
    ("tiny", (400, 50), None, (56, 56)),
    ("default", (480, 640), None, (112, 154)),
    ("default", (640, 480), 154, (112, 154)),
    ("tiny", (480, 640), None, (42, 56)),
])
def test_image_sizes(preset, camera_size, image_width, expected):
    image, geometry = prepare_image(np.zeros((*camera_size, 3), np.uint8), PRESETS[preset], image_width)
    assert tuple(image.shape) == (3, *expected)
    assert geometry.image_size == expected and geometry.camera_size == camera_size
    assert geometry == image_geometry(PRESETS[preset], camera_size, image_width)


@pytest.mark.parametrize("preset, shape", [("lingbot_map", (480, 640)), ("lingbot_map", (640, 480)),
                                           ("default", (480, 640)), ("default", (640, 480)), ("tiny", (480, 640))])
def test_pixels_are_those_of_pil(photo, preset, shape):
    Image = pytest.importorskip("PIL.Image")
    config = PRESETS[preset]
    photo = photo if shape == (480, 640) else np.ascontiguousarray(photo.transpose(1, 0, 2))
    height, width = shape
    source = Image.fromarray(photo)
    if preset == "default":
        crop_width, crop_height = min(width, round(height * 11 / 8)), min(height, round(width * 8 / 11))
        left, top = (width - crop_width) // 2, (height - crop_height) // 2
        source = source.crop((left, top, left + crop_width, top + crop_height)).resize((154, 112), Image.BICUBIC)
        expected = np.asarray(source)
    else:
        side = config.image_width
        full = 14 * round(height * side / width / 14)
        expected = np.asarray(source.resize((side, full), Image.BICUBIC))
        if full > side:
            expected = expected[(full - side) // 2 :][:side]
    image, _ = prepare_image(photo, config)
    assert image.dtype == torch.float32 and 0 <= image.min() and image.max() <= 1
    difference = np.abs(image.permute(1, 2, 0).numpy() * 255 - expected)
    assert difference.max() <= 1.001 and difference.mean() < 0.1


def test_an_image_of_the_right_size_is_not_touched():
    rgb = np.random.default_rng(0).integers(0, 256, (294, 518, 3), dtype=np.uint8)
    image, geometry = prepare_image(rgb, PRESETS["lingbot_map"])
    np.testing.assert_allclose(image.permute(1, 2, 0).numpy() * 255, rgb, atol=1e-4)
    assert (geometry.scale_x, geometry.scale_y, geometry.offset_x, geometry.offset_y) == (1, 1, 0, 0)


def test_views_read_only_arrays_and_tensors_are_taken(photo):
    expected, _ = prepare_image(photo[:, ::-1].copy(), PRESETS["tiny"])
    read_only = photo[:, ::-1].copy()
    read_only.flags.writeable = False
    for rgb in (photo[:, ::-1], read_only, torch.from_numpy(photo).flip(1)):
        assert torch.equal(prepare_image(rgb, PRESETS["tiny"])[0], expected)


@pytest.mark.parametrize("preset, shape", [("lingbot_map", (640, 480)), ("default", (480, 640)),
                                           ("default", (640, 300))])
def test_geometry_says_where_a_pixel_went(preset, shape):
    """A bright blob of the camera's image is found where the geometry puts it."""
    height, width = shape
    v, u = height // 2 + 31, width // 2 - 40
    rows, columns = np.mgrid[:height, :width]
    blob = 255 * np.exp(-((rows - v) ** 2 + (columns - u) ** 2) / (2 * 12.0**2))
    image, geometry = prepare_image(np.repeat(blob[..., None], 3, 2).astype(np.uint8), PRESETS[preset])
    weight = image[0].double().numpy()
    rows, columns = np.mgrid[: weight.shape[0], : weight.shape[1]]
    found = (columns * weight).sum() / weight.sum(), (rows * weight).sum() / weight.sum()
    # A camera whose principal point is the blob: it moves with it.
    K_camera = np.array([[500.0, 0, u], [0, 510.0, v], [0, 0, 1]])
    K_image = geometry.to_image_intrinsics(K_camera)
    np.testing.assert_allclose(K_image[:2, 2], found, atol=0.05)
    np.testing.assert_allclose([K_image[0, 0], K_image[1, 1]], [500 * geometry.scale_x, 510 * geometry.scale_y])
    np.testing.assert_allclose(geometry.to_camera_intrinsics(K_image), K_camera)
    tensor = torch.from_numpy(K_camera)
    np.testing.assert_allclose(geometry.to_image_intrinsics(tensor).numpy(), K_image)
    assert tensor[0, 2] == u  # the input is not changed


@pytest.mark.parametrize("rgb, error, message", [
    (np.zeros((10, 10), np.uint8), ValueError, r"\[height, width, 3\], not \[10, 10\]"),
    (np.zeros((10, 10, 4), np.uint8), ValueError, r"\[10, 10, 4\]"),
    (np.zeros((10, 10, 3), np.float32), TypeError, "uint8"),
    (np.zeros((0, 10, 3), np.uint8), ValueError, "empty"),
    (np.zeros((81, 10, 3), np.uint8), ValueError, "10x81 is beyond an aspect ratio of 8:1"),
    (np.zeros((1, 60_000, 3), np.uint8), ValueError, "60000x1"),
    (np.zeros((60_000, 1, 3), np.uint8), ValueError, "1x60000"),
])
def test_arrays_that_are_no_images_are_refused(rgb, error, message):
    with pytest.raises(error, match=message):
        prepare_image(rgb, PRESETS["tiny"])


@pytest.mark.parametrize("preset, image_width", [("lingbot_map", 500), ("lingbot_map", 532), ("lingbot_map", 0),
                                                 ("default", 140)])
def test_widths_that_the_model_does_not_take_are_refused(preset, image_width):
    with pytest.raises(ValueError, match=rf"image_width .*not {image_width}"):
        image_geometry(PRESETS[preset], (480, 640), image_width)
