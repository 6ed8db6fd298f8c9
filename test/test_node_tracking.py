# SPDX-License-Identifier: Apache-2.0
"""Tracking, windows and keyframes through the node: states, events, recovery, standing still, changes while running."""
from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Log
from ros_harness import (
    LATCHED, SCALE_FRAMES, TIMEOUT, Feed, image_message, private, stamp_of, stamps, statuses, values,
    wait_until,
)
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header
from std_srvs.srv import Trigger

from lingbot_map_ros.synthetic import intrinsics_from_fov, make_place, render


def kinds(events) -> list[str]:
    return [event.name.rsplit(": ", 1)[1] for event in events]


def states(messages) -> list[str]:
    """Return the states in their order, without repetitions."""
    found = [message.message for message in messages]
    return [state for state, before in zip(found, [None, *found]) if state != before]


class Astray:
    """Makes a node's model predict poses that are no numbers, while it is on, once a window has kept some frames."""

    def __init__(self, node, monkeypatch, after: int) -> None:
        self.on = False
        step = node.channels[0].mapper.model.step

        def astray(images, state, keep=True):
            is_bad = self.on and len(images) == 1 and state.num_kept >= after
            output = step(images, state, keep)
            return replace(output, T_world_camera=output.T_world_camera * float("nan")) if is_bad else output

        monkeypatch.setattr(node.channels[0].mapper.model, "step", astray)


def test_a_hand_over_is_an_event_and_on_diagnostics(ros, make_node):
    node = make_node(window_size=12, overlap_keyframes=4, diagnostics_period=0.1, jump_factor=1e6, path_period=0.0)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    paths = ros.listen(Path, private(node, "path"))
    Feed(ros, node).images(0, 30)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)  # late, and yet it gets them all
    wait_until(lambda: kinds(events) == ["sequence", "hand_over", "hand_over", "hand_over"], "three hand-overs")
    assert [values(event)["window"] for event in events[1:]] == ["1", "2", "3"]
    assert [values(event)["frame"] for event in events[1:]] == ["12", "20", "28"]
    for event in events[1:]:
        figures = values(event)
        assert float(figures["scale"]) > 0 and float(figures["translation_jump"]) >= 0
        assert float(figures["rotation_jump"]) >= 0 and float(figures["seconds"]) > 0
        assert (event.level == DiagnosticStatus.WARN) == bool(figures["problem"])
    wait_until(lambda: values(statuses(reports, node)["tracking"]).get("hand_overs") == "3", "three on /diagnostics")
    shown = values(statuses(reports, node)["tracking"])
    assert shown["hand_over_seconds_max"] == max((values(event)["seconds"] for event in events[1:]), key=float)
    assert {name: shown[f"hand_over_{name}"] for name in values(events[-1])} == values(events[-1])
    assert values(statuses(reports, node)["cache"])["window"] == "3"
    wait_until(lambda: paths and len(paths[-1].poses) == 30, "one path through all windows")
    assert node.channels[0].monitor.counts.poses == 30 and node.channels[0].monitor.counts.sequences == 1


def test_a_lost_track_gives_no_poses_and_is_anchored_anew(ros, make_node, monkeypatch):
    node = make_node(window_size=40, overlap_keyframes=4, lost_after=3, jump_factor=1e6, path_period=0.0)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    paths = ros.listen(Path, private(node, "path"))
    feed, model = Feed(ros, node), Astray(node, monkeypatch, after=11)
    feed.images(0, 12)
    mapped = len(node.channels[0].mapper.map.voxels)
    wait_until(lambda: tracking and tracking[-1].message == "TRACKING", "tracking")
    model.on = True
    feed.images(12, 15)
    assert node.channels[0].mapper.session.window_index == 1 and len(node.channels[0].mapper.map.voxels) == mapped
    feed.images(15, 18)
    wait_until(lambda: states(tracking) == ["INITIALIZING", "TRACKING", "DEGRADED", "LOST", "DEGRADED", "TRACKING"],
               "tracking again")
    lost = next(message for message in tracking if message.message == "LOST")
    assert lost.level == DiagnosticStatus.ERROR and "not finite" in values(lost)["reasons"]
    wait_until(lambda: kinds(events) == ["sequence", "lost", "relocated"], "events")
    wait_until(lambda: len(odometry) == 15, "the poses before and after")
    assert stamps(odometry) == [stamp_of(index) for index in (*range(12), 15, 16, 17)]
    wait_until(lambda: paths and len(paths[-1].poses) == 15, "one path")
    counts = node.channels[0].monitor.counts
    assert (counts.rejected, counts.lost, counts.relocations, counts.sequences) == (3, 1, 1, 1)


