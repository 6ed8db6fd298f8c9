# SPDX-License-Identifier: Apache-2.0
"""Which attention backend a cache uses: by name, or the fastest one that works."""
from __future__ import annotations

import logging
import time

import torch

from lingbot_map_ros.cache.attention import (
    AttentionBackend,
    FlashInferBackend,
    SdpaBackend,
    SettlingBackend,
    VisibleTokens,
)
from lingbot_map_ros.cache.flash import FlashBackend, check_flash
from lingbot_map_ros.cache.fp8 import FP8
from lingbot_map_ros.cache.notice import first_line, warn_once

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "triton", "flashinfer-fa2", "flashinfer-fa3")
MEASURED_CALLS = 20


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError with the reason when `name` is no backend or cannot be used with device and dtype."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    if name not in ("auto", "sdpa") and not _runs_half_precision_kernels(device, dtype):
        raise ValueError(f"the backend {name} needs a CUDA device and 16 bits or fewer, not {device} and {dtype}")


def make_backend(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens
) -> AttentionBackend:
    """Return the backend called `name`, ready to run.

    q, k, v, visible: a frame with a full window, as AttentionBackend.attend takes them. "auto" takes "triton" if that
    works; elsewhere it measures on them which backends work and are the fastest, and remembers that for caches of the
    same sizes. FlashInfer compiles its kernels the first time, for a minute or so, and keeps them on disk. Raises what
    a backend raises that is asked for by name and does not work; "auto" does without, with a warning.
    """
    if not _runs_half_precision_kernels(k.device, k.dtype):
        return SdpaBackend()
    if name == "sdpa":
        return SettlingBackend(SdpaBackend(any_length=True), SdpaBackend())
    if name == FlashBackend.name and (reason := check_flash(k.device, k.dtype, 1, k.shape[-1])):
        raise ValueError(f"the backend {name} cannot be used: {reason}")
    if name != "auto":
        backend = _create(name, k.device)
        _prepare(backend, q, k, v, visible)
        return backend
    key = (k.device, k.dtype, *q.shape, visible.num_tokens)
    if key not in _choices:
        _choices[key] = _choose(q, k, v, visible)
    changing, settled = _choices[key]
    if changing == settled:
        return _create(changing, k.device)
    return SettlingBackend(_create(changing, k.device), _create(settled, k.device))


_choices: dict[tuple, tuple[str, str]] = {}  # by device, dtype and sizes: names of the backends (changing, settled)


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens) -> tuple[str, str]:
    """Return the fastest backend for changing lengths and the fastest for one that stays.

    Our own, where it works, since recorded frames need it, and it was the fastest on an H200. Else they are measured;
    FlashInfer's compile for minutes first.
    """
    own = FlashBackend.name
    if not check_flash(k.device, k.dtype, 1, k.shape[-1]) and _prepared(own, q, k, v, visible):
        return own, own
    seconds = {}
    for name in (*_flashinfer_backends(k.device), "sdpa-any-length", "sdpa"):
        backend = _prepared(name, q, k, v, visible)
        if backend is not None:
            seconds[name] = _seconds(backend, q, k, v, visible)
    changing = min((name for name in seconds if name != "sdpa"), key=seconds.get)
    settled = min(seconds, key=seconds.get)
    logger.info(
        "attention: %s (%s)",
        changing if changing == settled else f"{changing}, then {settled} once the window is full",
        ", ".join(f"{name} {1000 * took:.2f} ms" for name, took in sorted(seconds.items(), key=lambda item: item[1])),
    )
    return changing, settled


def _prepared(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens
) -> AttentionBackend | None:
    """Return a backend that has run once; None, with a warning, for one that does not work."""
    try:
        backend = _create(name, k.device)
        _prepare(backend, q, k, v, visible)
        return backend
    except Exception as error:  # whatever a compiler or a driver may raise
        warn_once(logger, f"{name} cannot be used, attention runs on another kernel: {first_line(error)}")
        return None


def _create(name: str, device: torch.device) -> AttentionBackend:
    if name == FlashBackend.name:
        return FlashBackend(device)
    if name.startswith("flashinfer-"):
        return FlashInferBackend(device, name.removeprefix("flashinfer-"))
    return SdpaBackend(any_length=name == "sdpa-any-length")


def _prepare(
    backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens
) -> None:
    """Run a backend once, which may compile it."""
    if backend.name.startswith("flashinfer"):
        logger.info("preparing %s: the first time on a machine this compiles for a minute or two", backend.name)
    begin = time.monotonic()
    backend.attend(q, k, v, visible)
    torch.cuda.synchronize(k.device)
    logger.info("%s is ready after %.1f s", backend.name, time.monotonic() - begin)


def _seconds(
    backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleTokens
) -> float:
    """Return the seconds of one call of a backend that is ready."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    backend.attend(q, k, v, visible)
    start.record()
    for _ in range(MEASURED_CALLS):
        backend.attend(q, k, v, visible)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / MEASURED_CALLS / 1000


def _runs_half_precision_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, FP8)


def _flashinfer_backends(device: torch.device) -> tuple[str, ...]:
    """Return the FlashInfer backends made for a device, none when it is not installed."""
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        warn_once(logger, f"FlashInfer cannot be imported, attention runs on torch's kernels: {first_line(error)}")
        return ()
    if torch.cuda.get_device_capability(device) == (9, 0):
        return ("flashinfer-fa3", "flashinfer-fa2")
    return ("flashinfer-fa2",)
