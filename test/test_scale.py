# SPDX-License-Identifier: Apache-2.0
"""The scale from odometry and from the camera's height."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.mapping.scale import FloorScale, OdometryScale, floor_below


def drive(estimator: OdometryScale, scale: float, steps: int, rng, noise: float = 0.0, wrong: float = 0.0):
    """Feed a walk, with a share of wrong odometry; return the scales that were reported."""
    position, reported = np.zeros(3), []
    for _ in range(steps):
        position = position + rng.normal([0.1, 0, 0], 0.02)
        odometry = position + rng.normal(0, noise, 3) if noise else position
        if rng.random() < wrong:
            odometry = odometry + rng.normal(0, 3, 3)
        found = estimator.add(position / scale, odometry)
        if found is not None:
            reported.append(found)
    return reported


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100))
def test_scale_of_exact_odometry(scale):
    reported = drive(OdometryScale(), scale, 100, np.random.default_rng(0))
    assert reported == [pytest.approx(scale)]  # once: it does not change


def test_scale_of_noisy_odometry():
    reported = drive(OdometryScale(), 2.5, 500, np.random.default_rng(1), noise=0.01, wrong=0.05)
    assert reported[-1] == pytest.approx(2.5, rel=0.05)


def test_a_scale_that_changes_is_followed():
    estimator, rng = OdometryScale(), np.random.default_rng(2)
    drive(estimator, 2.0, 200, rng)
    reported = drive(estimator, 3.0, 400, rng)
    assert reported[-1] == pytest.approx(3.0)


def test_a_standing_robot_and_odometry_of_another_motion_say_nothing():
    rng = np.random.default_rng(3)
    estimator = OdometryScale()
    assert all(estimator.add(rng.normal(0, 1e-3, 3), rng.normal(0, 1e-3, 3)) is None for _ in range(200))
    other = OdometryScale()
    found = [other.add(np.cumsum(10 ** rng.uniform(-3, 3, 3)), np.array([i, 0.0, 0.0])) for i in range(100)]
    assert all(scale is None for scale in found)
    stuck = OdometryScale()
    assert all(stuck.add(np.zeros(3), np.array([i, 0.0, 0.0])) is None for i in range(20))


def scene(rng, height: float, noise: float = 0.01, floor: int = 4000, table: int = 1500) -> np.ndarray:
    """Return heights relative to the camera of a floor, walls from floor to ceiling, and a table at half height."""
    parts = [np.full(floor, -height), rng.uniform(-height, height, 6000), np.full(table, -height / 2)]
    return np.concatenate(parts) * (1 + rng.normal(0, noise, floor + 6000 + table))


@pytest.mark.parametrize("height", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("table", [0, 1500, 8000])
def test_floor_is_found(height, table):
    assert floor_below(scene(np.random.default_rng(0), height, table=table)) == pytest.approx(height, rel=0.02)


def test_where_no_floor_is_seen_there_is_none():
    rng = np.random.default_rng(0)
    assert floor_below(rng.uniform(0.1, 2, 5000)) is None  # all above
    assert floor_below(np.full(5000, np.nan)) is None
    assert floor_below(np.empty(0)) is None
    assert floor_below(np.concatenate([rng.uniform(0.1, 2, 9000), np.full(200, -1.0)])) is None  # too little of it


def test_scale_of_the_cameras_height():
    estimator, rng = FloorScale(), np.random.default_rng(0)
    reported = [estimator.add(scene(rng, 0.5), 1.2) for _ in range(20)]
    assert reported[:2] == [None, None] and reported[2] == pytest.approx(2.4, rel=0.03)
    assert sum(scale is not None for scale in reported) <= 2
