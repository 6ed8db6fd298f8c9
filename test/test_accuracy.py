# SPDX-License-Identifier: Apache-2.0
"""How accurate the embedded model is, through the real session and cache, on rooms that it was not trained on.

The bounds are near what was measured (lingbot_map_ros/models/README.md), so that a model, session or cache that gets
worse is seen. Baselines show that the sequences are no easy ones.
"""
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from lingbot_map_ros.gct import build_model
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from training.metrics import confidence_errors, depth_errors, medians, pose_errors

DATA = Path(__file__).resolve().parent / "data"
DEPTH_STRIDE = 3  # pixels whose depth the files hold


def measure(file: str, config: SessionConfig, most: int | None = None) -> tuple[dict, dict, list[int]]:
    """Return medians over a file's sequences, depth errors over confidence, and each sequence's number of windows.

    most: sequences, for the time that they take.
    """
    data = np.load(DATA / file)
    ends = np.cumsum(data["jpeg_bytes"])
    images = [cv2.cvtColor(cv2.imdecode(part, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
              for part in np.split(data["jpeg"], ends[:-1])]
    images = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).unflatten(0, data["jpeg_bytes"].shape)
    depth_every = images.shape[1] // data["depth"].shape[1]  # frames
    session = MappingSession(build_model("default"), config)
    rows, depths, confidences, windows = [], [], [], []
    depth_truth = data["depth"][:most].astype(np.float32)
    for sequence, T_true, depth_true in zip(images, data["T_world_camera"], depth_truth):
        session.reset()
        results = [result for image in sequence for result in session.step(image.float() / 255)]
        assert len(results) == len(sequence)
        T = torch.stack([result.T_world_camera for result in results]).double().numpy()
        depth, confidence = (
            torch.stack([getattr(result, name) for result in results[::depth_every]])[:, ::DEPTH_STRIDE, ::DEPTH_STRIDE]
            for name in ("depth", "confidence"))
        rows.append(pose_errors(T, T_true.astype(np.float64)) | depth_errors(depth.numpy(), depth_true))
        depths.append(depth.numpy() * np.median(depth_true / depth.numpy()))
        confidences.append(confidence.numpy())
        windows.append(session.window_index + 1)
    curve = confidence_errors(np.stack(depths), np.stack(confidences), depth_truth)
    figures = medians(rows)
    print(json.dumps(figures, indent=1), curve)
    return figures, curve, windows


@pytest.fixture(scope="module")
def measured() -> tuple[dict, dict]:
    """Return what is measured over 48 frames, in one window."""
    figures, curve, _ = measure("rooms.npz", SessionConfig(refine_poses=None))  # as this model recommends
    return figures, curve


def test_poses(measured):
    figures, _ = measured
    assert figures["ate_path"] < 0.95  # %
    assert figures["ate_path"] < 0.2 * min(figures["ate_path_static"], figures["ate_path_constant"])
    assert figures["rotation_step"] < 0.09 < 0.1 * figures["rotation_step_true"]  # degrees a frame
    assert figures["translation_step"] < 12  # % of the mean step
    assert figures["heading_end"] < 2  # degrees


def test_depth(measured):
    figures, _ = measured
    assert figures["abs_rel"] < 5.5 < 0.25 * figures["abs_rel_median"]  # %
    assert figures["delta"] > 97  # %


def test_error_falls_as_confidence_rises(measured):
    _, curve = measured
    errors = np.array(curve["abs_rel"])
    assert errors[0] > 3 * errors[-1]
    assert (np.diff(errors) < 0.5).all(), errors  # but for noise


def test_several_windows():
    """240 frames in windows of the model's own size, every frame a keyframe."""
    figures, _, windows = measure("rooms_long.npz", SessionConfig(refine_poses=None, window_size=None), most=2)
    assert min(windows) >= 2
    assert figures["ate_path"] < 1.2 < 0.2 * min(figures["ate_path_static"], figures["ate_path_constant"])  # %
    assert figures["rotation_step"] < 0.18 < 0.1 * figures["rotation_step_true"]  # degrees a frame
    assert figures["heading_end"] < 8  # degrees
    assert figures["abs_rel"] < 10 and figures["delta"] > 93  # %
