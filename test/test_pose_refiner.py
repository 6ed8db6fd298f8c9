# SPDX-License-Identifier: Apache-2.0
"""Poses corrected by how the image moves: the solver, what images tell and what they do not, and windows in between."""
from __future__ import annotations

from dataclasses import replace
from math import radians
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.gct import build_model
from lingbot_map_ros.mapping import MappingSession, SessionConfig, pose_refiner
from lingbot_map_ros.mapping.focal_length import FocalLength
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.mapping.pose_refiner import PoseRefiner, solve_pose
from lingbot_map_ros.mapping.prediction import Prediction
from lingbot_map_ros.synthetic import intrinsics_from_fov, make_place, render

INTRINSICS = np.array([[110.0, 0.0, 77.0], [0.0, 112.0, 56.0], [0.0, 0.0, 1.0]])
SIZE = (112, 154)
FRAMES = 12


def rigid(turn, shift) -> np.ndarray:
    """Return the motion [4, 4] of a rotation vector and a translation."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = cv2.Rodrigues(np.asarray(turn, np.float64))[0], shift
    return T


def angle(T: np.ndarray) -> float:
    """Return the angle of a motion's rotation in degrees."""
    return float(np.degrees(np.linalg.norm(cv2.Rodrigues(T[:3, :3])[0])))


def prediction(T: np.ndarray, depth, intrinsics: np.ndarray = INTRINSICS) -> Prediction:
    encoding = torch.from_numpy(np.concatenate([T[:3, 3], quaternion_from_matrix(T[:3, :3]), [1.0, 1.0]])).float()
    depth = torch.as_tensor(depth).float()
    return Prediction(is_keyframe=False, pose_encoding=encoding, T_world_camera=torch.from_numpy(T).float(),
                      intrinsics=torch.from_numpy(intrinsics).float(), depth=depth, confidence=torch.ones_like(depth))


def pose(refined: Prediction) -> np.ndarray:
    return refined.T_world_camera.double().numpy()


@pytest.fixture(scope="module")
def walk() -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Return images [n, 3, h, w], depth [n, h, w], T_world_camera [n, 4, 4] and intrinsics of a walk in a room."""
    place = make_place(5, frames=150)
    intrinsics = intrinsics_from_fov(torch.tensor(radians(75.0)), SIZE)
    images, depth = render(place, place.T_world_camera[:FRAMES], intrinsics, SIZE)
    T = place.T_world_camera[:FRAMES].double().numpy()
    return images, depth, np.linalg.inv(T[0]) @ T, intrinsics.double().numpy()


def jittered(T: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    """Return poses with the errors of a coarse model: 0.3 degrees and 2 cm, another one in each frame."""
    random = np.random.default_rng(seed)
    return [one @ rigid(random.normal(0, 0.005, 3), random.normal(0, 0.02, 3)) for one in T]


def refined(walk, poses, refiner: PoseRefiner | None = None, **options) -> tuple[np.ndarray, list[bool]]:
    """Return the corrected poses of a walk and whether each goes on from the one before."""
    images, depth, _, intrinsics = walk
    refiner = refiner or PoseRefiner()
    found = [refiner.refine(image, prediction(T, z, intrinsics), **options)
             for image, z, T in zip(images, depth, poses)]
    return np.stack([pose(one) for one, _ in found]), [continues for _, continues in found]


def step_errors(T: np.ndarray, T_true: np.ndarray) -> tuple[float, float]:
    """Return the mean errors from frame to frame in degrees and in the walk's unit."""
    steps, true = (np.linalg.inv(poses[:-1]) @ poses[1:] for poses in (np.asarray(T), T_true))
    errors = np.linalg.inv(true) @ steps
    return float(np.mean([angle(one) for one in errors])), float(np.linalg.norm(errors[:, :3, 3], axis=1).mean())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.1), st.floats(0, 0.3), st.floats(0, 0.3))
