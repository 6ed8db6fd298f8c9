# SPDX-License-Identifier: Apache-2.0
"""Camera calibrations: what is read, what is refused, lens distortion removed."""
from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensor_msgs.msg import CameraInfo, RegionOfInterest

from lingbot_map_ros.gct import PRESETS
from lingbot_map_ros.mapping.calibration import Calibration, CalibrationError, make_lens
from lingbot_map_ros.mapping.camera_view import ROTATIONS, view_image

SIZE = (240, 320)
K = [200.0, 0, 155.0, 0, 205.0, 122.0, 0, 0, 1]
P = [180.0, 0, 160.0, 0, 0, 181.0, 119.0, 0, 0, 0, 1, 0]
LENSES = {
    "plumb_bob": [-0.28, 0.07, 0.001, -0.0005, 0.01],
    "rational_polynomial": [0.3, 0.1, 0.0005, 0.0002, 0.02, 0.6, 0.2, 0.03],
    "equidistant": [0.02, -0.01, 0.004, -0.001],
}


def info(**fields) -> CameraInfo:
    """Return a message of the camera above; `fields` overwrite it."""
    values = {"height": SIZE[0], "width": SIZE[1], "distortion_model": "plumb_bob", "d": [0.0] * 5, "k": K,
              "r": np.eye(3).ravel(), "p": P, **fields}
    return CameraInfo(**values)


def distorted_pixels(rays: np.ndarray, model: str, D: list[float], matrix: np.ndarray) -> np.ndarray:
    """Project rays x / z, y / z [n, 2], by the formulas of OpenCV's documentation: pixels [n, 2]."""
    x, y = rays.T
    r = np.hypot(x, y)
    if model == "equidistant":
        theta = np.arctan(r)
        turned = theta * (1 + sum(k * theta ** (2 * i + 2) for i, k in enumerate(D)))
        factor = np.divide(turned, r, out=np.ones_like(r), where=r > 0)
        x, y = x * factor, y * factor
    else:
        k1, k2, p1, p2, k3, k4, k5, k6 = [*D, 0, 0, 0][:8]
        radial = (1 + k1 * r**2 + k2 * r**4 + k3 * r**6) / (1 + k4 * r**2 + k5 * r**4 + k6 * r**6)
        x, y = (x * radial + 2 * p1 * x * y + p2 * (r**2 + 2 * x**2),
                y * radial + p1 * (r**2 + 2 * y**2) + 2 * p2 * x * y)
    return np.stack([matrix[0, 0] * x + matrix[0, 2], matrix[1, 1] * y + matrix[1, 2]], axis=1)


@pytest.mark.parametrize("with_P", [True, False])
@pytest.mark.parametrize("model", LENSES)
def test_distortion_is_removed(model, with_P):
    """Every pixel of the result shows what the ideal camera of its intrinsics sees there."""
    calibration = Calibration.from_message(info(distortion_model=model, d=LENSES[model], p=P if with_P else [0.0] * 12))
    lens = make_lens(calibration, SIZE, undistort=True)
    expected = np.reshape(P, (3, 4))[:, :3] if with_P else np.reshape(K, (3, 3))
    np.testing.assert_allclose(lens.intrinsics, expected)
    rows, columns = (grid.astype(np.float64) for grid in np.mgrid[: SIZE[0], : SIZE[1]])
    raw = np.stack([columns / 2, rows, np.full(SIZE, 9.0)], axis=-1)  # a raw image that names its own pixels
    seen = lens.undistort(raw.astype(np.uint8)).astype(np.float64)
    rays = np.stack([(columns - expected[0, 2]) / expected[0, 0], (rows - expected[1, 2]) / expected[1, 1]], axis=-1)
    source = distorted_pixels(rays.reshape(-1, 2), model, LENSES[model], np.reshape(K, (3, 3))).reshape(*SIZE, 2)
    inside = ((source > 2) & (source < (SIZE[1] - 3, SIZE[0] - 3))).all(axis=-1)
    assert inside.mean() > 0.5
    # The image has whole numbers and counts columns in twos.
    np.testing.assert_allclose(seen[inside][:, 0], np.floor(source[inside][:, 0]) / 2, atol=1.1)
    np.testing.assert_allclose(seen[inside][:, 1], source[inside][:, 1], atol=1.1)
    assert abs(np.mean(seen[inside][:, 1] - source[inside][:, 1])) < 0.1
    moved = np.hypot(*np.moveaxis(distorted_pixels(
        np.stack([(columns - K[2]) / K[0], (rows - K[5]) / K[4]], -1).reshape(-1, 2), model, LENSES[model],
        np.reshape(K, (3, 3))).reshape(*SIZE, 2) - np.stack([columns, rows], -1), -1, 0)).max()
    assert calibration.max_distortion() == pytest.approx(moved, rel=0.15)


def test_images_without_distortion_are_not_touched():
    rgb = np.zeros((*SIZE, 3), np.uint8)
    for fields in ({"p": [0.0] * 12}, {"p": [*K[:3], 0, *K[3:6], 0, *K[6:], 0]}, {"p": [0.0] * 12, "d": []}):
        calibration = Calibration.from_message(info(**fields))
        lens = make_lens(calibration, SIZE, undistort=True)
        assert lens.undistort(rgb) is rgb and calibration.max_distortion() == 0
        np.testing.assert_allclose(lens.intrinsics, np.reshape(K, (3, 3)))


