# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on, and how much memory it holds."""
from __future__ import annotations

import os
import platform

import torch


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the device's name and the versions that matter."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = {"machine": name, "torch": torch.__version__, "python": platform.python_version()}
    try:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    except ImportError:
        versions["flashinfer"] = "absent"
    return versions


def device_synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the device memory that tensors hold now (0 on a CPU) and the process's resident size."""
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"device_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else 0, "rss_bytes": rss}


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, {torch.get_num_threads()} threads"
