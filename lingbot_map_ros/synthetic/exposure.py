# SPDX-License-Identifier: Apache-2.0
"""From light to pixels: exposure, white balance, vignetting, the tone curve and noise."""
from __future__ import annotations

import torch
from torch import Tensor

from lingbot_map_ros.synthetic.path import wander
from lingbot_map_ros.synthetic.texture import log_uniform, uniform


def expose(light: Tensor, generator: torch.Generator, noise: torch.Generator, effects: bool = True) -> Tensor:
    """Turn rendered light [b, s, 3, h, w] into images in [0, 1].

    Args:
        light: linear, of any brightness.
        generator: on the CPU, draws the camera's properties.
        noise: on light's device, draws the noise.
        effects: False: only bring each sequence to the same brightness.
    """
    count, frames, _, height, width = light.shape
    brightness = light.mean((1, 2, 3, 4)).clamp_min(0.01)
    if not effects:
        return (light * (0.42 / brightness).reshape(-1, 1, 1, 1, 1)).clamp(0, 1)
    device = light.device
    gain = uniform(generator, (count, 1), 0.28, 0.6) * (1 + uniform(generator, (count, 1), 0, 0.1)
                                                       * wander(generator, (count, frames), 0.05, 0.6))
    balance = 1 + 0.07 * torch.randn(count, 3, generator=generator)
    vignetting = uniform(generator, (count, 1, 1, 1, 1), 0, 0.25).to(device)
    gamma = log_uniform(generator, (count, 1, 1, 1, 1), 0.75, 1.35).to(device)
    sigma = uniform(generator, (count, 1, 1, 1, 1), 0, 0.03).to(device)
    image = light * (gain.to(device) / brightness[:, None])[..., None, None, None]
    image = image * balance.to(device)[:, None, :, None, None]
    y = torch.linspace(-1, 1, height, device=device)[:, None]
    x = torch.linspace(-1, 1, width, device=device)
    image = image * (1 - vignetting * (x * x + y * y) / 2)
    image = image.clamp(1e-4, 1) ** gamma
    return (image + sigma * torch.randn(image.shape, generator=noise, device=device)).clamp(0, 1)
