# SPDX-License-Identifier: Apache-2.0
"""The flat plan of what is occupied and free."""
import math

import numpy as np
import pytest
import torch

from lingbot_map_ros.mapping.alignment import Alignment
from lingbot_map_ros.mapping.occupancy import FREE, MAX_CELLS, OCCUPIED, UNKNOWN, Grid, Occupancy
from lingbot_map_ros.mapping.voxel_map import MapPoints

HALF = 2.0  # of a square room's side, the camera in its middle at a height of 1 above the floor
POST = (1.0, 0.3)


def room(step: float = 0.02) -> np.ndarray:
    """Return points of the walls and the floor of a room with a post, as its middle sees them."""
    line, heights = np.arange(-HALF, HALF, step), np.arange(-1.0, 0.5, step)
    a, z = (grid.ravel() for grid in np.meshgrid(line, heights))
    walls = [np.stack([np.full_like(a, x), a, z], 1) for x in (-HALF, HALF)]
    walls += [np.stack([a, np.full_like(a, y), z], 1) for y in (-HALF, HALF)]
    x, y = (grid.ravel() for grid in np.meshgrid(line, line))
    floor = np.stack([x, y, np.full_like(x, -1.0)], 1)
    angle, z = (grid.ravel() for grid in np.meshgrid(np.arange(0, 2 * math.pi, 0.1), heights))
    post = np.stack([POST[0] + 0.15 * np.cos(angle), POST[1] + 0.15 * np.sin(angle), z], 1)
    everything = np.concatenate([*walls, floor, post])
    # Nothing behind the post is seen.
    along = everything[:, :2] @ np.array(POST) / np.hypot(*POST)
    beside = np.abs(everything[:, :2] @ np.array([-POST[1], POST[0]]) / np.hypot(*POST))
    return everything[~((along > 1.25) & (beside < 0.15 * along / np.hypot(*POST)))]


def at(grid: Grid, x: float, y: float) -> int:
    column, row = (math.floor((value - start) / grid.resolution) for value, start in zip((x, y), grid.origin))
    if not (0 <= row < grid.cells.shape[0] and 0 <= column < grid.cells.shape[1]):
        return UNKNOWN
    return int(grid.cells[row, column])


def plan(alignment: Alignment = Alignment(), resolution: float = 0.05) -> Grid:
    occupancy, xyz = Occupancy(10), room()
    lowest, highest = (alignment.scale * z for z in (-0.8, 0.2))
    occupancy.add(torch.from_numpy(xyz), np.zeros(3), -0.8, 0.2)
    points = alignment.points(MapPoints(torch.from_numpy(xyz), None, None)).xyz.numpy()
    return occupancy.grid(points, alignment, resolution, lowest, highest)


def test_walls_are_occupied_the_room_is_free_the_rest_is_not_known():
    grid = plan()
    for x, y in ((0, 0), (-1.5, 1.5), (1.8, -1.8), (0.5, 0.15), (-0.3, -1.9)):
        assert at(grid, x, y) == FREE, (x, y)
    for x, y in ((-2, 0.5), (1.98, -1.0), (0.7, 1.98), (0.86, 0.26)):
        around = {at(grid, x + dx, y + dy) for dx in (-0.05, 0, 0.05) for dy in (-0.05, 0, 0.05)}
        assert OCCUPIED in around, (x, y)
    for x, y in ((2.3, 0), (0, -2.5), (1.7, 0.51)):  # outside, and behind the post
        assert at(grid, x, y) == UNKNOWN, (x, y)
    free = (grid.cells == FREE).sum() * grid.resolution**2
    assert 0.85 < free / (2 * HALF) ** 2 < 1


def test_the_floor_and_what_is_above_are_not_in_the_way():
    occupancy = Occupancy(1)
    x = np.arange(0.5, 3, 0.02)
    floor, beam = (np.stack([x, 0 * x, np.full_like(x, z)], 1) for z in (-1.0, 0.9))
    occupancy.add(torch.from_numpy(np.concatenate([floor, beam])), np.zeros(3), -0.8, 0.5)
    grid = occupancy.grid(np.concatenate([floor, beam]), Alignment(), 0.1, -0.8, 0.5)
    assert not (grid.cells == OCCUPIED).any() and (grid.cells == FREE).any()
    occupancy.add(torch.from_numpy(beam), np.zeros(3), -0.8, 0.5)  # alone it says nothing of the ground below
    cells = occupancy.grid(beam, Alignment(), 0.1, -0.8, 0.5).cells
    assert (cells == FREE).sum() == 1  # that of the camera


@pytest.mark.parametrize("yaw", [0.0, 0.8, -2.5])
def test_the_plan_follows_the_alignment(yaw):
    alignment = Alignment(scale=2.0, yaw=yaw, anchor_map=np.array([10.0, -7.0, 0.0]))
    grid = plan(alignment, resolution=0.1)
    straight = plan()
    c, s = math.cos(yaw), math.sin(yaw)
    for x, y in ((0, 0), (-1.5, 1.5), (1.8, -1.8), (0.5, 0.15), (1.7, 0.51), (2.5, 0)):
        assert at(grid, 10 + 2 * (c * x - s * y), -7 + 2 * (s * x + c * y)) == at(straight, x, y), (x, y)


