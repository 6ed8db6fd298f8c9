# SPDX-License-Identifier: Apache-2.0
"""The model's predictions in the geometry of the camera's image."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.gct import PRESETS, image_geometry
from lingbot_map_ros.mapping.camera_view import ROTATIONS, CameraView, view_image
from lingbot_map_ros.mapping.geometry import unproject
from lingbot_map_ros.mapping.prediction import Prediction

PLANE = np.array([0.02, -0.035, 0.5])  # 1 / z = PLANE . (x / z, y / z, 1) of every point of a plane


def plane_depth(size: tuple[int, int], K: np.ndarray, plane: np.ndarray) -> torch.Tensor:
    """Return the depth of a plane at the pixels of a camera."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    rays = np.stack([(columns - K[0, 2]) / K[0, 0], (rows - K[1, 2]) / K[1, 1], np.ones(size)], axis=-1)
    return torch.from_numpy(1 / (rays @ plane)).float()


def prediction(depth: torch.Tensor, K: np.ndarray, confidence: torch.Tensor | None = None) -> Prediction:
    return Prediction(is_keyframe=True, pose_encoding=torch.zeros(9), T_world_camera=torch.eye(4),
                      intrinsics=torch.from_numpy(K).float(), depth=depth,
                      confidence=torch.full_like(depth, 2.0) if confidence is None else confidence)


def view_of(preset: str, size: tuple[int, int], rotation: int = 0) -> CameraView:
    return view_image(np.zeros((*size, 3), np.uint8), PRESETS[preset], rotation=rotation)[1]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("preset", "size"), [("default", (120, 200)), ("default", (240, 320)), ("tiny", (90, 60)),
                                              ("lingbot_map", (480, 640)), ("tiny", (20, 30))])
def test_depth_of_a_plane_is_right_at_every_camera_pixel(preset, size, rotation):
    """Depth that is exact in the model's image is so in the camera's, at the pixels that its intrinsics say."""
    view = view_of(preset, size, rotation)
    assert view.camera_size == size
    height, width = view.geometry.image_size
    K = np.array([[width * 0.9, 0, width / 2], [0, width * 0.9, height / 2], [0, 0, 1]])
    upright = view.T_upright_camera[:3, :3]
    depth = view.depth(prediction(plane_depth((height, width), K, PLANE), K))
    assert depth.shape == size
    expected = plane_depth(size, view.to_camera_intrinsics(K), PLANE @ upright)
    seen = torch.isfinite(depth)
    # Half a pixel at the border of the model's image is extrapolated with its outermost value.
    border = 0.6 / min(view.geometry.scale_x, view.geometry.scale_y) if preset != "tiny" else 1.0
    inner = seen.clone()
    for axis in (0, 1):
        lines = seen.any(dim=1 - axis).nonzero()[:, 0]
        margin = int(np.ceil(border))
        cut = torch.zeros(size[axis], dtype=torch.bool)
        cut[int(lines[0]) + margin : int(lines[-1]) + 1 - margin] = True
        inner &= cut[:, None] if axis == 0 else cut[None]
    assert inner.any()
    torch.testing.assert_close(depth[inner], expected[inner], rtol=2e-3, atol=0)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(12, 90), width=st.integers(12, 90), rotation=st.sampled_from(ROTATIONS),
       preset=st.sampled_from(["tiny", "default"]))
