# SPDX-License-Identifier: Apache-2.0
"""The path that the camera took."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lingbot_map_ros.mapping.export import replace_file
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix

NANOSECONDS = 1_000_000_000


class Trajectory:
    """The newest `max_length` poses with their stamps, in memory that is allocated once.

    Poses are rows x, y, z, qx, qy, qz, qw (T_map_camera: the camera's position and rotation in map, model units).
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be 1 or more, got {max_length}")
        self.max_length = max_length
        self._stamps_ns = np.zeros(max_length, dtype=np.int64)
        self._poses = np.zeros((max_length, 7))
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self.max_length)

    @property
    def dropped(self) -> int:
        """Number of poses that made room for newer ones since the last reset."""
        return self._added - len(self)

    def append(self, stamp_ns: int, T_map_camera: np.ndarray) -> np.ndarray:
        """Add a pose [4, 4] with its stamp in integer nanoseconds; returns it as x, y, z, qx, qy, qz, qw [7].

        Raises ValueError on a pose of another shape or with entries that are not finite.
        """
        T = np.asarray(T_map_camera, dtype=np.float64)
        if T.shape != (4, 4):
            raise ValueError(f"expected a pose [4, 4], got {list(T.shape)}")
        if not np.all(np.isfinite(T)):
            raise ValueError("a pose with entries that are not finite cannot join the trajectory")
        pose = np.concatenate([T[:3, 3], quaternion_from_matrix(T[:3, :3])])
        row = self._added % self.max_length
        self._stamps_ns[row] = int(stamp_ns)
        self._poses[row] = pose
        self._added += 1
        return pose

    def stamps_ns(self) -> np.ndarray:
        """Return the stamps in nanoseconds, oldest first: int64 [n], a copy."""
        return self._ordered(self._stamps_ns)

    def poses(self) -> np.ndarray:
        """Return the poses, oldest first: float64 [n, 7], a copy."""
        return self._ordered(self._poses)

    def reset(self) -> None:
        """Forget every pose."""
        self._added = 0

    def _ordered(self, ring: np.ndarray) -> np.ndarray:
        if self._added <= self.max_length:
            return ring[: self._added].copy()
        return np.roll(ring, -(self._added % self.max_length), axis=0)


def write_tum(path: str | Path, stamps_ns: np.ndarray, poses: np.ndarray) -> None:
    """Write a trajectory in the TUM RGB-D benchmark's format: one line `stamp tx ty tz qx qy qz qw` a pose.

    Args:
        path: file to write or replace; its folder must exist.
        stamps_ns: integers [n], nanoseconds; written as seconds with 9 decimals, without rounding.
        poses: [n, 7], rows tx, ty, tz, qx, qy, qz, qw; written so that reading gives the same doubles.

    Raises ValueError on arrays of other shapes, OSError when the file cannot be written.
    """
    stamps_ns, poses = np.asarray(stamps_ns), np.asarray(poses, dtype=np.float64)
    n = len(stamps_ns)
    if stamps_ns.shape != (n,) or poses.shape != (n, 7):
        raise ValueError(f"expected stamps [n] and poses [n, 7], got {stamps_ns.shape} and {poses.shape}")
    if n and not np.issubdtype(stamps_ns.dtype, np.integer):
        raise ValueError(f"expected stamps in integer nanoseconds, got {stamps_ns.dtype}")
    with replace_file(path) as file:
        for stamp, pose in zip(stamps_ns.tolist(), poses.tolist()):
            file.write(tum_line(stamp, pose).encode("ascii"))


def tum_line(stamp_ns: int, pose: Iterable[float]) -> str:
    """Return the line of one pose tx, ty, tz, qx, qy, qz, qw, its end included (see `write_tum`)."""
    numbers = " ".join(repr(float(number)) for number in pose)
    return f"{_seconds(int(stamp_ns))} {numbers}\n"


def _seconds(stamp_ns: int) -> str:
    sign = "-" if stamp_ns < 0 else ""
    seconds, nanoseconds = divmod(abs(stamp_ns), NANOSECONDS)
    return f"{sign}{seconds}.{nanoseconds:09d}"
