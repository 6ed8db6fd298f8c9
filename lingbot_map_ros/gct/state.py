# SPDX-License-Identifier: Apache-2.0
"""What the model remembers of one sequence, and what that takes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lingbot_map_ros.cache import FlashInferKVCacheManager, check_cache_dtype
from lingbot_map_ros.gct.aggregator import AggregatorTables
from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.depth_head import PositionTable
from lingbot_map_ros.gct.frame_graph import FrameGraph

MIB = 2**20
# Floats a pixel of a held frame: image, depth and confidence, both again and their ratio when windows meet.
HELD_MAPS = 8
WORKING_TENSORS = 20  # of frames' tokens in float32, live at once in a step (measured with 8 at 518x378: 18)
WORKING_MAPS = 32  # channels of the image's size in float32, live at once in the depth head beside its features
GPU_WORKING_BYTES = 128 * MIB  # beside those, on a GPU: cuBLAS's, 32 MiB on an H200 for each of three streams, and more


class InsufficientMemoryError(MemoryError):
    """A state does not fit into the memory that is free; the message says what would."""


@dataclass(frozen=True)
class StateSizes:
    """Everything that sizes the memory of one sequence (see `resolve_sizes`)."""

    image_size: tuple[int, int]  # height, width
    scale_frames: int
    sliding_window: int
    remembered_frames: int
    max_sliding_window: int  # what `sliding_window` may become while the sequence runs
    camera_iterations: int
    spare_frames: int
    cache_dtype: torch.dtype  # of the aggregator's cache
    held_frames: int = 0

    def cache_arguments(self, config: GCTConfig) -> dict[str, object]:
        """Return what the aggregator's cache is sized by."""
        rows, columns = config.grid_size(self.image_size)
        return {
            "num_blocks": config.depth,
            "tokens_per_frame": config.num_special_tokens + rows * columns,
            "num_special_tokens": config.num_special_tokens,
            "num_heads": config.num_heads,
            "head_dim": config.head_dim,
            "dtype": self.cache_dtype,
            **self._frames(),
        }

    def camera_cache_arguments(self, config: GCTConfig) -> dict[str, object]:
        """Return what the camera head's cache is sized by: one token a frame, in float32."""
        return {
            "num_blocks": self.camera_iterations * config.camera_depth,
            "tokens_per_frame": 1,
            "num_special_tokens": 1,
            "num_heads": config.camera_heads,
            "head_dim": config.camera_head_dim,
            "dtype": torch.float32,
            **self._frames(),
        }

    def _frames(self) -> dict[str, int]:
        return {
            "max_num_frames": self.scale_frames + self.max_sliding_window + self.spare_frames,
            "max_total_frames": self.remembered_frames,
        }

    def cache_bytes(self, config: GCTConfig) -> int:
        """Return the bytes of both caches, exactly, without allocating anything."""
        required = FlashInferKVCacheManager.required_bytes
        return required(**self.cache_arguments(config)) + required(**self.camera_cache_arguments(config))

    def working_bytes(self, config: GCTConfig, device: torch.device) -> int:
        """Estimate what a step takes beside weights and caches, from above."""
        tokens = self.cache_arguments(config)["tokens_per_frame"]
        frame = WORKING_TENSORS * tokens * config.embed_dim * 4
        height, width = self.image_size
        head = (config.depth_features + WORKING_MAPS) * height * width * 4  # it takes one frame at a time
        recorded = frame + head + GPU_WORKING_BYTES if device.type == "cuda" else 0  # has memory of its own
        return self.scale_frames * frame + head + recorded

    @property
    def held_bytes(self) -> int:
        """Bytes of the frames that the caller holds, at most."""
        return held_bytes(self.held_frames, self.image_size)


def held_bytes(frames: int, image_size: tuple[int, int]) -> int:
    """Return the bytes that images of (height, width) take with their predictions, at most."""
    return frames * HELD_MAPS * image_size[0] * image_size[1] * 4


