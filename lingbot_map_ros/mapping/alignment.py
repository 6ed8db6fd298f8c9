# SPDX-License-Identifier: Apache-2.0
"""From the map as the session builds it, in the model's unit, to the map as it is given out."""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lingbot_map_ros.mapping.geometry import T_MAP_WORLD
from lingbot_map_ros.mapping.voxel_map import MapPoints


@dataclass(frozen=True, eq=False)
class Alignment:
    """Maps points of the session's map into map: x -> scale * yaw(tilt(x - anchor_model)) + anchor_map.

    The session's map is z up if the first camera was level; where it is known how the camera is mounted, the tilt says
    how it was not. A change of scale leaves the anchor where it is: the start of the sequence, or the camera when it
    was placed.
    """

    scale: float = 1.0  # metres per model unit; 1 while it is not known
    yaw: float = 0.0  # radians about z
    tilt: np.ndarray = field(default_factory=lambda: np.eye(3))  # turns the session's map level
    anchor_model: np.ndarray = field(default_factory=lambda: np.zeros(3))
    anchor_map: np.ndarray = field(default_factory=lambda: np.zeros(3))
    unit: float = 1.0  # of lengths that are set by hand, in map: 1 m, or the scene's depth while the scale is not known

    @property
    def rotation(self) -> np.ndarray:
        """[3, 3], turns directions of the session's map into those of map."""
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]]) @ self.tilt

    def levelled(self, T_model_camera: np.ndarray, T_body_camera: np.ndarray) -> Alignment:
        """Return the alignment of the same scale that puts a camera's body, whose z is up, at the origin.

        Args as in `placed`.
        """
        tilt = T_body_camera[:3, :3] @ T_model_camera[:3, :3].T
        return replace(self, yaw=0.0, tilt=tilt, anchor_model=T_model_camera[:3, 3].copy(),
                       anchor_map=T_body_camera[:3, 3].copy())

    def scaled(self, scale: float) -> Alignment:
        """Return the same with another scale, in metres. ValueError for one that is not finite and above 0."""
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be finite and above 0, not {scale}")
        return replace(self, scale=float(scale), unit=1.0)

    def placed(self, T_model_camera: np.ndarray, T_map_body: np.ndarray, T_body_camera: np.ndarray) -> Alignment:
        """Return the alignment that puts a camera where a pose says: by position and heading, so that z stays up.

        Args:
            T_model_camera: [4, 4], the camera (optical frame) in the session's map.
            T_map_body: [4, 4], where the body (x forward, z up) is to be in map.
            T_body_camera: [4, 4], the camera on the body.

        Raises ValueError for a camera or a body that heads straight up or down, or is no finite pose.
        """
        T_map_camera = T_map_body @ T_body_camera
        # The body's heading as the session sees it, since a camera may look straight down.
        T_model_body = self.tilt @ T_model_camera[:3, :3] @ T_body_camera[:3, :3].T
        yaw = _heading(T_map_body[:3, :3]) - _heading(T_model_body)
        return replace(self, yaw=math.remainder(yaw, 2 * math.pi), anchor_model=T_model_camera[:3, 3].copy(),
                       anchor_map=T_map_camera[:3, 3].copy())

    def pose(self, T_model_camera: np.ndarray) -> np.ndarray:
        """Return a camera's pose [4, 4] in map."""
        T, R = np.eye(4), self.rotation
        T[:3, :3] = R @ T_model_camera[:3, :3]
        T[:3, 3] = self.scale * R @ (T_model_camera[:3, 3] - self.anchor_model) + self.anchor_map
        return T

    def level(self, xyz: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        """Return points [..., 3] of the session's map turned level, in its unit and about its origin.

        A tensor's stay on its device.
        """
        return xyz @ (torch.from_numpy(self.tilt.T).to(xyz) if isinstance(xyz, torch.Tensor) else self.tilt.T)

    def height(self, z: float) -> float:
        """Return the height above the session's origin, turned level, of a height in map."""
        return float((z - self.anchor_map[2]) / self.scale + self.level(self.anchor_model)[2])

    def points(self, points: MapPoints) -> MapPoints:
        """Return points in map, on the same device."""
        xyz, R = points.xyz, torch.from_numpy(self.scale * self.rotation)
        offset = torch.from_numpy(self.anchor_map) - R @ torch.from_numpy(self.anchor_model)
        return points._replace(xyz=xyz @ R.T.to(xyz) + offset.to(xyz))


# The optical frame of a camera that looks ahead, on a body with x forward and z up (REP-103): [4, 4].
T_BODY_OPTICAL = T_MAP_WORLD


def _heading(rotation: np.ndarray) -> float:
    """Return the angle about z of the x axis, radians. ValueError where it has none."""
    x, y = rotation[0, 0], rotation[1, 0]
    if not math.hypot(x, y) > 1e-3:  # not: so that NaN is refused too
        raise ValueError("a pose that heads straight up or down, or is not finite, has no heading")
    return math.atan2(y, x)
