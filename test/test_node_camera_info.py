# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: camera_info, lens distortion, images that are not upright."""
from __future__ import annotations

import array
import math

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from rcl_interfaces.msg import Log
from ros_harness import SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, statuses, values, wait_until
from sensor_msgs.msg import CameraInfo, Image, PointCloud2

from lingbot_map_ros.mapping.image_message import to_rgb
from lingbot_map_ros.ros.node_parameters import NodeParameters
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.messages import POINT_TYPE

HEIGHT, WIDTH = 48, 64
K = [60.0, 0, 30.0, 0, 61.0, 25.0, 0, 0, 1]
P = [50.0, 0, 32.0, 0, 0, 51.0, 24.0, 0, 0, 0, 1, 0]
BARREL = [-0.3, 0.08, 0.0, 0.0, 0.0]


def info(**fields) -> CameraInfo:
    """Return the calibration of the images of `image_message`; `fields` overwrite it."""
    return CameraInfo(**{"height": HEIGHT, "width": WIDTH, "distortion_model": "plumb_bob", "d": [0.0] * 5, "k": K,
                         "r": np.eye(3).ravel(), "p": P, **fields})


def send(ros, node, message: CameraInfo) -> None:
    """Send a calibration and wait until the node has taken it."""
    publisher = ros.publisher(CameraInfo, node.resolve_topic_name("camera_info"))
    before = node.channels[0].loaded.camera_infos._content
    publisher.publish(message)
    wait_until(lambda: node.channels[0].loaded.camera_infos._content is not before, "the calibration taken")


def matrix(message: CameraInfo) -> list[float]:
    return [message.k[0], message.k[2], message.k[4], message.k[5]]


