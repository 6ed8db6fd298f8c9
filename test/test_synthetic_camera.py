# SPDX-License-Identifier: Apache-2.0
"""The camera in a rendered place: its parts, and the process that publishes over the middleware."""
from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest
import torch
from diagnostic_msgs.msg import DiagnosticArray
from hypothesis import given, settings
from hypothesis import strategies as st
from nav_msgs.msg import Odometry
from rosgraph_msgs.msg import Clock
from ros_harness import TIMEOUT, NodeProcess, wait_until
from sensor_msgs.msg import CameraInfo, Image

from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping.image_message import to_rgb
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.messages import nanoseconds
from lingbot_map_ros.ros.parameter_table import ParameterError
from lingbot_map_ros.ros.synthetic_camera import SyntheticCameraParameters
from lingbot_map_ros.synthetic.picture import Picture, RenderedLoop, motion_blur
from lingbot_map_ros.synthetic import make_place, render

SMALL = {"image_width": 64, "image_height": 48, "supersampling": 1, "loop_frames": 16, "stamps": "zero"}


# -- parts ----------------------------------------------------------------------------------------------------------

def number_picture(index: int) -> Picture:
    return Picture(np.full((2, 2, 3), index, np.uint8), np.full((2, 2), index, np.float32))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 9), capacity=st.integers(1, 12), steps=st.lists(st.integers(1, 4), max_size=12))
def test_loop_gives_the_right_picture_within_its_memory(length, capacity, steps):
    """Numbers may be left out; a loop that fits is rendered once, another holds no more than its capacity."""
    rendered = []

    def render_one(index: int) -> Picture:
        rendered.append(index)
        return number_picture(index)

    loop = RenderedLoop(render_one, length, capacity)
    number = 0
    try:
        for step in [0, *steps]:
            number += step
            wait_until(lambda: loop.take(number) is not None, f"picture {number}")
            assert loop.take(number).rgb[0, 0, 0] == number % length
            assert len(loop._pictures) <= min(length, capacity)
        if capacity >= length:
            wait_until(lambda: loop.ahead == length, "the whole loop")
            assert rendered == list(range(length))
    finally:
        loop.close()


def test_loop_renders_no_further_than_there_is_room():
    rendered = []
    loop = RenderedLoop(lambda index: rendered.append(index) or number_picture(index), 100, 5)
    try:
        wait_until(lambda: loop.ahead == 5, "five pictures ahead")
        assert rendered == [0, 1, 2, 3, 4]
        assert loop.take(3) is not None
        wait_until(lambda: loop.ahead == 5, "five pictures ahead again")
        assert rendered == list(range(8))
    finally:
        loop.close()


def test_what_rendering_raises_is_raised_where_pictures_are_taken():
    def fail(index: int) -> Picture:
        raise MemoryError("no room for a picture")

    loop = RenderedLoop(fail, 3, 3)
    with pytest.raises(MemoryError, match="no room"):
        wait_until(lambda: loop.take(0), "an error")
    loop.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "render"]


def test_blur_is_as_wide_as_the_motion():
    """A camera that moves to the right by a tenth of the depth: an edge moves by f / 10 = 6 pixels."""
    rgb = np.zeros((24, 80, 3), np.uint8)
    rgb[:, 40:] = 200
    picture = Picture(rgb, np.full((24, 80), 2.0, np.float32))
    K = np.array([[60.0, 0, 40], [0, 60.0, 12], [0, 0, 1]])
    T_next_camera = np.eye(4)
    T_next_camera[0, 3] = -0.2
    blurred = motion_blur(picture, K, T_next_camera, 1.0)[12, :, 0].astype(int)
    ramp = np.flatnonzero((blurred > 5) & (blurred < 195))
    assert 5 <= len(ramp) <= 7 and abs(ramp.mean() - 39.5) <= 1  # around where the edge was
    assert (np.diff(blurred) >= 0).all() and (blurred[0], blurred[-1]) == (0, 200)
    assert (motion_blur(picture, K, T_next_camera, 0.0) == rgb).all()
    assert (motion_blur(picture, K, np.eye(4), 1.0) == rgb).all()
    sky = dataclasses.replace(picture, depth=np.full((24, 80), np.inf, np.float32))
    assert (motion_blur(sky, K, T_next_camera, 1.0) == rgb).all()  # what is far away does not move


