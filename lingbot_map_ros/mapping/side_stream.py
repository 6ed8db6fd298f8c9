# SPDX-License-Identifier: Apache-2.0
"""Work on a GPU beside the model's."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@lru_cache(maxsize=None)
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a device's one side stream: torch keeps memory for each stream. Its work comes before the model's."""
    return torch.cuda.Stream(device, priority=-1)


class SideStream:
    """A CUDA stream for small work that must not wait until the model has done with the frame at hand.

    `mark` says how far what was given to the device is needed: that is waited for, what comes later is not. On a CPU,
    which does one thing after the other, neither changes anything.
    """

    def __init__(self, device: torch.device) -> None:
        """Its work sees what has been given to the device by now."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = _stream_of(device)
            self._marked = torch.cuda.Event()
        self.mark()

    def mark(self) -> None:
        """Let work from now on see what the current stream was given so far."""
        if self._stream is not None:
            self._marked.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run what is done within on the stream, and wait for its end, so that any stream may use the results."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._marked)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()
