# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a batch."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from lingbot_map_ros.gct import GCT
from lingbot_map_ros.gct.layers import Block
from lingbot_map_ros.synthetic import Sequences
from training.feed import Draw
from training.losses import AUXILIARY_BLOCKS, AuxiliaryHeads, losses, make_targets
from training.parallel import predict


class Trainee(nn.Module):
    """The model with its auxiliary heads; a call gives the loss."""

    def __init__(self, model: GCT, auxiliary_weight: float, depth_weight: float = 1.0) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        self.auxiliary = AuxiliaryHeads(model.config)
        self.auxiliary_weight = auxiliary_weight
        self.depth_weight = depth_weight

    def forward(self, sequences: Sequences, how: Draw) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch and its parts (see `losses.NAMES`)."""
        config = self.model.config
        targets = make_targets(sequences, how.scale_frames)
        with torch.autocast(sequences.images.device.type, torch.bfloat16, enabled=sequences.images.is_cuda):
            predictions = predict(
                self.model, sequences.images, scale_frames=how.scale_frames, window=how.window, times=how.times,
                depth_frames=how.depth_frames, blocks=tuple(b for b in AUXILIARY_BLOCKS if b < config.depth))
            auxiliary = self.auxiliary(predictions.outputs, config.num_special_tokens)
        return losses(predictions, auxiliary, targets, how.depth_frames, config, self.auxiliary_weight,
                      self.depth_weight)


class Step:
    """Forward and backward passes of batches of one shape. On a GPU they become one CUDA graph: launched one by one,
    their thousands of small kernels take longer to launch than to run."""

    WARM_UP = 3  # passes before the capture, in which all is compiled and allocated

    def __init__(self, trainee: Trainee, graph: bool) -> None:
        self._trainee = trainee
        self._is_graphed = graph
        self._passes = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Sequences, Draw] | None = None
        self._parts: Tensor | None = None

    def __call__(self, sequences: Sequences, how: Draw) -> Tensor:
        """Leave the gradients of a batch in the parameters; return the parts of its loss (see `losses.NAMES`)."""
        if not self._is_graphed:
            return self._run(sequences, how)
        if self._inputs is None:
            self._inputs = tuple(type(part)(**{name: tensor.clone() for name, tensor in vars(part).items()})
                                 for part in (sequences, how))
        for held, given in zip(self._inputs, (sequences, how)):
            for name, tensor in vars(held).items():
                tensor.copy_(getattr(given, name))
        if self._graph is not None:
            self._graph.replay()
            return self._parts
        self._passes += 1
        if self._passes <= self.WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                parts = self._run(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            return parts
        self._drop_gradients()  # those of the capture belong to the graph, which writes them anew at each replay
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog may ask for events meanwhile, from another thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._parts = self._run(*self._inputs)
        self._graph = graph
        graph.replay()
        return self._parts

    def _run(self, sequences: Sequences, how: Draw) -> Tensor:
        self._drop_gradients()
        loss, parts = self._trainee(sequences, how)
        loss.backward()
        return parts

    def _drop_gradients(self) -> None:
        for parameter in self._trainee.parameters():
            parameter.grad = None


def compile_layers() -> None:
    """Let torch.compile fuse the layers, for all models of this process."""
    torch._dynamo.config.recompile_limit = 64
    for owner, name in ((Block, "project"), (Block, "finish")):
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))
