# SPDX-License-Identifier: Apache-2.0
"""The bounded path and its file."""
import math

import numpy as np
import pytest

from lingbot_map_ros.mapping.trajectory import Trajectory, write_tum


def make_pose(x):
    T = np.eye(4)
    T[:3, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]  # a quarter turn to the left
    T[:3, 3] = [x, 2 * x, -x]
    return T


def test_keeps_the_newest_poses_in_order():
    trajectory = Trajectory(3)
    assert len(trajectory) == 0 and trajectory.poses().shape == (0, 7) and trajectory.stamps_ns().shape == (0,)
    for i in range(8):
        row = trajectory.append(100 + i, make_pose(float(i)))
        newest = list(range(max(0, i - 2), i + 1))
        assert trajectory.stamps_ns().tolist() == [100 + n for n in newest]
        assert trajectory.poses()[:, 0].tolist() == newest
        assert trajectory.poses()[-1].tolist() == row.tolist()
        assert (len(trajectory), trajectory.dropped) == (len(newest), i + 1 - len(newest))
    half = math.sqrt(0.5)
    assert trajectory.poses()[-1].tolist() == pytest.approx([7, 14, -7, 0, 0, half, half])
    trajectory.reset()
    assert (len(trajectory), trajectory.dropped) == (0, 0)
    trajectory.append(5, make_pose(1.0))
    assert trajectory.stamps_ns().tolist() == [5]


def test_poses_are_copies():
    trajectory = Trajectory(2)
    trajectory.append(1, make_pose(1.0))
    poses = trajectory.poses()
    poses[:] = 0
    assert trajectory.poses()[0, 0] == 1.0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="max_length"):
        Trajectory(0)
    trajectory = Trajectory(2)
    with pytest.raises(ValueError, match=r"\[4, 4\].*\[3, 3\]"):
        trajectory.append(0, np.eye(3))
    with pytest.raises(ValueError, match="not finite"):
        trajectory.append(0, make_pose(math.nan))
    assert len(trajectory) == 0


def test_tum_files_keep_every_digit(tmp_path):
    stamps = np.array([1_700_000_000_123_456_789, 5, 1_000_000_000, -1_500_000_000])
    poses = np.random.default_rng(0).normal(size=(4, 7)) / 3
    poses[0, 0], poses[1, 1] = 1e-17, 123456.789012345
    write_tum(tmp_path / "path.txt", stamps, poses)
    lines = (tmp_path / "path.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [
        "1700000000.123456789", "0.000000005", "1.000000000", "-1.500000000"
    ]
    assert all(len(line.split()) == 8 for line in lines)
    assert np.array_equal(np.loadtxt(tmp_path / "path.txt")[:, 1:], poses)


def test_an_empty_trajectory_gives_an_empty_file(tmp_path):
    trajectory = Trajectory(3)
    write_tum(tmp_path / "path.txt", trajectory.stamps_ns(), trajectory.poses())
    assert (tmp_path / "path.txt").read_bytes() == b""


def test_tum_refuses_what_would_lose_digits(tmp_path):
    with pytest.raises(ValueError, match="nanoseconds.*float64"):
        write_tum(tmp_path / "path.txt", np.array([1.5]), np.zeros((1, 7)))
    with pytest.raises(ValueError, match=r"\(2,\) and \(1, 7\)"):
        write_tum(tmp_path / "path.txt", np.array([1, 2]), np.zeros((1, 7)))
    assert list(tmp_path.iterdir()) == []
