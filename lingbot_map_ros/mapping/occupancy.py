# SPDX-License-Identifier: Apache-2.0
"""A flat plan of what is occupied and what is free, for planners: from the map's points and what each keyframe saw."""
from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import cv2
import numpy as np
import torch

from lingbot_map_ros.mapping.alignment import Alignment

UNKNOWN, FREE, OCCUPIED = -1, 0, 100  # as nav_msgs/OccupancyGrid has them
DIRECTIONS = 360  # of the rays of one keyframe, all around
MIN_POINTS = 2  # of the map in a cell that is occupied: a single one may hang in the air
MAX_CELLS = 2048  # along a side: farther from the newest camera nothing is shown
SHIFT = 4  # bits of a fraction of a cell that polygons are drawn with


class Grid(NamedTuple):
    """A plan; cell [0, 0] has its lower left corner at the origin."""

    cells: np.ndarray  # [rows along y, columns along x] int8
    origin: tuple[float, float]  # x, y in map
    resolution: float  # edge of a cell


class _Scan(NamedTuple):
    position: np.ndarray  # [3] of the camera, in the session's map turned level
    band: tuple[float, float]  # heights there between which points are in the way
    ranges: np.ndarray  # [DIRECTIONS], how far it is free in the plane, counter-clockwise from x; 0: not known