def test_faults_come_as_often_as_asked_and_repeat():
    asked = SyntheticCameraParameters(seed=3, rate=10.0, dropped=0.2, blurred=0.5, gap_period=10.0, gap_length=2.0)
    faults = [asked.fault(number) for number in range(2000)]
    assert faults == [asked.fault(number) for number in range(2000)]
    assert faults.count("gap") == 400 and set(faults[80:100]) == {"gap"} and "gap" not in faults[:80]
    assert faults.count("dropped") / 1600 == pytest.approx(0.2, abs=0.03)
    assert faults.count("blurred") / 1600 == pytest.approx(0.8 * 0.5, abs=0.04)
    assert faults != [dataclasses.replace(asked, seed=4).fault(number) for number in range(2000)]
    assert {SyntheticCameraParameters().fault(number) for number in range(100)} == {""}


@pytest.mark.parametrize(("values", "words"), [
    ({"fov": 151.0}, "fov is 151.0: expected 20 to 150"),
    ({"seed": -1}, "seed is -1"),
    ({"camera_frame": ""}, "camera_frame is ''"),
    ({"ground_truth_frame": "world"}, "must differ"),
    ({"gap_period": 2.0, "gap_length": 2.0}, "gap_length is 2.0 and gap_period 2.0"),
    ({"stamps": "names"}, "expected one of clock, zero"),
])
def test_bad_parameters_are_named(values, words):
    with pytest.raises(ParameterError, match=words):
        SyntheticCameraParameters(**values)


# -- the process ----------------------------------------------------------------------------------------------------

@pytest.fixture
def camera(tmp_path):
    """Yield a function that starts the camera in a namespace with a small image and more parameters."""
    processes = []

    def start(namespace: str, **parameters) -> NodeProcess:
        processes.append(NodeProcess(tmp_path / f"camera{len(processes)}.log", {**SMALL, **parameters},
                                     arguments=("-r", f"__ns:=/{namespace}"),
                                     command=("-m", "lingbot_map_ros.ros.synthetic_camera")))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def by_stamp(received) -> dict[int, object]:
    return {nanoseconds(message.header.stamp): message for message in list(received)}


def pose_of(message: Odometry) -> np.ndarray:
    p, q = message.pose.pose.position, message.pose.pose.orientation
    T = np.eye(4)
    T[:3, :3] = quaternion_to_matrix(torch.tensor([[q.x, q.y, q.z, q.w]], dtype=torch.float64))[0].numpy()
    T[:3, 3] = p.x, p.y, p.z
    return T


def depth_of(message: Image) -> np.ndarray:
    assert message.encoding == "32FC1" and message.step == 4 * message.width
    return np.frombuffer(message.data, "<f4").reshape(message.height, message.width)


def report_values(reports, namespace: str) -> list[dict[str, str]]:
    """Return what a camera's reports on /diagnostics hold, oldest first."""
    return [{entry.key: entry.value for entry in status.values} for report in reports for status in report.status
            if status.name == f"{namespace}/synthetic_camera: camera"]


def reprojection_errors(K: np.ndarray, a: tuple, b: tuple) -> np.ndarray:
    """Return the relative depth errors of what (T_world_camera, depth) `a` shows where `b` shows it.

    K: as in a CameraInfo, so that pixels have their centres at integers.
    """
    (T_a, depth_a), (T_b, depth_b) = a, b
    v, u = np.mgrid[0:depth_a.shape[0], 0:depth_a.shape[1]]
    rays = np.stack([u, v, np.ones_like(u)], -1) @ np.linalg.inv(K).T
    points = (rays * depth_a[..., None]).reshape(-1, 3)
    points = points[np.isfinite(points).all(1)]
    T = np.linalg.inv(T_b) @ T_a
    points = points @ T[:3, :3].T + T[:3, 3]
    pixels = points @ K.T
    u, v = np.round(pixels[:, :2] / pixels[:, 2:]).astype(int).T
    inside = (points[:, 2] > 0.1) & (u >= 0) & (v >= 0) & (u < depth_b.shape[1]) & (v < depth_b.shape[0])
    return np.abs(depth_b[v[inside], u[inside]] - points[inside, 2]) / points[inside, 2]


