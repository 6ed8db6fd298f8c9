# SPDX-License-Identifier: Apache-2.0
"""Training: whole sequences equal the stream, targets and losses follow their definitions, stages run and go on."""
import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from lingbot_map_ros.gct import GCT, PRESETS, build_model
from lingbot_map_ros.gct.model import EMBEDDED_WEIGHTS, initialise
from lingbot_map_ros.gct.pose import decode_pose_encoding
from lingbot_map_ros.mapping import MappingSession, SessionConfig
from lingbot_map_ros.mapping.evaluation.metrics import depth_errors as evaluation_depth_errors
from lingbot_map_ros.mapping.evaluation.metrics import trajectory_errors
from lingbot_map_ros.mapping.geometry import quaternion_from_matrix
from lingbot_map_ros.synthetic import KINDS, ROOMS, SceneGenerator, Sequences
from training.checkpoint import join, read_state, read_weights, save_checkpoint
from training.feed import Feed
from training.losses import (
    CONFIDENCE, Matches, Predictions, depth_loss, make_targets, match_patches, matching_loss, matrix_to_quaternion,
    pose_loss)
from training.metrics import confidence_errors, depth_errors, pose_errors
from training.optimiser import Muon, average_gradients, rate_factor
from training.parallel import predict, visible
from training.train import Phase, current_phase, parse_arguments

REPOSITORY = Path(__file__).resolve().parent.parent
COMPACT = replace(PRESETS["default"], name="small", image_width=42, image_height=28, embed_dim=64, num_heads=2,
                  depth=4, output_groups=(0, 1, 2, 3), depth_features=16, depth_channels=(16, 16, 16, 16),
                  camera_depth=1, camera_heads=1, stem_channels=(8, 8))


@pytest.fixture(scope="module")
def rooms() -> Sequences:
    """Two rendered sequences of ten frames."""
    return SceneGenerator((42, 56), seed=3, textures=8, supersampling=1).sequences(2, 10, options=ROOMS)