def test_intrinsics_of_camera_info_replace_the_predicted_ones(ros, make_node):
    node = make_node(diagnostics_period=0.1)
    infos = ros.listen(CameraInfo, private(node, "depth/camera_info"))
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    clouds = ros.listen(PointCloud2, private(node, "points"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    wait_until(lambda: len(infos) == 4, "predicted intrinsics")
    predicted = matrix(infos[-1])
    assert predicted != pytest.approx([60, 30, 61, 25])
    send(ros, node, info())
    feed.images(4, 6)
    wait_until(lambda: len(infos) == len(clouds) == 6, "intrinsics and clouds")
    assert matrix(infos[-1]) == pytest.approx([60, 30, 61, 25])
    assert (infos[-1].width, infos[-1].height) == (WIDTH, HEIGHT)
    wait_until(lambda: values(statuses(reports, node)["camera"])["intrinsics"] == "camera_info", "it on /diagnostics")
    shown = values(statuses(reports, node)["camera"])
    assert shown["camera_info_topic"] == node.resolve_topic_name("camera_info")
    assert float(shown["focal_length_camera_info"]) == 60
    ratio = float(shown["focal_length_predicted"]) / 60
    assert float(shown["focal_length_difference_percent"]) == pytest.approx(100 * (ratio - 1), abs=0.1)
    # The cloud is of that camera: wider than the predicted one's by the ratio of focal lengths.
    spread = [np.ptp(np.frombuffer(cloud.data, POINT_TYPE)["y"]) for cloud in clouds]
    assert spread[-1] / spread[3] == pytest.approx(predicted[0] / 60, rel=0.2)
    assert node.channels[0].monitor.counts.sequences == 1  # it goes on
    assert ros.set_parameter(node.get_fully_qualified_name(), "calibration", "P").successful
    feed.images(6, 7)
    wait_until(lambda: len(infos) == 7, "intrinsics")
    assert matrix(infos[-1]) == pytest.approx([50, 32, 51, 24])
    assert ros.set_parameter(node.get_fully_qualified_name(), "calibration", "none").successful
    feed.images(7, 8)
    wait_until(lambda: len(infos) == 8, "intrinsics")
    assert matrix(infos[-1]) != pytest.approx([50, 32, 51, 24])


def test_calibration_of_another_resolution_is_scaled(ros, make_node):
    node = make_node()
    infos = ros.listen(CameraInfo, private(node, "depth/camera_info"))
    feed = Feed(ros, node)
    send(ros, node, info(height=2 * HEIGHT, width=2 * WIDTH))
    feed.images(0, SCALE_FRAMES)
    wait_until(lambda: len(infos) == SCALE_FRAMES, "intrinsics")
    assert matrix(infos[-1]) == pytest.approx([30, 14.75, 30.5, 12.25])


@pytest.mark.parametrize(("fields", "words"), [
    ({"k": [math.nan] * 9}, ("k is", "nan")),
    ({"k": [0.0] * 9}, ("k is zero", "not calibrated")),
    ({"width": 0, "height": 0}, ("width is 0",)),
    ({"d": [math.inf] * 5}, ("d is", "inf")),
    ({"height": 480, "width": 480}, ("480x480", "64x48")),
])
def test_hostile_calibration_is_named_and_costs_nothing(ros, make_node, fields, words):
    log = ros.listen(Log, "/rosout", 1000)
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    node = make_node(diagnostics_period=0.1)
    feed = Feed(ros, node)
    feed.images(0, 4)
    publisher = ros.publisher(CameraInfo, node.resolve_topic_name("camera_info"))
    for index in range(4, 8):
        publisher.publish(info(**fields))
        feed.send(image_message(index))
    topic = node.resolve_topic_name("camera_info")
    wait_until(lambda: any(all(word in entry.msg for word in (topic, *words)) for entry in log), "a warning")
    wait_until(lambda: "camera" in statuses(reports, node) and words[0] in statuses(reports, node)["camera"].message
               and statuses(reports, node)["camera"].level == DiagnosticStatus.WARN, "it on /diagnostics")
    assert sum(topic in entry.msg for entry in log) <= 2
    assert node.channels[0].monitor.counts.poses == 8 and node.channels[0].monitor.counts.sequences == 1
    if "height" in fields and fields["height"]:
        return
    send(ros, node, info())
    feed.images(8, 9)
    assert node.channels[0].mapper.focal_lengths[1] == 60 and node.channels[0].loaded.camera_infos.problem == ""


@pytest.mark.parametrize(("model", "coefficients"), [
    ("plumb_bob", BARREL), ("rational_polynomial", [-0.3, 0.08, 0, 0, 0, 0.01, 0, 0]),
    ("equidistant", [-0.1, 0.01, 0.0, 0.0])])
def test_distortion_is_removed_on_request(ros, make_node, model, coefficients):
    node = make_node(undistort=True)
    images = ros.listen(Image, private(node, "image"))
    infos = ros.listen(CameraInfo, private(node, "depth/camera_info"))
    poses = ros.listen(PoseStamped, private(node, "pose"))
    feed = Feed(ros, node)
    message = image_message(0)
    pixels = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    pixels[:, WIDTH - 4 :] = 220  # a bright bar at the right
    message.data = array.array("B", pixels.tobytes())
    feed.images(0, 2)
    assert node.channels[0].monitor.counts.failed == 2  # they wait for the calibration
    send(ros, node, info(distortion_model=model, d=coefficients))
    for index in range(2, 2 + SCALE_FRAMES):
        message.header.stamp = image_message(index).header.stamp
        feed.send(message)
    wait_until(lambda: len(images) == len(infos) == len(poses) == SCALE_FRAMES, "images and poses")
    assert stamps(poses) == [stamp_of(index) for index in range(2, 2 + SCALE_FRAMES)]
    assert matrix(infos[-1]) == pytest.approx([50, 32, 51, 24]) and not any(infos[-1].d)
    bar = to_rgb(images[-1])[:, :, 0] > 120
    edge = bar.argmax(axis=1)  # first bright column of each row
    middle = len(edge) // 2
    assert bar[middle].any()  # straight in the raw image, the bar's edge is bent in the ideal one
    assert edge[0] != edge[middle]


def test_a_strongly_distorted_lens_is_warned_of(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node()
    send(ros, node, info(d=BARREL))
    wait_until(lambda: any("undistort" in entry.msg and node.resolve_topic_name("camera_info") in entry.msg
                           for entry in log), "a warning")


def test_undistortion_that_changes_starts_a_new_sequence(ros, make_node):
    node = make_node(undistort=True)
    feed = Feed(ros, node)
    send(ros, node, info(d=BARREL))
    feed.images(0, 4)
    content = node.channels[0].loaded.camera_infos._content
    publisher = ros.publisher(CameraInfo, node.resolve_topic_name("camera_info"))
    for _ in range(3):
        publisher.publish(info(d=BARREL))  # the same
    feed.images(4, 5)
    assert node.channels[0].monitor.counts.sequences == 1 and node.channels[0].loaded.camera_infos._content is content
    send(ros, node, info(d=[-0.2, 0.0, 0.0, 0.0, 0.0]))
    feed.images(5, 6)
    assert node.channels[0].monitor.counts.sequences == 2
    assert ros.set_parameter(node.get_fully_qualified_name(), "undistort", False).successful
    feed.images(6, 7)
    assert node.channels[0].monitor.counts.sequences == 3


def test_a_model_of_distortion_that_is_not_known_is_named(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(undistort=True)
    feed = Feed(ros, node)
    send(ros, node, info(distortion_model="omnidirectional", d=[0.5] * 6))
    feed.images(0, 1)
    wait_until(lambda: any("distortion_model is 'omnidirectional'" in entry.msg for entry in log), "a warning")
    assert node.channels[0].monitor.counts.failed == 1
    send(ros, node, info())
    feed.images(1, 1 + SCALE_FRAMES)
    assert node.channels[0].monitor.counts.poses == SCALE_FRAMES


def test_a_calibration_that_did_not_fit_fits_other_images(ros, make_node):
    node = make_node()
    feed = Feed(ros, node)
    feed.images(0, 3)
    send(ros, node, info(height=60, width=60))
    feed.images(3, 4)
    assert "60x60" in node.channels[0].loaded.camera_infos.problem and node.channels[0].mapper.focal_lengths[1] is None
    feed.images(4, 4 + SCALE_FRAMES, size=(60, 60))
    assert node.channels[0].loaded.camera_infos.problem == "" and node.channels[0].mapper.focal_lengths[1] == 60


def test_topic_is_beside_the_images_unless_it_is_remapped():
    context = rclpy.Context()
    context.init()
    try:
        for rules, expected in (
            ([], "/robot/camera_info"),
            (["image:=/front/image_raw"], "/front/camera_info"),
            (["image:=/front/image_raw", "camera_info:=/calibration"], "/calibration"),
        ):
            arguments = ["--ros-args", *(word for rule in rules for word in ("-r", rule))]
            node = rclpy.create_node("mapper", namespace="robot", context=context, cli_args=arguments)
            assert Scope(node, "", NodeParameters).camera_info_topic == expected
            node.destroy_node()
    finally:
        context.shutdown()


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_images_that_are_not_upright(ros, make_node, rotation):
    """A camera that is mounted askew gives the same points, and depth and pose of its own axes."""
    turns = rotation // 90
    depths, poses, clouds = {}, {}, {}
    for angle in (0, rotation):
        node = make_node(image_rotation=angle, keyframe_interval=1)
        depths[angle] = ros.listen(Image, private(node, "depth"))
        poses[angle] = ros.listen(PoseStamped, private(node, "pose"))
        clouds[angle] = ros.listen(PointCloud2, private(node, "points"))
        feed = Feed(ros, node)
        for index in range(4):
            message = image_message(index)
            pixels = np.rot90(to_rgb(message), turns if angle else 0)
            message.height, message.width, message.step = *pixels.shape[:2], 3 * pixels.shape[1]
            message.data = array.array("B", pixels.tobytes())
            feed.send(message)
        wait_until(lambda: len(depths[angle]) == len(poses[angle]) == len(clouds[angle]) == 4, "depth, poses, clouds")
    for upright, askew in zip(clouds[0], clouds[rotation]):
        assert upright.data == askew.data
    for upright, askew in zip(depths[0], depths[rotation]):
        a, b = (np.frombuffer(message.data, np.float32).reshape(message.height, message.width)
                for message in (upright, askew))
        np.testing.assert_array_equal(np.rot90(a, turns), b)
    for upright, askew in zip(poses[0], poses[rotation]):
        assert upright.pose.position == askew.pose.position
        a, b = (np.array([q.x, q.y, q.z, q.w]) for q in (upright.pose.orientation, askew.pose.orientation))
        assert 2 * math.acos(min(1.0, abs(a @ b))) == pytest.approx(min(rotation, 360 - rotation) * math.pi / 180)


def test_a_rotation_between_is_refused(ros, make_node):
    node = make_node()
    result = ros.set_parameter(node.get_fully_qualified_name(), "image_rotation", 45)
    assert not result.successful and "image_rotation is 45" in result.reason
    Feed(ros, node).images(0, 4)
    assert ros.set_parameter(node.get_fully_qualified_name(), "image_rotation", 180).successful
    Feed(ros, node).images(4, 5)
    assert node.channels[0].monitor.counts.sequences == 2
