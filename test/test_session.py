# SPDX-License-Identifier: Apache-2.0
"""The session: scale frames, keyframes, errors, and what its results owe to whom."""
from pathlib import Path

import numpy as np
import pytest
import torch

from lingbot_map_ros.gct import build_model
from lingbot_map_ros.gct.pose import decode_pose_encoding
from lingbot_map_ros.mapping import MappingSession, SessionConfig

HEIGHT, WIDTH = 42, 56
TENSORS = ("pose_encoding", "T_world_camera", "intrinsics", "depth", "confidence", "image")


@pytest.fixture(scope="module")
def model():
    return build_model("tiny")


def make_images(count, seed=0, size=(HEIGHT, WIDTH)):
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def run(session, images):
    return [result for i, image in enumerate(images) for result in session.step(image, i)]


def assert_same(results, others):
    assert [result.index for result in results] == [other.index for other in others]
    for result, other in zip(results, others):
        for name in TENSORS:
            assert torch.equal(getattr(result, name), getattr(other, name)), f"{name} of frame {result.index}"


def test_scale_frames_come_at_once_then_one_a_frame(model):
    session = MappingSession(model)
    assert session.config.scale_frames == model.config.scale_frames == 3
    counts = [len(session.step(image, f"stamp {i}")) for i, image in enumerate(make_images(6))]
    assert counts == [0, 0, 3, 1, 1, 1]
    assert session.frame_count == 6


def test_results_are_the_models_own(model):
    images = make_images(9)
    results = run(MappingSession(model, SessionConfig(keyframe_interval=2)), images)

    state = model.new_state((HEIGHT, WIDTH))
    outputs = [model.step(images[:3], state)]
    outputs += [model.step(images[i : i + 1], state, keep=(i - 3) % 2 == 0) for i in range(3, 9)]
    pose_encoding = torch.cat([output.pose_encoding for output in outputs])
    T_world_camera, intrinsics = decode_pose_encoding(pose_encoding, (HEIGHT, WIDTH))
    depth = torch.cat([output.depth for output in outputs])
    confidence = torch.cat([output.confidence for output in outputs])
    assert len(results) == 9
    for i, result in enumerate(results):
        assert (result.index, result.stamp) == (i, i)
        assert torch.equal(result.pose_encoding, pose_encoding[i])
        assert torch.equal(result.T_world_camera, T_world_camera[i])
        assert torch.equal(result.intrinsics, intrinsics[i])
        assert torch.equal(result.depth, depth[i]) and result.depth.shape == (HEIGHT, WIDTH)
        assert torch.equal(result.confidence, confidence[i])
        assert torch.equal(result.image, images[i])
        assert result.timings["model"] > 0


def test_keyframes_follow_the_interval(model):
    results = run(MappingSession(model, SessionConfig(keyframe_interval=3)), make_images(11))
    assert [result.index for result in results if result.is_keyframe] == [0, 1, 2, 3, 6, 9]


def test_other_frames_leave_no_trace(model):
    images = make_images(12)
    replaced = images.clone()
    others = [i for i in range(3, 12) if (i - 3) % 3]
    replaced[others] = make_images(len(others), seed=1)
    config = SessionConfig(keyframe_interval=3, scale_frames=3, sliding_window=2)
    results = run(MappingSession(model, config), images)
    changed = run(MappingSession(model, config), replaced)
    assert_same([r for r in results if r.is_keyframe], [r for r in changed if r.is_keyframe])
    assert not torch.equal(results[4].depth, changed[4].depth)


def test_a_frame_sees_earlier_keyframes(model):
    images = make_images(6)
    replaced = images.clone()
    replaced[3] = make_images(1, seed=1)[0]
    last = run(MappingSession(model), images)[-1]
    assert not torch.equal(last.pose_encoding, run(MappingSession(model), replaced)[-1].pose_encoding)


def test_results_stay_as_they_are(model):
    """Later steps, and a caller that reuses one buffer for all images, change no result."""
    images = make_images(10)
    expected = run(MappingSession(model), images)
    session, buffer, results = MappingSession(model), torch.empty(3, HEIGHT, WIDTH), []
    for i, image in enumerate(images):
        results += session.step(buffer.copy_(image), i)
    buffer.zero_()
    assert_same(results, expected)
    for result in results:
        for name in TENSORS:
            tensor = getattr(result, name)
            assert not tensor.requires_grad and tensor.grad_fn is None
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a view into something larger"


def test_reset_starts_anew_in_the_same_memory(model):
    images = make_images(9)
    session = MappingSession(model)
    assert session.memory_bytes == 0 and session.cache_stats() == {} and session.image_size is None
    first = run(session, images)
    state, size = session._state, session.memory_bytes
    assert session.image_size == (HEIGHT, WIDTH)
    session.reset()
    assert session.frame_count == 0 and session.cache_stats()["frame_count"] == 0
    assert session.memory_bytes == size
    assert_same(run(session, images), first)
    assert session._state is state
    session.reset()
    session.step(images[0])
    session.reset()  # drops the image that waits, too
    assert_same(run(session, images), first)