def test_points_of_camera_pixels_are_those_of_model_pixels(height, width, rotation, preset):
    """A camera pixel's ray, turned upright, is the ray of the model's pixel that the geometry says."""
    view = view_of(preset, (height, width), rotation)
    h, w = view.geometry.image_size
    K = np.array([[0.8 * w, 0, w / 2 + 1.5], [0, 0.7 * w, h / 2 - 2.25], [0, 0, 1]])
    ones = torch.ones(height, width, dtype=torch.float64)
    rays = unproject(ones, torch.from_numpy(view.to_camera_intrinsics(K)), torch.from_numpy(view.T_upright_camera))
    projected = rays @ torch.from_numpy(K).T
    pixels = np.stack(np.mgrid[:height, :width], axis=-1)
    turned = np.rot90(pixels, -(rotation // 90)).copy()
    rows, columns = np.mgrid[: turned.shape[0], : turned.shape[1]]
    geometry = view.geometry
    x = (columns + 0.5) * geometry.scale_x - geometry.offset_x - 0.5
    y = (rows + 0.5) * geometry.scale_y - geometry.offset_y - 0.5
    found = projected[turned[..., 0], turned[..., 1]].numpy()
    np.testing.assert_allclose(found[..., 0], x, atol=1e-6)
    np.testing.assert_allclose(found[..., 1], y, atol=1e-6)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_the_model_sees_the_image_upright(rotation):
    rgb = np.zeros((42, 56, 3), np.uint8)
    rgb[:10, :, 0] = 255  # the sky
    turned = np.ascontiguousarray(np.rot90(rgb, rotation // 90))  # what a camera that is mounted askew delivers
    image, view = view_image(turned, PRESETS["tiny"], rotation=rotation)
    assert torch.equal(image, view_image(rgb, PRESETS["tiny"])[0])
    depth = view.to_camera_image(image[0])
    np.testing.assert_allclose(depth.numpy(), turned[..., 0] / 255, atol=1e-6)


def test_nothing_is_known_outside_of_the_crop():
    geometry = image_geometry(PRESETS["default"], (120, 320))  # the middle 165 columns
    values = geometry.to_camera_image(torch.ones(112, 154))
    seen = torch.isfinite(values)
    left = round(geometry.offset_x / geometry.scale_x)
    assert left == 77 and not seen[:, :left].any() and not seen[:, left + 165 :].any()
    assert seen[:, left : left + 165].all() and (values[seen] == 1).all()


def test_values_of_an_image_that_was_not_resized_are_not_touched():
    values = torch.rand(294, 518)
    assert torch.equal(view_of("lingbot_map", (294, 518)).to_camera_image(values), values)


def test_values_are_linear_between_pixels_around_zero():
    ramp = torch.arange(154.0).repeat(112, 1) - 77
    seen = view_of("default", (448, 616)).to_camera_image(ramp)
    expected = (torch.arange(616.0) + 0.5) / 4 - 0.5 - 77
    torch.testing.assert_close(seen[:, 4:-4], expected[None, 4:-4].expand(448, -1), rtol=0, atol=1e-4)


def test_depth_is_not_blended_across_an_edge():
    depth = torch.ones(112, 154)
    depth[:, 77:] = 10.0
    K = np.diag([100.0, 100.0, 1.0])
    seen = view_of("default", (448, 616)).depth(prediction(depth, K))
    assert set(seen.unique().tolist()) == {1.0, 10.0}
    blended = view_of("default", (448, 616)).to_camera_image(depth)
    assert len(blended.unique()) > 2  # without a limit it is


def test_depth_that_is_not_sure_or_not_above_zero_is_not_known():
    depth, confidence = torch.ones(112, 154), torch.full((112, 154), 3.0)
    depth[:10], depth[10:20], depth[20:30] = 0.0, -1.0, torch.nan
    confidence[40:50], confidence[50:60] = 1.5, torch.nan
    view, K = view_of("default", (112, 154)), np.diag([100.0, 100.0, 1.0])
    known = torch.isfinite(view.depth(prediction(depth, K, confidence), 2.0))
    assert known[30:40].all() and known[60:].all() and not known[:30].any() and not known[40:60].any()
    everything = torch.isfinite(view.depth(prediction(depth, K, confidence), 1.0))
    assert everything[40:50].all()
    shown = view.confidence(prediction(depth, K, confidence))
    assert (shown[:40] == 3).all() and (shown[41:49] == 1.5).all()


def test_another_rotation_is_refused():
    with pytest.raises(ValueError, match="rotation is 45"):
        view_image(np.zeros((40, 40, 3), np.uint8), PRESETS["tiny"], rotation=45)