@pytest.mark.parametrize("options", [{"reset_when_lost": True, "window_size": 40}, {"windowed": False}])
def test_a_lost_track_starts_a_new_sequence_if_asked_to_or_if_nothing_else_helps(ros, make_node, monkeypatch, options):
    node = make_node(lost_after=2, jump_factor=1e6, path_period=0.0, **options)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    paths = ros.listen(Path, private(node, "path"))
    feed, model = Feed(ros, node), Astray(node, monkeypatch, after=6)
    feed.images(0, 8)
    model.on = True
    feed.images(8, 10)
    model.on = False
    feed.images(10, 14)
    wait_until(lambda: kinds(events) == ["sequence", "lost", "sequence"], "a new sequence")
    assert "tracking was lost" in values(events[-1])["reason"]
    wait_until(lambda: paths and stamps(paths[-1].poses) == [stamp_of(index) for index in range(10, 14)], "its path")
    assert node.channels[0].monitor.counts.relocations == 0


def test_a_track_that_stays_lost_is_given_up(ros, make_node, monkeypatch):
    node = make_node(window_size=40, lost_after=1)
    feed, model = Feed(ros, node), Astray(node, monkeypatch, after=0)
    feed.images(0, 10)
    poses = node.channels[0].monitor.counts.poses
    model.on = True
    for index in range(10, 40):
        feed.images(index, index + 1)
        if node.channels[0].monitor.counts.lost == 4:
            break
    channel = node.channels[0]
    assert channel.monitor.counts.relocations == 3
    assert channel.mapper.session.frame_count == 0  # the fourth time: a reset
    assert index - 10 == 3 * 5  # some frames from one attempt to the next
    assert node.channels[0].monitor.counts.poses == poses
    model.on = False
    feed.images(40, 40 + SCALE_FRAMES)
    assert node.channels[0].monitor.counts.poses == poses + SCALE_FRAMES


def test_tracking_state_is_latched_and_degraded_by_silence(ros, make_node):
    node = make_node(jump_factor=1e6, image_timeout=0.5)
    feed = Feed(ros, node)
    feed.images(0, 2)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    wait_until(lambda: tracking and tracking[-1].message == "INITIALIZING", "INITIALIZING for who comes late")
    feed.images(2, 5)
    wait_until(lambda: "TRACKING" in states(tracking), "TRACKING")
    wait_until(lambda: tracking[-1].message == "DEGRADED", "DEGRADED")
    assert node.resolve_topic_name("image") in values(tracking[-1])["reasons"]
    assert tracking[-1].level == DiagnosticStatus.WARN
    feed.images(5, 6)
    wait_until(lambda: any(message.message == "TRACKING" for message in list(tracking)[-2:]), "TRACKING again")
    node.trigger_deactivate()
    wait_until(lambda: "not active" in values(tracking[-1])["reasons"], "a paused node")


