# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: every kind of image in, and images that no camera should send."""
from __future__ import annotations

import array
import time

import cv2
import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from rcl_interfaces.msg import Log
from ros_harness import (
    LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, statuses, values, wait_until,
)
from sensor_msgs.msg import CompressedImage, Image

from lingbot_map_ros.mapping.image_message import to_rgb


def compressed_message(index: int, kind: str = "png", size: tuple[int, int] = (48, 64)) -> CompressedImage:
    """Return `image_message(index)` as a compressed image."""
    raw = image_message(index, size)
    data = cv2.imencode(f".{kind}", np.ascontiguousarray(to_rgb(raw)[..., ::-1]))[1]
    return CompressedImage(header=raw.header, format=f"rgb8; {kind} compressed bgr8", data=data.tobytes())


class CompressedFeed(Feed):
    """A Feed of compressed images."""

    message_type = CompressedImage


def test_compressed_images_give_the_poses_of_raw_ones(ros, make_node):
    poses = []
    for transport, feed in (("raw", Feed), ("compressed", CompressedFeed)):
        node = make_node(image_transport=transport)
        poses.append(ros.listen(PoseStamped, private(node, "pose")))
        feed = feed(ros, node)
        for index in range(5):
            feed.send(image_message(index) if transport == "raw" else compressed_message(index))
        wait_until(lambda: len(poses[-1]) == 5, "5 poses")
    assert [pose.pose for pose in poses[0]] == [pose.pose for pose in poses[1]]


