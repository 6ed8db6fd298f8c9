# SPDX-License-Identifier: Apache-2.0
"""One camera's sequence through the model."""
from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from lingbot_map_ros.gct import GCT, GCTState, StateSizes, resolve_sizes
from lingbot_map_ros.gct.pose import decode_pose_encoding

RANGE_TOLERANCE = 1e-3  # beyond [0, 1]: resizing in floating point overshoots a little


@dataclass(frozen=True)
class SessionConfig:
    """The window of a session. None means the model's own value."""

    scale_frames: int | None = None
    sliding_window: int | None = None
    keyframe_interval: int = 1  # every n-th frame after the scale frames is kept
    remembered_frames: int | None = None  # kept frames whose special tokens are remembered
    max_sliding_window: int | None = None  # memory is reserved for a window that may grow to this; None: the window
    cache_memory_mib: int | None = None  # budget of the caches instead: reserves the largest window that fits
    camera_iterations: int = 4
    backend: str = "auto"  # of attention over the cache (see cache.backends)
    device: torch.device | str | None = None  # None: where the model is
    dtype: torch.dtype | None = None  # None: the model's
    spare_frames: int = 1  # pages of the cache beside the window; one is enough

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for a value that no model could use."""
        for name, least in (
            ("scale_frames", 1),
            ("sliding_window", 1),
            ("keyframe_interval", 1),
            ("remembered_frames", 1),
            ("max_sliding_window", 1),
            ("cache_memory_mib", 1),
            ("camera_iterations", 1),
            ("spare_frames", 1),
        ):
            value = getattr(self, name)
            if value is None and name not in ("keyframe_interval", "camera_iterations", "spare_frames"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


@dataclass(frozen=True)
class FrameResult:
    """What the model says of one frame. World: the first camera's optical frame, in model units (not metres).

    The model predicts every pose, the first one too, so the first is only approximately the identity. Tensors are on
    the session's device, carry no gradient and are the receiver's to keep.
    """

    index: int  # of the frame in its sequence, from 0
    stamp: float | int | object  # as given to `step`
    is_keyframe: bool
    pose_encoding: torch.Tensor  # [9]
    T_world_camera: torch.Tensor  # [4, 4], camera points into world
    intrinsics: torch.Tensor  # [3, 3], pixels of the model's image
    depth: torch.Tensor  # [h, w], along the optical axis
    confidence: torch.Tensor  # [h, w], 1 or more
    image: torch.Tensor  # [3, h, w], as given to `step`, in float32
    timings: dict[str, float] = field(default_factory=dict)  # seconds by stage: "model"


class MappingSession:
    """Feeds images to a model and turns its outputs into poses, intrinsics and depth.

    The first `scale_frames` images of a sequence are gathered and run as one batch; from then on every image is run as
    it comes. Scale frames are keyframes, and so is every `keyframe_interval`-th frame from the first one after them:
    later frames see the keyframes in the window, while other frames leave no trace in the model's caches.
    """

    def __init__(self, model: GCT, config: SessionConfig = SessionConfig()) -> None:
        """Prepare a session; caches are allocated when the first image tells their size.

        A device or dtype in the configuration is applied to the model itself, so sessions that share a model must
        agree on them. Raises ValueError for a window that the model does not take.
        """
        if config.device is not None:
            model.to(config.device)
        if config.dtype is not None and config.dtype != model.dtype:
            model.set_dtype(config.dtype)
        self._model = model
        self._asked = replace(config, device=model.device, dtype=model.dtype)
        self._config = replace(self._asked, scale_frames=config.scale_frames or model.config.scale_frames)
        if config.cache_memory_mib is None:  # a budget gives a window only once the images' size is known
            self._adopt(self._sizes(self._asked, model.config.smallest_image))
        self._state: GCTState | None = None
        self._image_size: tuple[int, int] | None = None  # of the sequence, from its first image on
        self._gathered: list[tuple[torch.Tensor, object]] = []  # scale frames that wait: image, stamp
        self._num_scale_frames = 0  # that the sequence began with; fewer than configured after a flush
        self._next_index = 0  # of the next frame to run

    @property
    def config(self) -> SessionConfig:
        """The configuration with the model's own values in place of None.

        With a memory budget the window stays None until the first image tells its size.
        """
        return self._config

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the sequence's images; None before the first."""
        return self._image_size

    @property
    def frame_count(self) -> int:
        """Frames taken in this sequence, gathered ones included."""
        return self._next_index + len(self._gathered)

    @property
    def memory_bytes(self) -> int:
        """Bytes of both caches, constant from the first image on; 0 before."""
        return 0 if self._state is None else self._state.memory_bytes

    def step(self, image: torch.Tensor, stamp: object = None) -> list[FrameResult]:
        """Take one image [3, h, w] in [0, 1]: no result while scale frames gather, then one for each, then one a frame.

        Raises TypeError for an image that is no floating-point tensor; ValueError for another shape, for values out
        of range (looked at on a CPU only: elsewhere looking would wait for the device) and for a size other than
        the sequence's. After these the session goes on as if the image had not come. After an error within the model,
        such as a lack of memory, a new sequence begins.
        """
        size = self._check(image)
        # A copy, since the caller may reuse its buffer while the image waits or the result is in use.
        image = image.detach().to(self._config.device, torch.float32, copy=True)
        self._prepare_state(size)
        if self._next_index > 0:
            return self._run([(image, stamp)])
        self._gathered.append((image, stamp))
        return self.flush() if len(self._gathered) >= self._config.scale_frames else []

    def flush(self) -> list[FrameResult]:
        """Run the images that have been gathered so far, for a sequence that ends before its scale frames are complete.

        Should more images come after all, the sequence goes on with these as its scale frames. Nothing gathered: no
        results.
        """
        gathered, self._gathered = self._gathered, []
        if not gathered:
            return []
        scale_frames = gathered[: self._config.scale_frames]  # all, unless a resize made it fewer in between
        self._num_scale_frames = len(scale_frames)
        results = self._run(scale_frames)
        for frame in gathered[self._num_scale_frames :]:
            results += self._run([frame])
        return results

    def resize(
        self,
        *,
        scale_frames: int | None = None,
        sliding_window: int | None = None,
        remembered_frames: int | None = None,
        keyframe_interval: int | None = None,
    ) -> None:
        """Change the window from the next frame on; None leaves a value as it is. No memory is moved or allocated.

        The newest frames that fit stay; fewer scale frames take effect at once, more at the next reset. Raises
        ValueError, naming what must be set when the session is made, for a change beyond the memory reserved.
        """
        changes = {
            "scale_frames": scale_frames,
            "sliding_window": sliding_window,
            "remembered_frames": remembered_frames,
            "keyframe_interval": keyframe_interval,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        asked, config = replace(self._asked, **changes), replace(self._config, **changes)
        window = {name: value for name, value in changes.items() if name != "keyframe_interval"}
        if self._state is not None:
            self._state.resize(**window)
        elif asked.cache_memory_mib is None:
            self._sizes(asked, self._model.config.smallest_image)  # raises for what cannot be
        self._asked, self._config = asked, config

    def reset(self) -> None:
        """Start a new sequence; memory stays as it is."""
        if self._state is not None:
            self._state.reset()
        self._image_size = None
        self._gathered = []
        self._num_scale_frames = 0
        self._next_index = 0

    def cache_stats(self) -> dict[str, int]:
        """Return the cache's state (see FlashInferKVCacheManager.get_cache_stats); empty before the first image."""
        return {} if self._state is None else self._state.cache.get_cache_stats()

    def _check(self, image: torch.Tensor) -> tuple[int, int]:
        """Return the (height, width) of an image that may join the sequence."""
        if not isinstance(image, torch.Tensor) or not image.is_floating_point():
            kind = image.dtype if isinstance(image, torch.Tensor) else type(image).__name__
            raise TypeError(f"image must be a floating-point tensor with values in [0, 1], not {kind}")
        if image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(f"image must have the shape [3, height, width], not {list(image.shape)}")
        size = (image.shape[1], image.shape[2])
        if self._image_size is None:
            self._model.config.grid_size(size)  # raises for a size that the model does not take
        elif size != self._image_size:
            raise ValueError(
                f"image is {size[1]}x{size[0]} pixels, but the sequence's are "
                f"{self._image_size[1]}x{self._image_size[0]}: reset the session to change the size"
            )
        if image.device.type == "cpu":
            low, high = (float(bound) for bound in image.aminmax())
            if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):  # not: so that NaN is refused too
                raise ValueError(f"image values must lie in [0, 1], not from {low:g} to {high:g}")
        return size

    def _prepare_state(self, size: tuple[int, int]) -> None:
        """Allocate the caches for images of a size, unless the present ones fit."""
        if self._state is None or self._state.sizes.image_size != size:
            self._state = None  # freed before the new one is allocated
            self._state = self._model.new_state(size, backend=self._asked.backend, **_size_options(self._asked))
            self._adopt(self._state.sizes)
        self._image_size = size

    def _sizes(self, config: SessionConfig, image_size: tuple[int, int]) -> StateSizes:
        return resolve_sizes(self._model.config, self._model.dtype, image_size, **_size_options(config))

    def _adopt(self, sizes: StateSizes) -> None:
        self._config = replace(
            self._asked,
            scale_frames=sizes.scale_frames,
            sliding_window=sizes.sliding_window,
            remembered_frames=sizes.remembered_frames,
            max_sliding_window=sizes.max_sliding_window,
        )

    def _is_keyframe(self, index: int) -> bool:
        return index < self._num_scale_frames or (index - self._num_scale_frames) % self._config.keyframe_interval == 0

    @torch.no_grad()
    def _run(self, frames: list[tuple[torch.Tensor, object]]) -> list[FrameResult]:
        """Run the model on frames: the scale frames, or one later frame."""
        first = self._next_index
        start = time.perf_counter()
        try:
            output = self._model.step(
                torch.stack([image for image, _ in frames]), self._state, keep=self._is_keyframe(first)
            )
        except BaseException:
            self.reset()  # some blocks may have stored the frame and others not
            raise
        # On CUDA this is the time to submit the work: waiting for its end would hold up the caller.
        seconds = (time.perf_counter() - start) / len(frames)
        self._next_index += len(frames)
        T_world_camera, intrinsics = decode_pose_encoding(output.pose_encoding, self._image_size)
        # Copies, so that keeping one result does not keep its whole batch.
        return [
            FrameResult(
                index=first + i,
                stamp=stamp,
                is_keyframe=self._is_keyframe(first + i),
                pose_encoding=output.pose_encoding[i].clone(),
                T_world_camera=T_world_camera[i].clone(),
                intrinsics=intrinsics[i].clone(),
                depth=output.depth[i].clone(),
                confidence=output.confidence[i].clone(),
                image=image,
                timings={"model": seconds},
            )
            for i, (image, stamp) in enumerate(frames)
        ]


def _size_options(config: SessionConfig) -> dict[str, int | None]:
    """Return what sizes a state, as `resolve_sizes` takes it."""
    return {
        "scale_frames": config.scale_frames,
        "sliding_window": config.sliding_window,
        "remembered_frames": config.remembered_frames,
        "max_sliding_window": config.max_sliding_window,
        "cache_bytes": None if config.cache_memory_mib is None else config.cache_memory_mib * 2**20,
        "camera_iterations": config.camera_iterations,
        "spare_frames": config.spare_frames,
    }