def test_exact_points_give_the_exact_pose(seed, turn, shift, outliers):
    random = np.random.default_rng(seed)
    points = np.column_stack([random.uniform(-1, 1, (150, 2)), np.ones(150)]) * random.uniform(1, 6, (150, 1))
    T = rigid(turn * random.normal(size=3) / 2, shift * random.normal(size=3) / 2)
    seen = (points @ T[:3, :3].T + T[:3, 3]) @ INTRINSICS.T
    pixels = seen[:, :2] / seen[:, 2:]
    wrong = random.random(150) < outliers
    pixels[wrong] += random.uniform(15, 40, (wrong.sum(), 2))
    guess = T @ rigid(random.normal(0, 0.01, 3), random.normal(0, 0.03, 3))
    found, inliers = solve_pose(points, pixels, INTRINSICS, guess)
    assert angle(np.linalg.inv(T) @ found) < (0.5 if wrong.any() else 0.01)
    assert np.linalg.norm(found[:3, 3] - T[:3, 3]) < (0.05 if wrong.any() else 1e-3)
    assert (inliers & wrong).sum() <= 2  # by chance along their epipolar lines
    assert inliers[~wrong].mean() > 0.9


def test_wrong_depths_do_not_turn_the_camera():
    """Depths that are off by a quarter, as a network's are, cost the rotation little, though the pixels move far."""
    random = np.random.default_rng(3)
    points = np.column_stack([random.uniform(-0.7, 0.7, (200, 2)), np.ones(200)]) * random.uniform(2, 6, (200, 1))
    T = rigid([0.01, 0.03, 0.0], [0.3, 0.02, 0.1])
    seen = (points @ T[:3, :3].T + T[:3, 3]) @ INTRINSICS.T
    pixels = seen[:, :2] / seen[:, 2:] + random.normal(0, 0.1, (200, 2))
    points *= random.normal(1, 0.25, (200, 1)).clip(0.4)
    found, _ = solve_pose(points, pixels, INTRINSICS, np.eye(4))
    plain = cv2.solvePnP(points, pixels, INTRINSICS, None)
    assert angle(np.linalg.inv(T) @ found) < 0.4
    assert angle(np.linalg.inv(T) @ found) < 0.5 * angle(np.linalg.inv(T) @ rigid(plain[1][:, 0], 0))


def test_jitter_goes(walk):
    T_true, jitter = walk[2], jittered(walk[2])
    T, continues = refined(walk, jitter)
    assert continues == [False] + [True] * (FRAMES - 1)
    np.testing.assert_allclose(T[0], jitter[0], atol=1e-6)  # where it starts is the model's
    before, after = step_errors(jitter, T_true), step_errors(T, T_true)
    assert after[0] < 0.2 * before[0] and after[1] < 0.2 * before[1], (before, after)


def test_pose_and_its_encoding_agree(walk):
    images, depth, T, intrinsics = walk
    refiner = PoseRefiner()
    for i in range(3):
        found, _ = refiner.refine(images[i], prediction(jittered(T)[i], depth[i], intrinsics))
    np.testing.assert_allclose(found.pose_encoding[:3], found.T_world_camera[:3, 3], atol=1e-6)
    np.testing.assert_allclose(found.pose_encoding[3:7], quaternion_from_matrix(pose(found)[:3, :3]), atol=1e-5)
    fov_h, fov_w = found.pose_encoding[7:].tolist()
    assert found.intrinsics[0, 0] == pytest.approx(77 / np.tan(fov_w / 2), rel=1e-5)
    assert found.intrinsics[1, 1] == pytest.approx(56 / np.tan(fov_h / 2), rel=1e-5)