class Occupancy:
    """Remembers how far the newest keyframes saw in each direction, and draws the plan from that and the map."""

    def __init__(self, max_keyframes: int) -> None:
        """Start with nothing seen."""
        self._scans: deque[_Scan] = deque(maxlen=max_keyframes)

    def __len__(self) -> int:
        return len(self._scans)

    def reset(self) -> None:
        """Forget what was seen."""
        self._scans.clear()

    def add(self, xyz: torch.Tensor, position: np.ndarray, lowest: float, highest: float) -> None:
        """Take note of what a keyframe saw. Waits for the points' device.

        In each direction it is free up to the nearest point between the heights, and at most up to the farthest point
        that was seen there at or below them: a ray that reaches the floor has passed over nothing higher.

        Args:
            xyz: [n, 3], its points in the session's map turned level.
            position: [3], the camera there.
            lowest, highest: heights there between which a point is in the way.
        """
        x, y = xyz[:, 0] - position[0], xyz[:, 1] - position[1]
        distance = torch.hypot(x, y)
        direction = (torch.atan2(y, x) * (DIRECTIONS / (2 * math.pi))).long() % DIRECTIONS
        below = xyz[:, 2] <= highest
        blocks = below & (xyz[:, 2] >= lowest)
        seen = distance.new_zeros(DIRECTIONS)
        seen.scatter_reduce_(0, direction, torch.where(below, distance, 0.0), "amax")
        nearest = torch.full_like(seen, torch.inf)
        nearest.scatter_reduce_(0, direction, torch.where(blocks, distance, torch.inf), "amin")
        ranges = torch.minimum(seen, nearest).double().cpu().numpy()
        self._scans.append(_Scan(np.array(position, dtype=np.float64), (lowest, highest), ranges))

    def grid(self, xyz: np.ndarray, alignment: Alignment, resolution: float, lowest: float, highest: float) -> Grid:
        """Draw the plan in map.

        Where the heights are others than when a keyframe was added, as another scale makes them, too, its rays end from
        now on at what the map has in the way; they get no longer, as it is not known what else they would have passed.

        Args:
            xyz: [n, 3], points of the map, in map.
            alignment: from the session's map, in which keyframes were added, to map.
            resolution: edge of a cell.
            lowest, highest: heights in map between which a point makes its cell occupied.
        """
        outlines = [self._outline(scan, alignment) for scan in self._scans]
        obstacles = xyz[(xyz[:, 2] >= lowest) & (xyz[:, 2] <= highest), :2]
        everything = np.concatenate([obstacles, *outlines])
        if len(everything) == 0:
            return Grid(np.empty((0, 0), np.int8), (0.0, 0.0), resolution)
        low, high = everything.min(axis=0), everything.max(axis=0)
        if outlines:  # bounded around the newest camera
            centre = outlines[-1][0]
            low = np.maximum(low, centre - MAX_CELLS // 2 * resolution)
            high = np.minimum(high, centre + (MAX_CELLS // 2 - 2) * resolution)
        first = np.floor(low / resolution).astype(int)  # a multiple of the cell's edge: cells stay where they are
        columns, rows = np.minimum(np.floor(high / resolution).astype(int) - first + 1, MAX_CELLS)
        origin = first * resolution

        index = np.floor((obstacles - origin) / resolution).astype(int)
        index = index[((index >= 0) & (index < (columns, rows))).all(axis=1)]
        counts = np.bincount(index[:, 1] * columns + index[:, 0], minlength=rows * columns).reshape(rows, columns)
        occupied = (counts >= MIN_POINTS).astype(np.uint8)

        band = alignment.height(lowest), alignment.height(highest)
        others = [number for number, scan in enumerate(self._scans)
                  if any(abs(a - b) > 1e-6 * (1 + abs(b)) for a, b in zip(scan.band, band))]
        if others:
            farthest = alignment.scale * max(self._scans[number].ranges.max() for number in others)
            angles = alignment.yaw + 2 * math.pi / DIRECTIONS * (np.arange(DIRECTIONS) + 0.5)
            steps = np.arange(1, math.ceil(min(farthest / resolution, MAX_CELLS)) + 1)
            rays = (np.stack([np.cos(angles), np.sin(angles)])[:, :, None] * steps).astype(np.float32)
        for number in others:
            scan = self._scans[number]
            ranges = self._clipped(scan, alignment, occupied, origin, resolution, rays)
            self._scans[number] = scan = _Scan(scan.position, band, ranges)
            outlines[number] = self._outline(scan, alignment)
        cells = np.full((rows, columns), UNKNOWN, np.int16)
        for outline in outlines:
            # OpenCV's pixel centres are at whole numbers.
            corners = np.round(((outline - origin) / resolution - 0.5) * (1 << SHIFT)).astype(np.int32)
            cv2.fillPoly(cells, [corners], FREE, shift=SHIFT)
        cells[occupied > 0] = OCCUPIED
        return Grid(cells.astype(np.int8), (float(origin[0]), float(origin[1])), resolution)

    @staticmethod
    def _clipped(
        scan: _Scan, alignment: Alignment, occupied: np.ndarray, origin: np.ndarray, resolution: float, rays: np.ndarray
    ) -> np.ndarray:
        """Return the ranges of a keyframe, no farther than occupied cells; that of the camera is not in the way.

        rays: [2, DIRECTIONS, n], x and y in cells, step by step from the camera.
        """
        ranges = alignment.scale * scan.ranges
        steps = rays[:, :, : math.ceil(min(ranges.max() / resolution, MAX_CELLS))]
        if steps.size == 0:
            return scan.ranges
        # OpenCV's pixel centres are at whole numbers.
        x, y = ((_position(scan, alignment) - origin) / resolution - 0.5).astype(np.float32)
        hit = cv2.remap(occupied, steps[0] + x, steps[1] + y, cv2.INTER_NEAREST, borderValue=0)
        nearest = np.where(hit.any(axis=1), (hit.argmax(axis=1) + 1) * resolution, np.inf)
        return np.minimum(ranges, nearest) / alignment.scale

    @staticmethod
    def _outline(scan: _Scan, alignment: Alignment) -> np.ndarray:
        """Return the corners [n, 2] in map of what a keyframe saw free, the camera first.

        A direction is drawn as wide as it is, with the camera between such that are not next to each other.
        """
        camera = _position(scan, alignment)
        width = 2 * math.pi / DIRECTIONS
        start = alignment.yaw + width * np.arange(DIRECTIONS)
        # Both ends of each direction's arc; a range of 0 puts them at the camera.
        angles = np.stack([start, start + width], axis=1).ravel()
        ranges = alignment.scale * scan.ranges.repeat(2)
        return np.concatenate([camera[None], camera + ranges[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)])


def _position(scan: _Scan, alignment: Alignment) -> np.ndarray:
    """Return where a keyframe's camera is in map, x and y."""
    T = np.eye(4)
    T[:3, 3] = alignment.tilt.T @ scan.position
    return alignment.pose(T)[:2, 3]