def test_a_standing_camera_adds_no_keyframes(ros, make_node):
    """Stand, drive, stand in a rendered room with the embedded model."""
    place = make_place(0, frames=120)
    views, _ = render(place, place.T_world_camera[:40], intrinsics_from_fov(torch.tensor(1.3), (112, 154)), (112, 154))
    views = (views * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    node = make_node(preset="default", keyframe_policy="motion", init_motion=0.01, max_init_wait=2.0, window_size=14,
                     overlap_keyframes=4, scale_frames=4)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    feed = Feed(ros, node)
    sent = 0

    def send(*numbers: int) -> None:
        nonlocal sent
        for number in numbers:
            feed.send(image_message(sent, size=(112, 154), data=views[number].tobytes()))
            sent += 1

    def keyframes() -> int:
        return node.channels[0].mapper.session.cache_stats()["frame_count"]

    send(*[0] * 20)
    assert node.channels[0].monitor.counts.poses == 0
    send(0)  # 2 s after the first
    wait_until(lambda: tracking and tracking[-1].message == "DEGRADED", "DEGRADED for want of motion")
    assert "hardly moved" in values(tracking[-1])["reasons"]
    send(*[0] * 20)
    standing = keyframes()
    assert standing <= 3  # those that had to do as scale frames, and the first one after them
    assert node.channels[0].monitor.counts.hand_overs == 0
    send(*range(1, 40))
    driven = node.channels[0].monitor.counts.hand_overs
    assert driven >= 1 and keyframes() >= 5
    wait_until(lambda: tracking[-1].message == "TRACKING", "a window that began in motion")
    before = keyframes()
    send(*[39] * 40)
    assert keyframes() - before <= 1 and node.channels[0].monitor.counts.hand_overs == driven
    assert node.channels[0].monitor.counts.poses == sent - 19 and node.channels[0].monitor.counts.sequences == 1


def test_the_window_changes_while_the_node_runs(ros, make_node):
    node = make_node(max_sliding_window=8, diagnostics_period=0.1)
    name = node.get_fully_qualified_name()
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    feed = Feed(ros, node)
    feed.images(0, 12)
    sequence_bytes = node.channels[0].mapper.session.memory_bytes

    def cache(key: str) -> str:
        return values(statuses(reports, node)["cache"])[key] if "cache" in statuses(reports, node) else ""

    wait_until(lambda: (cache("sliding_window"), cache("live_pages")) == ("4", "4"), "the model's own window")
    assert ros.set_parameter(name, "sliding_window", 2).successful
    wait_until(lambda: (cache("sliding_window"), cache("live_pages"), cache("resizes")) == ("2", "2", "1"),
               "a smaller one")
    assert ros.set_parameter(name, "sliding_window", 8).successful
    feed.images(12, 20)
    wait_until(lambda: cache("live_pages") == "8", "a larger one, filled")
    refused = ros.set_parameter(name, "sliding_window", 9)
    assert not refused.successful and "max_sliding_window" in refused.reason
    assert ros.set_parameter(name, "sliding_window", 0).successful  # the model's own again
    for parameter, value in (("keyframe_policy", "motion"), ("flow_threshold", 500.0), ("window_size", 30),
                             ("windowed", False), ("remembered_frames", 20)):
        assert ros.set_parameter(name, parameter, value).successful
    names = ("sliding_window", "flow_threshold", "window_size", "remembered_frames")
    wait_until(lambda: [cache(key) for key in names] == ["4", "500.0", "0", "20"], "the changes")
    kept = int(cache("frame_count"))
    feed.images(20, 26)
    assert node.channels[0].mapper.session.cache_stats()["frame_count"] == kept  # the image does not move by 500 pixels

    def told() -> dict[str, str]:
        """What the events say of the window in the end: changes that come together may share an event."""
        return {key: value for event in events if kinds([event]) == ["resized"] for key, value in values(event).items()}

    wait_until(lambda: told() == {"sliding_window": "4", "flow_threshold": "500.0", "window_size": "0",
                                  "remembered_frames": "20"}, "events that tell of all changes")
    assert values(next(event for event in events if kinds([event]) == ["resized"])) == {"sliding_window": "2"}
    assert node.channels[0].monitor.counts.poses == 26 and node.channels[0].monitor.counts.sequences == 1
    assert node.channels[0].mapper.session.memory_bytes == sequence_bytes


def test_a_memory_budget_chooses_the_window(ros, make_node):
    node = make_node(cache_memory_mib=4)
    own = node.channels[0].mapper.session.config
    assert own.sliding_window == own.max_sliding_window > 4
    assert node.channels[0].mapper.session.memory_bytes <= 4 << 20
    Feed(ros, node).images(0, SCALE_FRAMES, size=(32, 64))  # smaller images: more of them fit
    larger = node.channels[0].mapper.session.config
    assert larger.sliding_window > own.sliding_window
    own = larger
    name = node.get_fully_qualified_name()
    assert ros.set_parameter(name, "sliding_window", 5).successful
    wait_until(lambda: node.channels[0].mapper.session.config.sliding_window == 5, "the smaller window")
    assert ros.set_parameter(name, "sliding_window", 0).successful
    wait_until(lambda: node.channels[0].mapper.session.config.sliding_window == own.sliding_window, "what fits again")
    assert not ros.set_parameter(name, "sliding_window", own.sliding_window + 1).successful


def test_points_on_the_topic_are_those_in_the_map(ros, make_node, monkeypatch):
    from lingbot_map_ros.mapping import map_builder

    calls = []
    frame_points = map_builder.frame_points
    monkeypatch.setattr(map_builder, "frame_points", lambda *args: calls.append(args) or frame_points(*args))
    node = make_node()
    calls.clear()  # of what warmed it up
    clouds = ros.listen(PointCloud2, private(node, "points"))
    Feed(ros, node).images(0, 5)
    wait_until(lambda: len(clouds) == 5, "clouds")
    assert len(calls) == 5  # once a keyframe, for both


def test_a_scale_that_cannot_be_measured_degrades_the_window(ros, make_node, monkeypatch):
    from lingbot_map_ros.mapping import hand_over

    monkeypatch.setattr(hand_over, "MIN_RATIOS", 10**9)
    node = make_node(window_size=12, overlap_keyframes=4, jump_factor=1e6, diagnostics_period=0.1)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    feed = Feed(ros, node)
    feed.images(0, 14)
    wait_until(lambda: "TRACKING" in states(tracking) and tracking[-1].message == "DEGRADED", "DEGRADED")
    assert "pixels of the shared keyframes" in values(tracking[-1])["reasons"]
    wait_until(lambda: kinds(events)[-1:] == ["hand_over"], "the event")
    assert events[-1].level == DiagnosticStatus.WARN and values(events[-1])["problem"]
    wait_until(lambda: values(statuses(reports, node)["tracking"]).get("hand_over_problems") == "1", "a count")
    monkeypatch.undo()
    feed.images(14, 24)
    wait_until(lambda: tracking[-1].message == "TRACKING", "a window with a scale of its own")
    assert node.channels[0].monitor.counts.poses == 24


def test_a_reset_that_lacks_memory_goes_on_with_the_old_map(ros, make_node, monkeypatch):
    from lingbot_map_ros.ros import mapper

    node = make_node()
    name, feed = node.get_fully_qualified_name(), Feed(ros, node)
    feed.images(0, 5)
    build = mapper.MapBuilder

    def lacking(max_points, *args, **options):
        if max_points == 30_000:
            raise RuntimeError("out of memory")
        return build(max_points, *args, **options)

    monkeypatch.setattr(mapper, "MapBuilder", lacking)
    assert ros.set_parameter(name, "max_map_points", 30_000).successful
    answer = ros.call(Trigger, private(node, "reset"))
    assert answer.success and "the map stays at 20000 points: out of memory" in answer.message
    assert len(node.channels[0].mapper.map.voxels) == len(node.channels[0].mapper.path) == 0
    feed.images(5, 10)
    assert node.channels[0].monitor.counts.poses == 10 and node.channels[0].monitor.counts.failed == 0
    assert ros.set_parameter(name, "max_map_points", 40_000).successful
    assert ros.call(Trigger, private(node, "reset")).message == "a new sequence starts at the next image"
    assert node.channels[0].mapper.map.voxels.max_points == 40_000

    monkeypatch.setattr(mapper, "free_bytes", lambda device: 10 << 20)
    refused = ros.set_parameter(name, "max_map_points", 1_000_000)
    assert not refused.successful and "10 MiB are free" in refused.reason
    assert ros.set_parameter(name, "publish_tf", False).successful


def test_a_window_that_cannot_be_had_does_not_keep_the_old_map(ros, make_node):
    node = make_node()
    feed = Feed(ros, node)
    feed.images(0, 5)
    # As if it had passed the check.
    node._parameters_in_force = node._parameters_in_force.changed({"sliding_window": 30})
    answer = ros.call(Trigger, private(node, "reset"))
    assert answer.success and "max_sliding_window" in answer.message
    assert len(node.channels[0].mapper.map.voxels) == len(node.channels[0].mapper.path) == 0
    feed.images(5, 10)
    assert node.channels[0].monitor.counts.poses == 10 and node.channels[0].monitor.counts.failed == 0
    name = node.get_fully_qualified_name()
    assert ros.set_parameter(name, "jump_factor", 20.0).successful  # is not to blame


def test_camera_iterations_that_break_the_budget_are_refused(ros, make_node):
    node = make_node(cache_memory_mib=3)
    name, feed = node.get_fully_qualified_name(), Feed(ros, node)
    feed.images(0, 6)
    fits = node.channels[0].mapper.session.config.sliding_window
    assert ros.set_parameter(name, "sliding_window", fits).successful
    refused = ros.set_parameter(name, "camera_iterations", 8)
    assert not refused.successful and "cache of 3 MiB is too small" in refused.reason
    assert ros.set_parameter(name, "sliding_window", 2).successful
    assert ros.set_parameter(name, "camera_iterations", 8).successful
    refused = ros.set_parameter(name, "sliding_window", fits)  # it could not be had any more after the next reset
    assert not refused.successful and "cache of 3 MiB is too small" in refused.reason
    assert ros.call(Trigger, private(node, "reset")).success
    feed.images(6, 12)
    assert node.channels[0].monitor.counts.poses == 12


def test_images_that_cannot_be_read_degrade_tracking(ros, make_node):
    node = make_node(jump_factor=1e6, image_timeout=0.5, diagnostics_period=0.1)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: "TRACKING" in states(tracking), "TRACKING")
    end = time.monotonic() + TIMEOUT
    while "although images arrive" not in values(tracking[-1])["reasons"]:
        assert time.monotonic() < end
        feed.images(5, 6, encoding="none", header=Header(stamp=node.get_clock().now().to_msg()))
        time.sleep(0.05)
    assert tracking[-1].message == "DEGRADED"
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    wait_until(lambda: "camera" in statuses(reports, node)
               and "no image on" in statuses(reports, node)["camera"].message
               and statuses(reports, node)["model"].level == DiagnosticStatus.OK, "silence of the camera alone")


