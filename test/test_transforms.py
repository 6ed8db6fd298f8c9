# SPDX-License-Identifier: Apache-2.0
"""The tree of frames."""
import math

import numpy as np
import pytest

from lingbot_map_ros.mapping.transforms import HISTORY_NS, MAX_FRAMES, TransformError, Transforms, interpolate

S = 1_000_000_000


def T(x: float = 0.0, yaw: float = 0.0) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:2, :2] = [[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]]
    matrix[0, 3] = x
    return matrix


@pytest.fixture
def tree() -> Transforms:
    """odom -> base moves by 1 m and 0.2 rad a second; base -> mast -> camera and base -> lidar are fixed."""
    tree = Transforms()
    for i in range(6):
        tree.set("odom", "base", T(i, 0.2 * i), i * S)
    tree.set("base", "mast", T(0.5), None)
    tree.set("mast", "camera", T(0.1, 1.0), None)
    tree.set("base", "lidar", T(-0.3), None)
    return tree


def test_chains_up_and_down(tree):
    np.testing.assert_allclose(tree.lookup("odom", "camera", 2 * S), T(2, 0.4) @ T(0.5) @ T(0.1, 1.0))
    np.testing.assert_allclose(tree.lookup("camera", "odom", 2 * S), np.linalg.inv(T(2, 0.4) @ T(0.5) @ T(0.1, 1.0)))
    np.testing.assert_allclose(tree.lookup("lidar", "camera", 99 * S), T(0.8) @ T(0.1, 1.0), atol=1e-12)
    np.testing.assert_array_equal(tree.lookup("base", "base", 0), np.eye(4))


def test_between_samples(tree):
    np.testing.assert_allclose(tree.lookup("odom", "base", 5 * S // 2), T(2.5, 0.5), atol=1e-9)


def test_interpolation_is_a_slerp_nearly():
    for share in (0.1, 0.25, 0.5, 0.9):
        found = interpolate(T(0, 0), T(1, math.pi / 3), share)
        assert math.atan2(found[1, 0], found[0, 0]) == pytest.approx(share * math.pi / 3, abs=math.radians(0.1) * 5)
    np.testing.assert_allclose(interpolate(T(0, 3.0), T(0, -3.0), 0.5), T(0, math.pi), atol=1e-9)  # the short way


def test_beyond_the_samples_within_the_tolerance_only(tree):
    np.testing.assert_array_equal(tree.lookup("odom", "base", 5 * S + S // 10, S // 5), T(5, 1.0))
    with pytest.raises(TransformError, match=r"odom -> base is known from 0.000 s to 5.000 s, not at 5.300 s"):
        tree.lookup("odom", "camera", 5 * S + 3 * S // 10, S // 5)


@pytest.mark.parametrize(("target", "source", "words"), [
    ("odom", "arm", "nobody publishes the frame arm"),
    ("world", "camera", "nobody publishes the frame world"),
    ("camera", "island", "not connected"),
])
def test_what_is_missing_is_named(tree, target, source, words):
    tree.set("sea", "island", T(), None)
    with pytest.raises(TransformError, match=words):
        tree.lookup(target, source, S)


def test_frames_in_a_circle_end(tree):
    tree.set("b", "a", T(), None)
    tree.set("a", "b", T(), None)
    with pytest.raises(TransformError):
        tree.lookup("odom", "a", S)


@pytest.mark.parametrize("matrix", [T() * math.nan, T() * 2, np.zeros((4, 4))])
def test_what_is_no_transform_is_refused(tree, matrix):
    with pytest.raises(TransformError, match="odom -> base"):
        tree.set("odom", "base", matrix, 6 * S)
    np.testing.assert_allclose(tree.lookup("odom", "base", 5 * S), T(5, 1.0))


def test_memory_is_bounded():
    tree = Transforms()
    for i in range(20_000):
        tree.set("odom", "base", T(i), i * S // 1000)
    samples = tree._samples["base"]
    assert len(samples.stamps) == len(samples.transforms) <= 5000
    assert samples.stamps[-1] - samples.stamps[0] <= HISTORY_NS
    with pytest.raises(TransformError, match="more than"):
        for i in range(MAX_FRAMES + 1):
            tree.set("odom", f"frame{i}", T(), 0)


def test_time_that_goes_back_starts_anew_and_late_samples_are_sorted_in(tree):
    tree.set("odom", "base", T(1.4, 0.28), 7 * S // 5)
    np.testing.assert_allclose(tree.lookup("odom", "base", 7 * S // 5), T(1.4, 0.28))
    tree.set("odom", "base", T(7), -3 * S)
    with pytest.raises(TransformError):
        tree.lookup("odom", "base", 2 * S)
    tree.set("earth", "base", T(9), 0)  # another parent
    np.testing.assert_allclose(tree.lookup("earth", "base", 0), T(9))
