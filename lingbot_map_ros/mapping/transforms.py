# SPDX-License-Identifier: Apache-2.0
"""A tree of frames that move: transforms as they come, and those between any two frames at a time."""
from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from lingbot_map_ros.mapping.geometry import matrix_from_quaternion, quaternion_from_matrix

HISTORY_NS = 10_000_000_000  # that transforms are remembered for
MAX_SAMPLES = 5000  # of one transform
MAX_FRAMES = 1000  # of the tree
MAX_DEPTH = 100  # of the tree: beyond, frames go round in a circle


class TransformError(ValueError):
    """Why a transform is not known, in one line."""


class _Samples:
    """One frame's transform into its parent over time; its stamps ascend."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.stamps: list[int] = []
        self.transforms: list[np.ndarray] = []

    def add(self, stamp_ns: int, T: np.ndarray) -> None:
        if self.stamps and stamp_ns < self.stamps[0]:  # time went back: a simulation or recording started anew
            self.stamps.clear()
            self.transforms.clear()
        index = bisect_right(self.stamps, stamp_ns)
        if index and self.stamps[index - 1] == stamp_ns:
            self.transforms[index - 1] = T
            return
        self.stamps.insert(index, stamp_ns)
        self.transforms.insert(index, T)
        old = max(bisect_left(self.stamps, self.stamps[-1] - HISTORY_NS), len(self.stamps) - MAX_SAMPLES)
        if old > 0:
            del self.stamps[:old], self.transforms[:old]

    def at(self, stamp_ns: int, tolerance_ns: float) -> np.ndarray | None:
        """Return the transform at a time: between two samples, or that of the nearest within the tolerance; else None.
        """
        index = bisect_left(self.stamps, stamp_ns)
        if index < len(self.stamps) and self.stamps[index] == stamp_ns:
            return self.transforms[index]
        if 0 < index < len(self.stamps):
            before, after = self.stamps[index - 1], self.stamps[index]
            share = (stamp_ns - before) / (after - before)
            return interpolate(self.transforms[index - 1], self.transforms[index], share)
        end = 0 if index == 0 else -1
        return self.transforms[end] if abs(stamp_ns - self.stamps[end]) <= tolerance_ns else None


class Transforms:
    """Remembers the transforms of the last seconds. For one thread, or under a lock."""

    def __init__(self) -> None:
        """Know no frame."""
        self._samples: dict[str, _Samples] = {}
        self._static: dict[str, tuple[str, np.ndarray]] = {}

    def set(self, parent: str, child: str, T_parent_child: np.ndarray, stamp_ns: int | None) -> None:
        """Take a transform [4, 4], which maps points of the child's frame into the parent's; no stamp: for all time.

        Raises TransformError for one that is no rigid motion, or of a frame too many.
        """
        T = np.asarray(T_parent_child, dtype=np.float64)
        is_rigid = T.shape == (4, 4) and np.isfinite(T).all() and np.allclose(
            T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-3)
        if not is_rigid:
            raise TransformError(f"the transform {parent} -> {child} is no rotation and translation")
        if not child or not parent or child == parent:
            raise TransformError(f"the transform {parent!r} -> {child!r} leads nowhere")
        if len(self._samples) + len(self._static) >= MAX_FRAMES and child not in self._samples | self._static:
            raise TransformError(f"{child} is more than the {MAX_FRAMES} frames that are remembered")
        if stamp_ns is None:
            self._static[child] = (parent, T)
            return
        samples = self._samples.get(child)
        if samples is None or samples.parent != parent:
            samples = self._samples[child] = _Samples(parent)
        samples.add(stamp_ns, T)

    def lookup(self, target: str, source: str, stamp_ns: int, tolerance_ns: float = 0) -> np.ndarray:
        """Return T_target_source [4, 4] at a time.

        tolerance_ns: how far beyond the samples the nearest one counts. Raises TransformError, with the reason.
        """
        to_source, to_target = (self._ancestors(frame, stamp_ns, tolerance_ns) for frame in (source, target))
        common = next((frame for frame in to_source if frame in to_target), None)
        if common is None:
            for frame in (target, source):
                if frame not in self._static and frame not in self._samples and not self._is_parent(frame):
                    raise TransformError(f"nobody publishes the frame {frame}")
            raise TransformError(f"{target} and {source} are not connected")
        for ancestors, frame in ((to_source, source), (to_target, target)):
            if ancestors[common] is None:
                raise TransformError(self._why_unknown(frame, stamp_ns, tolerance_ns))
        return np.linalg.inv(to_target[common]) @ to_source[common]

    def _ancestors(self, frame: str, stamp_ns: int, tolerance_ns: float) -> dict[str, np.ndarray | None]:
        """Return T_ancestor_frame for a frame and its ancestors, nearest first; None beyond what is known at that time.
        """
        found: dict[str, np.ndarray | None] = {frame: np.eye(4)}
        while len(found) < MAX_DEPTH:
            parent, T = self._step(frame, stamp_ns, tolerance_ns)
            if parent is None or parent in found:
                break
            below = found[frame]
            found[parent] = None if T is None or below is None else T @ below
            frame = parent
        return found

    def _step(self, frame: str, stamp_ns: int, tolerance_ns: float) -> tuple[str | None, np.ndarray | None]:
        if frame in self._static:
            return self._static[frame]
        samples = self._samples.get(frame)
        return (None, None) if samples is None else (samples.parent, samples.at(stamp_ns, tolerance_ns))

    def _is_parent(self, frame: str) -> bool:
        return any(frame == parent for parent, _ in self._static.values()) or any(
            frame == samples.parent for samples in self._samples.values())

    def _why_unknown(self, frame: str, stamp_ns: int, tolerance_ns: float) -> str:
        for _ in range(MAX_DEPTH):
            parent, T = self._step(frame, stamp_ns, tolerance_ns)
            if T is None:
                break
            frame = parent
        stamps = self._samples[frame].stamps
        return (f"{self._samples[frame].parent} -> {frame} is known from {stamps[0] / 1e9:.3f} s to "
                f"{stamps[-1] / 1e9:.3f} s, not at {stamp_ns / 1e9:.3f} s")


def interpolate(T0: np.ndarray, T1: np.ndarray, share: float) -> np.ndarray:
    """Return the pose [4, 4] at a share of the way from one to another: on a line, turned by the normalised mean of
    quaternions, which is a slerp to within 0.1 degrees for turns of up to 60 degrees.
    """
    q0, q1 = quaternion_from_matrix(T0[:3, :3]), quaternion_from_matrix(T1[:3, :3])
    T = np.eye(4)
    T[:3, :3] = matrix_from_quaternion((1 - share) * q0 + share * (q1 if q0 @ q1 >= 0 else -q1))
    T[:3, 3] = (1 - share) * T0[:3, 3] + share * T1[:3, 3]
    return T