def test_memory_stays_the_same(model):
    session = MappingSession(model, SessionConfig(sliding_window=2))
    sizes = set()
    for image in make_images(30):
        session.step(image)
        sizes.add(session.memory_bytes)
    stats = session.cache_stats()
    assert len(sizes) == 1 and sizes.pop() > stats["bytes"] > 0
    assert (stats["frame_count"], stats["scale_pages"], stats["live_pages"], stats["free_pages"]) == (30, 3, 2, 1)


def test_flush_runs_a_short_sequence(model):
    images = make_images(4)
    session = MappingSession(model)
    assert session.flush() == []
    assert session.step(images[0], "a") == session.step(images[1], "b") == []
    results = session.flush()
    assert [(r.index, r.stamp, r.is_keyframe) for r in results] == [(0, "a", True), (1, "b", True)]
    assert session.flush() == []
    direct = model.step(images[:2], model.new_state((HEIGHT, WIDTH)))
    assert torch.equal(torch.stack([r.depth for r in results]), direct.depth)
    # What comes after a flush is a later frame, kept by the interval from there on.
    assert [r.index for image in images[2:] for r in session.step(image)] == [2, 3]


def test_another_size_needs_a_reset(model):
    session = MappingSession(model)
    images = make_images(5)
    run(session, images[:4])
    small = make_images(3, size=(28, 56))
    with pytest.raises(ValueError, match="56x28.*56x42.*reset"):
        session.step(small[0])
    expected = run(MappingSession(model), images)[-1]
    assert_same(session.step(images[4]), [expected])  # as if the other image had not come
    session.reset()
    assert [r.depth.shape for r in run(session, small)] == [(28, 56)] * 3


@pytest.mark.parametrize(
    "image, error, words",
    [
        (torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8), TypeError, "floating-point.*uint8"),
        ([[0.0]], TypeError, "list"),
        (torch.zeros(1, 3, HEIGHT, WIDTH), ValueError, r"\[3, height, width\].*\[1, 3, 42, 56\]"),
        (torch.zeros(HEIGHT, WIDTH, 3), ValueError, r"\[42, 56, 3\]"),
        (torch.zeros(3, 40, WIDTH), ValueError, "56x40"),
        (torch.full((3, HEIGHT, WIDTH), 255.0), ValueError, "255"),
        (torch.full((3, HEIGHT, WIDTH), -0.5), ValueError, "-0.5"),
        (torch.full((3, HEIGHT, WIDTH), float("nan")), ValueError, "nan"),
    ],
)
def test_bad_images_are_refused_and_forgotten(model, image, error, words):
    images = make_images(4)
    session = MappingSession(model)
    with pytest.raises(error, match=words):
        session.step(image)
    session.step(images[0], 0)
    with pytest.raises(error):
        session.step(image)
    results = [r for i in range(1, 4) for r in session.step(images[i], i)]
    assert_same(results, run(MappingSession(model), images))


def test_an_error_in_the_model_begins_a_new_sequence(model, monkeypatch):
    images = make_images(6)
    session = MappingSession(model)
    run(session, images[:4])
    real = type(model.aggregator).forward

    def fail_late(aggregator, *args, **kwargs):
        real(aggregator, *args, **kwargs)
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.aggregator), "forward", fail_late)
        with pytest.raises(MemoryError):
            session.step(images[4])
    assert session.frame_count == 0
    assert_same(run(session, images), run(MappingSession(model), images))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"scale_frames": 0}, "scale_frames.*at least 1.*0"),
        ({"sliding_window": -4}, "sliding_window.*-4"),
        ({"keyframe_interval": 0}, "keyframe_interval"),
        ({"keyframe_interval": None}, "keyframe_interval.*None"),
        ({"keyframe_interval": 1.5}, "keyframe_interval.*1.5"),
        ({"camera_iterations": 0}, "camera_iterations"),
        ({"spare_frames": 0}, "spare_frames"),
        ({"scale_frames": True}, "scale_frames.*True"),
        ({"cache_dtype": torch.float64}, "cache_dtype.*float8_e4m3fn or None, not torch.float64"),
        ({"cache_dtype": "float32"}, "cache_dtype.*not 'float32'"),
    ],
)
def test_bad_configurations_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        SessionConfig(**values)


def test_remembered_frames_must_hold_the_window(model):
    with pytest.raises(ValueError, match="remembered_frames.*7.*6"):
        MappingSession(model, SessionConfig(remembered_frames=6))


def test_configuration_is_resolved(model):
    config = MappingSession(model, SessionConfig(sliding_window=100)).config
    assert (config.scale_frames, config.sliding_window, config.remembered_frames) == (3, 100, 103)
    assert config.device == torch.device("cpu") and config.dtype == torch.float32


