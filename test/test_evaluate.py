# SPDX-License-Identifier: Apache-2.0
"""Replaying recordings without ROS, and the errors that are measured."""
from __future__ import annotations

import csv
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from lingbot_map_ros.gct import PRESETS, build_model, image_geometry, prepare_image
from lingbot_map_ros.image_files import ReplayError
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from lingbot_map_ros.mapping.evaluation import evaluate as program
from lingbot_map_ros.mapping.evaluation.evaluate import main, parse_arguments
from lingbot_map_ros.mapping.evaluation.metrics import (
    depth_errors, heading_error, read_tum, sample_depth, trajectory_errors)
from lingbot_map_ros.mapping.evaluation.sources import Frame, open_source, read_depth
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, quaternion_from_matrix
from lingbot_map_ros.mapping.image_message import ImageError, compressed_to_rgb
from lingbot_map_ros.mapping.trajectory import write_tum

WIDTH, HEIGHT, FOCAL = 220, 160, 190.0
TINY = ["--preset", "tiny", "--device", "cpu"]


def rotation(degrees_x: float, degrees_y: float, degrees_z: float = 0.0) -> np.ndarray:
    """Return the rotation about y, then x, then z."""
    matrices = []
    for axis, degrees in ((0, degrees_x), (1, degrees_y), (2, degrees_z)):
        vector = np.zeros(3)
        vector[axis] = np.radians(degrees)
        matrices.append(cv2.Rodrigues(vector)[0])
    return matrices[2] @ matrices[0] @ matrices[1]


def texture(size: int = 700) -> np.ndarray:
    """Return a picture of coloured patches of all sizes, uint8 [size, size, 3]."""
    generator = np.random.default_rng(5)
    picture = np.full((size, size, 3), 128, np.uint8)
    for edge in np.geomspace(0.4, 0.02, 400) * size:
        x, y = generator.integers(-edge, size, 2)
        width, height = generator.uniform(0.5, 1, 2) * edge
        colour = generator.integers(40, 230, 3).tolist()
        cv2.rectangle(picture, (int(x), int(y)), (int(x + width), int(y + height)), colour, -1)
    return picture


