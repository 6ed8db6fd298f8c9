# SPDX-License-Identifier: Apache-2.0
"""The replay executable, as a process of its own that publishes over the middleware."""
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from nav_msgs.msg import Odometry
from rclpy.qos import qos_profile_sensor_data
from ros_harness import TIMEOUT, wait_until
from sensor_msgs.msg import CameraInfo, Image

from lingbot_map_ros.mapping.image_message import to_rgb
from lingbot_map_ros.ros.replay import (
    Frames, ReplayError, load_camera_info, open_frames, scale_camera_info, stamp_from_name)

CALIBRATION = """
image_width: 640
image_height: 480
distortion_model: plumb_bob
camera_matrix: {rows: 3, cols: 3, data: [500.0, 0.0, 320.0, 0.0, 510.0, 240.0, 0.0, 0.0, 1.0]}
distortion_coefficients: {rows: 1, cols: 5, data: [0.1, -0.2, 0.0, 0.0, 0.0]}
rectification_matrix: {rows: 3, cols: 3, data: [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]}
projection_matrix: {rows: 3, cols: 4, data: [480.0, 0.0, 320.0, 0.0, 0.0, 490.0, 240.0, 0.0, 0.0, 0.0, 1.0, 0.0]}
"""


def write_images(folder: Path, count: int, names: list[str] | None = None) -> list[np.ndarray]:
    """Write PNGs of a textured wall passing by and return their pixels, RGB [48, 64, 3]."""
    wall = np.random.default_rng(1).integers(0, 256, (12, 64, 3), np.uint8).repeat(4, 0).repeat(4, 1)
    frames = [np.roll(wall, 2 * index, axis=1)[:, :64] for index in range(count)]
    for index, frame in enumerate(frames):
        name = names[index] if names else f"frame{index}"
        assert cv2.imwrite(str(folder / f"{name}.png"), frame[..., ::-1])
    return frames


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "lingbot_map_ros.ros.replay", *map(str, arguments)]


def replay(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=2 * TIMEOUT)


def seconds(message) -> float:
    return message.header.stamp.sec + message.header.stamp.nanosec * 1e-9


def test_folder_arrives_as_a_camera(ros, tmp_path):
    frames = write_images(tmp_path, 12)  # frame10 comes after frame9
    (tmp_path / "notes.txt").write_text("not an image")
    images = ros.listen(Image, "replayed/image", qos_profile_sensor_data)
    infos = ros.listen(CameraInfo, "replayed/camera_info", qos_profile_sensor_data)
    calibration = tmp_path / "camera.yaml"
    calibration.write_text(CALIBRATION)
    # The subscriptions above may be found after the first images went out, so the folder is played more than once.
    player = subprocess.Popen(command(tmp_path, "--rate", 50, "--stamps", "zero", "--loop", 0, "--frame-id", "eye",
                                      "--camera-info", calibration, "--ros-args", "-r", "__ns:=/replayed"))
    try:
        wait_until(lambda: len(images) > 40 and len(infos) > 40, "40 images")
    finally:
        player.send_signal(signal.SIGINT)
    assert player.wait(TIMEOUT) == 0
    for image in images:
        index = round(seconds(image) * 50)
        assert seconds(image) == pytest.approx(index / 50, abs=1e-9)
        assert image.header.frame_id == "eye"
        np.testing.assert_array_equal(to_rgb(image), frames[index % 12])
    assert {info.header.stamp.nanosec for info in infos} & {image.header.stamp.nanosec for image in images}
    assert (infos[0].width, infos[0].height, infos[0].k[0]) == (64, 48, 50.0)


def test_end_of_folder_ends_with_status_0(tmp_path):
    write_images(tmp_path, 3)
    done = replay(tmp_path, "--rate", 100, "--loop", 2, "--size", "32x24", "--fov", 60)
    assert done.returncode == 0, done.stderr
    assert "6 images published on /image" in done.stderr