def test_known_intrinsics_are_better_than_wrong_ones(walk):
    images, depth, T_true, intrinsics = walk
    wrong = intrinsics.copy()
    wrong[[0, 1], [0, 1]] *= 1.3
    predicted = refined((images, depth, T_true, wrong), T_true)[0]
    known = refined((images, depth, T_true, wrong), T_true, known_intrinsics=intrinsics)[0]
    assert step_errors(known, T_true)[0] < 0.5 * step_errors(predicted, T_true)[0]


@pytest.fixture(scope="module")
def turning() -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor]:
    """Return what `walk` does of a camera that turns on the spot, almost; depths are off by up to a tenth."""
    place = make_place(5, frames=150)
    K = intrinsics_from_fov(torch.tensor(radians(75.0)), SIZE)
    turns = np.stack([rigid([0.02 * np.sin(i / 3), 0.06 * i, 0], [0.01 * i, 0, 0]) for i in range(24)])
    T = place.T_world_camera[0].double().numpy() @ turns
    images, depth = render(place, torch.from_numpy(T).float(), K, SIZE)
    return images, depth * (1 + 0.1 * torch.linspace(-1, 1, SIZE[0]))[:, None], turns, K


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.2])
def test_a_turning_camera_tells_its_focal_length(factor, turning):
    """The model's focal lengths are off by a factor, its poses jitter."""
    images, depth, turns, K = turning
    wrong = K.double().numpy().copy()
    wrong[[0, 1], [0, 1]] *= factor
    poses = jittered(turns)
    refiner, known = PoseRefiner(), PoseRefiner()
    found = [refiner.refine(image, prediction(*parts, wrong))[0] for image, *parts in zip(images, poses, depth)]
    given = [known.refine(image, prediction(*parts, wrong), K.double().numpy())[0]
             for image, *parts in zip(images, poses, depth)]
    assert found[0].intrinsics[0, 0] == pytest.approx(float(wrong[0, 0]))
    for axis in (0, 1):
        assert float(found[-1].intrinsics[axis, axis] / K[axis, axis]) == pytest.approx(1, abs=0.06)
        assert float(given[-1].intrinsics[axis, axis]) == pytest.approx(float(wrong[axis, axis]))  # the model's own
    turned, true = (np.linalg.inv(T[4]) @ T[-1] for T in ([pose(one) for one in found], turns))
    assert angle(np.linalg.inv(true) @ turned) < 0.04 * angle(true)


def test_a_camera_that_does_not_turn_keeps_the_models_focal_length():
    """Depths that slope over the image would look as if it were another; still images would count again and again."""
    place = make_place(5, frames=150)
    K = intrinsics_from_fov(torch.tensor(radians(75.0)), SIZE)
    ahead = [rigid([0, 0, 0], [0, 0, 0.05 * i]) for i in range(12)]
    T = place.T_world_camera[0].double().numpy() @ np.stack(ahead)
    images, depth = render(place, torch.from_numpy(T).float(), K, SIZE)
    depth = depth * torch.exp(0.4 * torch.linspace(-0.5, 0.5, SIZE[0]))[:, None]
    refiner, generator = PoseRefiner(), torch.Generator().manual_seed(0)
    for i in [*range(12), *[11] * 12]:
        image = (images[i] + 0.01 * torch.randn(images[i].shape, generator=generator)).clamp(0, 1)
        found, _ = refiner.refine(image, prediction(ahead[i], depth[i], K.double().numpy()))
    assert float(found.intrinsics[0, 0]) == pytest.approx(float(K[0, 0]), rel=0.01)


def test_what_corners_say_of_the_focal_length_is_bounded():
    wild = FocalLength().with_prediction(np.array([100.0, 110.0]))
    for information, logarithm in ((np.nan, 1.0), (1.0, np.inf), (0.0, 1.0), (-1.0, 1.0)):
        assert wild.with_corners(information, logarithm) is wild
    for _ in range(1000):
        wild = wild.with_prediction(np.array([100.0, 110.0])).with_corners(1e9, 20.0)
    np.testing.assert_allclose(wild.value, np.array([100, 110]) * np.exp(0.25))
    assert len(wild.predicted) == 256
    for _ in range(1000):  # the lens has zoomed
        wild = wild.with_corners(1e4, np.log(100))
    np.testing.assert_allclose(wild.value, [96.4, 106.1], rtol=0.01)