def test_cells_stay_where_they_are_when_the_plan_grows():
    occupancy, xyz = Occupancy(10), room()
    grids = []
    for x in (0.0, -0.33):
        occupancy.add(torch.from_numpy(xyz + (x, 0, 0)), np.array([x, 0.0, 0.0]), -0.8, 0.2)
        grids.append(occupancy.grid(xyz, Alignment(), 0.05, -0.8, 0.2))
    shift = (np.array(grids[0].origin) - grids[1].origin) / 0.05
    np.testing.assert_allclose(shift, shift.round(), atol=1e-6)


def test_the_plan_is_bounded():
    occupancy = Occupancy(3)
    for x in (0.0, 1e3, 1e6):
        occupancy.add(torch.from_numpy(room() + (x, 0, 0)), np.array([x, 0.0, 0.0]), -0.8, 0.2)
    occupancy.add(torch.from_numpy(room() + (2e6, 0, 0)), np.array([2e6, 0.0, 0.0]), -0.8, 0.2)
    assert len(occupancy) == 3
    grid = occupancy.grid(room(), Alignment(), 0.05, -0.8, 0.2)
    assert max(grid.cells.shape) <= MAX_CELLS and at(grid, 2e6, 0) == FREE


def test_nothing_seen_is_an_empty_plan():
    occupancy = Occupancy(3)
    assert occupancy.grid(np.empty((0, 3)), Alignment(), 0.05, 0, 1).cells.size == 0
    occupancy.add(torch.from_numpy(np.empty((0, 3))), np.zeros(3), 0, 1)
    assert occupancy.grid(np.empty((0, 3)), Alignment(), 0.05, 0, 1).cells.size == 1  # that of the camera


def test_what_is_seen_over_an_obstacle_is_not_free_by_that_ray():
    occupancy = Occupancy(1)
    x = np.arange(0.5, 3, 0.02)
    floor = np.stack([x, 0 * x + 0.01, np.full_like(x, -1.0)], 1)
    box = np.array([[1.0, 0.01, -0.5]] * 3)
    occupancy.add(torch.from_numpy(np.concatenate([floor, box])), np.zeros(3), -0.8, 0.2)
    grid = occupancy.grid(np.concatenate([floor, box]), Alignment(), 0.1, -0.8, 0.2)
    assert at(grid, 0.7, 0.0) == FREE and at(grid, 1.02, 0.02) == OCCUPIED and at(grid, 2.0, 0.0) == UNKNOWN


@pytest.mark.parametrize("alignment", [Alignment(), Alignment(2.0, 0.8, anchor_map=np.array([10.0, -7.0, 3.0]))])
def test_keyframes_of_other_heights_do_not_see_through_what_is_in_the_way_now(alignment):
    """The post is passed over until the heights reach down to it."""
    occupancy, xyz = Occupancy(10), room()
    # Above all: free up to the farthest point seen, post or not.
    occupancy.add(torch.from_numpy(xyz), np.zeros(3), 0.55, 0.6)
    points = alignment.points(MapPoints(torch.from_numpy(xyz), None, None)).xyz.numpy()

    def plan_between(lowest: float, highest: float) -> Grid:
        heights = (alignment.anchor_map[2] + alignment.scale * h for h in (lowest, highest))
        return occupancy.grid(points, alignment, 0.05 * alignment.scale, *heights)

    def seen(grid: Grid, x: float, y: float) -> int:
        c, s = math.cos(alignment.yaw), math.sin(alignment.yaw)
        moved = alignment.scale * np.array([c * x - s * y, s * x + c * y]) + alignment.anchor_map[:2]
        return at(grid, *moved)

    through = np.array([-1.0, 0.7])  # a table of the map there, on the way to what lies behind
    table = np.tile([*through, -0.3], (200, 1)) + np.random.default_rng(0).uniform(-0.1, 0.1, (200, 3))
    points = np.concatenate([points, alignment.points(MapPoints(torch.from_numpy(table), None, None)).xyz.numpy()])
    before = plan_between(0.55, 0.6)
    assert seen(before, *(1.6 * through)) == FREE and not (before.cells == OCCUPIED).any()
    after = plan_between(-0.8, 0.2)
    assert seen(after, *(1.6 * through)) == UNKNOWN and seen(after, *(0.5 * through)) == FREE
    assert seen(after, 0.5, -1.0) == FREE and (after.cells == OCCUPIED).any()
    again = plan_between(0.55, 0.6)  # what was cut off stays so
    assert seen(again, *(1.6 * through)) == UNKNOWN and seen(again, *(0.5 * through)) == FREE