def test_video_is_read_to_its_end(tmp_path):
    video = cv2.VideoWriter(str(tmp_path / "video.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    assert video.isOpened()
    for frame in range(5):
        video.write(np.full((48, 64, 3), 40 * frame, np.uint8))
    video.release()
    frames = list(Frames(tmp_path / "video.avi"))
    assert [name for name, _ in frames] == ["0", "1", "2", "3", "4"]
    assert [round(pixels.mean() / 40) for _, pixels in frames] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("storage", ["MCAP", "SQLITE3"])
def test_bag_is_played_with_its_stamps(ros, tmp_path, storage):
    pytest.importorskip("rosbags")
    from test_evaluate import write_bag

    frames = np.random.default_rng(3).integers(0, 256, (5, 42, 56, 3), np.uint8)
    bag = write_bag(tmp_path / "bag", storage, frames)
    opened = open_frames(bag, "/png")
    assert opened.count == 5 and [name for name, _ in opened] == [str(2_000_000_000 + i * 100_000_000).zfill(19)
                                                                  for i in range(5)]
    images = ros.listen(Image, "bag/image", qos_profile_sensor_data)
    player = subprocess.Popen(command(bag, "--topic", "/raw", "--rate", 50, "--stamps", "names", "--loop", 0,
                                      "--ros-args", "-r", "__ns:=/bag"))
    try:
        wait_until(lambda: len(images) > 10, "10 images")
    finally:
        player.send_signal(signal.SIGINT)
    assert player.wait(TIMEOUT) == 0
    for image in images:
        assert image.header.stamp.sec == 100
        np.testing.assert_array_equal(to_rgb(image), frames[image.header.stamp.nanosec // 7])


@pytest.mark.parametrize("make, arguments, words", [
    (lambda folder: None, [], "no images in"),
    (lambda folder: folder.rmdir(), [], "does not exist"),
    (lambda folder: (folder / "a.png").write_text("no picture"), [], "cannot be read as an image"),
    (lambda folder: write_images(folder, 1), ["--stamps", "names"], "is no time stamp"),
    (lambda folder: write_images(folder, 1), ["--camera-info", "/nowhere.yaml"], "is no camera calibration"),
    (lambda folder: write_images(folder, 1), ["--topic", "/raw"], "is no bag"),
    (lambda folder: (folder / "metadata.yaml").write_text("no bag"), [], "cannot be read as a bag"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path, make, arguments, words):
    folder = tmp_path / "images"
    folder.mkdir()
    make(folder)
    done = replay(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize("arguments", [["--rate", "0"], ["--loop", "-1"], ["--size", "64"], ["--fov", "180"],
                                       ["--fov", "60", "--camera-info", "x.yaml"]])
def test_bad_option_is_refused(tmp_path, arguments):
    done = replay(tmp_path, *arguments)
    assert done.returncode == 2
    assert "error:" in done.stderr


def test_replay_needs_no_torch():
    """`ros2 run` starts it with ROS 2's own interpreter, which has none."""
    code = "import sys; sys.modules['torch'] = None; import lingbot_map_ros.ros.replay"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_stamps_from_names():
    assert stamp_from_name("1305031102.175304") == 1305031102_175304000
    assert stamp_from_name("1403636579763555584") == 1403636579763555584
    assert stamp_from_name("1403636579763555") == 1403636579763555000
    assert stamp_from_name("1403636579763") == 1403636579763000000
    with pytest.raises(ReplayError, match="'000012' is no time stamp"):
        stamp_from_name("000012")


def test_calibration_is_scaled_with_the_images(tmp_path):
    (tmp_path / "camera.yaml").write_text(CALIBRATION)
    info = scale_camera_info(load_camera_info(tmp_path / "camera.yaml"), 320, 120)
    assert (info.width, info.height, info.distortion_model) == (320, 120, "plumb_bob")
    np.testing.assert_allclose(info.k, [250, 0, 159.75, 0, 127.5, 59.625, 0, 0, 1])
    np.testing.assert_allclose(info.p, [240, 0, 159.75, 0, 0, 122.5, 59.625, 0, 0, 0, 1, 0])
    np.testing.assert_allclose(info.d, [0.1, -0.2, 0, 0, 0])


@pytest.mark.parametrize("text", ["", "[]", "image_width: 640", CALIBRATION.replace("510.0, ", ""), "a: b: c"])
def test_bad_calibration_is_refused(tmp_path, text):
    (tmp_path / "camera.yaml").write_text(text)
    with pytest.raises(ReplayError, match="is no camera calibration"):
        load_camera_info(tmp_path / "camera.yaml")


def test_waiting_loses_no_image_and_repeats(ros, make_node, tmp_path):
    """At a rate far above the node's, every image is processed once, and a second run gives the same poses."""
    write_images(tmp_path, 20)
    runs = []
    for namespace, camera in (("first", ""), ("second", ""), ("third", "rear/")):
        options = {"cameras": ["front", "rear"]} if camera else {}
        node = make_node(namespace, diagnostics_period=0.1, scale_frames=4, sliding_window=4, **options)
        topic = f"lingbot_map_node/{camera}odometry"
        odometry = ros.listen(Odometry, f"/{namespace}/{topic}")
        wait_until(lambda: ros.peer.count_publishers(f"/{namespace}/{topic}"), "odometry offered")
        done = replay(tmp_path, "--rate", 500, "--stamps", "zero", "--wait", topic,
                      "--ros-args", "-r", f"__ns:=/{namespace}", "-r", f"image:={camera}image")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: len(odometry) == 20, "a pose for every image")
        assert [round(seconds(message) * 500) for message in odometry] == list(range(20))
        runs.append([message.pose.pose for message in odometry])
        assert node.get_name() == "lingbot_map_node"
    assert runs[0] == runs[1] == runs[2]


def test_pose_that_does_not_come_ends_the_wait(ros, tmp_path):
    write_images(tmp_path, 2)
    images = ros.listen(Image, "/silent/image")
    publisher = ros.peer.create_publisher(Odometry, "/silent/odometry", 10)
    player = subprocess.Popen(command(tmp_path, "--wait", "odometry", "--timeout", 2, "--ros-args", "-r",
                                      "__ns:=/silent"), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: images, "the first image")
        publisher.publish(Odometry())  # a pose, but not of the image that is waited for
        _, errors = player.communicate(timeout=TIMEOUT)
    finally:
        player.kill()
        ros.peer.destroy_publisher(publisher)
    assert player.returncode == 1
    assert "no pose for image 2" in errors