def resolve_sizes(
    config: GCTConfig,
    dtype: torch.dtype,
    image_size: tuple[int, int],
    *,
    scale_frames: int | None = None,
    sliding_window: int | None = None,
    remembered_frames: int | None = None,
    max_sliding_window: int | None = None,
    cache_bytes: int | None = None,
    camera_iterations: int | None = None,
    cache_dtype: torch.dtype | None = None,
    spare_frames: int = 1,
    held_frames: int = 0,
) -> StateSizes:
    """Fill in what is None, from the model's configuration or the budget, and check that it fits together.

    remembered_frames: kept frames whose special tokens and camera tokens stay visible, scale frames and window
    included; None: the range that the model was trained on. max_sliding_window: pages reserved for a window that grows
    later; None: the window. cache_bytes: a budget for both caches, which reserves the largest window that fits, though
    not beyond the trained range; that is then the window, too, unless one is given. cache_dtype: of the kept K and V
    (see FlashInferKVCacheManager); None: `dtype`, the model's. spare_frames: pages beside the window; one is enough for
    frames that are not kept. held_frames: images that the caller holds with their predictions; they belong to no
    budget, but must fit beside it.

    Raises ValueError, naming the argument, for what cannot be.
    """
    config.grid_size(image_size)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    check_cache_dtype("cache_dtype", cache_dtype)
    scale_frames = config.scale_frames if scale_frames is None else scale_frames
    by_budget = cache_bytes is not None
    window_is_free = by_budget and sliding_window is None
    if window_is_free:
        sliding_window = 1  # at least; as large as fits in the end
    elif sliding_window is None:
        sliding_window = config.sliding_window
    if by_budget and max_sliding_window is not None:
        raise ValueError("max_sliding_window and a memory budget exclude each other: the budget reserves the pages")
    if max_sliding_window is None:
        max_sliding_window = sliding_window
    if camera_iterations is None:
        camera_iterations = config.camera_iterations
    if remembered_frames is None:
        remembered_frames = max(config.trained_frames, scale_frames + max_sliding_window)
    for name, value, least in (
        ("scale_frames", scale_frames, 1),
        ("sliding_window", sliding_window, 1),
        ("max_sliding_window", max_sliding_window, sliding_window),
        ("remembered_frames", remembered_frames, scale_frames + max_sliding_window),
        ("camera_iterations", camera_iterations, 1),
        ("spare_frames", spare_frames, 0),
        ("held_frames", held_frames, 0),
    ):
        if value < least:
            why = f" (scale_frames {scale_frames} + the window)" if name == "remembered_frames" else ""
            raise ValueError(f"{name} must be at least {least}{why}, not {value}")
    sizes = StateSizes(
        image_size=tuple(image_size),
        scale_frames=scale_frames,
        sliding_window=sliding_window,
        remembered_frames=remembered_frames,
        max_sliding_window=max_sliding_window,
        camera_iterations=camera_iterations,
        spare_frames=spare_frames,
        cache_dtype=cache_dtype,
        held_frames=held_frames,
    )
    if not by_budget:
        return sizes
    largest = largest_window(sizes, config, cache_bytes)
    if scale_frames + sliding_window > min(config.trained_frames, remembered_frames):
        raise ValueError(
            f"with a memory budget scale_frames {scale_frames} + sliding_window {sliding_window} must not exceed the "
            f"{min(config.trained_frames, remembered_frames)} frames that the model was trained on and remembers"
        )
    if largest < sliding_window:
        raise ValueError(
            f"a cache of {cache_bytes // MIB} MiB is too small: a sliding_window of {sliding_window} with "
            f"{scale_frames} scale_frames and {remembered_frames} remembered_frames needs "
            f"{-(-sizes.cache_bytes(config) // MIB)} MiB"
        )
    return replace(sizes, max_sliding_window=largest, sliding_window=largest if window_is_free else sliding_window)


def largest_window(sizes: StateSizes, config: GCTConfig, cache_bytes: int) -> int:
    """Return the largest sliding window of the remembered and trained range whose caches fit; 0: none does."""
    most = min(config.trained_frames, sizes.remembered_frames) - sizes.scale_frames
    for window in range(most, 0, -1):
        if replace(sizes, sliding_window=window, max_sliding_window=window).cache_bytes(config) <= cache_bytes:
            return window
    return 0


