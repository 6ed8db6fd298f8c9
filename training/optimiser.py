# SPDX-License-Identifier: Apache-2.0
"""How weights follow their gradients."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Muon:
    """Momentum whose matrices are made nearly orthogonal (K. Jordan et al., "Muon: an optimizer for hidden layers in
    neural networks", 2024), with steps of AdamW's size (J. Liu et al., "Muon is scalable for LLM training", 2025).

    As `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw", but all matrices of one shape at once: one by one they
    take more than a third of the launches of a step.
    """

    COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic Newton-Schulz iteration

    def __init__(self, parameters: list[nn.Parameter], decay: float, momentum: float = 0.95, iterations: int = 5,
                 ) -> None:
        self._decay, self._momentum, self._iterations = decay, momentum, iterations
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self._groups = [(group, [torch.zeros_like(parameter) for parameter in group]) for group in by_shape.values()]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Step at a learning rate."""
        for parameters, momenta in self._groups:
            gradients = [parameter.grad for parameter in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
            update = torch.stack(torch._foreach_lerp(gradients, momenta, self._momentum))  # Nesterov's
            update = self.orthogonalise(update) * (0.2 * max(update.shape[-2:]) ** 0.5 * rate)
            torch._foreach_mul_(parameters, 1 - rate * self._decay)
            torch._foreach_sub_(parameters, list(update.unbind()))

    def orthogonalise(self, matrices: Tensor) -> Tensor:
        """Bring the singular values of matrices [n, rows, columns] near 1."""
        a, b, c = self.COEFFICIENTS
        x = matrices.bfloat16()
        is_tall = x.shape[-2] > x.shape[-1]
        x = x.mT if is_tall else x
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
        for _ in range(self._iterations):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.mT if is_tall else x).to(matrices.dtype)


class Optimiser:
    """Muon for the matrices of transformer blocks, AdamW for all else."""

    def __init__(self, trainee: nn.Module, rate: float, matrix_rate: float, decay: float = 0.02) -> None:
        matrices, others, small = [], [], []
        for name, parameter in trainee.named_parameters():
            inner = ("_blocks." in name or ".trunk." in name) and name.endswith("weight") and parameter.ndim == 2
            (matrices if inner else others if parameter.ndim > 1 else small).append(parameter)
        groups = [{"params": others, "weight_decay": decay}, {"params": small, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=others[0].is_cuda)
        self._muon = Muon(matrices, decay)
        self._rate, self._matrix_rate = rate, matrix_rate
        self._parameters = [*matrices, *others, *small]

    def step(self, factor: float, clip: float = 1.0) -> Tensor:
        """Clip gradients and step at `factor` of the learning rates. Returns the gradients' norm."""
        norm = nn.utils.clip_grad_norm_(self._parameters, clip, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = self._rate * factor
        self._adam.step()
        self._muon.step(self._matrix_rate * factor)
        return norm


def average_gradients(module: nn.Module) -> None:
    """Replace gradients by their mean over all processes, which thus all take the same step from the same weights."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    torch._foreach_copy_(gradients, [part.view_as(gradient) for gradient, part in
                                     zip(gradients, flat.split([gradient.numel() for gradient in gradients]))])


def rate_factor(step: int, steps: int, warm_up: int, hold: float) -> float:
    """Return the learning rate's share of its peak: a warm-up, a plateau until `hold` of the stage, a line down."""
    progress = step / max(steps, 1)
    return min(1.0, (step + 1) / warm_up) * max(0.01, min(1.0, 1 - (progress - hold) / (1 - hold)))
