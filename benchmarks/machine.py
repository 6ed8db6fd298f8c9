# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on, and its figures segment by segment."""
from __future__ import annotations

import os
import platform
import statistics
import time

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


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of a large matrix product, the best of several."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.rand((side, side), device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(10):
        device_synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        device_synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * side**3 / min(seconds)


def segment(start: int, stop: int, seconds: list[float], device: torch.device) -> dict[str, object]:
    """Return the figures of the frames from start to stop, which took `seconds` each."""
    milliseconds = sorted(1000 * s for s in seconds)
    return {
        "frames": f"{start}-{stop}",
        "p50_ms": statistics.median(milliseconds),
        "p99_ms": milliseconds[min(len(milliseconds) - 1, int(0.99 * len(milliseconds)))],
        **memory_bytes(device),
    }


def bounds(warm_up: int, frames: int) -> list[tuple[int, int]]:
    """Split frames into the first `warm_up` (half at most) and four parts of the rest: (start, stop) each."""
    warm_up = min(warm_up, frames // 2)
    edges = [0, warm_up, *(warm_up + (frames - warm_up) * part // 4 for part in range(1, 5))]
    return list(zip(edges, edges[1:]))


def print_segments(segments: list[dict[str, object]]) -> None:
    """Print a table with a row a segment."""
    print(f"{'frames':>14} {'p50 ms':>9} {'p99 ms':>9} {'device MiB':>11} {'RSS MiB':>9}")
    for row in segments:
        print(f"{row['frames']:>14} {row['p50_ms']:9.3f} {row['p99_ms']:9.3f} {row['device_bytes'] / 2**20:11.1f} "
              f"{row['rss_bytes'] / 2**20:9.1f}")


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, {torch.get_num_threads()} threads"