def check_memory(sizes: StateSizes, config: GCTConfig, device: torch.device) -> None:
    """Raise InsufficientMemoryError when the caches, held frames and a step do not fit into the memory that is free."""
    free = free_bytes(device) - sizes.working_bytes(config, device) - sizes.held_bytes
    needed = sizes.cache_bytes(config)
    if needed <= free:
        return
    height, width = sizes.image_size
    fits = largest_window(sizes, config, free)
    advice = f"a sliding_window of {fits} fits" if fits else "no sliding_window fits, use smaller images"
    beside = ""
    if sizes.held_frames:  # the caller's: images with their predictions
        beside = f" beside {sizes.held_bytes // MIB} MiB for {sizes.held_frames} held frames"
        advice += "" if fits else " or hold fewer frames"
    raise InsufficientMemoryError(
        f"the caches need {needed // MIB} MiB for images of {width}x{height} with {sizes.scale_frames} scale_frames, "
        f"room for a sliding_window of {sizes.max_sliding_window} and {sizes.remembered_frames} remembered_frames, but "
        f"{max(free, 0) // MIB} MiB are free on {device}{beside}: {advice}"
    )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        # What recorded frames have reserved is theirs alone.
        reusable = sum(segment["total_size"] - segment["allocated_size"] for segment in torch.cuda.memory_snapshot()
                       if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0))
        return torch.cuda.mem_get_info(device)[0] + reusable
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(line for line in file if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


@dataclass
class GCTState:
    """What the model remembers of one sequence. A model serves any number of states."""

    cache: FlashInferKVCacheManager  # of the aggregator's global blocks
    camera_cache: FlashInferKVCacheManager  # of the camera head, one token a frame
    sizes: StateSizes  # as reserved
    scale_frames: int  # of the next sequence; this one's are the cache's
    aggregator_tables: AggregatorTables
    camera_tables: object
    depth_tables: list[PositionTable]
    frame_graph: FrameGraph | None = None  # on a GPU: what is done with a frame after the scale frames, recorded
    num_kept: int = 0  # frames kept so far: the next frame's time
    is_undecided: bool = False  # the last frame waits for `keep_last` or `rollback_last`

    @property
    def memory_bytes(self) -> int:
        """Bytes of both caches."""
        return self.cache.get_cache_stats()["bytes"] + self.camera_cache.get_cache_stats()["bytes"]

    def keep_last(self) -> None:
        """Keep the frame that was left undecided, and evict what it displaces."""
        self._decide(lambda cache, block: cache.evict_frames(block, cache.scale_frames, cache.sliding_window))

    def rollback_last(self) -> None:
        """Forget the frame that was left undecided, as if it had not been kept from the start."""
        self._decide(lambda cache, block: cache.rollback_last_frame(block))
        self.num_kept -= 1

    def _decide(self, act: Callable[[FlashInferKVCacheManager, int], None]) -> None:
        if not self.is_undecided:
            raise RuntimeError("no frame waits to be kept or rolled back")
        for cache in (self.cache, self.camera_cache):
            for block in range(cache.num_blocks):
                act(cache, block)
        self.is_undecided = False

    def check_resize(
        self, scale_frames: int | None, sliding_window: int | None, remembered_frames: int | None
    ) -> tuple[int, int, int]:
        """Return the three sizes as `resize` would set them, without changing anything.

        Raises ValueError, naming the size to raise at start, when they go beyond what is reserved.
        """
        scale_frames = self.scale_frames if scale_frames is None else scale_frames
        sliding_window = self.cache.sliding_window if sliding_window is None else sliding_window
        remembered_frames = self.cache.remembered_frames if remembered_frames is None else remembered_frames
        frames, reserved = scale_frames + sliding_window, self.sizes.scale_frames + self.sizes.max_sliding_window
        if frames > reserved:
            raise ValueError(
                f"scale_frames {scale_frames} + sliding_window {sliding_window} is beyond the {reserved} frames that "
                "memory was reserved for: raise max_sliding_window or cache_memory_mib at start"
            )
        if remembered_frames > self.sizes.remembered_frames:
            raise ValueError(
                f"remembered_frames {remembered_frames} is beyond the {self.sizes.remembered_frames} that memory was "
                "reserved for: set it at start"
            )
        if remembered_frames < frames:
            raise ValueError(
                f"remembered_frames must be at least {frames} (scale_frames {scale_frames} + the window), not "
                f"{remembered_frames}"
            )
        return scale_frames, sliding_window, remembered_frames

    def resize(
        self,
        *,
        scale_frames: int | None = None,
        sliding_window: int | None = None,
        remembered_frames: int | None = None,
    ) -> None:
        """Change the window between two frames, within what was reserved; None leaves a value as it is.

        The newest frames that fit stay, where they are. Fewer scale frames take effect at once, more from the next
        reset on. Raises the errors of `check_resize`, and changes nothing then.
        """
        if self.is_undecided:
            raise RuntimeError("the last frame must be kept or rolled back first")
        scale_frames, sliding_window, remembered_frames = self.check_resize(
            scale_frames, sliding_window, remembered_frames
        )
        self._resize_caches(
            scale_frames if self.num_kept == 0 else min(scale_frames, self.cache.scale_frames),
            sliding_window,
            remembered_frames,
        )
        self.scale_frames = scale_frames

    def _resize_caches(self, scale_frames: int, sliding_window: int, remembered_frames: int) -> None:
        for cache in (self.cache, self.camera_cache):
            cache.resize(scale_frames=scale_frames, sliding_window=sliding_window, remembered_frames=remembered_frames)

    def reset(self) -> None:
        """Forget the sequence. No memory is freed or allocated."""
        self.cache.reset()
        self.camera_cache.reset()
        self.num_kept = 0
        self.is_undecided = False
        if self.scale_frames != self.cache.scale_frames:
            self._resize_caches(self.scale_frames, self.cache.sliding_window, self.cache.remembered_frames)
