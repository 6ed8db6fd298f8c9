# SPDX-License-Identifier: Apache-2.0
"""The model and its streaming step."""
from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lingbot_map_ros.cache import FlashInferKVCacheManager
from lingbot_map_ros.cache.notice import first_line, warn_once
from lingbot_map_ros.gct.aggregator import Aggregator, Attend
from lingbot_map_ros.gct.camera_head import CameraHead
from lingbot_map_ros.gct.checkpoint import load_checkpoint, open_checkpoint
from lingbot_map_ros.gct.compact import CompactCameraHead, CompactDepthHead, ConvPatchEmbed
from lingbot_map_ros.gct.config import PRESETS, GCTConfig
from lingbot_map_ros.gct.depth_head import DepthHead
from lingbot_map_ros.gct.dtypes import DTYPES, dtype_name, preferred_dtype
from lingbot_map_ros.gct.frame_graph import FrameGraph, recording_streams
from lingbot_map_ros.gct.layers import Block, allow_many_versions
from lingbot_map_ros.gct.patch_embed import DINOv2PatchEmbed
from lingbot_map_ros.gct.pose import decode_pose_encoding
from lingbot_map_ros.gct.state import MIB, GCTState, StateSizes, check_memory, resolve_sizes

logger = logging.getLogger(__name__)

EMBEDDED_WEIGHTS = Path(__file__).resolve().parent.parent / "models" / "default.safetensors"


@dataclass(frozen=True)
class GCTOutput:
    """Predictions for n frames of h x w pixels, in fp32."""

    pose_encoding: torch.Tensor  # [n, 9] tx ty tz qx qy qz qw fov_h fov_w, camera to world (see pose.py)
    T_world_camera: torch.Tensor  # [n, 4, 4] of the pose encoding (see decode_pose_encoding)
    intrinsics: torch.Tensor  # [n, 3, 3] likewise
    depth: torch.Tensor  # [n, h, w] along the optical axis, model units
    confidence: torch.Tensor  # [n, h, w], 1 or more


