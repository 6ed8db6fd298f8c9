# SPDX-License-Identifier: Apache-2.0
"""Windows in a row: the session against an offline computation, exact geometry, keyframes by motion, bounds."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import SIZE, OracleModel, curve

from lingbot_map_ros.gct import build_model, decode_pose_encoding
from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.mapping.hand_over import Similarity, align
from lingbot_map_ros.mapping.keyframes import ImageMotion, Progress, mean_flow
from lingbot_map_ros.mapping.prediction import Prediction
from lingbot_map_ros.mapping.scale_frames import ScaleFrames, median_motion


@pytest.fixture(scope="module")
def model():
    return build_model("tiny")


def random_images(count, seed=0):
    """Smooth images that change slowly, as a camera's do."""
    generator = torch.Generator().manual_seed(seed)
    wall = torch.rand(1, 3, 9, 60, generator=generator)
    wall = torch.nn.functional.interpolate(wall, (42, 56 + 4 * count), mode="bicubic")
    return [wall[0, :, :, 4 * i : 4 * i + 56].clamp(0, 1) for i in range(count)]


def run(session, images):
    return [result for i, image in enumerate(images) for result in session.step(image, i)]


# An offline computation of the same windows, from their rules and all images at once, in float64 numpy.


def offline(model, images, scale_frames, sliding_window, interval, window_size, overlap):
    """Return a list of (window, is_keyframe, centre, rotation, depth) a frame, as mapped into the first window."""
    span = scale_frames + (window_size - scale_frames) * interval
    shared = max(scale_frames, overlap * interval)
    mapped, start, window = {}, 0, 0
    while True:
        stop = min(start + span, len(images))
        state = model.new_state(SIZE, scale_frames=scale_frames, sliding_window=sliding_window)
        frames = {}
        for index in range(start + scale_frames - 1, stop):
            first = index == start + scale_frames - 1
            batch = images[start : index + 1] if first else images[index : index + 1]
            kept = first or (index - start - scale_frames) % interval == 0
            output = model.step(torch.stack(batch), state, keep=kept)
            T, _ = decode_pose_encoding(output.pose_encoding, SIZE)
            for offset in range(len(batch)):
                frames[index + 1 - len(batch) + offset] = (
                    kept, T[offset].double().numpy(), output.depth[offset].double().numpy(),
                    output.confidence[offset].double().numpy(),
                )  # fmt: skip
        if window == 0:
            s, R, t = 1.0, np.eye(3), np.zeros(3)
        else:
            both = [i for i in range(start, start + shared) if frames[i][0] and mapped[i][1]]
            ratios = []
            for i in both:
                ratio = mapped[i][4] / frames[i][2]
                sure = (mapped[i][5] >= np.sort(mapped[i][5], None)[(mapped[i][5].size - 1) // 2]) & (
                    frames[i][3] >= np.sort(frames[i][3], None)[(frames[i][3].size - 1) // 2])
                ratios.append(ratio[sure])
            ratios = np.sort(np.concatenate(ratios))
            s = ratios[int(0.5 * (len(ratios) - 1))]
            last = both[-1]
            R = mapped[last][3] @ frames[last][1][:3, :3].T
            t = mapped[last][2] - s * R @ frames[last][1][:3, 3]
        for index, (kept, T, depth, confidence) in frames.items():
            if index not in mapped:
                mapped[index] = (window, kept, s * R @ T[:3, 3] + t, R @ T[:3, :3], s * depth, confidence)
        if stop == len(images):
            return [mapped[i] for i in range(len(images))]
        start, window = stop - shared, window + 1


@pytest.mark.parametrize(
    ("interval", "window_size", "overlap", "count"), [(1, 12, 4, 60), (1, 9, 1, 50), (3, 10, 2, 80), (2, 8, 5, 60)]
)
def test_windows_are_those_of_an_offline_computation(model, interval, window_size, overlap, count):
    images = random_images(count, seed=interval)
    config = SessionConfig(
        sliding_window=4, keyframe_interval=interval, window_size=window_size, overlap_keyframes=overlap
    )
    results = run(MappingSession(model, config), images)
    reference = offline(model, images, 3, 4, interval, window_size, overlap)
    assert [result.index for result in results] == list(range(count))
    assert results[-1].window > 2
    for result, (window, kept, centre, rotation, depth, _) in zip(results, reference):
        assert (result.window, result.is_keyframe) == (window, kept), result.index
        np.testing.assert_allclose(result.T_world_camera[:3, 3], centre, rtol=0, atol=1e-4)
        np.testing.assert_allclose(result.T_world_camera[:3, :3], rotation, rtol=0, atol=1e-4)
        np.testing.assert_allclose(result.depth, depth, rtol=1e-4)
        T, _ = decode_pose_encoding(result.pose_encoding, SIZE)
        torch.testing.assert_close(T, result.T_world_camera, rtol=0, atol=1e-5)


def test_one_window_is_the_models_own_run(model):
    images = random_images(20)
    endless = run(MappingSession(model), images)
    windowed = run(MappingSession(model, SessionConfig(window_size=50)), images)
    assert all(torch.equal(a.pose_encoding, b.pose_encoding) for a, b in zip(endless, windowed))


def test_advance_takes_the_hand_over_out_of_the_next_step(model):
    images = random_images(40)
    config = SessionConfig(window_size=10, overlap_keyframes=4)
    plain, eager = MappingSession(model, config), MappingSession(model, config)
    hand_overs = []
    for i, image in enumerate(images):
        a, b = plain.step(image, i), eager.step(image, i)
        assert [r.index for r in a] == [r.index for r in b]
        assert all(torch.equal(x.pose_encoding, y.pose_encoding) for x, y in zip(a, b))
        hand_overs.append(eager.advance())
        assert eager.advance() is None  # done once
    assert [h.frame_index for h in hand_overs if h] == [10, 16, 22, 28, 34, 40]
    assert eager.window_index == 6 and all(h.shared_frames == 4 and h.seconds > 0 for h in hand_overs if h)


# Exact predictions: what is left is the geometry of the hand-over.


def oracle(model, count, still=(0, 0)):
    """Return a model that is never wrong, and the images, poses and depths of a camera's drive."""
    poses, depths = curve(count, still)
    images = [torch.full((3, *SIZE), index / 1000) for index in range(count)]
    return OracleModel(poses, depths, model.config), images, poses, depths


@pytest.mark.parametrize("settings", [dict(), dict(keyframe_interval=3), dict(flow_threshold=0.4)])
def test_exact_predictions_make_a_path_without_jumps(model, settings):
    oracle_model, images, poses, depths = oracle(model, 200)
    session = MappingSession(oracle_model, SessionConfig(window_size=10, overlap_keyframes=3, **settings))
    results = run(session, images)
    assert [result.index for result in results] == list(range(200)) and results[-1].window > 5
    scale = results[0].depth[0, 0].double() / depths[0][0, 0]
    for result in results:
        expected = np.linalg.inv(poses[0]) @ poses[result.index]
        expected[:3, 3] *= float(scale)
        np.testing.assert_allclose(result.T_world_camera, expected, rtol=0, atol=3e-6)
        torch.testing.assert_close(result.depth.double(), scale * depths[result.index], rtol=3e-6, atol=0)
        if result.hand_over is not None:
            assert result.hand_over.translation_jump < 1e-6 * float(scale) * 5
            assert result.hand_over.rotation_jump < 1e-6 and not result.hand_over.problem


def test_a_standing_camera_keeps_nothing_and_starts_no_window(model):
    oracle_model, images, *_ = oracle(model, 900, still=(100, 800))
    session = MappingSession(oracle_model, SessionConfig(window_size=10, overlap_keyframes=3, flow_threshold=0.4))
    results = run(session, images)
    still = results[101:800]
    assert not any(result.is_keyframe for result in still)
    assert len({result.window for result in still}) == 1
    assert sum(result.is_keyframe for result in results[800:]) > 5


# Keyframes by motion.


def prediction(T, depth, is_keyframe=True, confidence=None, fov=(0.8, 1.0)):
    encoding = torch.tensor([*T[:3, 3], *quaternion_from_matrix(T[:3, :3]), *fov], dtype=torch.float32)
    T_world_camera, intrinsics = decode_pose_encoding(encoding, depth.shape)
    confidence = torch.full_like(depth, 2.0) if confidence is None else confidence
    return Prediction(
        is_keyframe=is_keyframe, pose_encoding=encoding, T_world_camera=T_world_camera, intrinsics=intrinsics,
        depth=depth, confidence=confidence,
    )  # fmt: skip


def translated(x=0.0, y=0.0, z=0.0):
    T = np.eye(4)
    T[:3, 3] = x, y, z
    return T


def test_flow_of_a_sideways_camera_is_fx_times_the_shift_over_the_depth():
    depth = torch.full(SIZE, 4.0)
    still, moved = prediction(translated(), depth), prediction(translated(x=0.1), depth)
    assert float(mean_flow(still, still)) < 1e-4
    expected = float(still.intrinsics[0, 0]) * 0.1 / 4
    assert float(mean_flow(moved, still)) == pytest.approx(expected, rel=1e-4)


def test_flow_leaves_out_what_has_no_depth_or_lies_behind():
    depth = torch.full(SIZE, 4.0)
    depth[:, 24:] = 0.0  # without depth
    still = prediction(translated(), torch.full(SIZE, 4.0))
    moved = prediction(translated(x=0.1), depth)
    assert float(mean_flow(moved, still)) == pytest.approx(float(still.intrinsics[0, 0]) * 0.1 / 4, rel=1e-4)
    behind = prediction(translated(z=-10.0), torch.full(SIZE, 4.0))
    assert float(mean_flow(behind, still)) == 0.0


def test_keyframes_by_motion_are_the_first_those_that_moved_and_those_after_a_gap():
    depth = torch.full(SIZE, 4.0)
    last = prediction(translated(), depth)
    near, far = prediction(translated(x=0.01), depth), prediction(translated(x=0.5), depth)
    policy = ImageMotion(flow_threshold=2.0, max_gap=5)
    assert policy.before(Progress(7, 2, last)) is None
    assert policy.after(Progress(0, 0, last), near)
    assert not policy.after(Progress(7, 2, last), near)
    assert policy.after(Progress(7, 2, last), far)
    assert not policy.after(Progress(7, 3, last), near) and policy.after(Progress(7, 4, last), near)
    assert not ImageMotion(2.0).after(Progress(700, 400, last), near)


# The hand-over's bad cases.


def shared_frames(scale, count=4, noise=None):
    depth = torch.rand(*SIZE, generator=torch.Generator().manual_seed(3)) + 1
    previous = [prediction(translated(x=0.1 * i), depth) for i in range(count)]
    noise = 1 if noise is None else noise
    new = [prediction(translated(x=0.1 * i / scale), depth / scale * noise) for i in range(count)]
    return previous, new


def test_the_scale_is_the_median_of_the_ratios():
    previous, new = shared_frames(3.0)
    new[0].depth[:10] = 100.0  # outliers
    similarity, translation_jump, rotation_jump, problem = align(previous, new, Similarity.identity())
    assert similarity.scale == pytest.approx(3.0, rel=1e-5) and problem == ""
    assert translation_jump < 1e-6 and rotation_jump < 1e-6


def test_pixels_of_low_confidence_do_not_tell_the_scale():
    previous, new = shared_frames(3.0)
    for frame in new:
        frame.confidence[:, :26] = 1.0
        frame.depth[:, :26] = 50.0
    assert align(previous, new, Similarity.identity())[0].scale == pytest.approx(3.0, rel=1e-5)


def test_a_degenerate_overlap_falls_back_to_the_last_good_scale_and_says_so():
    last_good = Similarity.make(1.7, torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    previous, new = shared_frames(3.0)
    for frame in new:
        frame.depth.fill_(float("nan"))
    similarity, _, _, problem = align(previous, new, last_good)
    assert similarity.scale == 1.7 and "only 0 pixels" in problem
    wild = torch.exp(3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(4)))
    similarity, _, _, problem = align(*shared_frames(3.0, noise=wild), last_good)
    assert similarity.scale == 1.7 and "disagree" in problem


def test_frames_without_a_finite_pose_are_not_aligned_to():
    previous, new = shared_frames(3.0)
    new[-1].T_world_camera[0, 3] = float("nan")
    new[1].T_world_camera[0, 0] = float("nan")
    similarity, translation_jump, rotation_jump, problem = align(previous, new, Similarity.identity())
    assert similarity.scale == pytest.approx(3.0, rel=1e-5) and problem == ""
    assert translation_jump < 1e-6 and rotation_jump < 1e-6
    for frame in new:
        frame.T_world_camera.fill_(float("nan"))
    last_good = Similarity.identity()
    similarity, translation_jump, rotation_jump, problem = align(previous, new, last_good)
    assert similarity is last_good and "no shared frame" in problem
    assert translation_jump == rotation_jump == float("inf")


def test_a_thousand_windows_in_a_row_still_rotate():
    """Each window's poses are float32, whose rounding must not add up to something that is no rotation."""
    generator = np.random.default_rng(0)
    similarity, depth = Similarity.identity(), torch.ones(20, 20)
    for _ in range(1000):
        axis = generator.normal(size=4)
        T = translated(x=0.1)
        T[:3, :3] = quaternion_to_matrix(torch.tensor(axis / np.linalg.norm(axis))).numpy()
        previous = [similarity.map(prediction(T, depth))]
        similarity, *_ = align(previous, [prediction(np.linalg.inv(T), depth)], similarity)
    R = similarity.rotation
    assert (R @ R.T - torch.eye(3)).abs().max() < 1e-12 and abs(float(torch.linalg.det(R)) - 1) < 1e-12


# Scale frames.


def textured(shift, size=(112, 154)):
    """A textured view, moved sideways by whole pixels."""
    wall = torch.rand(1, 1, 14, 40, generator=torch.Generator().manual_seed(0))
    wall = torch.nn.functional.interpolate(wall, (size[0], size[1] + 100), mode="bicubic")[0].clamp(0, 1)
    return wall[:, :, shift : shift + size[1]].expand(3, -1, -1).clone()


def test_motion_between_images_is_measured():
    assert median_motion(textured(0), textured(0)) < 0.1
    assert median_motion(textured(0), textured(6)) == pytest.approx(6, abs=0.5)
    assert median_motion(torch.rand(3, 14, 518), torch.rand(3, 14, 518)) >= 0  # flat images, too


def test_scale_frames_are_taken_where_the_camera_moved():
    frames = ScaleFrames()
    shifts = [0, 0, 1, 1, 8, 8, 9, 16, 24]
    complete = [frames.add(textured(s), i, 0.1 * i, 4, 4.0, 0) for i, s in enumerate(shifts)]
    assert [stamp for _, stamp in frames.images] == [0, 4, 7, 8]
    assert complete == [False] * 8 + [True] and not frames.timed_out


def test_a_camera_that_stands_is_waited_for_only_so_long():
    frames = ScaleFrames()
    complete = [frames.add(textured(0), i, 10 + i, 8, 4.0, 3.0) for i in range(4)]
    assert complete == [False, False, False, True] and frames.timed_out
    assert [stamp for _, stamp in frames.images] == [0, 3]


def test_a_clock_that_is_set_back_starts_the_wait_anew():
    frames = ScaleFrames()
    complete = [frames.add(textured(0), i, seconds, 8, 4.0, 2.0) for i, seconds in enumerate([100, 101, 0, 1, 2])]
    assert complete == [False, False, False, False, True] and frames.timed_out


def test_motion_may_be_asked_for_while_frames_gather(model):
    session = MappingSession(model)
    images = random_images(6)
    assert not session.step(images[0], seconds=0.0)
    session.resize(init_motion=1.0, max_init_wait=5.0)
    assert not session.step(images[0], seconds=0.1)  # does not count
    assert not session.step(images[1], seconds=0.2)
    assert len(session.step(images[2], seconds=0.3)) == 3


def test_a_session_says_that_it_lacked_motion(model):
    session = MappingSession(model, SessionConfig(init_motion=2.0, max_init_wait=1.0))
    still = random_images(1)[0]
    results = [session.step(still, seconds=0.4 * i) for i in range(5)]
    assert [len(r) for r in results] == [0, 0, 0, 2, 1]
    assert session.lacked_motion
    session.reset()
    assert not session.lacked_motion


def test_windows_that_do_not_fit_are_refused(model):
    for settings, kept in (
        (dict(window_size=8, overlap_keyframes=8), 8),
        (dict(window_size=3, overlap_keyframes=1), 3),
        (dict(window_size=6, overlap_keyframes=3, keyframe_interval=4), 6),  # 12 frames: 3, then 9 of which 3 are kept
    ):
        with pytest.raises(ValueError, match=f"window_size must be 0 or more than the {kept} keyframes"):
            MappingSession(model, SessionConfig(**settings))
        MappingSession(model, SessionConfig(**(settings | {"window_size": kept + 1})))
    with pytest.raises(ValueError, match="flow_threshold must be a finite number"):
        SessionConfig(flow_threshold=float("nan"))


def test_window_parameters_change_while_running(model):
    session = MappingSession(model, SessionConfig(window_size=30, overlap_keyframes=4))
    images = random_images(60)
    run(session, images[:20])
    session.resize(window_size=20)
    results = run(session, images[20:21])
    assert results[0].window == 1 and results[0].hand_over.shared_frames == 4
    session.resize(flow_threshold=1e6)
    assert not any(result.is_keyframe for result in run(session, images[21:40]))
    session.resize(flow_threshold=0.0, window_size=0)
    assert all(result.is_keyframe and result.window == 1 for result in run(session, images[40:]))
    with pytest.raises(ValueError, match="window_size"):
        session.resize(window_size=3)
    before = session.config
    for name, value in (("camera_iterations", 1), ("device", "meta"), ("max_sliding_window", 50), ("windows", 2)):
        with pytest.raises(ValueError, match=f"{name} can be set only when the session is made"):
            session.resize(**{name: value})
    assert session.config == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_later_windows_do_not_wait_for_the_device():
    session = MappingSession(build_model("tiny", device="cuda"), SessionConfig(window_size=12, overlap_keyframes=4))
    images = [image.cuda() for image in random_images(30)]
    results = run(session, images[:26])
    assert results[-1].window == 2 and session.advance() is None
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = session.step(images[26])[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.window == 2 and result.T_world_camera.isfinite().all()


def test_five_thousand_frames_in_windows_hold_no_more_than_five_hundred():
    import tracemalloc

    config = build_model("tiny").config
    oracle_model, images, *_ = oracle(SimpleNamespace(config=config), 100)
    session = MappingSession(oracle_model, SessionConfig(window_size=12, overlap_keyframes=4))
    tracemalloc.start()
    sizes = []
    for index in range(5000):
        session.step(images[index % 100])
        if index in (500, 4999):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert session.window_index > 500
    assert sizes[1] - sizes[0] < 100_000


def test_a_session_is_anchored_anew_from_the_frames_that_were_not_discarded(model):
    oracle_model, images, poses, depths = oracle(model, 60)
    session = MappingSession(oracle_model, SessionConfig(window_size=30, overlap_keyframes=4))
    results = run(session, images[:20])
    exact = oracle_model.poses[:]
    oracle_model.poses = [translated(x=1e3) for _ in exact]  # the model goes astray
    astray = run(session, images[20:23])
    for result in astray:
        session.discard(result)
    oracle_model.poses = exact
    hand_over = session.relocate()
    assert hand_over.shared_frames == 1 and hand_over.frame_index == 23  # 4 are kept, 3 of them were discarded
    results = run(session, images[23:40])
    assert results[0].hand_over is hand_over and results[0].window == 1
    scale = float(results[0].depth[0, 0].double() / depths[23][0, 0])
    expected = np.linalg.inv(poses[0]) @ poses[39]
    np.testing.assert_allclose(results[-1].T_world_camera[:3, 3], scale * expected[:3, 3], rtol=0, atol=1e-5 * scale)


def test_a_session_with_nothing_left_to_start_from_says_so(model):
    session = MappingSession(model, SessionConfig(window_size=30, overlap_keyframes=4))
    assert session.relocate() is None
    for result in run(session, random_images(6)):
        session.discard(result)
    assert session.relocate() is None
    endless = MappingSession(model)
    run(endless, random_images(6))
    assert endless.relocate() is None
