# SPDX-License-Identifier: Apache-2.0
"""A frame's way through the model on a GPU, recorded once."""
from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 2  # runs before the recording, in which kernels are compiled and chosen


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
    ) -> None:
        """Record run(images, special, times), which may launch but not wait; images, special: examples."""
        self._images, self._special = images.clone(), special.clone()
        self._times = torch.zeros(1, dtype=torch.float64, device=images.device)
        inputs = self._images, self._special, self._times
        stream = torch.cuda.Stream(images.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run(*inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = run(*inputs)

    def replay(self, images: torch.Tensor, special: torch.Tensor, time: int) -> tuple[torch.Tensor, ...]:
        """Return what run gives for these, on the current stream."""
        self._images.copy_(images, non_blocking=True)
        self._special.copy_(special)
        self._times.fill_(time)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)
