# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: qualities of service by parameter, silence explained, covariances."""
from __future__ import annotations

import numpy as np
import pytest
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import Log
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy
from ros_harness import LATCHED, SCALE_FRAMES, Feed, private, wait_until
from sensor_msgs.msg import Image

from lingbot_map_ros.ros import interfaces


def qos_of(ros, node, topic: str, kind: str) -> QoSProfile:
    find = getattr(ros.peer, f"get_{kind}_info_by_topic")
    wait_until(lambda: find(topic), f"{kind} of {topic}")
    (info,) = [info for info in find(topic) if info.node_namespace == node.get_namespace()]
    return info.qos_profile


def test_qos_is_overridden_by_parameters(ros, make_node):
    prefix = "qos_overrides./robot_qos/"
    node = make_node(namespace="robot_qos", **{
        f"{prefix}image.subscription.reliability": "reliable",
        f"{prefix}lingbot_map_node/odometry.publisher.reliability": "best_effort",
        f"{prefix}lingbot_map_node/odometry.publisher.depth": 3,
        f"{prefix}lingbot_map_node/pose.publisher.durability": "transient_local",
    })
    assert qos_of(ros, node, "/robot_qos/image", "subscriptions").reliability == QoSReliabilityPolicy.RELIABLE
    odometry = qos_of(ros, node, private(node, "odometry"), "publishers")
    assert odometry.reliability == QoSReliabilityPolicy.BEST_EFFORT
    pose = qos_of(ros, node, private(node, "pose"), "publishers")
    assert pose.durability == QoSDurabilityPolicy.TRANSIENT_LOCAL
    poses = ros.listen(interfaces.POSE.message, private(node, "pose"), LATCHED)
    Feed(ros, node).images(0, SCALE_FRAMES)
    wait_until(lambda: poses, "a pose")
    # Neither another node, nor the same one configured again, is touched by it.
    assert interfaces.ODOMETRY.qos.reliability == QoSReliabilityPolicy.RELIABLE and interfaces.ODOMETRY.qos.depth == 10
    other = make_node()
    assert qos_of(ros, other, private(other, "odometry"), "publishers").reliability == QoSReliabilityPolicy.RELIABLE
    node.trigger_deactivate()
    node.trigger_cleanup()
    assert node.start()
    assert qos_of(ros, node, "/robot_qos/image", "subscriptions").reliability == QoSReliabilityPolicy.RELIABLE


@pytest.mark.parametrize(("entity", "value"), [
    ("image.subscription.reliability", "sometimes"), ("lingbot_map_node/map.publisher.durability", "for ever"),
    ("image.subscription.depth", "many")])
def test_an_override_that_cannot_be_is_named(ros, make_node, entity, value):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(namespace="robot_bad_qos", autostart=False, **{f"qos_overrides./robot_bad_qos/{entity}": value})
    assert not node.start()
    topic = f"/robot_bad_qos/{entity.split('.')[0]}"
    wait_until(lambda: any("qos_overrides" in entry.msg and topic in entry.msg for entry in log),
               "an error that names it")


def test_silence_of_simulated_time_is_explained(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(use_sim_time=True, image_timeout=0.2, diagnostics_period=0.1)
    ros.peer.create_publisher(Image, node.resolve_topic_name("image"), 1)
    wait_until(lambda: any("no image on" in entry.msg and "use_sim_time is on, but nothing comes on /clock" in entry.msg
                           for entry in log), "a warning")


def test_covariance_follows_its_model(ros, make_node):
    node = make_node(scale_source="fixed", metric_scale=3.0, covariance_noise=0.01, covariance_drift=0.02)
    odometry = ros.listen(Odometry, private(node, "odometry"))
    feed = Feed(ros, node)
    feed.images(0, 8)
    wait_until(lambda: len(odometry) == 8, "poses")
    positions = np.array([[getattr(m.pose.pose.position, axis) for axis in "xyz"] for m in odometry])
    length = np.linalg.norm(np.diff(positions, axis=0), axis=1).sum()
    first, last = (np.reshape(m.pose.covariance, (6, 6)).diagonal() for m in (odometry[0], odometry[-1]))
    assert odometry[0].twist.covariance[0] == -1  # there is no velocity yet
    depth = np.sqrt(first[0]) / 0.01
    assert last[0] == pytest.approx((0.01 * depth) ** 2 + (0.02 * length) ** 2, rel=0.2)  # each image has its own depth
    assert first[3] == pytest.approx(1e-4) and last[3] > first[3]
    twist = np.reshape(odometry[-1].twist.covariance, (6, 6)).diagonal()
    assert twist[3] == pytest.approx(2 * (0.01 / 0.1) ** 2, rel=1e-6)
    name = node.get_fully_qualified_name()
    for parameter in ("covariance_noise", "covariance_drift"):
        assert ros.set_parameter(name, parameter, 0.0).successful
    feed.images(8, 9)
    wait_until(lambda: len(odometry) == 9, "a pose")
    assert odometry[-1].pose.covariance[0] == odometry[-1].twist.covariance[0] == -1