def test_which_matrix_is_used():
    calibration = Calibration.from_message(info())
    for source, is_rectified, focal_length in (("auto", False, 200), ("auto", True, 180), ("K", True, 200),
                                               ("P", False, 180)):
        assert make_lens(calibration, SIZE, source, is_rectified=is_rectified).intrinsics[0, 0] == focal_length
    assert make_lens(calibration, SIZE, "none").intrinsics is None
    assert make_lens(calibration, SIZE, "none", undistort=True).intrinsics is None
    with pytest.raises(CalibrationError, match="p is zero"):
        make_lens(Calibration.from_message(info(p=[0.0] * 12)), SIZE, "P")


@pytest.mark.parametrize("factor", [0.5, 2, 3])
def test_images_of_another_resolution(factor):
    """A blob that the resized image shows lies where the scaled matrix says."""
    size = (int(SIZE[0] * factor), int(SIZE[1] * factor))
    scaled = Calibration.from_message(info()).for_size(size)
    image = np.zeros(SIZE, np.float32)
    image[122, 155] = 1  # at K's principal point
    resized = cv2.resize(cv2.GaussianBlur(image, (0, 0), 8), size[::-1], interpolation=cv2.INTER_AREA)
    rows, columns = np.mgrid[: size[0], : size[1]]
    found = [(grid * resized).sum() / resized.sum() for grid in (columns, rows)]
    np.testing.assert_allclose(scaled.K[:2, 2], found, atol=0.1)
    assert (scaled.K[0, 0], scaled.K[1, 1]) == (200 * factor, 205 * factor)


def test_images_of_another_shape_are_refused():
    with pytest.raises(CalibrationError, match="320x240: the images are 320x180"):
        Calibration.from_message(info()).for_size((180, 320))
    Calibration.from_message(info(height=1080, width=1920)).for_size((270, 481))  # rounding is not another shape


def test_region_of_interest_and_binning():
    roi = RegionOfInterest(x_offset=100, y_offset=40, width=200, height=160)
    cut = Calibration.from_message(info(roi=roi, binning_x=2, binning_y=2))
    assert cut.size == (80, 100)
    # The binned pixel u covers the sensor's pixels 100 + 2 u and the next one: their centre is at 100.5 + 2 u.
    np.testing.assert_allclose(cut.K, [[100, 0, (155 - 100.5) / 2], [0, 102.5, (122 - 40.5) / 2], [0, 0, 1]])
    with pytest.raises(CalibrationError, match="roi"):
        Calibration.from_message(info(roi=RegionOfInterest(x_offset=300, width=200, height=160)))


@pytest.mark.parametrize(("fields", "field", "value"), [
    ({"width": 0}, "width", "0"),
    ({"k": [0.0] * 9}, "k", "zero"),
    ({"k": [math.nan, *K[1:]]}, "k", "nan"),
    ({"k": [math.inf, *K[1:]]}, "k", "inf"),
    ({"k": [-200.0, *K[1:]]}, "k", "-200"),
    ({"k": [1e30, *K[1:]]}, "k", "1e+30"),
    ({"k": [*K[:2], 1e7, *K[3:]]}, "k", "10000000"),
    ({"p": [math.nan, *P[1:]]}, "p", "nan"),
    ({"d": [math.nan] * 5}, "d", "nan"),
    ({"d": [0.1, 0.1]}, "d", "0.1"),
    ({"distortion_model": "equidistant", "d": [0.1] * 5}, "d", "0.1"),
    ({"r": [2.0, 0, 0, 0, 1, 0, 0, 0, 1]}, "r", "2.0"),
])
def test_hostile_values_are_named(fields, field, value):
    with pytest.raises(CalibrationError) as caught:
        Calibration.from_message(info(**fields))
    assert caught.value.field == field and value in str(caught.value)


def test_an_unknown_distortion_is_refused_only_where_it_matters():
    calibration = Calibration.from_message(info(distortion_model="kannala", d=[0.1] * 7))
    assert make_lens(calibration, SIZE).intrinsics[0, 0] == 200
    with pytest.raises(CalibrationError, match="distortion_model is 'kannala'"):
        make_lens(calibration, SIZE, undistort=True)


@settings(max_examples=60, deadline=None)
@given(height=st.integers(12, 90), width=st.integers(12, 90), rotation=st.sampled_from(ROTATIONS),
       preset=st.sampled_from(["tiny", "default"]))
def test_intrinsics_lead_to_the_models_image_and_back(height, width, rotation, preset):
    view = view_image(np.zeros((height, width, 3), np.uint8), PRESETS[preset], rotation=rotation)[1]
    matrix = np.array([[50.0, 0, 17.5], [0, 60, 20.25], [0, 0, 1]])
    np.testing.assert_allclose(view.to_camera_intrinsics(view.to_image_intrinsics(matrix)), matrix)