def test_compressed_images_that_are_cut_off_are_named_and_cost_nothing(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(image_transport="compressed", diagnostics_period=0.1)
    feed = CompressedFeed(ros, node)
    for index in range(4):
        feed.send(compressed_message(index, "jpeg"))
    for index, cut in ((4, 500), (5, 0)):
        message = compressed_message(index, "jpeg")
        message.data = message.data[:cut]
        feed.send(message)
    topic = node.resolve_topic_name("image") + "/compressed"
    wait_until(lambda: any(topic in entry.msg and "500 bytes" in entry.msg and "jpeg" in entry.msg for entry in log),
               "a warning")
    wait_until(lambda: "camera" in statuses(reports, node)
               and values(statuses(reports, node)["camera"])["frames_failed"] == "2", "both on /diagnostics")
    assert statuses(reports, node)["camera"].hardware_id == topic
    for index in range(6, 9):
        feed.send(compressed_message(index, "jpeg"))
    assert node.channels[0].monitor.counts.failed == 2
    assert node.channels[0].monitor.counts.poses == 7 and node.channels[0].monitor.counts.sequences == 1


def test_transport_changes_while_the_node_is_unconfigured(ros, make_node):
    node = make_node()
    refused = ros.set_parameter(node.get_fully_qualified_name(), "image_transport", "compressed")
    assert not refused.successful and "unconfigured" in refused.reason
    node.trigger_deactivate()
    node.trigger_cleanup()
    assert ros.set_parameter(node.get_fully_qualified_name(), "image_transport", "compressed").successful
    assert node.start()
    feed = CompressedFeed(ros, node)
    for index in range(SCALE_FRAMES):
        feed.send(compressed_message(index))
    assert node.channels[0].monitor.counts.poses == SCALE_FRAMES


def test_silence_of_another_transport_says_what_to_set(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(diagnostics_period=0.1, image_timeout=0.3, autostart=False)
    context = rclpy.Context()  # of its own: within one, a topic has one type
    context.init()
    camera = rclpy.create_node("camera", context=context)
    try:
        camera.create_publisher(CompressedImage, node.resolve_topic_name("image"), 1)
        wait_until(lambda: node.get_publishers_info_by_topic(node.resolve_topic_name("image")), "the camera known")
        assert node.start()
        wait_until(lambda: any("set image_transport to compressed" in entry.msg for entry in log), "a warning")
    finally:
        camera.destroy_node()
        context.shutdown()


@pytest.mark.parametrize("encoding", ["yuv422", "nv12", "bayer_rggb8", "mono16"])
def test_other_encodings_are_mapped(ros, make_node, encoding):
    node = make_node()
    feed = Feed(ros, node)
    for index in range(SCALE_FRAMES + 1):
        message = image_message(index)
        grey = cv2.cvtColor(to_rgb(message), cv2.COLOR_RGB2GRAY)
        data = {"yuv422": lambda: np.stack([np.full_like(grey, 128), grey], axis=-1),
                "nv12": lambda: np.concatenate([grey, np.full((grey.shape[0] // 2, grey.shape[1]), 128, np.uint8)]),
                "bayer_rggb8": lambda: grey,
                "mono16": lambda: grey.astype("<u2") << 8}[encoding]()
        message.encoding, message.step = encoding, data[0].nbytes
        message.data = array.array("B", data.tobytes())
        feed.send(message)
    assert node.channels[0].monitor.counts.poses == SCALE_FRAMES + 1


def test_another_encoding_starts_a_new_sequence(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 5)
    feed.images(5, 5 + SCALE_FRAMES, encoding="bgr8")
    assert node.channels[0].monitor.counts.sequences == 2 and node.channels[0].monitor.counts.poses == 5 + SCALE_FRAMES
    wait_until(lambda: len(events) == 2 and "from rgb8 to bgr8" in events[-1].message, "an event")
    wait_until(lambda: any("from rgb8 to bgr8" in entry.msg for entry in log), "it in the log")


def test_rate_is_limited_by_stamps(ros, make_node):
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(max_rate=5.0, diagnostics_period=0.1)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    publisher = ros.publisher(Image, node.resolve_topic_name("image"))
    for index in range(12):  # at 10 Hz
        publisher.publish(image_message(index))
        monitor = node.channels[0].monitor
        wait_until(lambda: monitor.counts.processed + monitor.counts.skipped == index + 1, "it dealt with")
    wait_until(lambda: len(poses) == 6, "poses")
    assert stamps(poses) == [stamp_of(index) for index in range(0, 12, 2)]
    wait_until(lambda: values(statuses(reports, node)["camera"])["skipped_images"] == "6", "them on /diagnostics")
    assert statuses(reports, node)["camera"].level == DiagnosticStatus.OK
    assert ros.set_parameter(node.get_fully_qualified_name(), "max_rate", 0.0).successful
    Feed(ros, node).images(12, 16)
    assert node.channels[0].monitor.counts.poses == 10


def test_a_rate_of_less_than_an_image_in_image_timeout_is_no_stall(ros, make_node):
    node = make_node(max_rate=0.01, image_timeout=0.2)
    Feed(ros, node).images(0, 1)
    publisher = ros.publisher(Image, node.resolve_topic_name("image"))
    for index in range(1, 11):
        publisher.publish(image_message(index))
        time.sleep(0.05)
    wait_until(lambda: node.channels[0].monitor.counts.skipped == 10, "all skipped")
    assert node.channels[0].monitor.stall == 0


def test_an_image_of_8k_is_mapped(ros, make_node):
    node = make_node()
    feed = Feed(ros, node)
    size = (4320, 7680)
    data = array.array("B", bytes(size[0] * size[1]))
    for index in range(SCALE_FRAMES):
        message = image_message(index)
        message.encoding, (message.height, message.width), message.step, message.data = "mono8", size, size[1], data
        feed.send(message)
    assert node.channels[0].monitor.counts.poses == SCALE_FRAMES
    feed.images(SCALE_FRAMES, 2 * SCALE_FRAMES)
    assert node.channels[0].monitor.counts.poses == 2 * SCALE_FRAMES


def test_a_thousand_images_a_second(ros, make_node):
    node = make_node()
    poses = ros.listen(PoseStamped, private(node, "pose"))
    publisher = ros.publisher(Image, node.resolve_topic_name("image"))
    messages = [image_message(index) for index in range(1000)]
    begin = time.monotonic()
    for index, message in enumerate(messages):
        publisher.publish(message)
        time.sleep(max(0.0, begin + index / 1000 - time.monotonic()))

    def all_accounted_for() -> bool:  # some may still be on their way
        counts = node.channels[0].monitor.counts
        return counts.received > 100 and counts.processed + node.channels[0].mailbox.displaced == counts.received

    wait_until(all_accounted_for, "every image that came mapped or displaced")
    counts = node.channels[0].monitor.counts
    assert counts.failed == 0 and counts.sequences == 1
    Feed(ros, node).images(1000, 1003)
    wait_until(lambda: poses and stamps(poses)[-1] == stamp_of(1002), "the newest pose")


def test_the_node_is_ready_for_images_of_the_size_that_it_was_told(ros, make_node):
    node = make_node(camera_size="64x36")
    session = node.channels[0].mapper.session
    state = session._state
    Feed(ros, node).images(0, 4, size=(36, 64))
    assert session._state is state and session.frame_count == 4
    Feed(ros, node).images(4, 8, size=(48, 64))  # of another shape
    assert session._state is not state and session.frame_count == 4