class GCT(nn.Module):
    """Streaming geometric context transformer (arXiv 2604.14141)."""

    def __init__(self, config: GCTConfig) -> None:
        """Lay out the model. Weights are undefined until loaded (see `build_model`)."""
        super().__init__()
        self.config = config
        self.aggregator = Aggregator(config, (ConvPatchEmbed if config.compact else DINOv2PatchEmbed)(config))
        self.camera_head = (CompactCameraHead if config.compact else CameraHead)(config)
        self.depth_head = (CompactDepthHead if config.compact else DepthHead)(config)
        self.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.aggregator.camera_token.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the aggregator's matrix products and, unless a state is made with another, of its cache."""
        return self.aggregator.frame_blocks[0].attn.qkv.weight.dtype

    def set_dtype(self, dtype: torch.dtype) -> GCT:
        """Set the dtype of the aggregator's matrix products. All else (norms, learned tokens, heads) stays in float32.

        States made before do not fit any more. Raises ValueError for a dtype that is none of DTYPES.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}")
        for module in self.aggregator.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.to(dtype)
        return self

    def peak_bytes(self, sizes: StateSizes) -> int:
        """Return the device memory that weights, one state's caches and work take at most, held frames apart."""
        weights = sum(tensor.nbytes for tensor in self.state_dict().values())
        return weights + sizes.cache_bytes(self.config) + sizes.working_bytes(self.config, self.device)

    def new_state(
        self, image_size: tuple[int, int], *, backend: str = "auto", graph: bool = True,
        log_level: int = logging.INFO, **options: int | torch.dtype | None,
    ) -> GCTState:
        """Allocate the caches of one sequence of images of (height, width).

        options: those of `state.resolve_sizes`; None means the model's own value. backend: of attention over the cache
        (see cache.backends). graph: on a GPU, compile and record what is done with a frame, which takes a while and
        makes every frame faster. log_level: of the line that says what is allocated. Weights must have been loaded
        before.
        Raises ValueError for sizes that can not be, InsufficientMemoryError when they do not fit into memory.
        """
        config = self.config
        sizes = resolve_sizes(config, self.dtype, image_size, **options)
        check_memory(sizes, config, self.device)
        logger.log(
            log_level,
            "caches of %d MiB in %s: %d scale frames and a sliding window of %d (reserved: %d) at %dx%d, %d frames "
            "remembered",
            sizes.cache_bytes(config) // MIB, dtype_name(sizes.cache_dtype), sizes.scale_frames,
            sizes.sliding_window, sizes.max_sliding_window, image_size[1], image_size[0], sizes.remembered_frames,
        )  # fmt: skip
        window = {
            "scale_frames": sizes.scale_frames,
            "sliding_window": sizes.sliding_window,
            "device": self.device,
        }
        with on_device(self.device), torch.no_grad():
            cache = FlashInferKVCacheManager(**sizes.cache_arguments(config), **window, backend=backend)
            camera_cache = FlashInferKVCacheManager(**sizes.camera_cache_arguments(config), **window)
            state = GCTState(
                cache=cache,
                camera_cache=camera_cache,
                sizes=sizes,
                scale_frames=sizes.scale_frames,
                aggregator_tables=self.aggregator.tables(image_size),
                camera_tables=self.camera_head.tables(),
                depth_tables=self.depth_head.tables(image_size),
            )
            if graph and self.device.type == "cuda":
                self._record(state, log_level)
        return state

    @torch.no_grad()
    def step(self, images: torch.Tensor, state: GCTState, keep: bool | None = True) -> GCTOutput:
        """Predict for images [n, 3, h, w] in [0, 1]: first the scale frames in one batch, then one frame a call.

        keep: whether later frames see this one; a frame that is not kept leaves no trace in the state.
        None leaves that to be decided on the prediction: the frame attends with nothing evicted yet, and
        `state.keep_last` or `state.rollback_last` must follow. The scale frames are kept; after a batch of fewer, the
        next kept frames count as scale frames. On a GPU nothing here waits for the device.

        Raises ValueError for images that do not fit the state, TypeError for images that are not floating point.
        After another error the state must be reset.
        """
        self._check(images, state, keep)
        with on_device(self.device):
            return self._step(images, state, keep)

    def _step(self, images: torch.Tensor, state: GCTState, keep: bool | None) -> GCTOutput:
        first, n = state.num_kept, len(images)
        kinds = [0 if t == 0 else 1 if t < state.cache.scale_frames else 2 for t in range(first, first + n)]
        special = torch.stack([state.aggregator_tables.special[kind] for kind in kinds])
        caches = state.cache, state.camera_cache
        if state.frame_graph is not None and first > 0:
            if not state.frame_graph.reads(self._a_weight):
                raise RuntimeError("the weights have moved since this state was made: make a new one")
            for cache in caches:
                cache.place_frame(keep)
            output = GCTOutput(*state.frame_graph.replay(images, special, first))
        else:
            images = images.to(self.device, torch.float32, non_blocking=True)
            times = torch.arange(first, first + n, dtype=torch.float64, device=self.device)
            attend, attend_poses = (attend_to(cache, is_first=first == 0, keep=keep) for cache in caches)
            outputs = self.aggregator(images, state.aggregator_tables, attend, special=special, times=times)
            output = GCTOutput(*self._find_pose(state, outputs, times, attend_poses),
                               *self._find_depth(state, outputs))
        state.num_kept += n if keep is not False else 0
        state.is_undecided = keep is None
        return output

    def _find_pose(
        self, state: GCTState, outputs: list[torch.Tensor], times: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pose_encoding = self.camera_head(
            outputs[-1][:, 0], state.camera_tables, attend, times=times, iterations=state.sizes.camera_iterations
        )[-1]
        return pose_encoding, *decode_pose_encoding(pose_encoding, state.sizes.image_size)

    def _find_depth(self, state: GCTState, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        # Frame by frame: the decoder's full-size maps are what needs most memory.
        patches = [output[:, self.config.num_special_tokens:] for output in outputs]
        maps = [
            self.depth_head([level[i : i + 1] for level in patches], state.sizes.image_size, state.depth_tables)
            for i in range(len(patches[0]))
        ]
        return maps[0] if len(maps) == 1 else tuple(map(torch.cat, zip(*maps)))

    @property
    def _a_weight(self) -> torch.Tensor:
        """One that moves with the others, and when the dtype changes."""
        return self.aggregator.frame_blocks[0].attn.qkv.weight

    def _record(self, state: GCTState, log_level: int) -> None:
        """Compile a frame's way and record it, for as long as the weights stay where they are, if that can be done."""
        begin = time.monotonic()
        reason = state.cache.why_not_placed or state.camera_cache.why_not_placed
        if not reason:
            logger.log(log_level, "compiling and recording what is done with a frame: for half a minute, less when it "
                       "is cached")
            blocks = [module for module in self.modules() if isinstance(module, Block)]
            try:
                for block in blocks:
                    block.is_fused = True
                state.frame_graph = self._frame_graph(state)
            except Exception as error:  # compilers and drivers raise whatever they like
                reason = first_line(error.__context__ or error)  # what went wrong within a recording comes first
                torch.cuda.synchronize(self.device)
            finally:
                for block in blocks:
                    block.is_fused = False
                state.reset()
        if reason:
            warn_once(logger, "frames are launched kernel by kernel, which is slower, since they cannot be compiled "
                      f"and recorded: {reason}")
        else:
            logger.log(log_level, "a frame's kernels were compiled and recorded in %.1f s", time.monotonic() - begin)

    def _frame_graph(self, state: GCTState) -> FrameGraph:
        allow_many_versions()
        self.depth_head.to(memory_format=torch.channels_last)
        caches = state.cache, state.camera_cache
        attend, attend_poses = (attend_placed_in(cache) for cache in caches)
        beside = recording_streams(self.device)[1]

        def run(images: torch.Tensor, special: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = self.aggregator(images, state.aggregator_tables, attend, special=special, times=times)
            # The camera head's many small steps leave room for the depth head.
            present = torch.cuda.current_stream()
            beside.wait_stream(present)
            try:
                with torch.cuda.stream(beside):
                    depth, confidence = self._find_depth(state, outputs)
                pose = self._find_pose(state, outputs, times, attend_poses)
            finally:
                present.wait_stream(beside)
            return *pose, depth, confidence

        for cache in caches:
            cache.place_frame(keep=False)
        images = torch.zeros((1, 3, *state.sizes.image_size), device=self.device)
        return FrameGraph(run, images, state.aggregator_tables.special[2:], self._a_weight)

    @staticmethod
    def _check(images: torch.Tensor, state: GCTState, keep: bool | None) -> None:
        if state.is_undecided:
            raise RuntimeError("the last frame must be kept or rolled back first")
        height, width = state.sizes.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, height, width):
            raise ValueError(f"images must have the shape [n, 3, {height}, {width}], not {list(images.shape)}")
        if not images.is_floating_point():
            raise TypeError(f"images must be floating point in [0, 1], not {images.dtype}")
        most = state.cache.scale_frames if state.num_kept == 0 else 1
        if not 1 <= len(images) <= most:
            what = f"1 to {most} scale frames" if state.num_kept == 0 else "one frame at a time"
            raise ValueError(f"the model takes {what} now, not {len(images)} frames")
        if state.num_kept == 0 and keep is not True:
            raise ValueError("the scale frames must be kept")


def attend_to(cache: FlashInferKVCacheManager, *, is_first: bool, keep: bool | None) -> Attend:
    """Return a function that attends from n frames to a cache and to themselves.

    is_first: the n frames start the sequence and all see one another. Otherwise n is 1. keep: None leaves the frame in
    the cache with nothing evicted, to be kept or rolled back.
    """
    def attend(block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not is_first and keep is not None:
            return cache.attend_frame(block, q[0], k[0], v[0], keep=keep)
        for frame_k, frame_v in zip(k, v):
            cache.append_frame(block, frame_k, frame_v)
        return cache.compute_attention(block, q.flatten(0, 1))

    return attend


def attend_placed_in(cache: FlashInferKVCacheManager) -> Attend:
    """Return a function that attends from one frame to a cache, at the places of the last `place_frame`."""
    return lambda block, q, k, v: cache.attend_placed(block, q[0], k[0], v[0])


def on_device(device: torch.device) -> AbstractContextManager:
    """Make a CUDA device the current one, which kernels outside torch run on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def build_model(
    preset: str = "default",
    *,
    checkpoint: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GCT:
    """Build a model; `default` without a checkpoint carries the weights that ship with the package.

    preset: a name in PRESETS; a checkpoint that holds its own configuration takes precedence. Without a checkpoint
    `lingbot_map` and `tiny` get random weights, always the same ones on one kind of device: for benchmarks and tests.
    dtype: of the aggregator (see `GCT.set_dtype`); None: `preferred_dtype`.

    Raises ValueError for an unknown preset, an unfit checkpoint or dtype, FileNotFoundError for a missing checkpoint.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    if checkpoint is None and preset == "default":
        checkpoint = EMBEDDED_WEIGHTS
    source = None if checkpoint is None else open_checkpoint(checkpoint)
    config = source.config if source is not None and source.config is not None else PRESETS[preset]

    with torch.device("meta"):
        model = GCT(config)
    model.set_dtype(preferred_dtype(device) if dtype is None else dtype)
    if source is not None:
        load_checkpoint(model, source, device)
    else:
        initialise(model.to_empty(device=device))
    return model


@torch.no_grad()
def initialise(model: GCT, seed: int = 0) -> None:
    """Fill a model with random weights that give poses near the identity and depths around 1."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "gamma":
            parameter.fill_(0.2)
        elif leaf == "bias":
            parameter.zero_()
        elif leaf == "weight" and parameter.ndim == 1:
            parameter.fill_(1.0)
        elif leaf == "weight":
            fan_in = parameter[0].numel()
            parameter.normal_(0.0, 0.7 * fan_in**-0.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    # Over the usual four iterations: no rotation, fields of view of about a radian, small translations.
    last = model.camera_head.pose_branch.fc2
    last.weight.mul_(0.05)
    last.bias[6:] = torch.tensor([1.0, 0.8, 1.0], device=last.bias.device) / 4
