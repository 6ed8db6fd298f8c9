# SPDX-License-Identifier: Apache-2.0
"""Time through the node: stamps that go back, repeat, pause or are missing, and simulated time."""
from __future__ import annotations

import logging
import threading

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Log
from ros_harness import (
    LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, statuses, values, wait_until,
)
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from std_msgs.msg import Header
from std_srvs.srv import Trigger


def unstamped(index: int) -> Image:
    return image_message(index, header=Header(frame_id="camera"))


def test_a_looping_recording_starts_a_new_sequence(ros, make_node):
    node = make_node(diagnostics_period=0.1, path_period=0.0)
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    paths = ros.listen(Path, private(node, "path"))
    feed = Feed(ros, node)
    for _ in range(3):
        feed.images(0, 12)
    wait_until(lambda: len(events) == 3, "three sequences")
    assert ["stamps went back" in values(event)["reason"] for event in events] == [False, True, True]
    wait_until(lambda: paths and stamps(paths[-1].poses) == [stamp_of(index) for index in range(12)],
               "the last loop's path")
    assert node.channels[0].monitor.counts.poses == 36 and node.channels[0].monitor.counts.sequences == 3
    wait_until(lambda: values(statuses(reports, node)["camera"]).get("stamps_back") == "2", "two on /diagnostics")


def test_going_back_is_noted_even_if_that_image_was_displaced(ros, make_node, monkeypatch):
    node = make_node()
    feed = Feed(ros, node)
    feed.images(15, 19)
    gate, step = threading.Event(), node.channels[0].mapper.session.step
    monkeypatch.setattr(node.channels[0].mapper.session, "step", lambda *args: gate.wait(20) and step(*args))
    feed._publisher.publish(image_message(19))
    channel = node.channels[0]
    wait_until(lambda: channel.mailbox.is_empty and channel.monitor.counts.received == 5, "image 19 with the model")
    for received, index in ((6, 0), (7, 1)):  # 1 takes the place of 0
        feed._publisher.publish(image_message(index))
        wait_until(lambda: node.channels[0].monitor.counts.received == received, "an image received")
    gate.set()
    wait_until(lambda: node.channels[0].monitor.counts.sequences == 2, "a new sequence")
    assert node.channels[0].monitor.counts.stamps_back == 1


