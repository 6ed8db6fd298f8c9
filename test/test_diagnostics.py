# SPDX-License-Identifier: Apache-2.0
"""Levels and reasons of the diagnostic statuses."""
from __future__ import annotations

import pytest
from diagnostic_msgs.msg import DiagnosticStatus

from lingbot_map_ros.ros import diagnostics
from lingbot_map_ros.ros.diagnostics import Counts, Interval, Monitor, TrackingReport


def camera(**changes) -> DiagnosticStatus:
    arguments = {
        "node": "robot1/node", "part": "camera", "topic": "/robot1/image", "active": True, "publishers": 1,
        "silence": 0.1, "repeats": 0, "timeout": 3.0, "dropped": 3, "image_size": (480, 640),
        "counts": Counts(received=9, processed=5, failed=1),
        "interval": Interval(seconds=2.0, received=8),
    }
    return diagnostics.camera_status(**{**arguments, **changes})


def model(**changes) -> DiagnosticStatus:
    arguments = {"node": "node", "hardware": "cpu", "state": "active", "load_error": "", "progress": "",
                 "values": {"device": "cpu"}, "interval": Interval(seconds=1.0)}
    return diagnostics.model_status(**{**arguments, **changes})


def values(status: DiagnosticStatus) -> dict[str, str]:
    return {entry.key: entry.value for entry in status.values}


def test_camera_that_works():
    status = camera()
    assert (status.name, status.hardware_id) == ("robot1/node: camera", "/robot1/image")
    assert status.level == DiagnosticStatus.OK
    assert status.message == "4.0 images/s"
    assert values(status) == {
        "topic": "/robot1/image", "publishers": "1", "image_width": "640", "image_height": "480",
        "images_per_second": "4.00", "frames_received": "9", "frames_processed": "5", "frames_dropped": "3",
        "frames_failed": "1", "mapped_per_second": "0.00", "duplicate_stamps": "0",
        "late_images": "0", "skipped_images": "0", "stamp_gaps": "0", "stamps_back": "0",
    }


@pytest.mark.parametrize(("changes", "level", "words"), [
    ({"silence": 12.0, "publishers": 0}, DiagnosticStatus.WARN, ("/robot1/image", "12 s", "0 publishers")),
    ({"silence": 12.0}, DiagnosticStatus.WARN, ("1 publisher",)),
    ({"repeats": 60}, DiagnosticStatus.WARN, ("60 images in a row", "same header.stamp")),
    ({"interval": Interval(seconds=1.0, camera_error="step is 3")}, DiagnosticStatus.ERROR, ("step is 3",)),
    ({"active": False, "silence": 99.0}, DiagnosticStatus.OK, ("not active",)),
])
def test_camera_in_trouble(changes, level, words):
    status = camera(**changes)
    assert status.level == level and all(word in status.message for word in words)


def test_cache_beyond_the_trained_range():
    good = diagnostics.cache_status("node", "cache", "cpu", {"frame_count": 64, "map_points": 7}, 64)
    bad = diagnostics.cache_status("node", "cache", "cpu", {"frame_count": 65, "map_points": 7}, 64)
    assert (good.level, bad.level) == (DiagnosticStatus.OK, DiagnosticStatus.WARN)
    assert "65" in bad.message and "64" in bad.message and values(bad) == {"frame_count": "65", "map_points": "7"}
    assert diagnostics.cache_status("node", "cache", "auto", None, 0).message == "no model is loaded"
    small = {"frame_count": 6, "map_points": 7, "window_problem": "too few"}
    less = diagnostics.cache_status("node", "cache", "cpu", small, 64)
    assert (less.level, less.message) == (DiagnosticStatus.WARN, "too few")


@pytest.mark.parametrize(("changes", "level", "message"), [
    ({"interval": Interval(seconds=2.0, latencies=[0.1, 0.3])}, DiagnosticStatus.OK, "1.0 frames/s"),
    ({"state": "loading"}, DiagnosticStatus.OK, "loading"),
    ({"state": "loading", "progress": "compiling"}, DiagnosticStatus.OK, "loading: compiling"),
    ({"state": "active", "progress": "compiling"}, DiagnosticStatus.OK, "0.0 frames/s"),
    ({"state": "unconfigured", "load_error": "no file"}, DiagnosticStatus.ERROR, "no file"),
    ({"interval": Interval(seconds=1.0, model_error="out of memory")}, DiagnosticStatus.ERROR, "out of memory"),
    ({"stall": 5.2, "timeout": 3.0}, DiagnosticStatus.WARN, "no image was processed for 5 s although images arrive"),
    ({"stall": 2.9, "timeout": 3.0}, DiagnosticStatus.OK, "0.0 frames/s"),
    ({"stall": 5.2, "timeout": 3.0, "state": "inactive"}, DiagnosticStatus.OK, "inactive"),
    ({"interval": Interval(seconds=1.0, rejected=3)}, DiagnosticStatus.WARN,
     "3 poses were not plausible and were withheld"),
])
def test_model_levels(changes, level, message):
    status = model(**changes)
    assert (status.level, status.message) == (level, message)


