# SPDX-License-Identifier: Apache-2.0
"""The model of a pose's uncertainty."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingbot_map_ros.mapping.uncertainty import DEGRADED_FACTOR, uncertainty


def test_figures():
    found = uncertainty(4.0, 30.0, 0.1, 0.005, 0.015)
    assert found.position == pytest.approx(math.hypot(0.02, 0.45))
    assert found.rotation == pytest.approx(math.hypot(0.005, 0.015 * math.sqrt(7.5)))
    assert found.linear == pytest.approx(math.sqrt(2) * 0.2)
    assert found.angular == pytest.approx(math.sqrt(2) * 0.05)


@given(st.floats(0.1, 100), st.floats(0, 1e4), st.floats(0.01, 10), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1),
       st.floats(0.01, 100))
def test_lengths_scale_with_the_unit_and_angles_do_not(depth, length, seconds, noise, drift, scale):
    one = uncertainty(depth, length, seconds, noise, drift)
    other = uncertainty(scale * depth, scale * length, seconds, noise, drift)
    assert other.position == pytest.approx(scale * one.position) and other.linear == pytest.approx(scale * one.linear)
    assert other.rotation == pytest.approx(one.rotation) and other.angular == pytest.approx(one.angular)
    worse = uncertainty(depth, length, seconds, noise, drift, is_degraded=True)
    assert worse == pytest.approx([DEGRADED_FACTOR * value for value in one])
    assert uncertainty(depth, length + 1, seconds, noise, drift).position > one.position


def test_a_first_pose_has_no_velocity_and_a_scene_without_depth_no_walk():
    assert math.isinf(uncertainty(1, 0, 0, 0.01, 0.01).linear)
    assert uncertainty(0, 5, 1, 0.01, 0.01).rotation == 0.01
