# SPDX-License-Identifier: Apache-2.0
"""A map of coloured points, one a voxel, in memory that is allocated once."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

AXIS_BITS = 21  # of a key for each axis: voxel indices from -2**20 to 2**20 - 1
MAX_WEIGHT = 100.0  # of what a voxel has seen, in units of confidence: newer observations keep counting
EMPTY = -1  # in the hash table
# Buckets looked at in the first round of probing and in each later one: on a GPU a round costs its launches, on a CPU
# its look-ups.
PROBES = {"cpu": (1, 2), "cuda": (4, 32)}
DROP_SHARE = 16  # a full map makes room for a 16th of itself at a time, since re-hashing costs as much for one voxel


class MapPoints(NamedTuple):
    """Points of a map or of a frame."""

    xyz: torch.Tensor  # [n, 3] float32
    rgb: torch.Tensor  # [n, 3] uint8
    confidence: torch.Tensor  # [n] float32


class VoxelMap:
    """Fuses points by voxel: running means of position, colour and confidence.

    Voxels live in rows 0 .. len - 1 of arrays of `max_points` rows; an open-addressing hash table with linear probing
    finds the row of a voxel's key. An insertion costs time by its points, not by the map's size, except when the map
    is full: then the voxels leave that were seen little and long ago, a 16th of the map at a time or more if more is
    needed, and the table is built anew.

    All work is vectorised; loops run over probing rounds, of which there are a few. An insertion reads a few counts
    back from the device, so on CUDA it waits for the points.
    """

    def __init__(self, max_points: int, voxel_size: float = 1.0, device: torch.device | str = "cpu") -> None:
        """Allocate a map of at most `max_points` voxels with edges of `voxel_size` (the points' unit)."""
        if max_points < 1:
            raise ValueError(f"max_points must be 1 or more, got {max_points}")
        self.max_points = max_points
        # full() instead of zeros(): the memory is touched now, not when the map has grown in a running robot.
        self._keys = torch.full((max_points,), 0, dtype=torch.int64, device=device)
        self._mean = torch.full((max_points, 7), 0.0, device=device)  # x, y, z, red, green, blue, confidence
        self._weight = torch.full((max_points,), 0.0, device=device)
        self._last_seen = torch.full((max_points,), 0, dtype=torch.int32, device=device)  # insertion that saw it
        self._table_bits = _table_bits(max_points)
        self._table = torch.full((1 << self._table_bits,), EMPTY, dtype=torch.int32, device=device)
        self._probes = PROBES.get(torch.device(device).type, PROBES["cuda"])
        self.version = 0  # changes whenever the content does
        self.reset(voxel_size)

    def reset(self, voxel_size: float | None = None) -> None:
        """Forget every voxel and counter, and set the voxels' size if one is given. Memory stays as it is."""
        if voxel_size is not None:
            self.voxel_size = _checked_size(voxel_size)
        self._table.fill_(EMPTY)
        self._length = 0
        self._insertions = 0
        self.dropped = 0  # voxels that left because the map was full
        self.refused = 0  # points that were not finite or too far away for a key
        self.version += 1

    def __len__(self) -> int:
        return self._length

    @staticmethod
    def required_bytes(max_points: int) -> int:
        """Return what `memory_bytes` of a map of that size will be, without allocating anything."""
        return max_points * (8 + 7 * 4 + 4 + 4) + (4 << _table_bits(max_points))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the map's arrays and hash table; the same from the constructor on."""
        arrays = (self._keys, self._mean, self._weight, self._last_seen, self._table)
        return sum(array.nbytes for array in arrays)

    @property
    def insertions(self) -> int:
        """How many frames were fused since the last reset."""
        return self._insertions

    def points(self, since: int = 0) -> MapPoints:
        """Return a copy of the current voxels: mean position, mean colour and mean confidence.

        since: only of those that changed after so many `insertions`.
        """
        mean = self._mean[: self._length]
        if since > 0:
            mean = mean[self._last_seen[: self._length] > since]
        return MapPoints(mean[:, :3].clone(), mean[:, 3:6].round().to(torch.uint8), mean[:, 6].clone())

    def insert(self, xyz: torch.Tensor, rgb: torch.Tensor, confidence: torch.Tensor) -> None:
        """Fuse the points of one frame.

        Points of one voxel are averaged by confidence; then a voxel's mean moves towards the frame's by the frame's
        mean confidence over the weight collected so far, at most MAX_WEIGHT. Points that are not finite, whose
        confidence is not above 0, or that lie 2**20 voxels or more from the origin are refused and counted.

        Args:
            xyz: [n, 3] float, in the map's frame and the unit of `voxel_size`.
            rgb: [n, 3] uint8.
            confidence: [n] float.
        """
        n = len(xyz)
        if xyz.shape != (n, 3) or rgb.shape != (n, 3) or confidence.shape != (n,):
            raise ValueError(
                "expected xyz [n, 3], rgb [n, 3] and confidence [n], got "
                f"{list(xyz.shape)}, {list(rgb.shape)} and {list(confidence.shape)}"
            )
        if rgb.dtype != torch.uint8:
            raise ValueError(f"expected rgb of uint8, got {rgb.dtype}")
        keys, mean, weight = self._group(*(a.to(self._keys.device) for a in (xyz, rgb, confidence)))
        self._insertions += 1
        if len(keys) == 0:
            return
        rows = self._find(keys)
        known, new = (rows != EMPTY).nonzero()[:, 0], (rows == EMPTY).nonzero()[:, 0]
        self._fuse(rows[known], mean[known], weight[known])
        self._add(keys[new], mean[new], weight[new])
        self.version += 1

    def resize_voxels(self, voxel_size: float) -> None:
        """Set the voxels' size and keep what was seen: those that come to share a voxel are fused, by their weights.

        Smaller voxels do not split what was fused before. Voxels too far away for a key then count as dropped.
        """
        voxel_size = _checked_size(voxel_size)
        keys, good = self._voxels_of(self._mean[: self._length], voxel_size)
        keys, group = torch.unique(keys, return_inverse=True)
        count = len(keys)
        old_mean, old_weight, old_seen = (a[: self._length][good] for a in (self._mean, self._weight, self._last_seen))
        weight = torch.zeros(count, device=keys.device).index_add_(0, group, old_weight)
        mean = torch.zeros(count, 7, device=keys.device).index_add_(0, group, old_mean * old_weight[:, None])
        seen = torch.zeros_like(old_seen[:count]).scatter_reduce_(0, group, old_seen, "amax", include_self=True)
        # Nothing has changed up to here, should memory have run out.
        self.dropped += self._length - len(good)
        self._keys[:count] = keys
        self._mean[:count] = mean / weight[:, None]
        self._weight[:count] = weight.clamp(max=MAX_WEIGHT)
        self._last_seen[:count] = seen
        self.voxel_size = voxel_size
        self._rebuild_table(count)
        self.version += 1

    def _voxels_of(self, xyz: torch.Tensor, voxel_size: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [m] of those points [n, 3 or more] that can have one, and their rows [m]."""
        # In float64, so that the same point gets the same voxel on every device.
        index = torch.floor(xyz[:, :3].double() / voxel_size)
        limit = 1 << (AXIS_BITS - 1)
        good = ((index >= -limit) & (index < limit)).all(dim=1).nonzero()[:, 0]  # not those with NaN and infinity
        index = index[good].long() + limit
        return (index[:, 0] << 2 * AXIS_BITS) | (index[:, 1] << AXIS_BITS) | index[:, 2], good

    def _group(
        self, xyz: torch.Tensor, rgb: torch.Tensor, confidence: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Average points by voxel: distinct keys [m], means [m, 7] and weights [m]."""
        sure = (torch.isfinite(confidence) & (confidence > 0)).nonzero()[:, 0]
        keys, good = self._voxels_of(xyz[sure], self.voxel_size)
        good = sure[good]
        self.refused += len(xyz) - len(good)
        keys, group, count = torch.unique(keys, return_inverse=True, return_counts=True)
        point_weight = confidence[good].float()
        values = torch.cat((xyz[good].float(), rgb[good].float(), point_weight[:, None]), dim=1)
        weight = torch.zeros(len(keys), device=keys.device).index_add_(0, group, point_weight)
        mean = torch.zeros(len(keys), 7, device=keys.device).index_add_(0, group, values * point_weight[:, None])
        return keys, mean / weight[:, None], weight / count

    def _fuse(self, rows: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> None:
        """Move the means of rows [m] towards a frame's."""
        total = self._weight[rows] + weight
        old = self._mean[rows]
        self._mean[rows] = old + (mean - old) * (weight / total)[:, None]
        self._weight[rows] = total.clamp(max=MAX_WEIGHT)
        self._last_seen[rows] = self._insertions

    def _add(self, keys: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> None:
        """Append new voxels, after making room for them."""
        surplus = len(keys) - self.max_points
        if surplus > 0:  # one frame sees more voxels than the map may hold: keep its surest
            keep = mean[:, 6].topk(self.max_points, sorted=False).indices
            keys, mean, weight = keys[keep], mean[keep], weight[keep]
            self.dropped += surplus
        lack = self._length + len(keys) - self.max_points
        if lack > 0:
            self._drop(min(self._length, max(lack, self.max_points // DROP_SHARE)))
        start, end = self._length, self._length + len(keys)
        self._keys[start:end] = keys
        self._mean[start:end] = mean
        self._weight[start:end] = weight.clamp(max=MAX_WEIGHT)
        self._last_seen[start:end] = self._insertions
        self._length = end
        self._hash_rows(start, end)

    def _drop(self, count: int) -> None:
        """Drop the `count` voxels of least weight for the insertions since they were seen.

        Most voxels of a full map are noise around surfaces: they were hit once or twice, surfaces time and again. By
        age alone surfaces would leave as soon as noise. The last rows move into the holes, so that no array is copied.
        """
        age = self._insertions - self._last_seen[: self._length]  # 0: in sight, which leaves last
        dropped = (self._weight[: self._length] / age).topk(count, largest=False, sorted=False).indices
        length = self._length - count
        stays = torch.ones(self._length, dtype=torch.bool, device=dropped.device)
        stays[dropped] = False
        holes = (~stays[:length]).nonzero()[:, 0]
        movers = stays[length:].nonzero()[:, 0] + length
        for array in (self._keys, self._mean, self._weight, self._last_seen):
            array[holes] = array[movers]
        self.dropped += count
        self._rebuild_table(length)

    def _rebuild_table(self, length: int) -> None:
        """Enter rows 0 .. length - 1 into an empty table."""
        self._length = length
        self._table.fill_(EMPTY)
        for start in range(0, length, 1 << 16):  # in chunks: the working memory stays small
            self._hash_rows(start, min(start + (1 << 16), length))

    def _hash(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the buckets [m] where probing for keys starts (the finalizer of SplitMix64, shifts made logical)."""
        mixed = keys
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ ((mixed >> shift) & ((1 << 64 - shift) - 1))) * factor
        return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) & ((1 << self._table_bits) - 1)

    def _find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows [m] of keys, EMPTY for those that the map lacks."""
        rows = torch.full((len(keys),), EMPTY, dtype=torch.int32, device=keys.device)
        buckets = self._hash(keys)
        pending = torch.arange(len(keys), device=keys.device)
        first = True
        while len(pending):
            probed = self._probe(buckets, first)
            found = self._table[probed]
            occupied = found != EMPTY
            hit = occupied & (self._keys[found.clamp(min=0)] == keys[pending][:, None])
            row = torch.where(hit, found, EMPTY).amax(1)  # a key has one row at most
            rows[pending] = row
            probe_on = (occupied.all(1) & (row == EMPTY)).nonzero()[:, 0]
            pending, buckets = pending[probe_on], probed[probe_on, -1] + 1
            first = False
        return rows.long()

    def _hash_rows(self, start: int, end: int) -> None:
        """Enter rows start .. end - 1, whose keys the table lacks."""
        rows = torch.arange(start, end, dtype=torch.int32, device=self._keys.device)
        buckets = self._hash(self._keys[start:end])
        first = True
        while len(rows):
            probed = self._probe(buckets, first)
            free = self._table[probed] == EMPTY
            # The first bucket that is free; where none is, the last one, which stays as it is.
            position = torch.where(free.any(1), free.int().argmax(1), probed.shape[1] - 1)
            buckets = probed.gather(1, position[:, None])[:, 0]
            present = self._table[buckets]
            self._table[buckets] = torch.where(present == EMPTY, rows, present)
            # Of several rows that wrote to one bucket one has won; it and only it reads itself back.
            lost = (self._table[buckets] != rows).nonzero()[:, 0]
            rows, buckets = rows[lost], buckets[lost] + 1
            first = False

    def _probe(self, buckets: torch.Tensor, first: bool) -> torch.Tensor:
        """Return the buckets [m, probes] to look at from those [m] on."""
        steps = torch.arange(self._probes[0 if first else 1], device=buckets.device)
        return (buckets[:, None] + steps) & ((1 << self._table_bits) - 1)


def _checked_size(voxel_size: float) -> float:
    if not (math.isfinite(voxel_size) and voxel_size > 0):
        raise ValueError(f"voxel_size must be finite and above 0, got {voxel_size}")
    return float(voxel_size)


def _table_bits(max_points: int) -> int:
    """Return the logarithm of the hash table's length: at most half full, so that probing ends after a few rounds."""
    return max(4, math.ceil(math.log2(2 * max_points)))