def test_model_latency():
    shown = values(model(interval=Interval(seconds=2.0, latencies=[0.1, 0.3])))
    assert (shown["latency_mean_ms"], shown["latency_max_ms"], shown["frames_per_second"]) == ("200.0", "300.0", "1.00")
    assert shown["device"] == "cpu"


def test_report_empties_the_interval_and_keeps_the_totals():
    monitor = Monitor()
    monitor.image_received()
    monitor.image_received()
    monitor.image_processed(0.2, poses=3, rejected=1)
    monitor.image_failed("bad step", in_model=False)
    monitor.count("sequences")
    monitor.handed_over({"scale": 1.0}, problem="", seconds=0.5)
    monitor.handed_over({"scale": 2.0}, problem="too dark", seconds=0.25)
    counts, interval = monitor.report()
    assert counts == Counts(received=2, processed=1, failed=1, poses=3, rejected=1, sequences=1, hand_overs=2,
                            hand_over_problems=1)
    assert (interval.received, interval.latencies, interval.camera_error) == (2, [0.2], "bad step")
    assert interval.rejected == 1 and interval.seconds > 0
    assert monitor.hand_over == {"scale": 2.0, "seconds_max": "0.5000"}
    counts, interval = monitor.report()
    assert counts.received == 2 and (interval.received, interval.latencies, interval.camera_error) == (0, [], "")


def test_latencies_are_bounded_where_nobody_asks():
    monitor = Monitor()
    for _ in range(10_001):
        monitor.image_processed(0.0, 1, 0)
    assert len(monitor.report()[1].latencies) == 10_000


@pytest.mark.parametrize(("state", "reasons", "level"), [
    ("INITIALIZING", (), DiagnosticStatus.OK),
    ("INITIALIZING", ("no image",), DiagnosticStatus.WARN),
    ("TRACKING", (), DiagnosticStatus.OK),
    ("DEGRADED", ("dark", "far"), DiagnosticStatus.WARN),
    ("LOST", ("far",), DiagnosticStatus.ERROR),
])
def test_tracking_levels(state, reasons, level):
    status = diagnostics.tracking_status("node", "tracking", "/image", TrackingReport(state, reasons, 2, 90))
    assert (status.name, status.level, status.message) == ("node: tracking", level, state)
    assert values(status) == {"reasons": "; ".join(reasons), "window": "2", "frame": "90"}


def test_the_last_hand_over_is_shown_with_the_counts():
    shown = diagnostics.tracking_values(Counts(hand_overs=3, lost=1), {"scale": "1.5"})
    assert (shown["hand_overs"], shown["times_lost"], shown["hand_over_scale"]) == (3, 1, "1.5")


def test_silence_is_measured_from_the_last_image_or_activation(monkeypatch):
    now = 100.0
    monkeypatch.setattr(diagnostics.time, "monotonic", lambda: now)
    monitor = Monitor()
    monitor.activated()
    now = 103.0
    assert monitor.silence == 3.0
    monitor.image_received()
    now = 104.0
    assert monitor.silence == 1.0
    monitor.image_dropped("duplicates")
    assert monitor.silence == 0.0


def test_a_stall_is_measured_from_the_first_image_that_waits(monkeypatch):
    now = 100.0
    monkeypatch.setattr(diagnostics.time, "monotonic", lambda: now)
    monitor = Monitor()
    monitor.activated()
    now = 200.0
    assert monitor.stall == 0.0  # nothing to process
    monitor.image_received()
    now = 204.0
    monitor.image_failed("unreadable", in_model=False)
    monitor.image_received()
    assert monitor.stall == 4.0
    monitor.image_processed(0.1, 1, 0)
    now = 210.0
    assert monitor.stall == 0.0
    monitor.image_dropped("duplicates")
    now = 213.0
    assert monitor.stall == 3.0
    monitor.activated()
    assert monitor.stall == 0.0


def test_images_of_one_stamp_are_counted_in_a_row():
    monitor = Monitor()
    for _ in range(12):
        monitor.image_dropped("duplicates")
    assert monitor.repeats == 12
    monitor.image_received()
    monitor.image_dropped("duplicates")
    monitor.image_dropped("late")
    assert monitor.repeats == 0 and (monitor.counts.duplicates, monitor.counts.late) == (13, 1)