def test_a_lost_pose_keeps_the_focal_length_and_a_discarded_frame_does_not_count(walk):
    images, depth, T, intrinsics = walk
    short = intrinsics * [[0.8], [0.8], [1]]

    def focal(found):
        return float(found[0].intrinsics[0, 0])

    refiner = PoseRefiner()
    before = [focal(refiner.refine(images[i], prediction(T[i], depth[i], short))) for i in range(FRAMES - 2)][-1]
    assert before > 1.05 * short[0, 0]
    refiner.refine(images[-2], prediction(T[-2], depth[-2], short * [[0.1], [0.1], [1]]))
    refiner.discard()
    refiner.lose()
    assert focal(refiner.refine(images[-2], prediction(T[-2], depth[-2], short))) == pytest.approx(before, rel=0.02)
    assert focal(refiner.carry(prediction(T[-1], depth[-1], short))) == pytest.approx(before, rel=0.02)
    refiner.reset()
    assert focal(refiner.refine(images[-1], prediction(T[-1], depth[-1], short))) == pytest.approx(short[0, 0])


def test_images_that_tell_nothing_leave_the_models_motion(walk):
    images, depth, T, intrinsics = walk
    poses = jittered(T)
    found, continues = refined((torch.full_like(images, 0.5), depth, T, intrinsics), poses)
    np.testing.assert_allclose(found, np.stack(poses), atol=1e-5)
    assert continues == [False] + [True] * (FRAMES - 1)
    # A dark image within a walk: the correction that there was stays.
    images = images.clone()
    images[5] = 0.0
    found, continues = refined((images, depth, T, intrinsics), poses)
    assert all(continues[1:]) and step_errors(found[6:], T[6:])[0] < 0.05
    expected = found[4] @ np.linalg.inv(poses[4]) @ poses[5]
    np.testing.assert_allclose(found[5], expected, atol=1e-5)


def test_a_standing_camera_does_not_drift(walk, monkeypatch):
    images, depth, T, intrinsics = walk

    def drift() -> float:
        """Return how far the camera is from where it was after 200 images with the sensor's noise."""
        random, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
        refiner, found = PoseRefiner(), []
        for _ in range(200):
            noisy = (images[0] + 0.03 * torch.randn(images[0].shape, generator=generator)).clamp(0, 1)
            shaken = T[0] @ rigid(random.normal(0, 0.005, 3), random.normal(0, 0.02, 3))
            found.append(pose(refiner.refine(noisy, prediction(shaken, depth[0], intrinsics))[0]))
        return float(np.median([np.linalg.norm(one[:3, 3] - found[1][:3, 3]) for one in found[-20:]]))

    standing = drift()
    monkeypatch.setattr(pose_refiner, "STILL", 0.0)  # compared with the frame before, each time with its noise
    assert standing < 0.01 and standing < 0.5 * drift()


@pytest.mark.parametrize("broken", ["pose_encoding", "T_world_camera", "depth", "intrinsics"])
def test_what_is_not_finite_counts_for_nothing(walk, broken):
    images, depth, T, intrinsics = walk
    refiner, poses = PoseRefiner(), jittered(T)
    for i in range(3):
        last, _ = refiner.refine(images[i], prediction(poses[i], depth[i], intrinsics))
    bad = prediction(poses[3], depth[3], intrinsics)
    bad = replace(bad, **{broken: getattr(bad, broken) * float("nan")})
    returned, continues = refiner.refine(images[3], bad)
    if broken in ("T_world_camera", "intrinsics"):
        assert returned is bad and not continues
    refiner.discard()  # as the tracker has it done; what was good before stays
    after, continues = refiner.refine(images[4], prediction(poses[4], depth[4], intrinsics))
    assert continues
    assert step_errors([pose(last), pose(after)], T[[2, 4]])[0] < 0.1


