# SPDX-License-Identifier: Apache-2.0
"""How far off a pose may be: a model by rule of thumb, since the network does not say."""
from __future__ import annotations

import math
from typing import NamedTuple

DEGRADED_FACTOR = 3.0  # of all deviations while tracking is degraded


class Uncertainty(NamedTuple):
    """Standard deviations along and about each axis, the same for all three."""

    position: float  # unit of the map
    rotation: float  # radians
    linear: float  # unit a second
    angular: float  # radians a second


def uncertainty(
    scene_depth: float, path_length: float, seconds: float, noise: float, drift: float, is_degraded: bool = False
) -> Uncertainty:
    """Return the deviations of a pose and of the velocity since the one before.

    Position: noise * scene_depth and drift * path_length, independent of each other: what one image tells, and drift
    that is a share of the way. Rotation: noise and drift * sqrt(path_length / scene_depth), a random walk by one step
    for each scene that was passed. Velocity: the noise of two poses over the time between them, since drift cancels.

    Args:
        scene_depth: median depth of the image.
        path_length: of the sequence so far, in the same unit.
        seconds: from the pose before to this one; 0: the velocity is not known (infinite).
        noise: of one pose, as a share of the scene's depth; radians of its rotation.
        drift: share of the path's length.
        is_degraded: whether tracking is.
    """
    factor = DEGRADED_FACTOR if is_degraded else 1.0
    per_second = math.sqrt(2) / seconds if seconds > 0 else math.inf
    return Uncertainty(
        factor * math.hypot(noise * scene_depth, drift * path_length),
        factor * math.hypot(noise, drift * math.sqrt(path_length / scene_depth) if scene_depth > 0 else 0.0),
        factor * noise * scene_depth * per_second,
        factor * noise * per_second,
    )
