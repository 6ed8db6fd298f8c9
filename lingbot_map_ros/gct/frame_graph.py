# SPDX-License-Identifier: Apache-2.0
"""A frame's way through the model on a GPU, recorded once."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

WARM_UPS = 2  # runs before the recording, in which kernels are compiled and chosen


@lru_cache(maxsize=None)
def recording_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return a device's two streams to record on, one beside the other: libraries keep memory for each stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class FrameGraph:
    """All that a model does with one frame after the scale frames, as one CUDA graph.

    Launched one by one, a frame's thousands of small kernels take longer to launch than to run. Shapes and addresses
    are the same for every frame; what differs (image, time, special tokens, places in the caches) is written into
    tensors of fixed addresses before each replay.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
        images: torch.Tensor,
        special: torch.Tensor,
        weight: torch.Tensor,
    ) -> None:
        """Record run(images, special, times), which may launch but not wait.

        images, special: examples. weight: one of those that run reads; the others move when it does.
        """
        self._weight_address = weight.data_ptr()
        self._images, self._special = images.clone(), special.clone()
        self._times = torch.zeros(1, dtype=torch.float64, device=images.device)
        inputs = self._images, self._special, self._times
        stream = recording_streams(images.device)[0]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run(*inputs)
        self._graph = torch.cuda.CUDAGraph()
        # The outer context brings the present stream back whatever happens within. Other threads may go on using the
        # device meanwhile.
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._outputs = run(*inputs)

    def reads(self, weight: torch.Tensor) -> bool:
        """Tell whether the weights are still where they were when they were recorded."""
        return weight.data_ptr() == self._weight_address

    def replay(self, images: torch.Tensor, special: torch.Tensor, time: int) -> tuple[torch.Tensor, ...]:
        """Return what run gives for these, on the current stream."""
        self._images.copy_(images, non_blocking=True)
        self._special.copy_(special)
        self._times.fill_(time)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)
