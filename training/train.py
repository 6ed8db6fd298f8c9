# SPDX-License-Identifier: Apache-2.0
"""Train the embedded model on rendered sequences, in stages that go on from one another.

    python -m training.train --output runs/first --minutes 9                       # from scratch, one GPU
    python -m training.train --output runs/second --resume runs/first --minutes 9  # go on
    torchrun --nproc-per-node 4 -m training.train --output runs/first ...           # several GPUs of one machine

A stage begins from weights, step and seed; the optimiser starts anew with a short warm-up. With --steps a stage is the
same in every run on one kind of machine; --minutes fits as many steps as there is time for.
"""
from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lingbot_map_ros.gct import GCT, PRESETS, GCTConfig
from lingbot_map_ros.gct.model import initialise
from lingbot_map_ros.gct.pose import decode_pose_encoding
from lingbot_map_ros.synthetic import KINDS, SceneGenerator, Sequences
from training.checkpoint import read_state, read_weights, save_checkpoint
from training.feed import Feed, clock, draw, image_size, read_photos
from training.losses import NAMES
from training.metrics import depth_errors, medians, pose_errors
from training.optimiser import Optimiser, average_gradients, rate_factor
from training.parallel import predict
from training.plots import plot_run
from training.step import Step, Trainee, compile_layers

PHOTOS = Path(__file__).resolve().parent / "photos"
HELD_OUT_SEED = 3_000_000_019  # beyond the seeds of stages, which count up with their steps; of 32 bits, as torch takes
PLAN_EVERY = 20  # steps between two looks at the clock
SAVE_SECONDS = 60.0  # between two checkpoints, so that a stage that is cut off leaves one
PLACES = tuple(kind for kind in KINDS if kind != "mixed")  # that make up batches of their own; the rest are mixed
REFRESH_EVERY = 50  # steps between two renewals of a part of the textures


