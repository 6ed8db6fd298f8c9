# SPDX-License-Identifier: Apache-2.0
"""The published model with known weights gives the reference implementation's numbers."""
import ctypes
import gc
import json
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lingbot_map_ros.gct import PRESETS, build_model
from lingbot_map_ros.gct.model import GCT

DATA = Path(__file__).parent / "data"


def fill_tensor(name: str, tensor: torch.Tensor) -> None:
    """Overwrite a float32 tensor on the CPU with the pseudo-random values that belong to its name.

    Standard normal numbers from a PCG64 seeded with the CRC-32 of the name, scaled by the tensor's role.
    """
    values = tensor.numpy()  # shares memory
    np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).standard_normal(dtype=np.float32, out=values)
    role = name.rsplit(".", 1)[-1]
    if role == "gamma":
        values *= np.float32(0.02)
        values += np.float32(0.1)
    elif role == "weight" and values.ndim == 1:
        values *= np.float32(0.05)
        values += np.float32(1)
    elif role == "weight":
        values /= np.float32(math.sqrt(math.prod(values.shape[1:])))
    else:
        values *= np.float32(0.02 if role == "bias" else 0.2)


@pytest.fixture(scope="module")
def published_model():
    """The full-size model, filled once; 4.6 GB."""
    with torch.device("meta"):
        model = GCT(PRESETS["lingbot_map"])
    model.to_empty(device="cpu")
    with ThreadPoolExecutor(2) as pool:  # NumPy lets go of the interpreter while it draws
        list(pool.map(fill_tensor, *zip(*model.state_dict().items())))
    yield model
    del model
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps most of it else, for the rest of the run


def test_state_dict_has_the_published_names_and_shapes():
    with torch.device("meta"):
        model = GCT(PRESETS["lingbot_map"])
    manifest = json.loads((DATA / "state_dict_manifest.json").read_text())
    assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == manifest


@pytest.mark.parametrize("name", ["every_frame", "keyframe_interval_3"])
def test_published_model_matches_the_reference(published_model, name):
    reference = np.load(DATA / f"{name}.npz")
    run = json.loads(str(reference["config"]))
    images = torch.from_numpy(reference["images"])
    scale_frames, interval = run["scale"], run["keyframe_interval"]
    state = published_model.new_state(
        tuple(images.shape[-2:]), scale_frames=scale_frames, sliding_window=run["window"],
        camera_iterations=run["iters"], remembered_frames=len(images), spare_frames=16,
    )
    outputs = [published_model.step(images[:scale_frames], state)]
    for i in range(scale_frames, len(images)):
        keep = (i - scale_frames) % interval == 0
        outputs.append(published_model.step(images[i : i + 1], state, keep=keep))

    def error(field: str, name: str) -> float:
        return np.abs(torch.cat([getattr(output, field) for output in outputs]).numpy() - reference[name]).max()

    assert error("pose_encoding", "pose_enc") < 2e-5
    assert error("depth", "depth") < 5e-6
    assert error("confidence", "depth_conf") < 5e-6
    stats = state.cache.get_cache_stats()
    expected = json.loads(str(reference["cache_stats"]))
    assert {key: stats[key] for key in expected} == expected


def test_default_model_matches_its_training_program():
    reference = np.load(DATA / "default_model.npz")
    images = torch.from_numpy(reference["images"]).permute(0, 3, 1, 2).float() / 255
    scale_frames = int(reference["scale_frames"])
    model = build_model("default")
    state = model.new_state((112, 154), scale_frames=scale_frames, sliding_window=int(reference["sliding_window"]),
                            camera_iterations=4)
    outputs = [model.step(images[:scale_frames], state)]
    outputs += [model.step(images[i : i + 1], state) for i in range(scale_frames, len(images))]

    pose_encoding = torch.cat([output.pose_encoding for output in outputs]).numpy()
    depth = torch.cat([output.depth for output in outputs])[:, ::4, ::4].numpy()
    confidence = torch.cat([output.confidence for output in outputs])[:, ::4, ::4].numpy()
    np.testing.assert_allclose(pose_encoding, reference["pose_enc"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(depth, reference["depth"], rtol=1e-4)
    np.testing.assert_allclose(confidence, reference["depth_conf"], rtol=1e-4)
