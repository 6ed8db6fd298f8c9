# SPDX-License-Identifier: Apache-2.0
"""The demo end to end, with the tiny model: three processes, real middleware, all files."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from ros_harness import REPOSITORY, TIMEOUT

from lingbot_map_ros.mapping.export import read_ply

ROOM = REPOSITORY / "scripts" / "demo_room"
TINY = ["-p", "preset:=tiny", "-p", "device:=cpu", "-p", "scale_frames:=3", "-p", "confidence_threshold:=1.0",
        "-p", "init_motion:=0.0", "-p", "jump_factor:=1e6"]  # every image gives a pose, as an untrained model has it


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / "demo.py"), *map(str, arguments)]


def demo(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=4 * TIMEOUT)


@pytest.fixture
def images(tmp_path):
    """Return a folder with the first images of the room that comes with the project."""
    folder = tmp_path / "images"
    folder.mkdir()
    for path in sorted(ROOM.glob("*.jpg"))[:10]:
        shutil.copy(path, folder)
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
@pytest.mark.parametrize("module", ["node", "replay"])
def test_a_signal_ends_all_processes(tmp_path, images, number, module):
    """It comes as soon as the process is there, when the demo may still be starting the other."""
    marker = str(tmp_path)
    process = subprocess.Popen(command(images, "--output", tmp_path / "output", "--ros-args", *TINY,
                                       "-p", f"map_frame:={marker}"), stderr=subprocess.PIPE)

    def children(module: str) -> list[str]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it has ended
                pass
        return [line for line in lines if marker in line and f"lingbot_map_ros.ros.{module}" in line]

    end = time.monotonic() + TIMEOUT
    while not children(module) and time.monotonic() < end:
        pass
    assert children(module)
    process.send_signal(number)
    assert process.wait(2 * TIMEOUT) == 130
    assert not children("node") and not children("replay")


def test_room_is_there():
    shapes = {cv2.imread(str(path)).shape for path in ROOM.glob("*.jpg")}
    assert shapes == {(224, 308, 3)}
    assert sum(path.stat().st_size for path in ROOM.iterdir()) < 1_500_000
