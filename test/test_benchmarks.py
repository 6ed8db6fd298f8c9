# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and their figures belong together; how large these are is for the benchmarks to say."""
import json
import os
import subprocess
import sys

import pytest
from ros_harness import REPOSITORY

REFERENCE = """
import torch
from lingbot_map_ros.gct import build_model

def make_step(image_size, scale_frames, sliding_window, device, dtype):
    calls = []
    def step(image):
        calls.append(image.shape)
        assert image.shape == (3, *image_size) and (scale_frames, sliding_window) == (3, 4)
        return torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    return step
"""


def run(script: str, *arguments: str, path: str = "") -> str:
    """Return what a benchmark prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(REPOSITORY / "benchmarks" / script), *arguments], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_frame_by_stage_beside_a_reference(tmp_path):
    (tmp_path / "other.py").write_text(REFERENCE)
    text = run("frame.py", "--preset", "tiny", "--frames", "210", "--threads", "1", "--reference", "other:make_step",
               "--json", str(tmp_path / "report.json"), path=str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    stages = report["stages"]
    assert {"prepare", "model", "patch embedding", "frame blocks", "attention over the cache", "camera head",
            "rest of the global blocks", "depth head", "map"} <= set(stages)
    for figures in (*stages.values(), report["frame"], report["reference"]):
        assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"]
    parts = sum(figures.get("gflop", 0) for stage, figures in stages.items() if stage != "model")
    assert report["frame"]["gflop"] == pytest.approx(parts) == stages["model"]["gflop"] and parts > 0
    assert all(0 < figures["share_of_rate"] for figures in stages.values() if "gflop" in figures)
    assert list(report["at_frame_ms"]) == ["200"] and report["rss_bytes"] > 1e7
    assert report["times_as_fast"] == pytest.approx(report["reference"]["p50_ms"] / report["frame"]["p50_ms"])
    assert "| attention over the cache |" in text and "other:make_step" in text


def test_images_through_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(1 + (int(os.environ["ROS_DOMAIN_ID"]) + 50) % 101))  # alone with its node
    run("node.py", "--rate", "10", "--seconds", "2", "--warm-up", "1", "--cameras", "2", "--json",
        str(tmp_path / "report.json"), "--parameters", "preset:=tiny", "device:=cpu", "init_motion:=0.0")
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0 < report["poses"] <= report["sent"] == 40
    assert 0 < report["p50_ms"] <= report["p90_ms"] <= report["p99_ms"] < 60_000 and report["node_mean_ms"] > 0


@pytest.mark.parametrize("script", ["cache.py", "model.py", "window.py", "synthetic.py"])
def test_benchmarks_start(script):
    assert "usage" in run(script, "--help")