def test_late_images_are_dropped_unless_they_stay_back(ros, make_node):
    node = make_node(diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    for index in (10, 11, 12, 14, 13, 15):
        feed.send(image_message(index))
    wait_until(lambda: stamps(odometry) == [stamp_of(index) for index in (10, 11, 12, 14, 15)], "the others")
    assert node.channels[0].monitor.counts.late == 1 and node.channels[0].monitor.counts.sequences == 1
    feed.images(7, 7 + 4 + SCALE_FRAMES)
    counts = node.channels[0].monitor.counts
    assert (counts.late, counts.stamps_back, counts.sequences) == (5, 1, 2)
    wait_until(lambda: values(statuses(reports, node)["camera"])["late_images"] == "5", "a count on /diagnostics")


def test_a_stamp_that_stands_still_is_explained(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    feed = Feed(ros, node)
    for _ in range(15):
        feed.send(image_message(0))
    wait_until(lambda: "14 images in a row carry the same" in statuses(reports, node)["camera"].message, "a reason")
    assert statuses(reports, node)["camera"].level == DiagnosticStatus.WARN
    wait_until(lambda: any("in a row carry the same" in entry.msg for entry in log), "a warning")


def test_duplicates_are_dropped_and_gaps_counted(ros, make_node):
    node = make_node(diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    for index in (0, 1, 1, 2, 3, 3, 3, 4, 5, 6, 10, 11):
        feed.send(image_message(index))
    expected = [stamp_of(index) for index in (0, 1, 2, 3, 4, 5, 6, 10, 11)]
    wait_until(lambda: stamps(odometry) == expected, "every image once")
    wait_until(lambda: values(statuses(reports, node)["camera"])["frames_processed"] == "9", "the last one counted")
    shown = values(statuses(reports, node)["camera"])
    assert (shown["duplicate_stamps"], shown["stamp_gaps"], shown["stamps_back"]) == ("3", "1", "0")


def test_images_without_stamps_are_mapped_with_a_warning(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    before = node.get_clock().now().nanoseconds
    for index in range(6):
        feed.send(unstamped(index))
    wait_until(lambda: len(odometry) == 6, "6 poses")
    found = [sec * 10**9 + nanosec for sec, nanosec in stamps(odometry)]
    assert found[0] == 0  # a time like others until it came again
    assert found[1:] == sorted(set(found[1:])) and found[1] >= before
    assert node.channels[0].monitor.counts.sequences == 1 and node.channels[0].monitor.counts.duplicates == 0
    wait_until(lambda: any("header.stamp" in entry.msg for entry in log), "a warning")


def test_simulated_time_that_nobody_tells_is_explained(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(use_sim_time=True)
    feed = Feed(ros, node)
    for index in range(3):
        feed.send(unstamped(index))
    wait_until(lambda: any("nothing comes on /clock" in entry.msg for entry in log), "a warning")


def test_simulated_time_is_the_nodes_and_may_start_anew(ros, make_node):
    node = make_node(use_sim_time=True, diagnostics_period=0.1)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    odometry = ros.listen(Odometry, private(node, "odometry"))
    clock, feed = ros.publisher(Clock, "/clock"), Feed(ros, node)

    def set_time(seconds: int) -> None:
        clock.publish(Clock(clock=Time(sec=seconds)))
        wait_until(lambda: node.get_clock().now().nanoseconds == seconds * 10**9, "simulated time")

    def reported(seconds: int) -> bool:
        return any(array.header.stamp == Time(sec=seconds) and any(
            status.name.startswith(node.get_fully_qualified_name().lstrip("/")) for status in array.status)
            for array in reports)

    set_time(5000)
    wait_until(lambda: reported(5000), "diagnostics in simulated time")
    for index in range(4):
        feed.send(unstamped(index))
    wait_until(lambda: len(odometry) == 4, "4 poses")
    assert stamps(odometry)[1:] == [(5000, 0)] * 3  # of their arrival
    feed.images(20, 24)
    set_time(20)
    wait_until(lambda: reported(20), "diagnostics of a simulation that started anew")
    feed.images(0, 4)
    wait_until(lambda: len(odometry) == 12, "poses of the new run")
    assert node.channels[0].monitor.counts.sequences == 2


def test_the_cache_describes_itself(ros, make_node):
    node = make_node()
    empty = ros.call(Trigger, private(node, "describe_cache"))
    assert empty.success and "0 frames kept" in empty.message
    Feed(ros, node).images(0, 6)
    text = ros.call(Trigger, private(node, "describe_cache")).message
    assert "6 frames kept, window 3 + 4" in text and len(text.splitlines()) == 1 + 8 + 1
    node.trigger_deactivate()
    node.trigger_cleanup()
    gone = ros.call(Trigger, private(node, "describe_cache"))
    assert not gone.success and "unconfigured" in gone.message


def test_progress_of_loading_is_logged_and_on_diagnostics(ros, make_node, monkeypatch):
    from lingbot_map_ros.ros import loaded_model

    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(autostart=False, diagnostics_period=0.1)
    gate, build = threading.Event(), loaded_model.build_model

    def slow(*args, **options):
        logging.getLogger("lingbot_map_ros.cache.backends").info("preparing kernels: %d of 2", 1)
        logging.getLogger("lingbot_map_ros.cache.backends").warning("kernel 2 cannot be used")
        logging.getLogger("lingbot_map_ros.cache.backends").info("compiling")
        assert gate.wait(20)
        return build(*args, **options)

    monkeypatch.setattr(loaded_model, "build_model", slow)
    starter = threading.Thread(target=node.start)
    starter.start()
    try:
        wait_until(lambda: "model" in statuses(reports, node)
                   and statuses(reports, node)["model"].message == "loading: compiling", "progress on /diagnostics")
    finally:
        gate.set()
        starter.join()
    wait_until(lambda: {entry.msg: entry.level for entry in log if entry.level >= 30}.get("kernel 2 cannot be used"),
               "a warning in the node's log")
    assert any(entry.msg == "preparing kernels: 1 of 2" for entry in log)
    Feed(ros, node).images(0, SCALE_FRAMES)
    node.close()
    logging.getLogger("lingbot_map_ros").warning("after the node")
    assert not any(entry.msg == "after the node" for entry in log)
