# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: both formats load, and files that do not fit are refused with the reason."""
import logging

import pytest
import torch
from safetensors.torch import save_file

from lingbot_map_ros.gct import PRESETS, build_model


@pytest.fixture(scope="module")
def weights():
    """Weights of a tiny model that are not those of `build_model("tiny")`."""
    return {name: tensor + 0.01 for name, tensor in build_model("tiny").state_dict().items()}


def assert_carries(model, weights):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


@pytest.mark.parametrize("wrap", [lambda weights: weights, lambda weights: {"model": weights, "epoch": 3}])
def test_published_formats_load(tmp_path, weights, wrap):
    path = tmp_path / "model.pt"
    torch.save(wrap(weights), path)
    model = build_model("tiny", checkpoint=path)
    assert_carries(model, weights)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.step(torch.rand(1, 3, 28, 56), model.new_state((28, 56)))


def test_weights_take_the_asked_dtype(tmp_path, weights):
    path = tmp_path / "model.pt"
    torch.save(weights, path)
    model = build_model("tiny", checkpoint=str(path), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert_carries(model, weights)


def test_other_heads_are_ignored(tmp_path, weights, caplog):
    path = tmp_path / "model.pt"
    torch.save({**weights, "point_head.norm.weight": torch.ones(4)}, path)
    with caplog.at_level(logging.WARNING):
        assert_carries(build_model("tiny", checkpoint=path), weights)
    assert not caplog.records


def test_tensors_without_a_place_are_reported(tmp_path, weights, caplog):
    path = tmp_path / "model.pt"
    torch.save({**weights, "aggregator.frame_blocks.9.norm1.weight": torch.ones(4)}, path)
    with caplog.at_level(logging.WARNING):
        build_model("tiny", checkpoint=path)
    assert "aggregator.frame_blocks.9.norm1.weight" in caplog.text


def test_a_safetensors_file_describes_itself(tmp_path, weights):
    path = tmp_path / "model.safetensors"
    save_file(weights, path, metadata={"config": PRESETS["tiny"].to_json()})
    model = build_model("lingbot_map", checkpoint=path)
    assert model.config == PRESETS["tiny"]
    assert_carries(model, weights)


def test_a_safetensors_file_without_configuration_takes_the_preset(tmp_path, weights):
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    assert_carries(build_model("tiny", checkpoint=path), weights)


def test_a_model_that_was_saved_by_torch_can_be_read(tmp_path):
    """Its state dict carries nothing but tensors that would make the file unsafe to read."""
    model = build_model("tiny")
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    assert_carries(build_model("tiny", checkpoint=tmp_path / "model.pt"), dict(model.state_dict()))


def test_a_missing_tensor_is_named(tmp_path, weights):
    path = tmp_path / "model.pt"
    torch.save({name: tensor for name, tensor in weights.items() if name != "depth_head.norm.bias"}, path)
    with pytest.raises(ValueError, match="model.pt lacks depth_head.norm.bias$"):
        build_model("tiny", checkpoint=path)


def test_a_wrong_shape_is_named(tmp_path, weights):
    path = tmp_path / "model.pt"
    torch.save({**weights, "depth_head.norm.bias": torch.ones(7)}, path)
    with pytest.raises(ValueError, match=r"depth_head.norm.bias has the shape \[7\], the model \[256\]"):
        build_model("tiny", checkpoint=path)


def test_something_else_than_a_tensor_is_named(tmp_path, weights):
    path = tmp_path / "model.pt"
    torch.save({**weights, "depth_head.norm.bias": 7}, path)
    with pytest.raises(ValueError, match="depth_head.norm.bias is a int"):
        build_model("tiny", checkpoint=path)


class Unsafe:
    """Unpickling this would run code of this module."""


@pytest.mark.parametrize("content, message", [
    ([1, 2], "holds no state dict"),
    ({"epoch": 3}, "holds no state dict"),
    (Unsafe(), "no checkpoint that can be read safely.*Unsupported global.*Unsafe"),
])
def test_a_file_of_something_else_is_refused(tmp_path, content, message):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        build_model("tiny", checkpoint=path)


@pytest.mark.parametrize("name", ["noise.pt", "noise.safetensors"])
@pytest.mark.parametrize("content", [b"", b"these are no weights at all" * 100])
def test_noise_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match="noise.* is no "):
        build_model("tiny", checkpoint=path)


def test_a_truncated_file_is_refused(tmp_path, weights):
    path = tmp_path / "model.pt"
    torch.save(weights, path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ValueError, match="no checkpoint that can be read safely"):
        build_model("tiny", checkpoint=path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        build_model("tiny", checkpoint=tmp_path / "absent.pt")
    with pytest.raises(FileNotFoundError, match="is no file"):
        build_model("tiny", checkpoint=tmp_path)


def test_the_embedded_model_describes_itself():
    model = build_model("default")
    assert model.config == PRESETS["default"] and model.dtype == torch.float32
    assert 9.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 9.75e6
