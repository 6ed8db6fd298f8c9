# SPDX-License-Identifier: Apache-2.0
"""The voxel map against a dictionary that does the same one point at a time."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.mapping.voxel_map import AXIS_BITS, MAX_WEIGHT, PROBES, MapPoints, VoxelMap


class DictMap:
    """Voxel -> mean (x, y, z, r, g, b, confidence), weight, last seen; never full."""

    def __init__(self, voxel_size):
        self.voxel_size, self.voxels, self.insertions = voxel_size, {}, 0

    def keys(self, xyz):
        return [tuple(math.floor(c / self.voxel_size) for c in point) for point in xyz.double().tolist()]

    def insert(self, xyz, rgb, confidence):
        self.insertions += 1
        groups = {}
        for key, point, color, weight in zip(self.keys(xyz), xyz.tolist(), rgb.tolist(), confidence.tolist()):
            groups.setdefault(key, []).append((np.array([*point, *color, weight]), weight))
        for key, members in groups.items():
            total = sum(weight for _, weight in members)
            mean, weight = sum(value * w for value, w in members) / total, total / len(members)
            if key in self.voxels:
                old, old_weight, _ = self.voxels[key]
                mean = old + (mean - old) * weight / (old_weight + weight)
                weight = old_weight + weight
            self.voxels[key] = (mean, min(weight, MAX_WEIGHT), self.insertions)

    def resize(self, voxel_size):
        self.voxel_size, old, self.voxels = voxel_size, self.voxels, {}
        groups = {}
        for mean, weight, last_seen in old.values():
            groups.setdefault(tuple(math.floor(c / voxel_size) for c in mean[:3]), []).append((mean, weight, last_seen))
        for key, members in groups.items():
            total = sum(weight for _, weight, _ in members)
            mean = sum(value * weight for value, weight, _ in members) / total
            self.voxels[key] = (mean, min(total, MAX_WEIGHT), max(seen for *_, seen in members))

    def sync(self, kept):
        """Drop what the map under test has dropped, after checking that nothing worth less was kept."""
        def worth(key):
            _, weight, last_seen = self.voxels[key]
            return weight / (self.insertions - last_seen) if self.insertions > last_seen else math.inf

        gone = [key for key in self.voxels if key not in kept]
        assert not gone or max(map(worth, gone)) <= 1.001 * min(map(worth, kept))
        for key in gone:
            del self.voxels[key]
        return len(gone)


def make_points(generator, count, spread, voxel_size):
    """Points well inside their voxels, so that rounding in a mean never moves one out."""
    index = torch.randint(-spread, spread, (count, 3), generator=generator)
    xyz = ((index + 0.1 + 0.8 * torch.rand(count, 3, generator=generator)) * voxel_size).float()
    rgb = torch.randint(0, 256, (count, 3), generator=generator).to(torch.uint8)
    return xyz, rgb, 1 + 5 * torch.rand(count, generator=generator)


def assert_equal(voxel_map, oracle):
    points = MapPoints(*(array.cpu() for array in voxel_map.points()))
    keys = oracle.keys(points.xyz)
    assert len(set(keys)) == len(keys) == len(voxel_map)
    assert set(keys) == set(oracle.voxels)
    if keys:
        expected = np.stack([oracle.voxels[key][0] for key in keys])
        np.testing.assert_allclose(points.xyz.numpy(), expected[:, :3], rtol=1e-4, atol=1e-4 * voxel_map.voxel_size)
        np.testing.assert_allclose(points.rgb.numpy(), expected[:, 3:6], atol=0.51)
        np.testing.assert_allclose(points.confidence.numpy(), expected[:, 6], rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(1, 200),
    spread=st.integers(1, 6),
    counts=st.lists(st.integers(0, 120), max_size=12),
    voxel_size=st.sampled_from([1e-3, 0.25, 1.0, 37.0]),
    probes=st.sampled_from(sorted(PROBES.values())),
)
def test_agrees_with_the_oracle(seed, capacity, spread, counts, voxel_size, probes):
    generator = torch.Generator().manual_seed(seed)
    voxel_map, oracle, dropped = VoxelMap(capacity, voxel_size), DictMap(voxel_size), 0
    voxel_map._probes = probes  # more than the smallest maps' tables have buckets
    memory = voxel_map.memory_bytes
    for count in counts:
        points = make_points(generator, count, spread, voxel_size)
        oracle.insert(*points)
        voxel_map.insert(*points)
        dropped += oracle.sync(set(oracle.keys(voxel_map.points().xyz)))
        assert len(voxel_map) <= capacity
        assert voxel_map.dropped == dropped
        assert_equal(voxel_map, oracle)
    assert voxel_map.memory_bytes == memory
    assert voxel_map.refused == 0


@pytest.mark.parametrize("probes", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))],
)
def test_large_maps_agree_with_the_oracle(device, probes, monkeypatch):
    """Enough voxels for collisions in the hash table and for several rounds of dropping."""
    monkeypatch.setitem(PROBES, device, probes)
    generator = torch.Generator().manual_seed(0)
    voxel_map, oracle = VoxelMap(3000, 0.1, device), DictMap(0.1)
    for _ in range(12):
        points = make_points(generator, 900, 15, 0.1)
        oracle.insert(*points)
        voxel_map.insert(*(array.to(device) for array in points))
        oracle.sync(set(oracle.keys(voxel_map.points().xyz)))
        assert_equal(voxel_map, oracle)
    assert voxel_map.dropped > 3000


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), factors=st.lists(st.sampled_from([0.25, 0.5, 2.0, 4.0]), min_size=1, max_size=4))
def test_voxels_of_another_size_keep_what_was_seen(seed, factors):
    generator = torch.Generator().manual_seed(seed)
    voxel_map, oracle, size = VoxelMap(5000, 1.0), DictMap(1.0), 1.0
    memory = voxel_map.memory_bytes
    for factor in factors:
        for _ in range(2):
            points = make_points(generator, 60, 4, size)
            oracle.insert(*points)
            voxel_map.insert(*points)
        size *= factor
        version = voxel_map.version
        voxel_map.resize_voxels(size)
        oracle.resize(size)
        assert voxel_map.voxel_size == size and voxel_map.version > version
        assert_equal(voxel_map, oracle)
        newest = oracle.keys(voxel_map.points(since=oracle.insertions - 1).xyz)
        assert set(newest) == {key for key, voxel in oracle.voxels.items() if voxel[2] == oracle.insertions}
    assert (voxel_map.memory_bytes, voxel_map.dropped, voxel_map.refused) == (memory, 0, 0)


def test_voxels_that_become_too_small_for_a_key_are_dropped_and_bad_sizes_change_nothing():
    voxel_map = VoxelMap(10, 1.0)
    xyz = torch.tensor([[0.5, 0.5, 0.5], [100.5, 0.5, 0.5]])
    voxel_map.insert(xyz, torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2))
    for size in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="voxel_size"):
            voxel_map.resize_voxels(size)
    assert len(voxel_map) == 2 and voxel_map.voxel_size == 1.0
    voxel_map.resize_voxels(100 / 2 ** (AXIS_BITS - 1))
    assert voxel_map.dropped == 1
    np.testing.assert_array_equal(voxel_map.points().xyz.numpy(), [[0.5, 0.5, 0.5]])
    voxel_map.reset()
    voxel_map.resize_voxels(2.0)
    assert len(voxel_map) == 0


def test_those_seen_little_and_long_ago_leave_first():
    voxel_map = VoxelMap(32, 1.0)

    def insert(xs, confidence=1.0):
        n = len(xs)
        xyz = torch.tensor([[x + 0.5, 0.5, 0.5] for x in xs])
        voxel_map.insert(xyz, torch.zeros(n, 3, dtype=torch.uint8), torch.full((n,), confidence))

    def kept():
        return sorted(int(x) for x in voxel_map.points().xyz[:, 0])

    for _ in range(6):
        insert(range(0, 8))  # a surface
    insert(range(8, 20))
    insert(range(20, 32))
    assert voxel_map.dropped == 0 and len(voxel_map) == 32
    insert(range(32, 36))  # of once seen ones the oldest leave: the surface is older, but was seen more often
    assert kept() == [*range(0, 8), *range(12, 36)]
    insert(range(12, 24))
    insert(range(36, 44), confidence=0.01)
    assert kept() == [*range(0, 8), *range(12, 24), *range(32, 44)]
    insert(range(44, 52), confidence=0.01)  # those seen last had hardly any weight
    assert kept() == [*range(0, 8), *range(12, 24), *range(32, 36), *range(44, 52)]
    for _ in range(300):
        insert([100])  # the camera has gone elsewhere
    insert(range(200, 219), confidence=5.0)
    insert(range(300, 312), confidence=5.0)  # what it saw there stays, however often it saw the surface
    assert kept() == [100, *range(200, 219), *range(300, 312)]
    assert len(voxel_map) == 32


def test_more_voxels_in_a_frame_than_the_map_holds():
    voxel_map = VoxelMap(4, 1.0)
    xyz = torch.arange(10.0)[:, None].expand(10, 3) + 0.5
    voxel_map.insert(xyz, torch.zeros(10, 3, dtype=torch.uint8), torch.arange(1.0, 11.0))
    assert sorted(voxel_map.points().confidence.tolist()) == [7, 8, 9, 10]
    assert voxel_map.dropped == 6


def test_a_voxel_keeps_adapting():
    """However long a voxel has been seen, a new colour takes over."""
    voxel_map = VoxelMap(4, 1.0)
    xyz, sure = torch.full((1, 3), 0.5), torch.full((1,), 2.0)
    for _ in range(500):
        voxel_map.insert(xyz, torch.zeros(1, 3, dtype=torch.uint8), sure)
    for _ in range(200):
        voxel_map.insert(xyz, torch.full((1, 3), 200, dtype=torch.uint8), sure)
    assert voxel_map.points().rgb.min() > 190


def test_points_without_a_place_are_refused():
    limit = float(1 << (AXIS_BITS - 1))
    good = [[0.5, 0.5, 0.5], [limit - 0.5, -limit, 0.5]]
    bad = [[math.nan, 0, 0], [0, math.inf, 0], [0, 0, -math.inf], [limit, 0, 0], [0, -limit - 1, 0], [1e30, 0, 0]]
    xyz = torch.tensor(good + bad + good[:1] * 4)
    confidence = torch.ones(len(xyz))
    confidence[-4:] = torch.tensor([math.nan, math.inf, 0.0, -1.0])
    voxel_map = VoxelMap(100, 1.0)
    voxel_map.insert(xyz, torch.zeros(len(xyz), 3, dtype=torch.uint8), confidence)
    assert sorted(voxel_map.points().xyz.tolist()) == sorted(good)
    assert voxel_map.refused == len(bad) + 4 and voxel_map.dropped == 0


def test_neighbours_at_the_edges_do_not_share_a_key():
    """One step along any axis, at the origin and at the ends of the range, is another voxel."""
    limit = 1 << (AXIS_BITS - 1)
    ends = torch.tensor([-limit, -1, 0, limit - 1])
    xyz = torch.cartesian_prod(ends, ends, ends).float() + 0.5
    voxel_map = VoxelMap(100, 1.0)
    voxel_map.insert(xyz, torch.zeros(64, 3, dtype=torch.uint8), torch.ones(64))
    assert len(voxel_map) == 64


def test_version_changes_with_the_content():
    voxel_map = VoxelMap(10, 1.0)
    seen = [voxel_map.version]
    points = (torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.uint8), torch.ones(1))
    voxel_map.insert(*points)
    seen.append(voxel_map.version)
    voxel_map.insert(*points)
    seen.append(voxel_map.version)
    voxel_map.insert(*(a[:0] for a in points))
    assert voxel_map.version == seen[-1]
    voxel_map.reset()
    seen.append(voxel_map.version)
    assert len(set(seen)) == len(seen)


def test_reset_forgets_and_points_are_copies():
    voxel_map = VoxelMap(10, 1.0)
    xyz, rgb, confidence = torch.full((1, 3), 0.5), torch.full((1, 3), 9, dtype=torch.uint8), torch.ones(1)
    voxel_map.insert(xyz * math.nan, rgb, confidence)
    voxel_map.insert(xyz, rgb, confidence)
    before = voxel_map.points()
    voxel_map.reset(2.0)
    assert (len(voxel_map), voxel_map.refused, voxel_map.dropped, voxel_map.voxel_size) == (0, 0, 0, 2.0)
    assert len(voxel_map.points().xyz) == 0
    voxel_map.insert(xyz + 1, rgb, confidence)
    assert before.xyz.tolist() == [[0.5] * 3] and before.rgb.tolist() == [[9] * 3]
    assert voxel_map.points().xyz.tolist() == [[1.5] * 3]


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan, math.inf])
def test_bad_voxel_sizes_are_refused(size):
    with pytest.raises(ValueError, match="voxel_size"):
        VoxelMap(10, size)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="max_points"):
        VoxelMap(0)
    voxel_map = VoxelMap(10)
    with pytest.raises(ValueError, match=r"\[2, 3\], \[1, 3\] and \[2\]"):
        voxel_map.insert(torch.zeros(2, 3), torch.zeros(1, 3, dtype=torch.uint8), torch.ones(2))
    with pytest.raises(ValueError, match="uint8.*float32"):
        voxel_map.insert(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2))
    assert len(voxel_map) == 0


@pytest.mark.parametrize("max_points", [1, 8, 9, 500, 20_000])
def test_memory_is_known_before_it_is_taken(max_points):
    assert VoxelMap.required_bytes(max_points) == VoxelMap(max_points).memory_bytes


def test_points_that_changed_since_an_insertion():
    voxels = VoxelMap(100, 1.0)
    rgb, confidence = torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2)
    voxels.insert(torch.tensor([[0.5, 0.5, 0.5], [1.5, 0.5, 0.5]]), rgb, confidence)
    before = voxels.insertions
    assert len(voxels.points(0).xyz) == 2 and len(voxels.points(before).xyz) == 0
    voxels.insert(torch.tensor([[1.7, 0.5, 0.5], [2.5, 0.5, 0.5]]), rgb, confidence)
    changed = voxels.points(before)
    np.testing.assert_allclose(np.sort(changed.xyz[:, 0]), [1.6, 2.5], atol=1e-6)
    assert len(voxels.points().xyz) == 3
