# SPDX-License-Identifier: Apache-2.0
"""From light to pixels: exposure, white balance, vignetting, noise, the tone curve and sharpening."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lingbot_map_ros.synthetic.draws import chance, log_uniform, uniform
from lingbot_map_ros.synthetic.options import SceneOptions
from lingbot_map_ros.synthetic.path import wander

BRIGHTNESS = 0.42  # mean of an image that is exposed well
COLOUR_NOISE = 0.5  # how much the noise differs between the colours


@dataclass
class Camera:
    """Properties of b cameras, on the CPU."""

    target: Tensor  # [b, s] mean of the image that the exposure aims at
    memory: Tensor  # [b] frames that the exposure looks back
    adaptation: Tensor  # [b] 0: one exposure for the whole sequence, 1: the mean of each image is the target
    balance: Tensor  # [b, 3] gain of each colour
    vignetting: Tensor  # [b] loss of light in the corners
    noise: Tensor  # [b] standard deviation at full brightness
    gamma: Tensor  # [b] exponent of the tone curve
    sharpness: Tensor  # [b] positive: sharpened, negative: softened


def draw_camera(batch: int, frames: int, options: SceneOptions, generator: torch.Generator) -> Camera:
    """Draw `batch` cameras, on the CPU."""
    dark = chance(generator, (batch,), options.low_light)
    target = torch.where(dark, uniform(generator, (batch,), 0.12, 0.25), uniform(generator, (batch,), 0.28, 0.58))
    drift = uniform(generator, (batch, 1), 0, 0.12) * wander(generator, (batch, frames), 0.05, 0.6)
    noise = uniform(generator, (batch,), 0, 1) ** 2 * options.noise
    return Camera(
        target=target[:, None] * (1 + drift),
        memory=log_uniform(generator, (batch,), 1, 20),
        adaptation=uniform(generator, (batch,), 0, 1),
        balance=1 + 0.07 * torch.randn(batch, 3, generator=generator),
        vignetting=uniform(generator, (batch,), 0, 0.35),
        noise=torch.where(dark, noise + 0.5 * options.noise, noise),
        gamma=torch.where(dark, 0.8, log_uniform(generator, (batch,), 0.72, 1.35)),
        sharpness=uniform(generator, (batch,), -0.6, 0.6),
    )


def even_out(light: Tensor) -> Tensor:
    """Bring each sequence of light [b, s, 3, h, w] to the same mean, as images in [0, 1]."""
    mean = light.mean((1, 2, 3, 4), keepdim=True).clamp_min(1e-3)
    return (light * (BRIGHTNESS / mean)).clamp(0, 1)


def expose(light: Tensor, camera: Camera, generator: torch.Generator) -> Tensor:
    """Turn rendered light [b, s, 3, h, w] into images in [0, 1] as cameras give them.

    Args:
        light: linear, of any brightness.
        camera: of each sequence.
        generator: on light's device, draws the noise.
    """
    frames, height, width = light.shape[1], *light.shape[3:]

    def each(value: Tensor) -> Tensor:
        """Put [b] onto light's device and axes."""
        return value.to(light.device, non_blocking=True).reshape(-1, 1, 1, 1, 1)

    # Automatic exposure looks back with a memory that fades.
    brightness = light.mean((2, 3, 4)).clamp_min(1e-3)  # [b, s]
    age = torch.arange(frames)[:, None] - torch.arange(frames)
    weight = torch.where(age >= 0, torch.exp(-age.clamp_min(0) / camera.memory[:, None, None]), 0.0)
    weight = (weight / weight.sum(-1, keepdim=True)).to(light.device, non_blocking=True)
    seen = (weight @ brightness[..., None])[..., 0]
    share = camera.adaptation[:, None].to(light.device, non_blocking=True)
    seen = seen ** share * brightness.mean(1, keepdim=True) ** (1 - share)
    gain = camera.target.to(light.device, non_blocking=True) / seen
    image = light * gain[:, :, None, None, None]

    y = torch.linspace(-1, 1, height, device=light.device)[:, None]
    x = torch.linspace(-1, 1, width, device=light.device)
    image = image * (1 - each(camera.vignetting) * (x * x + y * y) / 2)
    image = image * camera.balance.to(light.device, non_blocking=True)[:, None, :, None, None]
    image = image.clamp(0, 1.05)

    # Photons arrive at random, so noise grows with the root of the light, and the tone curve shows it in the dark.
    noise = torch.randn(image.shape, generator=generator, device=light.device)
    noise = torch.lerp(noise.mean(2, keepdim=True) * 3 ** 0.5, noise, COLOUR_NOISE)
    image = image + each(camera.noise) * noise * (0.15 + 0.85 * image).sqrt()
    image = image.clamp_min(1e-4) ** each(camera.gamma)
    flat = image.flatten(0, 1)
    smooth = F.avg_pool2d(F.pad(flat, (1, 1, 1, 1), mode="replicate"), 3, stride=1).unflatten(0, light.shape[:2])
    return (image + each(camera.sharpness) * (image - smooth)).clamp(0, 1)