def render(T_world_camera: np.ndarray, picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what a camera sees in a room of 4 x 2.6 x 6 m around the origin, and its depth: BGR uint8 and metres."""
    u, v = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    rays = np.stack([u - (WIDTH - 1) / 2, v - (HEIGHT - 1) / 2, np.full(u.shape, FOCAL)], axis=-1) / FOCAL
    directions, centre = rays @ T_world_camera[:3, :3].T, T_world_camera[:3, 3]
    walls = np.sign(directions) * [2.0, 1.3, 3.0]  # of each axis the one that the ray goes to
    depths = (walls - centre) / directions
    axis, depth = depths.argmin(axis=-1), depths.min(axis=-1)
    points = centre + depth[..., None] * directions
    first, second = (np.take_along_axis(points, ((axis + i) % 3)[..., None], axis=-1)[..., 0] for i in (1, 2))
    side = np.take_along_axis(walls, axis[..., None], axis=-1)[..., 0]  # gives every wall a part of its own
    columns, rows = ((part * 50 + 37 * side + 350 + 20 * axis).astype(np.float32) for part in (first, second))
    return cv2.remap(picture, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP), depth


def pose_row(T: np.ndarray) -> list[float]:
    return [*T[:3, 3].tolist(), *quaternion_from_matrix(T[:3, :3]).tolist()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Return a dataset in TUM format: 24 images of a room, from a camera that goes forward, sways and turns."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "rgb").mkdir()
    (folder / "depth").mkdir()
    picture = texture()
    lists = {name: ["# a comment"] for name in ("rgb", "depth", "groundtruth")}
    for i in range(24):
        angle = i / 24 * 2 * np.pi
        T = np.eye(4)
        T[:3, :3] = rotation(2 * np.sin(angle), 1.0 * i)
        T[:3, 3] = 0.5 * np.sin(angle / 2), 0.1 * np.sin(angle), -2.0 + 0.06 * i
        image, depth = render(T, picture)
        stamp = 1305031102.2 + i / 30
        cv2.imwrite(str(folder / "rgb" / f"{stamp:.6f}.png"), image)
        lists["rgb"].append(f"{stamp:.6f} rgb/{stamp:.6f}.png")
        if i % 2 == 0:  # depth is there for half of the images, and not at the very same time
            cv2.imwrite(str(folder / "depth" / f"{i}.png"), np.round(depth * 5000).astype(np.uint16))
            lists["depth"].append(f"{stamp + 0.004:.6f} depth/{i}.png")
        lists["groundtruth"].append(" ".join([f"{stamp - 0.002:.6f}", *map(repr, pose_row(T))]))
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Return a folder of 14 small images whose names are no times."""
    folder = tmp_path_factory.mktemp("images")
    picture = texture(300)
    for i in range(14):
        cv2.imwrite(str(folder / f"{i}.png"), picture[4 * i : 4 * i + 80, 6 * i : 6 * i + 112])
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def report(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


# -- whole runs -----------------------------------------------------------------------------------------------------

def test_tum_dataset_with_the_default_model(dataset, tmp_path, capsys):
    pytest.importorskip("evo")
    assert main([str(dataset), "-o", str(tmp_path / "a" / "b"), "--flow-threshold", "0", "--device", "cpu"]) == 0
    folder = tmp_path / "a" / "b"
    assert {path.name for path in folder.iterdir()} == set(program.OUTPUTS)
    for picture in folder.glob("*.png"):
        assert cv2.imread(str(picture)).std() > 1
    metrics, trace = report(folder), rows(folder / "trace.csv")
    assert metrics["source"]["kind"] == "TUM dataset" and metrics["frames"]["results"] == len(trace) == 24
    trajectory = metrics["trajectory"]
    assert trajectory["matched_poses"] == 24 and metrics["trajectory_problem"] == ""
    ate = trajectory["ate"]["translation"]
    assert 0 < ate["rmse_percent_of_path"] < 10  # standing still would be 25
    assert trajectory["rpe_one_pose"]["rotation_degrees"]["rmse"] < 1
    assert ate["rmse_percent_of_path"] == pytest.approx(100 * ate["rmse"] / trajectory["path_length"])
    translation = np.array([float(row["translation"]) for row in rows(folder / "errors.csv")])
    assert ate == pytest.approx({
        "rmse": np.sqrt((translation**2).mean()), "mean": translation.mean(), "median": np.median(translation),
        "max": translation.max(), "rmse_percent_of_path": ate["rmse_percent_of_path"]})
    with_depth = [row for row in trace if row["depth_abs_rel"]]
    assert len(with_depth) == metrics["depth"]["frames"] == 12
    assert metrics["depth"]["abs_rel"] == pytest.approx(np.mean([float(row["depth_abs_rel"]) for row in with_depth]))
    assert metrics["depth"]["abs_rel"] < 0.12 and metrics["depth"]["delta_1"] > 0.9
    printed = capsys.readouterr().out
    assert "24 poses of 24 frames" in printed and f"ATE rmse {ate['rmse']:.4g}" in printed and "AbsRel" in printed


def test_outputs_are_the_sessions_own(images, tmp_path):
    options = ["--scale-frames", "3", "--window-size", "6", "--overlap-keyframes", "2", "--flow-threshold", "0"]
    assert main([str(images), "-o", str(tmp_path), "--rate", "20", *options, *TINY]) == 0

    model = build_model("tiny", device="cpu")
    session = MappingSession(model, SessionConfig(scale_frames=3, window_size=6, overlap_keyframes=2))
    results, stats = [], []
    for i in range(14):
        rgb = cv2.cvtColor(cv2.imread(str(images / f"{i}.png")), cv2.COLOR_BGR2RGB)
        new = session.step(prepare_image(rgb, model.config)[0])
        results += new
        stats += [session.cache_stats()] * len(new)
    trace = rows(tmp_path / "trace.csv")
    stamps, poses = read_tum(tmp_path / "trajectory.txt")
    assert stamps == pytest.approx(np.arange(14) / 20)
    hand_overs = 0
    for result, cache, row, pose in zip(results, stats, trace, poses, strict=True):
        assert pose.tolist() == pose_row(T_MAP_WORLD @ result.T_world_camera.double().numpy())  # to the last bit
        assert (int(row["index"]), int(row["window"])) == (result.index, result.window)
        assert bool(int(row["is_keyframe"])) is result.is_keyframe and row["name"] == str(result.index)
        assert {name: int(row[f"cache_{name}"]) for name in cache} == cache
        assert float(row["step_ms"]) > 0
        assert bool(row["hand_over_scale"]) is (result.hand_over is not None)
        if result.hand_over is not None:
            hand_overs += 1
            assert float(row["hand_over_scale"]) == result.hand_over.scale
            assert float(row["hand_over_translation_jump"]) == result.hand_over.translation_jump
            assert int(row["hand_over_shared_frames"]) == result.hand_over.shared_frames
            assert row["hand_over_problem"] == result.hand_over.problem and float(row["hand_over_ms"]) > 0
    metrics = report(tmp_path)
    assert hand_overs == metrics["hand_overs"]["count"] == metrics["frames"]["windows"] - 1 >= 2
    assert metrics["session"]["window_size"] == 6 and metrics["model"]["preset"] == "tiny"
    assert metrics["trajectory"] is None and metrics["trajectory_problem"] == "no ground truth"
    assert not (tmp_path / "errors.png").exists()


def test_frames_can_be_chosen(images, tmp_path):
    assert main([str(images), "-o", str(tmp_path), "--every-nth", "3", "--max-frames", "4", *TINY]) == 0
    assert [row["name"] for row in rows(tmp_path / "trace.csv")] == ["0", "3", "6", "9"]
    assert main([str(images), "-o", str(tmp_path), "--max-frames", "1", *TINY]) == 0  # fewer than scale frames
    assert [row["name"] for row in rows(tmp_path / "trace.csv")] == ["0"]


def test_ground_truth_from_a_file(images, tmp_path):
    pytest.importorskip("evo")
    assert main([str(images), "-o", str(tmp_path), *TINY]) == 0
    (tmp_path / "trajectory.txt").rename(tmp_path / "truth.txt")  # the same run again is without error
    assert main([str(images), "-o", str(tmp_path), "--ground-truth", str(tmp_path / "truth.txt"), *TINY]) == 0
    metrics = report(tmp_path)
    assert metrics["trajectory"]["ate"]["translation"]["max"] < 1e-9 * metrics["trajectory"]["path_length"]
    assert metrics["trajectory"]["scale"] == pytest.approx(1)
    (tmp_path / "truth.txt").write_text("".join(f"{i} 0 0 0 0 0 0 1\n" for i in range(100, 110)))
    assert main([str(images), "-o", str(tmp_path), "--ground-truth", str(tmp_path / "truth.txt"), *TINY]) == 0
    assert report(tmp_path)["trajectory"] is None
    assert "within 0.02 s" in report(tmp_path)["trajectory_problem"]


def test_an_interrupted_run_is_evaluated(images, tmp_path, monkeypatch, capsys):
    class Interrupted:
        kind, ground_truth = "folder", None

        def __len__(self):
            return 14

        def __iter__(self):
            for index, frame in enumerate(open_source(images)):
                if index == 6:
                    raise KeyboardInterrupt
                yield frame

    monkeypatch.setattr(program, "open_source", lambda *_, **__: Interrupted())
    assert main([str(images), "-o", str(tmp_path), *TINY]) == 0
    assert report(tmp_path)["frames"]["interrupted"] is True
    assert capsys.readouterr().out.startswith("interrupted: 6 poses of 6 frames")
    assert len(rows(tmp_path / "trace.csv")) == len(read_tum(tmp_path / "trajectory.txt")[0]) == 6


def test_images_are_not_kept(tmp_path):
    alive, most = weakref.WeakSet(), 0

    class Pixels(np.ndarray):  # plain arrays cannot be in a WeakSet: they have no hash
        __hash__ = object.__hash__

    def frames():
        nonlocal most
        for i in range(60):
            rgb = np.full((56, 56, 3), i, np.uint8).view(Pixels)
            alive.add(rgb)
            most = max(most, len(alive))
            yield Frame(str(i), i, rgb)

    model = build_model("tiny", device="cpu")
    session = MappingSession(model, SessionConfig(window_size=10, overlap_keyframes=3))
    evaluation = program.Evaluation(session, lambda rgb: prepare_image(np.asarray(rgb), model.config))
    with program.Trace(tmp_path / "trace.csv") as trace, open(tmp_path / "trajectory.txt", "w") as trajectory:
        evaluation.run(frames(), trace, trajectory)
    assert evaluation.counts["results"] == 60 and most <= 3


def test_stamps_that_are_not_newer_are_left_out(tmp_path):
    model = build_model("tiny", device="cpu")
    evaluation = program.Evaluation(MappingSession(model), lambda rgb: prepare_image(rgb, model.config))
    frames = [Frame(str(i), stamp, np.full((56, 56, 3), i, np.uint8)) for i, stamp in enumerate((5, 6, 6, 4, 7, 8))]
    with program.Trace(tmp_path / "trace.csv") as trace, open(tmp_path / "trajectory.txt", "w") as trajectory:
        evaluation.run(iter(frames), trace, trajectory)
    assert [row["name"] for row in rows(tmp_path / "trace.csv")] == ["0", "1", "4", "5"]
    assert (evaluation.counts["read"], evaluation.counts["not_newer"]) == (6, 2)


def test_runs_without_ros(images, tmp_path):
    code = ("import sys; from lingbot_map_ros.mapping.evaluation.evaluate import main; "
            f"status = main([{str(images)!r}, '-o', {str(tmp_path)!r}, '--max-frames', '3', '--preset', 'tiny']); "
            "assert not {'rclpy', 'sensor_msgs'} & set(sys.modules); sys.exit(status)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "3 poses of 3 frames" in done.stdout, done.stderr


# -- sources --------------------------------------------------------------------------------------------------------

def test_dataset_is_read_in_order_with_its_depth(dataset):
    source = open_source(dataset)
    frames = list(source)
    assert len(source) == len(frames) == 24 and source.ground_truth == dataset / "groundtruth.txt"
    assert frames[0].stamp_ns == 1305031102_200000000
    assert [frame.depth_file is not None for frame in frames] == [True, False] * 12
    assert frames[2].depth_file == dataset / "depth" / "2.png"
    bgr = cv2.imread(str(dataset / frames[5].name))
    np.testing.assert_array_equal(frames[5].rgb, bgr[..., ::-1])
    assert all(frame.depth_file is None for frame in open_source(dataset, max_time_difference=0.003))
    depth = read_depth(frames[0].depth_file, 5000)
    assert depth.shape == (HEIGHT, WIDTH)
    assert depth[HEIGHT // 2, WIDTH // 2] == pytest.approx(5, abs=1e-3)  # from z = -2 to the wall at 3
    np.testing.assert_allclose(read_depth(frames[0].depth_file, 1000), 5 * depth, rtol=1e-6)


def test_folder_whose_names_are_times(tmp_path):
    for name in ("1305031102.5", "1305031102.25"):
        cv2.imwrite(str(tmp_path / f"{name}.png"), np.zeros((4, 4, 3), np.uint8))
    frames = list(open_source(tmp_path))
    assert [frame.stamp_ns for frame in frames] == [1305031102_250000000, 1305031102_500000000]
    assert [frame.name for frame in frames] == ["1305031102.25", "1305031102.5"]


def test_video_has_its_own_rate(tmp_path):
    writer = cv2.VideoWriter(str(tmp_path / "video.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 8.0, (64, 48))
    for i in range(5):
        writer.write(np.full((48, 64, 3), 40 * i, np.uint8))
    writer.release()
    source = open_source(tmp_path / "video.avi")
    frames = list(source)
    assert source.kind == "video" and len(source) == len(frames) == 5
    assert [frame.stamp_ns for frame in frames] == [125_000_000 * i for i in range(5)]
    assert [round(float(frame.rgb.mean()), -1) for frame in frames] == [0, 40, 80, 120, 160]


def write_bag(path: Path, storage: str, frames: np.ndarray) -> Path:
    """Write RGB frames [n, h, w, 3] as raw and as PNG-compressed messages, and one topic of text."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    with Writer(path, version=9, storage_plugin=StoragePlugin[storage]) as writer:
        topics = {name: writer.add_connection(name, kind, typestore=store) for name, kind in (
            ("/raw", "sensor_msgs/msg/Image"), ("/png", "sensor_msgs/msg/CompressedImage"),
            ("/text", "std_msgs/msg/String"))}
        for i, rgb in enumerate(frames):
            ns = 2_000_000_000 + 100_000_000 * i
            stamp = types["builtin_interfaces/msg/Time"](sec=100, nanosec=7 * i)
            header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="camera")
            padded = np.pad(rgb[..., ::-1].reshape(len(rgb), -1), ((0, 0), (0, 5)))
            raw = types["sensor_msgs/msg/Image"](
                header=header, height=rgb.shape[0], width=rgb.shape[1], encoding="bgr8", is_bigendian=0,
                step=padded.shape[1], data=padded.reshape(-1))
            unset = types["std_msgs/msg/Header"](
                stamp=types["builtin_interfaces/msg/Time"](sec=0, nanosec=0), frame_id="")
            png = types["sensor_msgs/msg/CompressedImage"](
                header=unset, format="rgb8; png compressed bgr8",
                data=cv2.imencode(".png", np.ascontiguousarray(rgb[..., ::-1]))[1].reshape(-1))
            for topic, message in (("/raw", raw), ("/png", png), ("/text", types["std_msgs/msg/String"](data="hello"))):
                connection = topics[topic]
                writer.write(connection, ns, store.serialize_cdr(message, connection.msgtype))
    return path


@pytest.mark.parametrize("storage", ["MCAP", "SQLITE3"])
def test_bag(storage, tmp_path, capsys):
    pytest.importorskip("rosbags")
    frames = np.random.default_rng(3).integers(0, 256, (5, 42, 56, 3), np.uint8)
    bag = write_bag(tmp_path / "bag", storage, frames)
    raw, png = list(open_source(bag, topic="/raw")), list(open_source(bag, topic="/png"))
    np.testing.assert_array_equal([frame.rgb for frame in raw], frames)
    np.testing.assert_array_equal([frame.rgb for frame in png], frames)
    assert [frame.stamp_ns for frame in raw] == [100_000_000_000 + 7 * i for i in range(5)]
    assert [frame.stamp_ns for frame in png] == [2_000_000_000 + 100_000_000 * i for i in range(5)]  # the bag's
    (file,) = [path for path in bag.iterdir() if path.suffix in (".mcap", ".db3")]
    assert len(open_source(file, topic="/raw")) == 5

    assert main([str(bag), "-o", str(tmp_path / "out"), "--topic", "/png", *TINY]) == 0
    assert report(tmp_path / "out")["source"]["topic"] == "/png"
    assert len(rows(tmp_path / "out" / "trace.csv")) == 5
    for options, words in (
        ([], ["2 image topics", "--topic", "/png (sensor_msgs/msg/CompressedImage)", "/raw (sensor_msgs/msg/Image)"]),
        (["--topic", "/left"], ["no topic /left", "/raw (sensor_msgs/msg/Image)", "/text (std_msgs/msg/String)"]),
        (["--topic", "/text"], ["/text is of std_msgs/msg/String", "sensor_msgs/msg/Image"]),
    ):
        assert_refused([str(bag), "-o", str(tmp_path / "none"), *options, *TINY], words, capsys)
    file.write_bytes(b"no bag")
    arguments = [str(bag), "--topic", "/raw", "-o", str(tmp_path / "none"), *TINY]
    assert_refused(arguments, ["cannot be read as a bag"], capsys)
    moved = file.rename(tmp_path / file.name)  # without its metadata
    assert_refused([str(moved), *arguments[1:]], ["lacks the bag's metadata.yaml"], capsys)
    assert not (tmp_path / "none").exists()


def test_compressed_images_that_are_none():
    for data in (b"", b"\xff\xd8 no JPEG"):
        with pytest.raises(ImageError, match=f"data is '{len(data)} bytes'.*format 'jpeg'"):
            compressed_to_rgb(SimpleNamespace(format="jpeg", data=data))


# -- errors of the user ---------------------------------------------------------------------------------------------

def assert_refused(arguments: list[str], words: list[str], capsys) -> None:
    """Assert that the program ends with status 2 and one line that has the words."""
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("lingbot_map_evaluate: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


def test_sources_that_cannot_be_read(images, dataset, tmp_path, capsys):
    def refused(source: Path, *words: str, options: tuple[str, ...] = ()) -> None:
        assert_refused([str(source), "-o", str(tmp_path / "out"), *options, *TINY], list(words), capsys)

    refused(tmp_path / "nowhere", "nowhere does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no images in")
    (tmp_path / "text.txt").write_text("hello")
    refused(tmp_path / "text.txt", "neither a folder of images nor a video")
    refused(images, "is no bag", options=("--topic", "/image"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"hello")
    refused(tmp_path / "broken", "0.png cannot be read as an image")

    (tmp_path / "tum").mkdir()
    rgb = tmp_path / "tum" / "rgb.txt"
    for text, *words in (("# nothing\n", "rgb.txt names no images"),
                         ("# x\n1.5 a.png\nyesterday b.png\n", "line 3", "'yesterday b.png'"),
                         ("1.5\n", "line 1", "'1.5'"),
                         ("1.5 rgb/a.png\n", "rgb/a.png", "cannot be read")):
        rgb.write_text(text)
        refused(tmp_path / "tum", *words)
    cv2.imwrite(str(tmp_path / "tum" / "grey.png"), np.zeros((60, 80), np.uint8))
    rgb.write_text("1.5 grey.png\n")
    (tmp_path / "tum" / "depth.txt").write_text("1.5 grey.png\n")
    refused(tmp_path / "tum", "grey.png is uint8", "16-bit")
    (tmp_path / "tum" / "groundtruth.txt").write_text("1 2 3\n")
    refused(tmp_path / "tum", "groundtruth.txt has 3 numbers a line")
    (tmp_path / "tum" / "groundtruth.txt").write_text("1 2 3 x\n")
    refused(tmp_path / "tum", "groundtruth.txt cannot be read as a trajectory")


def test_sizes_that_change_and_windows_that_cannot_be(images, tmp_path, capsys):
    for name, size in (("0", (112, 80)), ("1", (112, 112))):
        cv2.imwrite(str(tmp_path / f"{name}.png"), np.zeros((size[1], size[0], 3), np.uint8))
    out = ["-o", str(tmp_path / "out")]
    assert_refused([str(tmp_path), *out, *TINY], ["1: image is 56x56 pixels, but the sequence's are 56x42"], capsys)
    assert_refused([str(images), *out, *TINY, "--window-size", "2"], ["window_size must be"], capsys)
    assert_refused([str(images), *out, *TINY, "--checkpoint", str(tmp_path / "no.pt")], ["no.pt"], capsys)
    assert_refused([str(images), *out, "--preset", "lingbot_map"], ["--checkpoint"], capsys)
    assert_refused([str(images), *out, *TINY, "--device", "toaster"], ["toaster"], capsys)
    (tmp_path / "file").write_text("")
    assert_refused([str(images), "-o", str(tmp_path / "file"), *TINY], ["file"], capsys)
    still = tmp_path / "still"
    still.mkdir()
    for i in range(4):
        cv2.imwrite(str(still / f"{i}.png"), np.zeros((80, 112, 3), np.uint8))
    assert main([str(still), *out, *TINY, "--init-motion", "3"]) == 0  # the first image was taken
    assert report(tmp_path / "out")["frames"]["results"] == 1


@pytest.mark.parametrize("module", ["evo", "rosbags", "tqdm", "matplotlib"])
def test_missing_packages_are_named_with_the_command(module, dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    source = dataset
    if module == "rosbags":
        source = tmp_path / "bag"
        source.mkdir()
        (source / "metadata.yaml").write_text("")
    assert_refused([str(source), "-o", str(tmp_path / "out"), *TINY], [f"needs {module}: pip install {module}"], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, words", [
    (["--window-size", "-1"], "'-1' is not a whole number of at least 0 or auto"),
    (["--flow-threshold", "inf"], "'inf' is not a number"),
    (["--every-nth", "0"], "at least 1"),
    (["--preset", "huge"], "invalid choice"),
])
def test_bad_options(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        parse_arguments(["folder", *arguments])
    assert error.value.code == 2 and words in capsys.readouterr().err


def test_commands_of_the_readme():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    commands = [line.split("#")[0].split() for line in readme.splitlines() if line.startswith("lingbot_map_evaluate ")]
    assert len(commands) >= 3
    for _, *arguments in commands:
        parse_arguments(arguments)


def test_options_are_the_sessions_fields():
    options = parse_arguments(["folder", "--scale-frames", "5", "--window-size", "0", "--flow-threshold", "auto",
                               "--init-motion", "2.5", "--cache-memory-mib", "64"])
    assert (options.scale_frames, options.window_size, options.flow_threshold) == (5, 0, None)
    assert (options.init_motion, options.cache_memory_mib, options.keyframe_interval) == (2.5, 64, 1)
    left_out = {"device", "dtype", "cache_dtype", "spare_frames"}  # the model's group has the first three
    assert set(program.SESSION_OPTIONS) == set(SessionConfig.__dataclass_fields__) - left_out


# -- errors of poses and depths -------------------------------------------------------------------------------------

def random_path(count: int = 50) -> list[np.ndarray]:
    """Return poses [4, 4] along a smooth path."""
    poses = []
    for i in range(count):
        T = np.eye(4)
        T[:3, :3] = rotation(20 * np.sin(i / 9), 3 * i, 5 * np.cos(i / 5))
        T[:3, 3] = np.sin(i / 8), np.cos(i / 11), i / 30
        poses.append(T)
    return poses


def as_tum(poses: list[np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray]:
    stamps_ns = 1_700_000_000_000_000_000 + 33_333_333 * np.arange(len(poses))
    write_tum(path, stamps_ns, np.array([pose_row(T) for T in poses]))
    return read_tum(path)


def test_a_similarity_is_no_error(tmp_path):
    pytest.importorskip("evo")
    truth = random_path()
    R, t, scale = rotation(40, -70, 15), np.array([3.0, -2.0, 8.0]), 0.37
    moved = [np.block([[R @ T[:3, :3], (scale * R @ T[:3, 3] + t)[:, None]], [np.eye(4)[3:]]]) for T in truth]
    errors = trajectory_errors(as_tum(moved, tmp_path / "a.txt"), as_tum(truth, tmp_path / "b.txt"))
    assert errors.matched == 50 and errors.scale == pytest.approx(1 / scale)
    steps = np.diff([T[:3, 3] for T in truth], axis=0)
    assert errors.path_length == pytest.approx(np.linalg.norm(steps, axis=1).sum())
    summary = errors.summary
    assert summary["ate"]["translation"]["max"] < 1e-9 and summary["rpe_one_pose"]["translation"]["max"] < 1e-9
    assert summary["ate"]["rotation_degrees"]["max"] < 1e-5
    assert summary["rpe_one_pose"]["rotation_degrees"]["max"] < 1e-5
    assert abs(errors.final_heading) < 1e-5
    np.testing.assert_allclose(errors.T_truth_estimate @ moved[7][:, 3], truth[7][:, 3], atol=1e-6)


@pytest.mark.parametrize("degrees", [-100.0, 4.0, 170.0])
def test_final_heading_is_the_turn_about_the_vertical_that_was_added(degrees):
    truth = np.array([T[:3, :3] for T in random_path(30)])
    frame = rotation(40, -70, 15)  # of the estimate: another one
    turned = frame @ truth
    turned[-1] = frame @ rotation(0, 0, degrees) @ truth[-1]
    assert heading_error(truth, turned) == pytest.approx(degrees, abs=1e-6)
    tilted = frame @ truth
    tilted[-1] = frame @ rotation(degrees, 0) @ truth[-1]
    assert heading_error(truth, tilted) == pytest.approx(0, abs=1e-6)


def test_errors_are_what_was_put_in(tmp_path):
    pytest.importorskip("evo")
    truth = random_path(400)
    wrong = [T.copy() for T in truth]
    wrong[200][:3, 3] += [0.0, 0.03, 0.04]
    wrong[100][:3, :3] = wrong[100][:3, :3] @ rotation(0, 7)
    errors = trajectory_errors(as_tum(wrong, tmp_path / "a.txt"), as_tum(truth, tmp_path / "b.txt"))
    assert errors.summary["ate"]["translation"]["max"] == pytest.approx(0.05, rel=0.02)
    assert np.argmax(errors.translation) == 200 and np.argmax(errors.rotation) == 100
    assert errors.summary["ate"]["rotation_degrees"]["max"] == pytest.approx(7, rel=0.02)
    assert errors.summary["rpe_one_pose"]["rotation_degrees"]["max"] == pytest.approx(7, rel=0.02)
    assert errors.summary["ate"]["translation"]["median"] < 0.001


def test_trajectories_that_cannot_be_compared(tmp_path):
    pytest.importorskip("evo")
    truth = as_tum(random_path(), tmp_path / "truth.txt")
    with pytest.raises(ReplayError, match="2 poses and 50"):
        trajectory_errors((truth[0][:2], truth[1][:2]), truth)
    with pytest.raises(ReplayError, match="no pose is within 0.02 s"):
        trajectory_errors((truth[0] + 1e6, truth[1]), truth)
    still = truth[1].copy()
    still[:, :3] = 1.0
    with pytest.raises(ReplayError, match="on one line or point"):
        trajectory_errors((truth[0], still), truth)


def test_depth_is_sampled_where_the_model_looks():
    v, u = np.mgrid[:HEIGHT, :WIDTH]
    ramp = (u * 0.6 + v * 0.7).astype(np.uint8)
    for preset, size in (("default", (HEIGHT, WIDTH)), ("tiny", (HEIGHT, WIDTH)), ("tiny", (WIDTH, HEIGHT)),
                         ("default", (100, 300))):
        grey = cv2.resize(ramp, size[::-1])
        image, geometry = prepare_image(np.repeat(grey[..., None], 3, axis=2), PRESETS[preset])
        assert geometry == image_geometry(PRESETS[preset], size)
        for factor in (1, 2):  # depth images may be smaller than the camera's
            depth = cv2.resize(grey, (size[1] // factor, size[0] // factor), interpolation=cv2.INTER_AREA)
            sampled = sample_depth(depth.astype(np.float32), geometry)
            assert sampled.shape == image.shape[1:]
            difference = np.abs(sampled - 255 * image[0].numpy())[2:-2, 2:-2]
            assert difference.max() < 2.5 * factor and difference.mean() < 0.8 * factor


def test_depth_errors():
    known = np.linspace(1, 4, 400).reshape(20, 20)
    exact = depth_errors(known / 7, known)
    assert (exact.scale, exact.abs_rel, exact.delta_1) == pytest.approx((7, 0, 1))
    known = np.full((20, 20), 2.0)
    predicted = np.full((20, 20), 0.5)
    predicted[:5] *= 1.5  # a quarter is too far by half
    known[15:] = [0.0, np.nan] * 10  # unknown
    off = depth_errors(predicted, known)
    assert (off.scale, off.abs_rel, off.delta_1) == pytest.approx((4, 0.5 / 3, 2 / 3))
    predicted[5:10] = np.nan
    predicted[:5] = 0.5
    assert depth_errors(predicted, known).delta_1 == pytest.approx(2 / 3)
    assert depth_errors(predicted, known).abs_rel == pytest.approx(1 / 3)
    assert depth_errors(predicted, np.zeros((20, 20))) is None
    assert depth_errors(np.zeros((20, 20)), known).abs_rel == 1.0
