# SPDX-License-Identifier: Apache-2.0
"""Reading of weights from files, tensor by tensor.

Two formats: a `.pt` file as published (a state dict, alone or under `model`), and `.safetensors` whose metadata holds
the model's configuration as JSON under `config`, so that the file describes itself.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lingbot_map_ros.gct.config import GCTConfig

logger = logging.getLogger(__name__)

CONFIG_KEY = "config"


@dataclass(frozen=True)
class Checkpoint:
    """The names of the tensors in a file, and a way to each."""

    path: Path
    names: list[str]
    read: Callable[[str], object]
    config: GCTConfig | None  # None: the file does not say


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a file of weights without reading them.

    Raises FileNotFoundError, or ValueError when the file is no checkpoint.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} {'is no file' if path.exists() else 'does not exist'}")
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    metadata = file.metadata() or {}
    config = GCTConfig.from_json(metadata[CONFIG_KEY]) if CONFIG_KEY in metadata else None
    return Checkpoint(path, list(file.keys()), file.get_tensor, config)


def _open_pickle(path: Path) -> Checkpoint:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds, depending on where a foreign file stops making sense
        lines = str(error).strip().splitlines() or [repr(error)]
        # torch's own advice to trust the file comes first, and what is wrong with it later.
        reason = next((line.strip() for line in lines if "WeightsUnpickler error" in line), lines[0])
        raise ValueError(f"{path} is no checkpoint that can be read safely: {reason}") from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict) or not any(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict, neither itself nor under 'model'")
    return Checkpoint(path, list(content), content.__getitem__, None)


def load_checkpoint(model: nn.Module, checkpoint: Checkpoint, device: torch.device | str) -> None:
    """Give a model that was built on the meta device its weights.

    Each tensor goes straight to `device` and to the dtype of the parameter that it replaces, so that there is only one
    copy of the weights. Tensors that the model has no place for, such as other heads', are left alone.

    Raises ValueError, naming the tensors, when some are missing or of another shape.
    """
    places = model.state_dict()
    available = set(checkpoint.names)
    missing = [name for name in places if name not in available]
    if missing:
        raise ValueError(f"checkpoint {checkpoint.path} lacks {_list(missing)}")

    def place(name: str, like: torch.Tensor) -> torch.Tensor:
        tensor = checkpoint.read(name)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"checkpoint {checkpoint.path}: {name} is a {type(tensor).__name__}, not a tensor")
        if tensor.shape != like.shape:
            raise ValueError(f"checkpoint {checkpoint.path}: {name} has the shape {list(tensor.shape)}, "
                             f"the model {list(like.shape)}")
        return tensor.detach().to(device, like.dtype)

    model.load_state_dict({name: place(name, like) for name, like in places.items()}, assign=True)
    model.requires_grad_(False)

    built = {name.split(".")[0] for name in places}
    unused = sorted(name for name in available - set(places) if name.split(".")[0] in built)
    if unused:
        logger.warning("checkpoint %s: the model has no place for %s", checkpoint.path, _list(unused))


def _list(names: list[str], most: int = 5) -> str:
    """Return the names as text, the first few if there are many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
