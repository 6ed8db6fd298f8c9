# SPDX-License-Identifier: Apache-2.0
"""From a session's results to points, and from keyframes' points to the map."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, unproject
from lingbot_map_ros.mapping.session import FrameResult
from lingbot_map_ros.mapping.voxel_map import MapPoints, VoxelMap

MAX_DEPTH_STEP = 0.1  # relative, from a pixel to its neighbour: beyond, the pixel hangs between two surfaces


def frame_points(
    result: FrameResult,
    confidence_threshold: float = 1.0,
    T_map_world: np.ndarray = T_MAP_WORLD,
    max_depth_step: float = MAX_DEPTH_STEP,
) -> MapPoints:
    """Turn a frame's pixels into coloured points in map.

    A pixel gives a point if its depth is finite and above 0, its confidence is finite and reaches the threshold
    (confidence is 1 or more, so 1 keeps all), its point is finite, and no neighbour's depth differs by more than the
    share `max_depth_step` (networks blur depth across edges, and the pixels in between belong to neither surface).

    Returns points of at most h * w rows on the result's device; xyz in model units.
    """
    depth = result.depth
    keep = torch.isfinite(depth) & (depth > 0)
    keep &= torch.isfinite(result.confidence) & (result.confidence >= confidence_threshold)
    keep &= ~depth_edges(depth, max_depth_step)
    T = torch.tensor(T_map_world, dtype=torch.float64).to(depth.device) @ result.T_world_camera.double()
    xyz = unproject(depth, result.intrinsics.to(depth), T)
    keep &= torch.isfinite(xyz).all(dim=-1)
    rgb = (result.image.permute(1, 2, 0).float() * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = keep.flatten().nonzero().squeeze(1)  # found once: on a GPU this waits
    return MapPoints(xyz.reshape(-1, 3)[pixels], rgb.reshape(-1, 3)[pixels], result.confidence.flatten()[pixels])


def depth_edges(depth: torch.Tensor, max_step: float) -> torch.Tensor:
    """Mark pixels [h, w] whose depth and that of a pixel above, below, left or right differ by a share > max_step."""
    edges = torch.zeros_like(depth, dtype=torch.bool)
    for axis in (0, 1):
        near, far = depth.narrow(axis, 0, depth.shape[axis] - 1), depth.narrow(axis, 1, depth.shape[axis] - 1)
        step = (near - far).abs() > max_step * torch.minimum(near, far)
        edges.narrow(axis, 0, depth.shape[axis] - 1).logical_or_(step)
        edges.narrow(axis, 1, depth.shape[axis] - 1).logical_or_(step)
    return edges


class MapBuilder:
    """Fuses the keyframes of one sequence into a voxel map.

    The map is in the model's unit, which differs from sequence to sequence. While it is not known how many metres that
    is, a voxel's edge is a fraction of the median depth that the first results after a reset see. From then on it is a
    length in metres: a scale that is found or changes sizes the present voxels anew.
    """

    def __init__(
        self,
        max_points: int = 500_000,
        voxel_fraction: float = 0.015,
        confidence_threshold: float = 1.0,
        T_map_world: np.ndarray = T_MAP_WORLD,
        device: torch.device | str = "cpu",
        voxel_size: float = 0.05,
    ) -> None:
        """Allocate the map.

        Args:
            max_points: bound of the map; a full map drops the voxels that were seen little and long ago, and counts
                them.
            voxel_fraction: edge of a voxel while the scale is not known, as a fraction of the median depth of the first
                results (the scale frames).
            confidence_threshold: pixels below give no points; 1 keeps all. May be changed between two frames.
            T_map_world: [4, 4], maps points of the world (the first camera's optical frame) into map.
            device: where the map lives.
            voxel_size: edge of a voxel in metres, once the scale is known.
        """
        if not 0 < voxel_fraction < 1:
            raise ValueError(f"voxel_fraction must be between 0 and 1, not {voxel_fraction}")
        if not 0 < voxel_size < math.inf:
            raise ValueError(f"voxel_size must be finite and above 0, not {voxel_size}")
        self.voxel_fraction = voxel_fraction
        self.voxel_size = voxel_size
        self.confidence_threshold = confidence_threshold
        self.T_map_world = np.array(T_map_world, dtype=np.float64)
        self.voxels = VoxelMap(max_points, device=device)
        self._forget()

    def add(self, results: Sequence[FrameResult]) -> list[MapPoints | None]:
        """Fuse the keyframes among a step's results, in order; other frames leave the map as it is.

        Returns each result's points in map, None for frames that are no keyframes.
        """
        return [self._insert(result, results) if result.is_keyframe else None for result in results]

    def reset(self) -> None:
        """Forget the sequence's map. Memory stays as it is."""
        self.voxels.reset()
        self._forget()

    def set_scale(self, scale: float) -> None:
        """Take the metres per model unit, finite and above 0; the present voxels get the size that they have by that.
        """
        self._scale = scale
        if self.scene_depth is not None and self._edge() != self.voxels.voxel_size:
            self.voxels.resize_voxels(self._edge())

    def _forget(self) -> None:
        self._scale: float | None = None  # metres per model unit; None: not known
        self.scene_depth: float | None = None  # median of the first results, in the model's unit; None: not known yet

    def _edge(self) -> float:
        """Return a voxel's edge in the model's unit."""
        return self.voxel_fraction * self.scene_depth if self._scale is None else self.voxel_size / self._scale

    def _insert(self, result: FrameResult, results: Sequence[FrameResult]) -> MapPoints:
        points = frame_points(result, self.confidence_threshold, self.T_map_world)
        if self.scene_depth is None:
            self._start(results)
        if self.scene_depth is not None:
            self.voxels.insert(*points)
        return points

    def _start(self, results: Sequence[FrameResult]) -> None:
        """Take the scene's depth from the first results, unless no pixel has a usable one, and size the voxels."""
        depth = torch.stack([result.depth for result in results])
        depth = depth[torch.isfinite(depth) & (depth > 0)]
        if len(depth):
            self.scene_depth = float(depth.median())
            self.voxels.reset(self._edge())