def test_what_is_not_finite_after_a_hand_over_brings_no_old_window_back(walk):
    images, depth, T, intrinsics = walk
    elsewhere = rigid([0.0, 0.1, 0.0], [1.0, 0.0, 0.0])  # where the new window has all that
    refiner = PoseRefiner()
    for i in range(4):
        last, _ = refiner.refine(images[i], prediction(T[i], depth[i], intrinsics))
    refiner.start_window()
    refiner.refine(images[4], prediction(T[4] * np.nan, depth[4], intrinsics))
    refiner.discard()
    found, continues = refiner.refine(torch.zeros_like(images[5]), prediction(elsewhere @ T[5], depth[5], intrinsics))
    assert not continues
    np.testing.assert_allclose(pose(found), elsewhere @ T[5], atol=1e-5)


@pytest.mark.parametrize("focal", [0.0, 1e-30, 1e30, float("nan"), float("inf")])
def test_absurd_intrinsics_do_no_harm(walk, focal):
    images, depth, T, intrinsics = walk
    absurd = np.diag([focal, focal, 1.0])
    known = refined(walk, jittered(T), known_intrinsics=absurd)[0]
    assert step_errors(known, T)[0] < 0.1  # those that were predicted are taken
    predicted, continues = refined((images, depth, T, absurd), T)
    assert not any(continues) and np.allclose(predicted, T, atol=1e-6)


def test_a_few_pixels_without_depth_cost_nothing(walk):
    images, depth, T, intrinsics = walk
    holes = depth.clone()
    holes[:, ::9, ::7] = torch.tensor([float("nan"), float("inf"), -1.0, 0.0]).repeat(100)[:22]
    found, continues = refined((images, holes, T, intrinsics), jittered(T))
    assert all(continues[1:]) and step_errors(found, T)[0] < 0.1


def test_discarded_frames_are_not_gone_on_from(walk):
    images, depth, T, intrinsics = walk
    errors, poses = {}, jittered(T)
    away = T[3] @ rigid([0.0, 1.5, 0.0], [9.0, 0.0, 0.0])  # the image and the model lie, for one frame
    for discards in (True, False):
        refiner = PoseRefiner()
        for i in range(3):
            last, _ = refiner.refine(images[i], prediction(poses[i], depth[i], intrinsics))
        refiner.refine(images[3].flip(-1), prediction(away, depth[3], intrinsics))
        if discards:
            refiner.discard()
        after, continues = refiner.refine(images[4], prediction(poses[4], depth[4], intrinsics))
        assert continues
        errors[discards] = step_errors([pose(last), pose(after)], T[[2, 4]])[0]
    assert errors[True] < 0.1 < 0.3 < errors[False], errors  # else the jitter of the two frames


def test_a_motion_far_from_the_models_is_refused(walk, monkeypatch):
    """What fills the image may move by itself: the model, which knows scenes, is believed then."""
    images, depth, _, intrinsics = walk

    def seen_turn(degrees: float) -> float:
        """Return by how much the camera turns when the image turns and the model says that it stands."""
        rotation = rigid([0.0, np.radians(degrees), 0.0], np.zeros(3))[:3, :3]
        turned = cv2.warpPerspective(images[0].permute(1, 2, 0).numpy(), intrinsics @ rotation
                                     @ np.linalg.inv(intrinsics), SIZE[::-1])
        refiner = PoseRefiner()
        refiner.refine(images[0], prediction(np.eye(4), depth[0], intrinsics))
        found, _ = refiner.refine(
            torch.from_numpy(turned).permute(2, 0, 1), prediction(np.eye(4), depth[0], intrinsics))
        return angle(pose(found))

    assert seen_turn(8) == pytest.approx(8, abs=0.1) and seen_turn(13) < 1e-3
    monkeypatch.setattr(pose_refiner, "MAX_TURN", 1.0)
    assert seen_turn(13) == pytest.approx(13, abs=0.1)


