# SPDX-License-Identifier: Apache-2.0
"""Number formats of the model, and their names."""
from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def preferred_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype to use on a device: float32 on a CPU; on a GPU bfloat16 where it is fast, else float16."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a name; None for `auto`."""
    return None if name == "auto" else getattr(torch, name)
