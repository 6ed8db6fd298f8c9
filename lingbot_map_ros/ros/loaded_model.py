# SPDX-License-Identifier: Apache-2.0
"""The model as the node's parameters name it, and the hardware that it runs on. All cameras share it."""
from __future__ import annotations

import os

import torch

from lingbot_map_ros.gct import PRESETS, build_model, dtype_name, dtype_named
from lingbot_map_ros.ros.parameters import Parameters


class LoadedModel:
    """A model with its weights on its device."""

    def __init__(self, parameters: Parameters) -> None:
        """Raises ValueError for parameters that name no model, and the errors of `build_model`."""
        if parameters.preset not in PRESETS:
            raise ValueError(f"preset is {parameters.preset!r}: expected one of {', '.join(PRESETS)}")
        if parameters.preset == "lingbot_map" and not parameters.checkpoint:
            raise ValueError("preset lingbot_map has no weights of its own: set the parameter checkpoint to its file")
        self.device = _device(parameters.device)
        self.gct = build_model(
            parameters.preset,
            checkpoint=parameters.checkpoint or None,
            device=self.device,
            dtype=dtype_named(parameters.dtype),
        )
        self._checkpoint = parameters.checkpoint or "the model's own"

    def values(self) -> dict[str, object]:
        """Return what describes the model and the memory that it takes."""
        return {
            "model": self.gct.config.name,
            "checkpoint": self._checkpoint,
            "device": str(self.device),
            "dtype": dtype_name(self.gct.dtype),
            "trained_frames": self.gct.config.trained_frames,
            "device_memory_bytes": self.device_memory(),
        }

    def device_name(self) -> str:
        """Return the name of the hardware that the model runs on."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def device_memory(self) -> int:
        """Return the bytes that torch holds on the GPU; on a CPU the resident memory of this process."""
        if self.device.type == "cuda":
            return torch.cuda.memory_reserved(self.device)
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}: torch {torch.__version__} sees no CUDA GPU here")
    return device