def test_another_window_does_not_move_the_camera(walk):
    images, depth, T, intrinsics = walk
    elsewhere = rigid([0.0, 0.03, 0.0], [0.2, 0.0, 0.1])  # how far the new window's view of the frames is off
    poses = [*jittered(T)[:6], *(elsewhere @ one for one in jittered(T)[6:])]
    refiner, found = PoseRefiner(), []
    for i, (image, z, one) in enumerate(zip(images, depth, poses)):
        if i == 6:
            refiner.start_window()
        found.append(refiner.refine(image, prediction(one, z, intrinsics)))
    assert all(continues for _, continues in found[1:])
    assert step_errors([pose(one) for one, _ in found], T)[0] < 0.1
    # Where the image does not tell the motion, the new window's pose is taken as it is.
    refiner.start_window()
    last, continues = refiner.refine(torch.zeros_like(images[0]), prediction(T[0], depth[0], intrinsics))
    assert not continues
    np.testing.assert_allclose(pose(last), T[0], atol=1e-6)


def test_a_session_refines_across_windows():
    data = np.load(Path(__file__).resolve().parent / "data" / "rooms.npz")
    first = np.split(data["jpeg"], np.cumsum(data["jpeg_bytes"])[:24])[:24]
    images = [torch.from_numpy(cv2.cvtColor(cv2.imdecode(part, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)).permute(2, 0, 1)
              .float() / 255 for part in first]
    T_true = data["T_world_camera"][0, :24].astype(np.float64)
    model, errors = build_model("default"), {}
    for refine_poses in (False, None):  # None: as this model recommends
        session = MappingSession(model, SessionConfig(
            scale_frames=4, window_size=12, overlap_keyframes=4, refine_poses=refine_poses))
        results = [result for image in images for result in session.step(image)]
        assert results[-1].window == 2
        assert [result.continues for result in results] == [False] + [refine_poses is None] * 23
        T = torch.stack([result.T_world_camera for result in results]).double().numpy()
        errors[refine_poses] = step_errors(T, T_true)[0]
    assert errors[None] < 0.6 * errors[False]


def test_switching_it_in_a_running_session_does_not_move_the_camera(walk):
    images, _, T, _ = walk
    session = MappingSession(build_model("default"), SessionConfig(scale_frames=2, window_size=11))
    assert not any(result.continues for image in images[:3] for result in session.step(image))
    session.resize(refine_poses=True)
    results = [session.step(image)[0] for image in images[3:7]]
    assert [result.continues for result in results] == [False, True, True, True]
    session.resize(refine_poses=False)
    results += [session.step(image)[0] for image in images[7:11]]
    assert all(result.continues for result in results[4:])  # corrected as the last one was, to the window's end
    raw = MappingSession(build_model("default"), SessionConfig(scale_frames=2, window_size=11))
    own = [result for image in images for result in raw.step(image)]
    for before, now, own_before, own_now in zip(results[3:], results[4:], own[6:], own[7:]):
        step, own_step = (np.linalg.inv(pose(a)) @ pose(b) for a, b in ((before, now), (own_before, own_now)))
        np.testing.assert_allclose(step, own_step, atol=1e-5)
    result = session.step(images[11])[0]
    assert result.window == 1 and not result.continues
    assert set(result.timings) == {"model", "refine", "hand_over"}


@pytest.mark.parametrize("value", ["off", 2, 0.5])
def test_what_is_neither_on_nor_off_is_refused(value):
    with pytest.raises(ValueError, match=f"refine_poses must be True, False or None, not {value!r}"):
        SessionConfig(refine_poses=value)
