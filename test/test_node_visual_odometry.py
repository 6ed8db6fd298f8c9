# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: odometry without jumps."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from geometry_msgs.msg import PoseStamped, PoseWithCovarianceStamped
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import Log
from ros_harness import SCALE_FRAMES, Feed, private, stamp_of, stamps, wait_until
from sensor_msgs.msg import CameraInfo
from std_srvs.srv import Trigger
from test_node_transforms import MOUNTING, Robot, body

from lingbot_map_ros.mapping import MappingSession
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD
from lingbot_map_ros.mapping.pose_refiner import PoseRefiner
from lingbot_map_ros.ros import interfaces, messages


def matrices(received) -> list[np.ndarray]:
    poses = [message.pose.pose if isinstance(message, Odometry) else message.pose for message in received]
    return [messages.pose_matrix(pose.position, pose.orientation) for pose in poses]


def motions(poses: list[np.ndarray]) -> list[np.ndarray]:
    return [np.linalg.inv(before) @ now for before, now in zip(poses, poses[1:])]


def listen(ros, node) -> tuple[list, list]:
    return (ros.listen(Odometry, private(node, "visual_odometry")), ros.listen(PoseStamped, private(node, "pose")))


def test_refined_poses_go_on_across_hand_overs(ros, make_node):
    """The map's pose is then as continuous as the odometry's, whatever two windows say of a shared frame."""
    node = make_node(window_size=12, overlap_keyframes=4, jump_factor=1e6, refine_poses="always")
    odometry, poses = listen(ros, node)
    Feed(ros, node).images(0, 24)
    wait_until(lambda: len(odometry) == len(poses) == 24, "poses")
    assert node.channels[0].monitor.counts.hand_overs == 2
    assert node.channels[0].pipeline.state_values["refine_poses"] is True
    for of_odometry, of_map in zip(motions(matrices(odometry)), motions(matrices(poses))):
        np.testing.assert_allclose(of_odometry, of_map, atol=1e-6)
    name = node.get_fully_qualified_name()
    for value in ("never", "auto"):  # which is off for this model
        assert ros.set_parameter(name, "refine_poses", value).successful
        wait_until(lambda: node.channels[0].pipeline.state_values["refine_poses"] is False, "it off")
    refused = ros.set_parameter(name, "refine_poses", "perhaps")
    assert not refused.successful and "expected one of auto, always, never" in refused.reason


def test_calibration_is_what_poses_are_refined_with(ros, make_node, monkeypatch):
    given = []
    refine = PoseRefiner.refine

    def note(self, image, prediction, known_intrinsics):
        given.append(known_intrinsics)
        return refine(self, image, prediction, known_intrinsics)

    monkeypatch.setattr(PoseRefiner, "refine", note)
    node = make_node(refine_poses="always")
    given.clear()  # of the first run, before there are images
    feed = Feed(ros, node)
    feed.images(0, SCALE_FRAMES)
    assert given == [None] * SCALE_FRAMES
    info = CameraInfo(width=64, height=48, k=np.ravel([[70.0, 0.0, 31.0], [0.0, 71.0, 23.0], [0.0, 0.0, 1.0]]))
    ros.publisher(CameraInfo, node.channels[0].loaded.camera_infos.topic).publish(info)
    wait_until(lambda: node.channels[0].loaded.camera_infos._content is not None, "the calibration taken")
    feed.images(SCALE_FRAMES, SCALE_FRAMES + 2)
    view = node.channels[0].pipeline._view
    known = next(intrinsics for intrinsics in given if intrinsics is not None)
    np.testing.assert_allclose(known, view.to_image_intrinsics(np.reshape(info.k, (3, 3))))


def test_hand_overs_do_not_move_it(ros, make_node, monkeypatch):
    """Each step is the one that one window saw; the new window's at a hand-over, where the map's pose jumps."""
    joined = {}  # by the frame that a window begins with: the newest shared frame and its pose as that window sees it
    start_window = MappingSession._start_window

    def note(self):
        hand_over = start_window(self)
        assert hand_over.last_index == hand_over.frame_index - 1
        # As if the windows disagreed about the shared frame: the camera did not move by that.
        T = hand_over.last_T_world_camera.clone()
        T[:3, 3] += 0.5
        self._hand_over = replace(hand_over, last_T_world_camera=T)
        joined[hand_over.frame_index] = T_MAP_WORLD @ T.double().numpy()
        return self._hand_over

    monkeypatch.setattr(MappingSession, "_start_window", note)
    node = make_node(window_size=12, overlap_keyframes=4, jump_factor=1e6)
    odometry, poses = listen(ros, node)
    Feed(ros, node).images(0, 24)
    wait_until(lambda: len(odometry) == len(poses) == 24, "poses")
    assert stamps(odometry) == [stamp_of(index) for index in range(24)] and sorted(joined) == [12, 20]
    assert {(m.header.frame_id, m.child_frame_id) for m in odometry} == {("odom", "camera")}
    T_odom, T_map = matrices(odometry), matrices(poses)
    np.testing.assert_allclose(T_odom[0], T_map[0], atol=1e-9)
    for index, motion in enumerate(motions(T_odom), start=1):
        before = joined.get(index, T_map[index - 1])
        np.testing.assert_allclose(motion, np.linalg.inv(before) @ T_map[index], atol=1e-6)
        twist = odometry[index].twist.twist
        speed = np.linalg.norm([twist.linear.x, twist.linear.y, twist.linear.z])
        assert speed == pytest.approx(np.linalg.norm(motion[:3, 3]) / 0.1, rel=1e-6)
        covariance = np.reshape(odometry[index].pose.covariance, (6, 6))
        assert (np.diag(covariance) > 0).all()


