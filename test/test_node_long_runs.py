# SPDX-License-Identifier: Apache-2.0
"""A minute of standing, a drive and a minute of standing, through the node, image by image."""
from __future__ import annotations

import array

import numpy as np
import torch
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry, Path
from oracle import Oracle, curve
from ros_harness import LATCHED, Feed, image_message, private, stamp_of, stamps, statuses, values, wait_until

from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD

RATE = 5  # images a second
STILL, DRIVE = 60 * RATE, 400  # images: a minute, and as long as the curve leads towards the wall
SHADES = 100  # of red, of which one tells an image's place on the curve together with one of green


def image_of(index: int, place: int):
    """Return image `index` of a camera at a place of the curve: a wall that passes by, and the sensor's noise."""
    message = image_message(place)
    pixels = np.array(message.data, np.uint8).reshape(message.height, message.width, 3)
    pixels[..., 0] = 20 + 2 * (place % SHADES)
    pixels[..., 1] = 20 + 40 * (place // SHADES)
    noise = np.random.default_rng(index).integers(-8, 9, pixels.shape[:2])
    pixels[..., 2] = np.clip(pixels[..., 2].astype(int) + noise, 0, 255)
    seconds, nanoseconds = stamp_at(index)
    message.header.stamp.sec, message.header.stamp.nanosec = seconds, nanoseconds
    message.data = array.array("B", pixels.tobytes())
    return message


def stamp_at(index: int) -> tuple[int, int]:
    """Return seconds and nanoseconds of image `index`."""
    return stamp_of(10 // RATE * index)


def place_of(image) -> int:
    """Return the place that the model's image [3, h, w] shows."""
    red, green, _ = (255 * image.mean((1, 2))).round().int().tolist()
    return (red - 20) // 2 + SHADES * ((green - 20) // 40)


def states(messages) -> list[str]:
    """Return the states in their order, without repetitions."""
    found = [message.message for message in messages]
    return [state for state, before in zip(found, [None, *found]) if state != before]


def matrix(pose) -> np.ndarray:
    """Return a pose message as [4, 4]."""
    p, q = pose.position, pose.orientation
    T = np.eye(4)
    T[:3, :3] = quaternion_to_matrix(torch.tensor([q.x, q.y, q.z, q.w], dtype=torch.float64))
    T[:3, 3] = p.x, p.y, p.z
    return T


def test_a_minute_still_a_drive_and_a_minute_still(ros, make_node, monkeypatch):
    """The model's caches are real, its predictions exact: whatever is lost, repeated or jumps is the node's doing."""
    poses, depths = curve(DRIVE + 1)
    oracle = Oracle(poses, depths, place_of)
    node = make_node(max_path_length=2 * STILL + DRIVE, path_period=3600.0, diagnostics_period=0.2, image_timeout=600.0)
    step = node.channels[0].mapper.model.step

    def exact(images, state, keep=True):
        starts_window = state.num_kept == 0
        step(images, state, keep)
        return oracle.predict(images, starts_window)

    monkeypatch.setattr(node.channels[0].mapper.model, "step", exact)
    name = node.get_fully_qualified_name()
    for parameter, value in {"keyframe_policy": "motion", "flow_threshold": 0.4, "window_size": 10,
                             "overlap_keyframes": 3, "init_motion": 0.01, "max_init_wait": 5.0}.items():
        assert ros.set_parameter(name, parameter, value).successful
    events = ros.listen(DiagnosticStatus, private(node, "events"), LATCHED)
    tracking = ros.listen(DiagnosticStatus, private(node, "tracking_state"), LATCHED)
    odometry = ros.listen(Odometry, private(node, "odometry"), 3000)
    paths = ros.listen(Path, private(node, "path"), keep=1)
    reports = ros.listen(DiagnosticArray, "/diagnostics", 1000, keep=20)
    feed = Feed(ros, node)
    places = [0] * STILL + list(range(1, DRIVE + 1)) + [DRIVE] * STILL

    def send(start: int, end: int) -> None:
        for index in range(start, end):
            feed.send(image_of(index, places[index]))

    def shown(part: str, images: int) -> dict[str, str]:
        """Return what a status shows after so many images."""
        wait_until(lambda: "camera" in statuses(list(reports), node) and values(
            statuses(list(reports), node)["camera"])["frames_processed"] == str(images), f"{images} on /diagnostics")
        return values(statuses(list(reports), node)[part])

    def hand_overs() -> list[dict[str, str]]:
        return [values(event) for event in events if event.name.endswith("hand_over")]

    # Standing: after 5 s the first and the newest image have to do as scale frames, and the next is a keyframe.
    start = 6 * RATE
    send(0, start)
    cache, keyframes = shown("cache", start), 3
    assert cache["frame_count"] == str(keyframes) and cache["window"] == "0"
    memory, standing_points = int(cache["cache_bytes"]), cache["map_points"]
    send(start, STILL)
    cache = shown("cache", STILL)
    assert (cache["frame_count"], cache["map_points"]) == (str(keyframes), standing_points)
    assert states(tracking) == ["INITIALIZING", "DEGRADED"]
    assert "hardly moved" in values(tracking[-1])["reasons"] and not hand_overs()

    # Driving: a pose for each image, in one frame from window to window.
    send(STILL, STILL + DRIVE)
    cache, driven = shown("cache", STILL + DRIVE), shown("tracking", STILL + DRIVE)
    windows = int(cache["window"])
    assert windows >= 3 and driven["hand_overs"] == str(windows) and driven["hand_over_problems"] == "0"
    wait_until(lambda: len(hand_overs()) == windows, "an event for each hand-over")
    assert [int(figures["window"]) for figures in hand_overs()] == list(range(1, windows + 1))
    assert states(tracking) == ["INITIALIZING", "DEGRADED", "TRACKING"]

    # Standing again: nothing is kept, nothing starts anew, nothing grows.
    send(STILL + DRIVE, STILL + DRIVE + 50)
    resident = int(shown("model", STILL + DRIVE + 50)["device_memory_bytes"])
    send(STILL + DRIVE + 50, len(places))
    after = shown("cache", len(places))
    for key in ("frame_count", "window", "map_points", "live_pages", "evicted_pages"):
        assert after[key] == cache[key], key
    assert int(shown("model", len(places))["device_memory_bytes"]) - resident < 8 << 20
    assert int(after["cache_bytes"]) == memory and len(hand_overs()) == windows
    assert states(tracking) == ["INITIALIZING", "DEGRADED", "TRACKING"]
    assert {event.name.rsplit(": ", 1)[1] for event in events} <= {"resized", "sequence", "hand_over"}
    counts = node.channels[0].monitor.counts
    assert (counts.sequences, counts.rejected, counts.failed, counts.lost, counts.gaps) == (1, 0, 0, 0, 0)

    # None lost, none repeated, none elsewhere than where the camera was.
    expected = [0, *range(5 * RATE, len(places))]  # the first 5 s had too little motion
    wait_until(lambda: len(odometry) == len(expected), "a pose for each image")
    assert stamps(odometry) == [stamp_at(index) for index in expected]
    assert ros.set_parameter(name, "path_period", 0.0).successful
    wait_until(lambda: paths and stamps(paths[0].poses) == stamps(odometry), "the same in one path")
    scale = float(np.linalg.norm(matrix(odometry[-1].pose.pose)[:3, 3]) / np.linalg.norm(
        (np.linalg.inv(poses[0]) @ poses[-1])[:3, 3]))
    for index, message in zip(expected, odometry):
        T = T_MAP_WORLD @ np.linalg.inv(poses[0]) @ poses[places[index]]
        T[:3, 3] *= scale
        np.testing.assert_allclose(matrix(message.pose.pose), T, rtol=0, atol=1e-5 * scale, err_msg=str(index))
    for figures in hand_overs():
        assert float(figures["translation_jump"]) < 1e-6 * scale * 6  # the wall is 6 units away
        assert float(figures["rotation_jump"]) < 1e-6