def test_images_calibration_and_truth_belong_together(ros, camera, tmp_path):
    """Two rounds: the second, from memory, repeats the first; the truth's depth and poses explain one another."""
    images = ros.listen(Image, "/hall/image")
    infos = ros.listen(CameraInfo, "/hall/camera_info")
    truths = ros.listen(Odometry, "/hall/ground_truth/odometry")
    depths = ros.listen(Image, "/hall/ground_truth/depth")
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    transforms = ros.listen(interfaces.TFMessage, "/tf") if interfaces.TFMessage else None
    process = camera("hall", rate=8.0, loops=2, wait_for_subscriber=True, fov=90.0, seed=5)
    assert process.process.wait(4 * TIMEOUT) == 0, process.text()
    wait_until(lambda: len(images) == len(infos) == len(truths) == len(depths) == 32, "two rounds of 16")
    assert "32 images published on /hall/image" in process.text()

    assert [nanoseconds(image.header.stamp) for image in images] == [125_000_000 * k for k in range(32)]
    for received in (infos, truths, depths):
        assert by_stamp(received).keys() == by_stamp(images).keys()
    assert {(image.encoding, image.header.frame_id) for image in images} == {("rgb8", "camera_optical_frame")}
    K = np.reshape(infos[0].k, (3, 3))
    np.testing.assert_allclose(K, [[32, 0, 31.5], [0, 32, 23.5], [0, 0, 1]])
    np.testing.assert_allclose(np.reshape(infos[0].p, (3, 4))[:, :3], K)

    poses = [pose_of(truth) for truth in truths]
    assert {truth.header.frame_id for truth in truths} == {"world"}
    for k in range(16):
        assert images[k].data == images[k + 16].data
        np.testing.assert_array_equal(poses[k], poses[k + 16])
    steps = np.linalg.norm(np.diff([T[:3, 3] for T in poses], axis=0), axis=1)
    assert steps[15] < 1.5 * np.median(steps)  # from the end of a round to its beginning
    twist = truths[3].twist.twist.linear
    T_2_3 = np.linalg.inv(poses[3]) @ poses[2]
    np.testing.assert_allclose([twist.x, twist.y, twist.z], -T_2_3[:3, 3] * 8.0, atol=1e-6)

    views = [(T, depth_of(depth)) for T, depth in zip(poses, depths)]
    for k in range(0, 15, 5):
        errors = reprojection_errors(K, views[k], views[k + 1])
        assert len(errors) > 300 and np.median(errors) < 0.01
        moved = views[k + 1][0].copy()
        moved[:3, 3] += moved[:3, 2] * 0.3  # had the truth been wrong, it would have been seen
        assert np.median(reprojection_errors(K, views[k], (moved, views[k + 1][1]))) > 0.03

    place = make_place(5, frames=16)  # the images are those of the seed's place
    intrinsics = torch.tensor([[32.0, 0, 32], [0, 32, 24], [0, 0, 1]])
    image, depth = render(place, place.T_world_camera[3:4], intrinsics, (48, 64), supersampling=1)
    assert np.abs(to_rgb(images[3]) / 255 - image[0].permute(1, 2, 0).numpy()).max() < 0.003
    np.testing.assert_allclose(depth_of(depths[3]), depth[0].numpy(), rtol=1e-5)

    if transforms is not None:
        wait_until(lambda: len(transforms) >= 32, "transforms")
        (first,) = transforms[0].transforms
        assert (first.header.frame_id, first.child_frame_id) == ("world", "camera_ground_truth")
        assert first.transform.translation.x == pytest.approx(poses[0][0, 3])
    values = report_values(reports, "hall")[-1]
    assert (values["published"], values["dropped"], values["plays_from_memory"]) == ("32", "0", "True")


def test_faults_reach_the_subscribers(ros, camera):
    """Dropped images and gaps leave the truth alone; blurred images have fainter edges; a parameter stops all that."""
    images = ros.listen(Image, "/rough/image")
    truths = ros.listen(Odometry, "/rough/ground_truth/odometry")
    faults = {"dropped": 0.3, "blurred": 0.5, "gap_period": 2.0, "gap_length": 0.5, "exposure": 2.0, "seed": 2}
    process = camera("rough", rate=20.0, loops=5, wait_for_subscriber=True, memory_mib=1, render_ahead=16, **faults)
    assert process.process.wait(4 * TIMEOUT) == 0, process.text()
    wait_until(lambda: len(truths) == 80, "the truth of every image")
    asked = SyntheticCameraParameters(rate=20.0, **faults)
    expected = {number: asked.fault(number) for number in range(80)}
    arrived = {round(stamp / 5e7): to_rgb(image).astype(float) for stamp, image in by_stamp(images).items()}
    assert sorted(arrived) == [number for number, fault in expected.items() if fault in ("", "blurred")]
    edges = {number: np.abs(np.diff(pixels, axis=1)).mean() for number, pixels in arrived.items()}
    pairs = [(a, b) for a in edges for b in edges if a % 16 == b % 16 and (expected[a], expected[b]) == ("", "blurred")]
    assert len(pairs) > 5 and all(edges[b] < 0.95 * edges[a] for a, b in pairs)