def test_another_scale_and_another_place_do_not_move_it(ros, make_node):
    node = make_node(scale_source="fixed", metric_scale=2.0)
    odometry, poses = listen(ros, node)
    feed = Feed(ros, node)
    feed.images(0, 5)
    wait_until(lambda: len(odometry) == len(poses) == 5, "poses")
    assert ros.set_parameter(node.get_fully_qualified_name(), "metric_scale", 6.0).successful
    publisher = ros.publisher(PoseWithCovarianceStamped, node.resolve_topic_name("initialpose"))
    message = PoseWithCovarianceStamped()
    message.pose.pose = messages.pose(body(50.0, 1.0))
    publisher.publish(message)
    wait_until(lambda: node.channels[0].mapper.alignment.yaw, "it placed")
    feed.images(5, 8)
    wait_until(lambda: len(odometry) == len(poses) == 8, "poses")
    of_odometry, of_poses = motions(matrices(odometry)), motions(matrices(poses))
    for index in (0, 1, 2, 3, 5, 6):
        np.testing.assert_allclose(of_odometry[index], of_poses[index], atol=1e-6)
    # Across the change: by the new scale, from where it was.
    assert np.linalg.norm(of_poses[4][:3, 3]) > 10
    model = node.channels[0].mapper.path.poses()
    step = 6 * np.linalg.norm(model[5, :3] - model[4, :3])
    assert np.linalg.norm(of_odometry[4][:3, 3]) == pytest.approx(step, rel=1e-6)


def test_it_goes_on_in_a_new_sequence_and_starts_anew_with_a_reset(ros, make_node):
    node = make_node()
    odometry, poses = listen(ros, node)
    feed = Feed(ros, node)
    feed.images(0, 6)
    feed.images(6, 6 + SCALE_FRAMES, size=(60, 60))
    wait_until(lambda: len(odometry) == 6 + SCALE_FRAMES, "poses")
    assert node.channels[0].monitor.counts.sequences == 2
    T = matrices(odometry)
    np.testing.assert_allclose(T[6], T[5], atol=1e-9)
    assert not np.allclose(T[7], T[5], atol=1e-6)
    assert ros.call(Trigger, private(node, "reset")).success
    feed.images(10, 10 + SCALE_FRAMES)
    wait_until(lambda: len(odometry) == len(poses) == 6 + 2 * SCALE_FRAMES, "poses")
    np.testing.assert_allclose(matrices(odometry)[-SCALE_FRAMES:], matrices(poses)[-SCALE_FRAMES:], atol=1e-6)


@pytest.mark.skipif(interfaces.TF.message is None, reason="tf2_msgs cannot be imported")
def test_it_starts_where_the_robots_odometry_is(ros, make_node):
    log = ros.listen(Log, "/rosout", 1000)
    node = make_node(publish_tf=True, odom_frame="odom", frame_prefix="bot/")
    odometry, poses = listen(ros, node)
    feed = Feed(ros, node)
    feed.images(0, 4)
    text = f"{private(node, 'visual_odometry')} starts when the robot's odometry is known: nobody publishes the frame"
    wait_until(lambda: any(text in entry.msg for entry in log), "a warning")
    robot = Robot(ros, node, "bot/")
    for index in range(4, 7):
        robot.move(index, body(0.1 * index, 0.7))
        feed.images(index, index + 1)
    wait_until(lambda: len(odometry) == 3 and len(poses) == 7, "poses, once that is known")
    assert {message.header.frame_id for message in odometry} == {"bot/odom"}
    T = matrices(odometry)
    np.testing.assert_allclose(T[0], body(0.4, 0.7) @ MOUNTING, atol=1e-6)
    np.testing.assert_allclose(motions(T), motions(matrices(poses)[-3:]), atol=1e-6)