@dataclass(frozen=True)
class Phase:
    """A part of a stage, in which batches have one shape."""

    frames: int
    batch: int  # sequences a process
    share: float  # of the stage's steps

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Read FRAMESxBATCH:SHARE, such as 48x16:0.4."""
        shape, share = text.split(":")
        frames, batch = shape.split("x")
        phase = cls(int(frames), int(batch), float(share))
        if phase.frames < 8 or phase.batch < 1 or phase.share <= 0:
            raise ValueError
        return phase


class Plan:
    """How many steps a stage has, where it is given minutes: revised as their speed shows, alike in all processes."""

    def __init__(self, steps: int | None, seconds: float | None, device: torch.device) -> None:
        self._fixed = steps
        self.steps = steps or 100_000
        self._seconds = seconds
        self._device = device
        self._measured: tuple[int, float] | None = None
        self._started = time.monotonic()

    def revise(self, step: int) -> None:
        """Fit the number of steps to the time that is left; to be called in all processes at the same steps."""
        if self._fixed:
            return
        now = clock(self._device)
        if step >= PLAN_EVERY:  # the first steps compile
            if self._measured is None:
                self._measured = (step, now)
            elif step > self._measured[0]:
                each = (now - self._measured[1]) / (step - self._measured[0])
                self.steps = step + max(0, int((self._started + self._seconds - now) / each))
        if dist.is_initialized():
            steps = torch.tensor(self.steps, device=self._device)
            dist.broadcast(steps, 0)
            self.steps = int(steps)


@torch.no_grad()
def evaluate(model: GCT, sequences: Sequences, scale_frames: int, window: int, chunk: int = 4) -> dict[str, float]:
    """Return medians over sequences of the errors of `metrics`, predicted all frames at once."""
    rows = []
    size = tuple(sequences.images.shape[-2:])
    frames = sequences.images.shape[1]
    for start in range(0, len(sequences.images), chunk):
        images = sequences.images[start:start + chunk]
        some = torch.arange(0, len(images) * frames, 5, device=images.device)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            predictions = predict(model, images, scale_frames=scale_frames, window=window, depth_frames=some)
        T = decode_pose_encoding(predictions.pose_encodings[-1].double(), size)[0].cpu().numpy()
        T_true = sequences.T_world_camera[start:start + chunk].double().cpu().numpy()
        depth = predictions.log_depth.exp().cpu().numpy()
        depth_true = sequences.depth[start:start + chunk].flatten(0, 1)[some].cpu().numpy()
        of = (some // frames).cpu().numpy()
        rows += [pose_errors(T[i], T_true[i]) | depth_errors(depth[of == i], depth_true[of == i])
                 for i in range(len(T))]
    return medians(rows)


@dataclass(frozen=True)
class Stage:
    """What a stage is told on the command line."""

    output: Path
    resume: Path | None
    preset: str
    steps: int | None
    minutes: float | None
    phases: list[Phase]
    seed: int
    rate: float
    matrix_rate: float
    warm_up: int
    hold: float
    average: float
    rooms: float
    interiors: float
    offices: float
    corridors: float
    auxiliary_weight: float
    depth_weight: float
    textures: int
    photos: Path
    device: str
    compile: bool
    graph: bool
    held_out: int


def parse_arguments() -> Stage:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder to write: weights in parts, state.json, log.jsonl, plots")
    add("--resume", type=Path, help="folder of an earlier stage, or a file of weights, to go on from")
    add("--preset", default="default", help="configuration of a model that starts from scratch")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, help="of training, start-up included")
    add("--phases", type=Phase.parse, nargs="+", metavar="FRAMESxBATCH:SHARE",
        default=[Phase(8, 96, 0.2), Phase(24, 32, 0.35), Phase(48, 16, 0.45)],
        help="shapes of batches a process, one after the other")
    add("--seed", type=int, default=0)
    add("--rate", type=float, default=1e-3, help="peak learning rate of AdamW")
    add("--matrix-rate", type=float, default=2e-3, help="peak learning rate of Muon")
    add("--warm-up", type=int, default=100, help="steps over which the rates rise")
    add("--hold", type=float, default=0.4, help="share of the stage after which the rates fall")
    add("--average", type=float, default=0.998, help="decay a step of the moving average of weights that is written")
    add("--rooms", type=float, default=0.4, help="share of batches of plain rooms")
    add("--interiors", type=float, default=0.3, help="share of batches of furnished rooms")
    add("--offices", type=float, default=0.0, help="share of batches of open offices")
    add("--corridors", type=float, default=0.0, help="share of batches of corridors; the rest mix all, and streets")
    add("--auxiliary-weight", type=float, default=1.0)
    add("--depth-weight", type=float, default=1.0, help="of the loss of depth beside that of poses")
    add("--textures", type=int, default=512, help="in the bank")
    add("--photos", type=Path, default=PHOTOS, help="folder of photographs for textures")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", dest="compile", action="store_false", help="do not fuse the layers: slower, but starts at once")
    add("--no-graph", dest="graph", action="store_false", help="launch kernels one by one")
    add("--held-out", type=int, default=16, help="sequences of each kind for the evaluations before and after; 0: none")
    options = parser.parse_args()
    shares = {kind: getattr(options, kind) for kind in PLACES}
    if min(shares.values()) < 0 or sum(shares.values()) > 1 + 1e-9:
        parser.error(" ".join(f"--{kind}" for kind in PLACES) + " must be shares that add up to at most 1, got "
                     + " ".join(map(str, shares.values())))
    return Stage(**{field.name: getattr(options, field.name) for field in fields(Stage)})


def start_model(stage: Stage) -> tuple[Trainee, GCTConfig, int]:
    """Build the model from scratch or from an earlier stage; return it with the step to go on from."""
    step = 0
    if stage.resume is None:
        config, weights, auxiliary = PRESETS[stage.preset], None, None
    else:
        config, weights, auxiliary = read_weights(stage.resume)
        step = read_state(stage.resume)["step"] if stage.resume.is_dir() else 0
    torch.manual_seed(stage.seed)
    with torch.device("meta"):
        model = GCT(config)
    model.to_empty(device="cpu")
    if weights is None:
        initialise(model, stage.seed)
    else:
        model.load_state_dict(weights)
    trainee = Trainee(model, stage.auxiliary_weight, stage.depth_weight)
    if auxiliary:
        trainee.auxiliary.load_state_dict(auxiliary)
    return trainee, config, step


def train(stage: Stage) -> None:
    """Run a stage."""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(stage.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # poses and points that are the truth go through matrix products
    plan = Plan(stage.steps, stage.minutes and 60 * stage.minutes, device)
    if processes > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if stage.compile:
        compile_layers()

    trainee, config, first_step = start_model(stage)
    trainee.to(device)
    averaged = AveragedModel(trainee, multi_avg_fn=get_ema_multi_avg_fn(stage.average))
    optimiser = Optimiser(trainee, stage.rate, stage.matrix_rate)

    log = Log(stage.output if rank == 0 else None)
    size = image_size(config)
    seed = stage.seed + 1000 * first_step + rank
    generator = SceneGenerator(size, seed=seed, device=device, photos=read_photos(stage.photos),
                               textures=stage.textures)
    feed = Feed(generator, np.random.default_rng(seed), {kind: getattr(stage, kind) for kind in PLACES})
    rng = np.random.default_rng(seed + 1)
    held_out = make_held_out(stage, config, device) if rank == 0 and stage.held_out else {}
    log.say(f"ready after {log.seconds():.0f} s")
    for name, sequences in held_out.items():
        log.write(evaluation=name, step=first_step,
                  **evaluate(averaged.module.model, sequences, config.scale_frames, 16))

    def save() -> None:
        model = averaged.module
        save_checkpoint(stage.output, model.model, model.auxiliary, config,
                        {"step": first_step + step, "seed": stage.seed, "seconds": round(log.seconds())})

    sums = torch.zeros(len(NAMES) + 1, device=device)
    step = since = 0
    running = run = None
    saved = time.monotonic()
    while step < plan.steps:
        phase = current_phase(stage.phases, step / plan.steps)
        if phase != running:
            running, run = phase, Step(trainee, stage.graph and device.type == "cuda")
        parts = run(feed.next(phase.batch, phase.frames), draw(rng, phase.batch, phase.frames, device))
        if processes > 1:
            average_gradients(trainee)
        norm = optimiser.step(rate_factor(step, plan.steps, stage.warm_up, stage.hold))
        averaged.update_parameters(trainee)
        sums += torch.cat([parts, norm.reshape(1)])
        step += 1
        if step % REFRESH_EVERY == 0:
            generator.refresh()
        since += 1
        if step % PLAN_EVERY == 0:
            plan.revise(step)
        if step % PLAN_EVERY == 0 or step >= plan.steps:
            means = (sums / since).tolist()
            sums.zero_()
            since = 0
            log.write(step=first_step + step, planned=first_step + plan.steps, frames=phase.frames, batch=phase.batch,
                      processes=processes, render_seconds=round(feed.seconds, 3),
                      **dict(zip((*NAMES, "gradient"), means)))
            if not np.isfinite(means[0]):
                raise RuntimeError(f"the loss is {means[0]} at step {first_step + step}: lower the learning rates")
            if rank == 0 and time.monotonic() - saved > SAVE_SECONDS:
                save()
                saved = time.monotonic()

    check_equal(trainee)
    if rank == 0:
        save()
        for name, sequences in held_out.items():
            log.write(evaluation=name, step=first_step + step,
                      **evaluate(averaged.module.model, sequences, config.scale_frames, 16))
        plot_run(stage.output)
        log.say(f"{step} steps in {log.seconds():.0f} s; wrote {stage.output}")
    if processes > 1:
        dist.destroy_process_group()


def check_equal(module: nn.Module) -> None:
    """Raise RuntimeError where this process has trained to other weights than the first."""
    if not dist.is_initialized():
        return
    own = torch.stack([parameter.detach().double().norm() for parameter in module.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    if not torch.allclose(own, first, rtol=1e-4):
        raise RuntimeError(f"process {dist.get_rank()} has drifted from process 0: its weights are others")


def current_phase(phases: list[Phase], progress: float) -> Phase:
    """Return the phase that a stage is in after a share `progress` of its steps."""
    end, total = 0.0, sum(phase.share for phase in phases)
    for phase in phases:
        end += phase.share / total
        if progress < end:
            return phase
    return phases[-1]


def make_held_out(stage: Stage, config: GCTConfig, device: torch.device) -> dict[str, Sequences]:
    """Render the sequences that measure progress: places and textures that no stage trains on."""
    generator = SceneGenerator(image_size(config), seed=HELD_OUT_SEED, device=device, textures=64)
    return {name: generator.sequences(stage.held_out, 48, options=options)
            for name, options in KINDS.items()}


class Log:
    """Writes rows of figures to log.jsonl and says them. Without a folder (other processes) it is silent."""

    def __init__(self, folder: Path | None) -> None:
        self._started = time.monotonic()
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "log.jsonl", "a", buffering=1)

    def seconds(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._started

    def write(self, **row: float | str) -> None:
        """Write one row."""
        if self._file is not None:
            row = {"seconds": round(self.seconds(), 1)} | row
            self._file.write(json.dumps(row) + "\n")
            self.say("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                               for name, value in row.items()))

    def say(self, text: str) -> None:
        """Print a line."""
        if self._file is not None:
            print(text, flush=True)


if __name__ == "__main__":
    train(parse_arguments())
