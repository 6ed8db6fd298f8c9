# SPDX-License-Identifier: Apache-2.0
"""When poses are believed, and when not."""
import re

import numpy as np
import pytest
import torch

from lingbot_map_ros.mapping.prediction import Prediction, figures_of
from lingbot_map_ros.mapping.tracking import Tracker, TrackingState


def prediction(x=0.0, yaw=0.0, depth=2.0, confidence=1.5):
    T = torch.eye(4)
    T[0, 3] = x
    T[0, 0] = T[2, 2] = float(np.cos(yaw))
    T[0, 2], T[2, 0] = float(np.sin(yaw)), -float(np.sin(yaw))
    return Prediction(
        is_keyframe=True, pose_encoding=torch.zeros(9), T_world_camera=T, intrinsics=torch.eye(3),
        depth=torch.full((4, 5), depth), confidence=torch.full((4, 5), confidence))


def figures(**changes):
    return figures_of(prediction(**changes))


@pytest.fixture
def tracker():
    tracker = Tracker(lost_after=3)
    assert tracker.tracking.state is TrackingState.INITIALIZING
    for i in range(10):
        assert tracker.judge(figures(x=0.05 * i))
        assert tracker.tracking.state is TrackingState.TRACKING and not tracker.tracking.reasons
    return tracker


def broken(kind):
    bad = prediction(x=0.5)
    if kind == "nan":
        bad.T_world_camera[1, 3] = float("nan")
    elif kind == "depth":
        bad.depth.fill_(float("inf"))
    elif kind == "intrinsics":
        bad.intrinsics[0, 0] = float("nan")
    elif kind == "confidence":
        bad.confidence.fill_(float("nan"))
    elif kind == "mirror":
        bad.T_world_camera[0, 0] = -1
    elif kind == "far":
        bad.T_world_camera[0, 3] = 1e27
    elif kind == "jump":
        bad.T_world_camera[0, 3] = 5.0
    else:
        bad = prediction(x=0.5, yaw=2.0)
    return figures_of(bad)


@pytest.mark.parametrize(("kind", "words"), [
    ("nan", "not finite: pose"), ("depth", "not finite: depth"), ("intrinsics", "not finite: intrinsics"),
    ("confidence", "not finite: confidence"), ("mirror", "rigid"), ("far", "1e\\+27 units from the origin"),
    ("jump", "jumped by 4.55 units, its usual step is 0.05"), ("turn", "turned by 115 degrees"),
])  # fmt: skip
def test_an_implausible_frame_degrades_and_several_lose(tracker, kind, words):
    for count in range(1, 6):
        assert not tracker.judge(broken(kind))
        assert tracker.tracking.state is (TrackingState.LOST if count >= 3 else TrackingState.DEGRADED)
        assert len(tracker.tracking.reasons) == 1
        assert re.search(words, tracker.tracking.reasons[0])
    assert not tracker.judge(figures(x=0.5)), "a lost track stays lost until it is anchored anew"
    tracker.relocated()
    assert tracker.tracking.state is TrackingState.DEGRADED
    assert tracker.judge(figures(x=3.0))
    assert tracker.tracking.state is TrackingState.TRACKING


def test_one_bad_frame_is_left_out_and_tracking_goes_on(tracker):
    assert not tracker.judge(broken("jump"))
    assert tracker.judge(figures(x=0.55))
    assert tracker.tracking.state is TrackingState.TRACKING


def test_a_drop_of_confidence_degrades_but_poses_are_used(tracker):
    for i in range(50):  # a lasting drop does not become the usual
        assert tracker.judge(figures(x=0.5 + 0.05 * i, confidence=1.1))
        assert tracker.tracking.state is TrackingState.DEGRADED
    assert "confidence fell to 1.100, usual is 1.500" in tracker.tracking.reasons[0]
    assert tracker.judge(figures(x=3.0))
    assert tracker.tracking.state is TrackingState.TRACKING


def test_a_model_that_is_never_sure_tells_nothing_by_being_unsure():
    tracker = Tracker()
    for i in range(40):
        assert tracker.judge(figures(x=0.05 * i, confidence=1.05 if i < 20 else 1.001))
        assert tracker.tracking.state is TrackingState.TRACKING


def test_a_fast_camera_in_a_large_scene_is_no_jump(tracker):
    assert tracker.judge(figures(x=1.2, depth=2.0))  # 15 times the usual step, less than half of the depth


def test_a_camera_that_starts_from_rest_is_no_jump():
    tracker = Tracker()
    for _ in range(30):
        tracker.judge(figures(x=0.0))
    for i in range(5):
        assert tracker.judge(figures(x=0.3 * i)), tracker.tracking


def test_further_reasons_degrade(tracker):
    assert tracker.judge(figures(x=0.5), also=("the scale frames lacked motion",))
    assert tracker.tracking.state is TrackingState.DEGRADED
    assert tracker.tracking.reasons == ("the scale frames lacked motion",)
    tracker.reset()
    assert tracker.tracking.state is TrackingState.INITIALIZING