@pytest.mark.parametrize("config", [COMPACT, PRESETS["tiny"]], ids=["compact", "published"])
def test_whole_sequences_equal_the_stream(config):
    """All frames at once under masks give what the session gives frame by frame, long after its window is full."""
    model = GCT(config)
    initialise(model, seed=1)
    height = config.image_height or 42
    images = torch.rand(2, 14, 3, height, config.image_width, generator=torch.Generator().manual_seed(2))
    predictions = predict(model, images, scale_frames=3, window=4)
    depth = predictions.log_depth.exp().unflatten(0, (2, 14))
    confidence = predictions.confidence.unflatten(0, (2, 14))
    for i in range(2):
        session = MappingSession(model, SessionConfig(scale_frames=3, sliding_window=4, camera_iterations=4))
        results = [result for image in images[i] for result in session.step(image)]
        assert len(results) == 14
        for j, result in enumerate(results):
            torch.testing.assert_close(predictions.pose_encodings[-1][i, j], result.pose_encoding, rtol=0, atol=1e-5)
            torch.testing.assert_close(depth[i, j], result.depth, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(confidence[i, j], result.confidence, rtol=1e-5, atol=1e-6)


def test_what_a_frame_sees():
    frame = torch.arange(9)
    patches = visible(frame[:, None], frame[None], torch.zeros(1, 9, dtype=torch.bool), 3, 2).int().tolist()
    assert patches[0] == patches[2] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert patches[3] == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert patches[6] == [1, 1, 1, 0, 0, 1, 1, 0, 0]
    special = visible(frame[:, None], frame[None], torch.ones(1, 9, dtype=torch.bool), 3, 2).int().tolist()
    assert special[2] == [1, 1, 1, 0, 0, 0, 0, 0, 0] and special[6] == [1, 1, 1, 1, 1, 1, 1, 0, 0]


def test_quaternions_of_all_kinds_of_rotations():
    rotations = Rotation.random(200, random_state=0)
    turns = Rotation.from_rotvec(np.pi * np.vstack([np.eye(3), [[0.6, 0.8, 0.0]]]))
    for matrices in (rotations.as_matrix(), turns.as_matrix(), np.eye(3)[None]):
        ours = matrix_to_quaternion(torch.from_numpy(matrices)).numpy()
        np.testing.assert_allclose(Rotation.from_quat(ours).as_matrix(), matrices, atol=1e-7)
        assert (ours[:, 3] >= 0).all()


def encodings(targets) -> torch.Tensor:
    fov = targets.fov[:, None].expand(-1, targets.translation.shape[1], -1)
    return torch.cat([targets.translation, targets.quaternion, fov], -1)


def test_targets_are_in_the_models_frame_and_unit(rooms):
    targets = make_targets(rooms, scale_frames=4, stride=1)
    T, intrinsics = decode_pose_encoding(encodings(targets), (42, 56))
    torch.testing.assert_close(T[:, 0], torch.eye(4).expand(2, 4, 4), rtol=0, atol=1e-5)
    relative = torch.linalg.inv(rooms.T_world_camera[:, :1]) @ rooms.T_world_camera
    relative[..., :3, 3] /= targets.unit[:, None, None]
    torch.testing.assert_close(T, relative, rtol=0, atol=1e-4)
    torch.testing.assert_close(intrinsics[:, 5], rooms.intrinsics, rtol=1e-4, atol=1e-3)
    # The unit: the mean distance from the first camera of all points that the scale frames see.
    for i in range(2):
        y, x = np.mgrid[:42, :56] + 0.5
        distances = []
        for j in range(4):
            K, depth = rooms.intrinsics[i].numpy(), rooms.depth[i, j].numpy()
            points = np.stack([(x - K[0, 2]) / K[0, 0] * depth, (y - K[1, 2]) / K[1, 1] * depth, depth], -1)
            T_world = rooms.T_world_camera[i, j].numpy()
            world = points @ T_world[:3, :3].T + T_world[:3, 3]
            distances.append(np.linalg.norm(world - rooms.T_world_camera[i, 0, :3, 3].numpy(), axis=-1))
        assert targets.unit[i].item() == pytest.approx(np.mean(distances), rel=1e-3)


def test_scale_frames_that_see_only_sky_leave_metres(rooms):
    only_sky = replace(rooms, depth=torch.full_like(rooms.depth, torch.inf))
    targets = make_targets(only_sky, scale_frames=4)
    assert torch.equal(targets.unit, torch.ones(len(targets.unit)))


def test_the_sky_is_left_out(rooms):
    with_sky = replace(rooms, depth=rooms.depth.clone())
    with_sky.depth[:, :, :14] = torch.inf
    targets = make_targets(with_sky, scale_frames=4)
    assert targets.unit.isfinite().all()
    frames = torch.arange(20)
    truth = torch.where(targets.depth.isfinite(), targets.depth, 1.0).log().flatten(0, 1)
    wrong_sky = truth.clone()
    wrong_sky[:, :14] = 5.0
    confidence = torch.full_like(truth, 2.0)
    loss, _, _ = depth_loss(Predictions([], truth, confidence, [], {}), targets, frames)
    other, _, _ = depth_loss(Predictions([], wrong_sky, confidence, [], {}), targets, frames)
    assert loss.item() == other.item() == pytest.approx(0, abs=1e-6)
    matches = match_patches(targets, 1, 14)
    assert (matches.is_seen[:, :, :4] == 0).all() and matches.points.isfinite().all()


def test_true_poses_lose_nothing_and_others_do(rooms):
    targets = make_targets(rooms, scale_frames=4)
    truth = encodings(targets)
    loss, _ = pose_loss([truth, truth], targets)
    assert loss.item() == pytest.approx(0, abs=1e-4)
    negated = truth.clone()
    negated[..., 3:7] *= -1
    assert pose_loss([negated], targets)[0].item() == pytest.approx(0, abs=1e-4)
    for entry in range(9):
        off = truth.clone()
        off[:, 5:, entry] += 0.1
        assert pose_loss([off], targets)[0].item() > 0.02, entry


def test_confidence_tells_the_expected_error(rooms):
    """The loss is least where confidence is CONFIDENCE over the error."""
    targets = make_targets(rooms, scale_frames=4)
    truth = targets.depth.flatten(0, 1).log()
    losses = {}
    for confidence in (1.0, 2.0, 3.9, 4.0, 4.1, 8.0):
        prediction = Predictions([], truth + CONFIDENCE / 4, torch.full_like(truth, confidence), [], {})
        losses[confidence] = depth_loss(prediction, targets, torch.arange(20))[1].item()
    assert min(losses, key=losses.get) == 4.0


def test_matches_are_where_the_points_are(rooms):
    """Against a reprojection with the sequences' own poses, one patch at a time."""
    targets = make_targets(rooms, scale_frames=4)
    matches = match_patches(targets, 2, 14)
    K = rooms.intrinsics[1].numpy()
    seen = 0
    for row in range(3):
        for column in range(4):
            x, y = 14 * column + 7, 14 * row + 7
            depth = rooms.depth[1, 6, y, x].item()
            point = np.array([(x + 0.5 - K[0, 2]) / K[0, 0] * depth, (y + 0.5 - K[1, 2]) / K[1, 1] * depth, depth, 1])
            point = np.linalg.inv(rooms.T_world_camera[1, 4].numpy()) @ rooms.T_world_camera[1, 6].numpy() @ point
            u, v = K[0, 0] * point[0] / point[2] + K[0, 2], K[1, 1] * point[1] / point[2] + K[1, 2]
            np.testing.assert_allclose(matches.pixel[1, 4, 4 * row + column].numpy(), (u, v), atol=0.02)
            seen += matches.is_seen[1, 4, 4 * row + column].item()
    assert seen > 3


def test_attention_to_the_true_match_loses_least():
    """Two queries, one at a patch's middle, one halfway between four."""
    grid, patch = (3, 4), 14
    pixel = torch.tensor([[[[14 * 1.5, 14 * 1.5], [14 * 2, 14 * 1]] + [[7.0, 7.0]] * 10]])
    is_seen = torch.tensor([[[1.0, 1.0] + [0.0] * 10]])
    matches = Matches(pixel, is_seen, *(torch.zeros(1),) * 4)
    key = 8 * torch.eye(12)[None, None].expand(1, 2, 12, 12)

    def loss(first: list[int], second: list[int]) -> float:
        query = torch.zeros(1, 2, 12, 12)
        query[0, 1, 0, first] = 4.0
        query[0, 1, 1, second] = 4.0
        return matching_loss(query, key, matches, 1, grid, patch).item()

    right = loss([5], [1, 2, 5, 6])
    assert right < 0.75
    assert right < min(loss([6], [1, 2, 5, 6]), loss([5], [1]), loss([5], [0, 3, 4, 7]))


def test_metrics_equal_those_of_the_evaluation_tool():
    rng = np.random.default_rng(0)
    T_true = np.tile(np.eye(4), (30, 1, 1))
    T_true[:, :3, :3] = Rotation.from_rotvec(np.cumsum(rng.normal(0, 0.05, (30, 3)), 0)).as_matrix()
    T_true[:, :3, 3] = np.cumsum(rng.normal(0, 0.1, (30, 3)), 0)
    T = T_true.copy()
    T[:, :3, 3] = 3 * T[:, :3, 3] + rng.normal(0, 0.05, (30, 3)) + 1
    T[:, :3, :3] = T[:, :3, :3] @ Rotation.from_rotvec(rng.normal(0, 0.01, (30, 3))).as_matrix()
    ours = pose_errors(T, T_true)
    stamps = np.arange(30.0)
    rows = [np.hstack([poses[:, :3, 3], quaternion_from_matrix(poses[:, :3, :3])]) for poses in (T, T_true)]
    theirs = trajectory_errors((stamps, rows[0]), (stamps, rows[1])).summary
    assert ours["ate_path"] == pytest.approx(theirs["ate"]["translation"]["rmse_percent_of_path"], rel=1e-6)
    assert ours["rotation_step"] == pytest.approx(theirs["rpe_one_pose"]["rotation_degrees"]["mean"], rel=1e-6)
    perfect = pose_errors(T_true, T_true)
    assert perfect["ate_path"] < 1e-6 and perfect["translation_step"] < 1e-6 and perfect["heading_end"] < 1e-4
    assert ours["ate_path_static"] > ours["ate_path"] and ours["ate_path_constant"] > ours["ate_path"]

    truth = rng.uniform(1, 5, (20, 20))
    depth = 2 * truth * rng.uniform(0.7, 1.3, (20, 20))
    theirs = evaluation_depth_errors(depth, truth)
    ours = depth_errors(depth[None], truth[None])
    assert ours["abs_rel"] == pytest.approx(100 * theirs.abs_rel, rel=0.1)  # ratio of medians or median of ratios
    assert ours["delta"] == pytest.approx(100 * theirs.delta_1, abs=8)
    curve = confidence_errors(depth, 1 / np.abs(depth / truth / 2 - 1), truth)
    assert curve["abs_rel"][0] > 3 * curve["abs_rel"][-1] and curve["confidence"] == sorted(curve["confidence"])


def test_learning_rates_and_phases():
    assert rate_factor(0, 100, 10, 0.4) == pytest.approx(0.1) and rate_factor(20, 100, 10, 0.4) == 1
    assert rate_factor(70, 100, 10, 0.4) == pytest.approx(0.5) and rate_factor(100, 100, 10, 0.4) == 0.01
    phases = [Phase.parse("8x4:1"), Phase.parse("24x2:3")]
    assert [current_phase(phases, progress).frames for progress in (0, 0.2, 0.3, 1)] == [8, 8, 24, 24]
    for text in ("8x4", "4x4:1", "8x0:1", "8x4:0", "axb:1"):
        with pytest.raises(ValueError):
            Phase.parse(text)


def stage(folder: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> list[dict]:
    """Run a stage of the tiny model in a process of its own; return its log's rows."""
    command = [sys.executable, *launcher, "-m", "training.train", "--output", folder, "--preset", "tiny",
               "--device", "cpu",
               "--no-compile", "--textures", 4, "--held-out", 0, "--warm-up", 2, "--phases", "8x1:1", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_stages_go_on_are_repeatable_and_make_a_checkpoint(tmp_path):
    rows = stage(tmp_path / "a", "--steps", 3, "--held-out", 1)
    assert rows[-1]["step"] == 3 and set(KINDS) == {row["evaluation"] for row in rows if "evaluation" in row}
    assert (tmp_path / "a" / "losses.png").stat().st_size > 10_000
    losses = [row["total"] for row in rows if "total" in row]
    assert len(losses) == 1 and np.isfinite(losses[0])

    again = stage(tmp_path / "again", "--steps", 3)
    assert [row["total"] for row in again if "total" in row] == losses
    _, first, _ = read_weights(tmp_path / "a")
    _, second, auxiliary = read_weights(tmp_path / "again")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert auxiliary

    rows = stage(tmp_path / "b", "--steps", 2, "--resume", tmp_path / "a")
    assert rows[0]["step"] == 5 and json.loads((tmp_path / "b" / "state.json").read_text())["step"] == 5
    _, third, _ = read_weights(tmp_path / "b")
    assert any(not torch.equal(tensor, third[name]) for name, tensor in first.items())

    join(tmp_path / "b", tmp_path / "model.safetensors")
    model = build_model("default", checkpoint=tmp_path / "model.safetensors")  # the file says what it is
    assert model.config == PRESETS["tiny"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, third[name], rtol=0, atol=0)

    a, b, mean = (tmp_path / name for name in ("a", "b", "mean.safetensors"))
    join(b, mean, [(a, 0.25), (tmp_path / "model.safetensors", 0.25)])  # the latter is b's
    for name, tensor in build_model("default", checkpoint=mean).state_dict().items():
        torch.testing.assert_close(tensor, 0.75 * third[name] + 0.25 * first[name], rtol=2e-3, atol=1e-6)
    with pytest.raises(ValueError, match="another model's"):
        join(b, mean, [(EMBEDDED_WEIGHTS, 0.25)])
    for shares in ((0.7, 0.4), (1.5, -0.5), (float("nan"),)):
        with pytest.raises(ValueError, match="shares must be"):
            join(b, mean, [(a, share) for share in shares])


def test_processes_share_their_gradients(tmp_path):
    """Two processes on one machine train one model, from different places."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    rows = stage(tmp_path, "--steps", 2, launcher=launcher)
    assert len(rows) == 1 and rows[0]["processes"] == 2 and np.isfinite(rows[0]["total"])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before torch 2.9")
def test_muon_is_torchs():
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 4), (4, 12), (12, 4), (5, 5)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    muon = Muon(ours, decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        muon.step(0.01)
        reference.step()
    for mine, other, first in zip(ours, theirs, start):
        assert (mine - first).abs().mean() > 0.002
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)  # bfloat16 inside


def test_batches_are_of_the_kinds_that_shares_ask_for():
    class Recorder:
        device = torch.device("cpu")

        def __init__(self):
            self.asked = []

        def sequences(self, batch, frames, options):
            self.asked.append(options)
            return Sequences(torch.zeros(batch, frames, 3, 8, 8), torch.zeros(batch, frames, 8, 8),
                             torch.zeros(batch, frames, 4, 4), torch.zeros(batch, 3, 3))

    recorder = Recorder()
    shares = {"rooms": 0.4, "interiors": 0.0, "offices": 0.2, "corridors": 0.3}
    feed = Feed(recorder, np.random.default_rng(0), shares)
    for _ in range(800):
        feed.next(1, 2)
    assert len(recorder.asked) == 400  # each is used twice
    for kind in KINDS:
        share = recorder.asked.count(KINDS[kind]) / 400
        assert abs(share - shares.get(kind, 0.1)) < 0.07, kind


@pytest.mark.parametrize("shares", [("--rooms", "0.9", "--offices", "0.2"), ("--corridors", "-0.1")])
def test_shares_that_make_no_sense_are_refused(shares, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", "--output", "x", "--steps", "1", *shares])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--corridors must be shares" in capsys.readouterr().err


def average_in_process(rank: int, file: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    for parameter in module[0].parameters():  # the other layer has no gradient
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
    average_gradients(module)
    assert all((parameter.grad == 2).all() for parameter in module[0].parameters())
    assert all(parameter.grad is None for parameter in module[1].parameters())
    torch.distributed.destroy_process_group()


def test_gradients_are_averaged_over_processes(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=average_in_process, args=(rank, tmp_path / "meeting")) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_a_checkpoint_replaces_the_one_before_as_a_whole(tmp_path, monkeypatch):
    """Also one of more parts; and what was there stays where writing fails."""
    model, auxiliary = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)
    monkeypatch.setattr("training.checkpoint.PART_BYTES", 1)
    save_checkpoint(tmp_path, model, auxiliary, COMPACT, {"step": 1})
    assert len(list(tmp_path.glob("weights-*.safetensors"))) == 4
    monkeypatch.undo()
    save_checkpoint(tmp_path, model, auxiliary, COMPACT, {"step": 2})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["state.json", "weights-1-of-1.safetensors"]
    saved = read_weights(tmp_path)[1]["weight"]
    torch.testing.assert_close(saved, model.weight.detach().half().float())

    def fail(tensors, file, metadata):
        file.write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr("training.checkpoint.save_file", fail)
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, model, auxiliary, COMPACT, {"step": 3})
    config, tensors, _ = read_weights(tmp_path)
    assert config == COMPACT and torch.equal(tensors["weight"], saved) and read_state(tmp_path)["step"] == 2


def test_weights_that_lack_a_part_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path)
    (tmp_path / "weights-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="1 parts"):
        read_weights(tmp_path)