def test_a_model_that_hangs_degrades_tracking(ros, make_node, monkeypatch):
    node = make_node(jump_factor=1e6, image_timeout=0.5, diagnostics_period=0.1)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: "TRACKING" in states(tracking), "TRACKING")
    gate, step = threading.Event(), node.channels[0].mapper.session.step
    monkeypatch.setattr(node.channels[0].mapper.session, "step", lambda *args: gate.wait(20) and step(*args))
    try:
        end, index = time.monotonic() + TIMEOUT, 5
        while not ("although images arrive" in values(tracking[-1])["reasons"]
                   and "although images arrive" in statuses(reports, node)["model"].message):
            assert time.monotonic() < end
            feed._publisher.publish(image_message(index))
            index += 1
            time.sleep(0.05)
        assert tracking[-1].message == "DEGRADED"
        assert statuses(reports, node)["model"].level == DiagnosticStatus.WARN
    finally:
        gate.set()


def test_a_window_that_larger_images_leave_no_room_for_is_given_up(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(cache_memory_mib=4, diagnostics_period=0.1)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    name, feed = node.get_fully_qualified_name(), Feed(ros, node)
    feed.images(0, 6, size=(32, 64))
    fits = node.channels[0].mapper.session.config.sliding_window
    assert ros.set_parameter(name, "sliding_window", fits - 1).successful
    feed.images(6, 12, size=(64, 64))
    assert node.channels[0].monitor.counts.poses == 12 and node.channels[0].monitor.counts.failed == 0
    used = node.channels[0].mapper.session.config.sliding_window
    assert 0 < used < fits
    wait_until(lambda: any(f"the largest window that fits is taken instead, {used}" in entry.msg for entry in log),
               "a warning")

    def cache() -> DiagnosticStatus:
        return statuses(reports, node)["cache"] if reports else DiagnosticStatus()

    problem = f"sliding_window is {used}, not the {fits - 1} that were set"
    wait_until(lambda: problem in cache().message, "the window in use on /diagnostics")
    assert cache().level == DiagnosticStatus.WARN and values(cache())["sliding_window"] == str(used)
    wait_until(lambda: any(problem in event.message for event in events), "an event")
    assert ros.set_parameter(name, "window_size", 50).successful  # the other values are not to blame
    wait_until(lambda: node.channels[0].mapper.session.config.window_size == 50, "another change")
    assert node.channels[0].mapper.session.config.sliding_window == used
    feed.images(12, 15, size=(32, 64))
    assert node.channels[0].mapper.session.config.sliding_window == fits - 1  # what is set comes back where it fits
    wait_until(lambda: cache().level == DiagnosticStatus.OK, "all well")
    feed.images(15, 18, size=(64, 64))
    assert node.channels[0].mapper.session.config.sliding_window == used
    assert ros.set_parameter(name, "publish_tf", True).successful
    assert ros.set_parameter(name, "sliding_window", 3).successful
    feed.images(18, 20, size=(64, 64))
    assert node.channels[0].mapper.session.config.sliding_window == 3 and node.channels[0].monitor.counts.poses == 20