def test_late_images_are_counted_and_said(ros, camera):
    images = ros.listen(Image, "/slow/image")
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    # An image takes some fifty times as long to render as there is between two, and there is room for a few only, so
    # that what is rendered before the subscription is found does not matter.
    process = camera("slow", rate=240.0, loops=1, render_ahead=1, loop_frames=40, stamps="clock",
                     image_width=160, image_height=120, supersampling=8, memory_mib=1, wait_for_subscriber=True)
    assert process.process.wait(4 * TIMEOUT) == 0, process.text()
    assert "is late, 1 so far: rendering takes" in process.text()
    wait_until(lambda: len(images) == 40, "all images")
    stamps = [nanoseconds(image.header.stamp) for image in images]
    assert (np.diff(stamps) > 0).all()
    reported = [int(values["late"]) for values in report_values(reports, "slow")]  # of its last second perhaps not
    late = int(re.search(r"(\d+) of them late", process.text())[1])
    assert late > 10 and 1 <= max(reported) <= late


def test_simulated_clock_drives_the_camera(ros, camera):
    """Twice as fast as real time, then set back: images are stamped by it and go on coming."""
    clock = ros.peer.create_publisher(Clock, "/clock", 10)
    images = ros.listen(Image, "/simulated/image")
    process = camera("simulated", rate=4.0, stamps="clock", use_sim_time=True)
    shown = [100.0]  # seconds

    def tick() -> None:
        shown[0] += 0.02
        message = Clock()
        message.clock.sec, message.clock.nanosec = int(shown[0]), int(shown[0] % 1 * 1e9)
        clock.publish(message)

    timer = ros.peer.create_timer(0.01, tick)
    try:
        wait_until(lambda: len(images) > 6, "images")
        stamps = [nanoseconds(image.header.stamp) for image in images]
        assert min(stamps) >= 100_000_000_000 and max(stamps) <= shown[0] * 1e9
        assert np.median(np.diff(stamps)) == pytest.approx(250_000_000, rel=0.2)
        shown[0] = 10.0
        wait_until(lambda: any(image.header.stamp.sec < 50 for image in images), "an image after the clock's jump back")
    finally:
        ros.peer.destroy_timer(timer)
        ros.peer.destroy_publisher(clock)
    assert process.stop() == 0


def test_lockstep_with_the_mapping_node(ros, make_node, camera):
    """Far faster than the node maps, but none is dropped."""
    node = make_node("paced", diagnostics_period=0.1, scale_frames=3, sliding_window=4)
    odometry = ros.listen(Odometry, "/paced/lingbot_map_node/odometry")
    process = camera("paced", rate=240.0, loops=1, wait_for="lingbot_map_node/odometry")
    assert process.process.wait(4 * TIMEOUT) == 0, process.text()
    wait_until(lambda: len(odometry) == 16, "a pose for every image")
    assert node.channels[0].monitor.counts.processed == 16


def test_parameters_while_it_runs(ros, camera):
    images = ros.listen(Image, "/tuned/image")
    process = camera("tuned", rate=4.0)
    wait_until(lambda: images, "an image")
    assert ros.set_parameter("/tuned/synthetic_camera", "dropped", 1.0).successful
    refused = ros.set_parameter("/tuned/synthetic_camera", "gap_period", 0.5)
    assert not refused.successful and "gap_length is 1.0 and gap_period 0.5" in refused.reason
    assert not ros.set_parameter("/tuned/synthetic_camera", "seed", 7).successful
    assert process.stop() == 0


def test_bad_parameter_is_one_line_and_status_1(camera):
    process = camera("bad", fov=10.0)
    assert process.process.wait(TIMEOUT) == 1
    assert "fov" in process.text() and "Traceback" not in process.text()