def test_device_and_dtype_are_applied():
    model = build_model("tiny")
    session = MappingSession(model, SessionConfig(device="cpu", dtype=torch.bfloat16))
    assert model.dtype == session.config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype"):
        MappingSession(model, SessionConfig(dtype=torch.int8))


def test_default_model_gives_its_trainers_outputs():
    """On real images and past the window, through the session: the outputs that test/data/README.md describes."""
    data = np.load(Path(__file__).parent / "data" / "default_model.npz")
    config = SessionConfig(scale_frames=int(data["scale_frames"]), sliding_window=int(data["sliding_window"]),
                           camera_iterations=4)
    images = torch.from_numpy(data["images"]).permute(0, 3, 1, 2).float() / 255
    results = run(MappingSession(build_model("default"), config), images)
    pose_encoding = torch.stack([result.pose_encoding for result in results]).numpy()
    np.testing.assert_allclose(pose_encoding, data["pose_enc"], rtol=0, atol=1e-4)
    for name, reference in (("depth", "depth"), ("confidence", "depth_conf")):
        maps = torch.stack([getattr(result, name) for result in results]).numpy()[:, ::4, ::4]
        np.testing.assert_allclose(maps, data[reference], rtol=1e-4)


@pytest.mark.parametrize("cache_dtype, tolerance", [(torch.bfloat16, 0.01), (torch.float8_e4m3fn, 0.05)])
def test_default_model_predicts_nearly_the_same_from_a_cache_of_fewer_bits(cache_dtype, tolerance):
    data = np.load(Path(__file__).parent / "data" / "default_model.npz")
    images = torch.from_numpy(data["images"]).permute(0, 3, 1, 2).float() / 255
    model = build_model("default")
    sessions = [MappingSession(model, SessionConfig(cache_dtype=dtype)) for dtype in (torch.float32, cache_dtype)]
    exact, found = (run(session, images) for session in sessions)
    for name in ("pose_encoding", "depth"):
        expected = torch.stack([getattr(result, name) for result in exact])
        error = torch.stack([getattr(result, name) for result in found]) - expected
        assert 0 < error.norm() < tolerance * expected.norm(), float(error.norm() / expected.norm())
    exact_bytes, bytes_ = (session.cache_stats()["bytes"] for session in sessions)
    assert bytes_ == exact_bytes * cache_dtype.itemsize / 4 + (exact_bytes / model.config.depth / 2) * (
        cache_dtype.itemsize == 1)
    assert sessions[1].config.cache_dtype == cache_dtype


@pytest.mark.parametrize("direction", [1, -1])
def test_default_model_follows_a_camera_along_a_wall(direction):
    """A view that shifts by p pixels is a camera that moved by p * depth / fx along a wall, to the same side."""
    step, count = 4, 16
    wall = torch.nn.functional.interpolate(
        torch.rand(1, 3, 14, 40, generator=torch.Generator().manual_seed(1)), size=(112, 320), mode="bicubic"
    )[0].clamp(0, 1)
    lefts = [80 + direction * step * i for i in range(count)]
    session = MappingSession(build_model("default"))
    results = [result for left in lefts for result in session.step(wall[:, :, left : left + 154])]
    assert len(results) == count
    moved = results[-1].T_world_camera[:3, 3] - results[0].T_world_camera[:3, 3]
    shift = step * (count - 1) * results[0].depth.median() / results[0].intrinsics[0, 0]
    assert moved[0] * direction == pytest.approx(float(shift), rel=0.4)
    assert moved[1:].abs().max() < 0.3 * shift


def test_what_is_to_be_done_meanwhile_is_done_once_the_device_has_the_frame(model, monkeypatch):
    order = []
    step = model.step
    monkeypatch.setattr(model, "step", lambda *a, **k: (order.append("model"), step(*a, **k))[1])
    images = make_images(7)
    for config in (SessionConfig(keyframe_interval=2), SessionConfig(flow_threshold=3.0)):
        order.clear()
        session = MappingSession(model, config)
        for image in images:
            session.step(image, meanwhile=lambda: order.append("meanwhile"))
            order.append("results")
        assert order == ["results"] * 2 + ["model", "results"] + ["model", "meanwhile", "results"] * 4
    session.reset()
    results = [result for i, image in enumerate(images) for result in session.step(image, i, meanwhile=lambda: None)]
    assert_same(results, run(MappingSession(model, SessionConfig(flow_threshold=3.0)), images))


def test_an_error_meanwhile_begins_a_new_sequence(model):
    session = MappingSession(model)
    images = make_images(5)
    run(session, images[:4])

    def fails():
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        session.step(images[4], meanwhile=fails)
    assert session.frame_count == 0
    assert [result.index for result in run(session, images)] == list(range(5))
