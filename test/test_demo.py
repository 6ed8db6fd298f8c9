# SPDX-License-Identifier: Apache-2.0
"""The demo end to end, with the tiny model: three processes, real middleware, all files."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from ros_harness import REPOSITORY, TIMEOUT
from test_replay import write_images

from lingbot_map_ros.mapping.export import read_ply

TINY = ["-p", "preset:=tiny", "-p", "device:=cpu", "-p", "scale_frames:=3", "-p", "confidence_threshold:=1.0",
        "-p", "init_motion:=0.0", "-p", "jump_factor:=1e6"]  # every image gives a pose, as an untrained model has it


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / "demo.py"), *map(str, arguments)]


def demo(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=4 * TIMEOUT)


@pytest.fixture
def images(tmp_path):
    """Return a folder with ten images."""
    folder = tmp_path / "images"
    folder.mkdir()
    write_images(folder, 10)
    return folder


def test_demo_writes_everything(tmp_path, images):
    output = tmp_path / "output"
    done = demo(images, "--output", output, "--ros-args", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 poses" in done.stdout

    trajectory = np.loadtxt(output / "trajectory.txt")
    assert trajectory.shape == (10, 8) and np.isfinite(trajectory).all()
    np.testing.assert_allclose(trajectory[:, 0], np.arange(10) / 30, atol=1e-6)  # every image once, none dropped
    np.testing.assert_allclose(np.linalg.norm(trajectory[:, 4:], axis=1), 1, atol=1e-6)
    xyz, rgb, confidence = read_ply(output / "map.ply")
    assert len(xyz) > 100 and np.isfinite(xyz).all() and rgb.std() > 1 and (confidence >= 1).all()
    picture = cv2.imread(str(output / "topdown.png"))
    assert min(picture.shape[:2]) > 300 and picture.std() > 1
    diagnostics = json.loads((output / "diagnostics.json").read_text())
    assert diagnostics["run"]["poses"] == 10 and diagnostics["run"]["map_points"] == len(xyz)
    assert diagnostics["status"]["camera"]["values"]["frames_processed"] == 10
    assert diagnostics["status"]["camera"]["values"]["frames_dropped"] == 0


def test_rendered_place_is_mapped_in_real_time_and_compared_with_the_truth(tmp_path):
    output = tmp_path / "output"
    done = demo("--seed", 3, "--frames", 24, "--rate", 4, "--output", output, "--ros-args", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("ATE ", " m, ", " % of a path of ", "degrees a frame", "final heading", "depth AbsRel", "frames/s",
                  "ms (median)", "pages live"):
        assert words in done.stdout
    report = json.loads((output / "diagnostics.json").read_text())
    truth = np.loadtxt(output / "ground_truth.txt")
    assert report["place"] == {"kind": "room", "seed": 3, "frames": 24} and 12 <= len(truth) <= 24
    trajectory = report["trajectory"]
    assert 12 <= trajectory["matched_poses"] == report["run"]["poses"] <= 24
    steps = np.linalg.norm(np.diff(truth[:, 1:4], axis=0), axis=1)
    assert 0.5 * steps.sum() < trajectory["path_length"] <= steps.sum() + 1e-6
    # An untrained model: the errors are there, and are large.
    ate = trajectory["ate"]["translation"]
    assert ate["rmse_percent_of_path"] == pytest.approx(100 * ate["rmse"] / trajectory["path_length"])
    assert 1 < ate["rmse_percent_of_path"] < 100 and trajectory["rpe_one_pose"]["rotation_degrees"]["mean"] > 0.1
    assert 5 < report["depth"]["frames"] <= report["run"]["poses"]
    assert 0.05 < report["depth"]["abs_rel"] < 10 and 0 < report["depth"]["delta_1"] < 1
    assert 0 < report["depth"]["coverage"] <= 1
    assert 0 < report["latency_ms"]["median"] <= report["latency_ms"]["p95"] <= report["latency_ms"]["max"]
    assert report["run"]["poses_per_second"] > 0.5
    assert report["camera"]["camera"]["values"]["published"] == 24
    picture = cv2.imread(str(output / "topdown.png"))
    assert picture.shape[1] > 1.4 * picture.shape[0] > 400 and picture.std() > 1


def test_node_that_cannot_start_is_named(tmp_path, images):
    done = demo(images, "--output", tmp_path / "output", "--ros-args", "-p", "preset:=none_such")
    assert done.returncode == 1
    assert "demo: the node ended with status 1:" in done.stderr and "none_such" in done.stderr
    assert not (tmp_path / "output" / "map.ply").exists()


def test_sequence_without_poses_is_a_failure(tmp_path, images):
    """Ten images do not fill the scale frames, so no pose comes."""
    tiny = [word.replace("scale_frames:=3", "scale_frames:=32") for word in TINY]
    done = demo(images, "--output", tmp_path / "output", "--ros-args", *tiny)
    assert done.returncode == 1
    assert "0 poses came" in done.stderr


def test_bad_folder_is_status_2(tmp_path):
    done = demo(tmp_path / "none_such", "--output", tmp_path / "output")
    assert done.returncode == 2
    assert "does not exist" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["node", "replay", "synthetic_camera"])
def test_a_signal_ends_all_processes(tmp_path, images, number, module):
    """It comes as soon as the process is there, when the demo may still be starting the other."""
    source = [] if module == "synthetic_camera" else [images]
    process = subprocess.Popen(command(*source, "--output", tmp_path / "output", "--ros-args", *TINY),
                               stderr=subprocess.PIPE, env={**os.environ, "LINGBOT_TEST": str(tmp_path)})

    def children(module: str) -> list[str]:
        """Return the command lines of the demo's processes, also of those that have lost their parent."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_mine = f"LINGBOT_TEST={tmp_path}".encode() in (path.parent / "environ").read_bytes()
            except OSError:  # it has ended
                continue
            if is_mine and f"lingbot_map_ros.ros.{module}" in line:
                lines.append(line)
        return lines

    end = time.monotonic() + TIMEOUT
    while not children(module) and time.monotonic() < end:
        pass
    assert children(module)
    process.send_signal(number)
    assert process.wait(2 * TIMEOUT) == 130
    assert not any(children(module) for module in ("node", "replay", "synthetic_camera"))
