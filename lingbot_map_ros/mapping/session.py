# SPDX-License-Identifier: Apache-2.0
"""One camera's sequence through the model, window after window."""
from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from lingbot_map_ros.gct import GCT, GCTState, resolve_sizes
from lingbot_map_ros.gct.state import MIB, free_bytes, held_bytes
from lingbot_map_ros.mapping.hand_over import HandOver, Similarity, align
from lingbot_map_ros.mapping.pose_refiner import PoseRefiner
from lingbot_map_ros.mapping.prediction import Prediction
from lingbot_map_ros.mapping.scale_frames import ScaleFrames
from lingbot_map_ros.mapping.session_config import RUNNING, SessionConfig
from lingbot_map_ros.mapping.window import Window

logger = logging.getLogger(__name__)
T = TypeVar("T")
_WINDOW = ("scale_frames", "sliding_window", "remembered_frames")
MANY_ALLOCATIONS = 3  # of caches within ALLOCATIONS_PERIOD seconds, after which they are logged for debugging only
ALLOCATIONS_PERIOD = 10.0
RANGE_TOLERANCE = 1e-3  # beyond [0, 1]: resizing in floating point overshoots a little


@dataclass(frozen=True, kw_only=True)
class FrameResult(Prediction):
    """What the model says of one frame, its pose and focal lengths corrected by images with `refine_poses`.

    World: the first camera's optical frame, in model units (not metres). The model predicts every pose, the first one
    too, so the first is only approximately the identity. Tensors are on the session's device and carry no gradient.
    They may be kept but not written to: the session may need them again.
    """

    index: int  # of the frame in its sequence, from 0
    stamp: float | int | object  # as given to `step`
    image: torch.Tensor  # [3, h, w], as given to `step`, in float32
    window: int = 0  # of the sequence, from 0
    hand_over: HandOver | None = None  # how this window was joined to the one before it; of its first frame alone
    # Whether the pose goes on from that of the last frame that was not discarded, across windows too: it was refined.
    continues: bool = False
    timings: dict[str, float] = field(default_factory=dict)  # seconds by stage: "model", "refine", "hand_over"


class MappingSession:
    """Feeds images to a model and turns its outputs into poses, intrinsics and depth.

    The first `scale_frames` images of a sequence are gathered and run as one batch; from then on every image is run as
    it comes. Scale frames are keyframes, and so are those of the later ones that the configuration chooses: frames
    after them see the keyframes in the window, while other frames leave no trace in the model's caches.

    With a `window_size` the model starts anew whenever that many frames are kept: it runs the last frames, which the
    session keeps as images, once more, and the similarity between its two views of them maps all that follows into the
    world. No frame gives a result twice; only those that wait in vain for `init_motion` give none. With `refine_poses`
    poses are then moved on from frame to frame as the images tell, from window to window too (see PoseRefiner).
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
        self._config = self._asked.resolve(model)
        self._state: GCTState | None = None
        self._refiner = PoseRefiner()
        self._allocations: deque[float] = deque(maxlen=MANY_ALLOCATIONS)  # of caches, monotonic seconds
        self.reset()

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
        return self._next_index + len(self._gathered.images)

    @property
    def memory_bytes(self) -> int:
        """Bytes of both caches, constant from the first image on; 0 before."""
        return 0 if self._state is None else self._state.memory_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the images that windows share, with their predictions, at most; 0 before the first image.

        Not in `memory_bytes`, nor in a budget for the caches.
        """
        return 0 if self._state is None else held_bytes(self._config.held_frames, self._state.sizes.image_size)

    @property
    def window_index(self) -> int:
        """The window of this sequence that the next frame belongs to, from 0, unless it is full."""
        return self._window_index

    @property
    def is_window_full(self) -> bool:
        """Whether the next frame needs a new window, which takes as long as the frames that the windows share."""
        return self._is_windowed and self._window.is_full(self._config.window_size, self._config.keyframe_policy)

    @property
    def lacked_motion(self) -> bool:
        """Whether the sequence began without the motion between scale frames that was asked for."""
        return self._gathered.timed_out

    def step(
        self, image: torch.Tensor, stamp: object = None, seconds: float | None = None,
        known_intrinsics: np.ndarray | None = None, meanwhile: Callable[[], None] | None = None,
    ) -> list[FrameResult]:  # fmt: skip
        """Take one image [3, h, w] in [0, 1]: no result while scale frames gather, then one for each, then one a frame.

        seconds: the image's time, for `max_init_wait`; None: the present. known_intrinsics: [3, 3] in the image's
        pixels, for `refine_poses`; None: they are estimated. meanwhile: called after a later frame was given
        to the device and before its results are waited for, so that a GPU need not stand still; what it does there
        must not touch the session, nor wait for the stream that the session uses. Not called while scale frames gather;
        its time is counted as the model's in the result's `timings`.

        Raises TypeError for an image that is no floating-point tensor; ValueError for another shape, for values out
        of range (looked at on a CPU only: elsewhere looking would wait for the device) and for a size other than
        the sequence's. After these the session goes on as if the image had not come. After an error within the model,
        such as a lack of memory, a new sequence begins.
        """
        size = self._check(image)
        # A copy, since the caller may reuse its buffer while the image waits or the result is in use.
        image = image.detach().to(self._config.device, torch.float32, copy=True)
        self._prepare_state(size)
        if self._window.is_started:
            self.advance()
            return [self._run_next(image, (stamp, known_intrinsics), meanwhile)]
        complete = self._gathered.add(
            image, (stamp, known_intrinsics), time.monotonic() if seconds is None else seconds,
            self._config.scale_frames, self._config.init_motion, self._config.max_init_wait,
        )  # fmt: skip
        return self.flush() if complete else []

    def flush(self) -> list[FrameResult]:
        """Run the images that have been gathered so far, for a sequence that ends before its scale frames are complete.

        Should more images come after all, the sequence goes on with these as its scale frames. Nothing gathered: no
        results.
        """
        gathered, self._gathered.images = self._gathered.images, []
        if not gathered:
            return []
        first = gathered[: self._config.scale_frames]  # all, unless a resize made it fewer in between
        begin = time.perf_counter()
        predictions = self._guarded(lambda: self._window.start(torch.stack([image for image, _ in first])))
        seconds = (time.perf_counter() - begin) / len(first)
        results = [
            self._result(prediction, image, known, seconds) for prediction, (image, known) in zip(predictions, first)
        ]
        return results + [self._run_next(image, known) for image, known in gathered[len(first) :]]

    def advance(self) -> HandOver | None:
        """Start the next window if this one is full; `step` does so itself unless this was called before.

        A caller that has time between two images calls this then, so that the next image need not wait. Returns how the
        windows were joined, None where the present window goes on.
        """
        return self._start_window() if self.is_window_full else None

    def discard(self, result: FrameResult) -> None:
        """Take note that a result is implausible: no window starts from its frame, and no pose goes on from its.

        Of several results of one step, poses go on from the last one unless that one is discarded.
        """
        if result.index == self._next_index - 1:
            self._refiner.discard()
        others = (frame for frame in self._shared if frame[0] != result.index)
        self._shared = deque(others, maxlen=self._config.shared_frames)

    def relocate(self) -> HandOver | None:
        """Start a window at once, from the last frames that were not discarded, because the present one went astray.

        Returns how it was joined; None when there is no frame to start from, and the session must be reset.
        """
        if not (self._is_windowed and self._shared):
            return None
        self._refiner.lose()
        return self._start_window()

    def resize(self, **changes: int | float | None) -> None:
        """Change the window from the next frame on; None leaves a value as it is. No memory is moved or allocated.

        changes: of the fields in session_config.RUNNING. The newest frames that fit stay; fewer scale frames take
        effect at once, more at the next reset. Raises ValueError, naming what must be set when the session is made, for
        a change beyond the memory reserved or of another field.
        """
        asked, config = self._resized(changes)
        window = {name: changes[name] for name in _WINDOW if changes.get(name) is not None}
        if self._state is not None and window:
            self._state.resize(**window)
        self._asked, self._config = asked, config
        self._shared = deque(self._shared, maxlen=config.shared_frames)

    def check_resize(self, **changes: int | float | None) -> None:
        """Raise what `resize` would raise for these arguments; changes nothing and may be called from any thread."""
        self._resized(changes)

    def check_sizes(self, image_size: tuple[int, int]) -> None:
        """Raise the ValueError that images of (height, width) would meet, without allocating anything."""
        resolve_sizes(self._model.config, self._model.dtype, image_size, **self._asked.size_options)

    def reset(self) -> None:
        """Start a new sequence; memory stays as it is."""
        self._window = None if self._state is None else Window(self._model, self._state)
        self._image_size: tuple[int, int] | None = None  # of the sequence, from its first image on
        self._gathered = ScaleFrames()
        self._next_index = 0  # of the next frame to run
        self._refiner.reset()
        self._window_index = 0
        self._similarity = Similarity.identity(self._asked.device)  # maps this window's world into the first window's
        self._hand_over: HandOver | None = None  # for the next result to carry
        # The newest frames that the next window may share: index, image, prediction as mapped into the world.
        self._shared: deque[tuple[int, torch.Tensor, Prediction]] = deque(maxlen=self._config.shared_frames)

    def cache_stats(self) -> dict[str, int]:
        """Return the cache's state (see FlashInferKVCacheManager.get_cache_stats); empty before the first image."""
        return {} if self._state is None else self._state.cache.get_cache_stats()

    @property
    def attention_backend(self) -> str:
        """Name of the backend that attends over the cache; empty before the first image."""
        return "" if self._state is None else self._state.cache.backend.name

    def describe_pages(self) -> str:
        """Return the cache's page table as text; empty before the first image."""
        return "" if self._state is None else self._state.cache.describe_pages()

    def _resized(self, changes: dict[str, int | float | None]) -> tuple[SessionConfig, SessionConfig]:
        """Return the configuration after a change, as asked for and as resolved; ValueError for what cannot be."""
        changes = {name: value for name, value in changes.items() if value is not None}
        fixed = sorted(set(changes) - set(RUNNING))
        if fixed:
            raise ValueError(f"{', '.join(fixed)} can be set only when the session is made")
        asked, state = replace(self._asked, **changes), self._state
        if state is None:
            return asked, asked.resolve(self._model)
        state.check_resize(*(changes.get(name) for name in _WINDOW))
        if asked.cache_memory_mib is None:  # what was reserved stays so, for images of another size too
            asked = replace(asked, max_sliding_window=state.sizes.max_sliding_window)
        config = asked.resolve(self._model, self._config)
        more = held_bytes(config.held_frames - self._config.held_frames, state.sizes.image_size)
        if more > 0 and more > (free := free_bytes(config.device)):
            raise ValueError(
                f"overlap_keyframes {config.overlap_keyframes}: the {config.held_frames} images that windows share "
                f"then take {more // MIB} MiB more, but {free // MIB} MiB are free on {config.device}"
            )
        return asked, config

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
            self._state = self._window = None  # freed before the new one is allocated
            now = time.monotonic()
            # A camera whose images change their size time and again would fill the log.
            many = len(self._allocations) == MANY_ALLOCATIONS and now - self._allocations[0] < ALLOCATIONS_PERIOD
            self._allocations.append(now)
            self._give_up_window_beyond_budget(size, logging.DEBUG if many else logging.WARNING)
            self._state = self._model.new_state(
                size, backend=self._asked.backend, log_level=logging.DEBUG if many else logging.INFO,
                **self._asked.size_options, held_frames=self._config.held_frames,
            )  # fmt: skip
            self._window = Window(self._model, self._state)
            self._config = self._asked.resolve(self._model, self._state.sizes)
        self._image_size = size

    def _give_up_window_beyond_budget(self, size: tuple[int, int], log_level: int) -> None:
        """Take what fits in place of a window that was set for smaller images and that these leave no room for."""
        if self._asked.cache_memory_mib is None or self._asked.sliding_window is None:
            return
        try:
            self.check_sizes(size)
        except ValueError as error:
            self._asked = replace(self._asked, sliding_window=None)
            fits = resolve_sizes(self._model.config, self._model.dtype, size, **self._asked.size_options)
            logger.log(
                log_level, "%s: the largest window that fits is taken instead, %d", error, fits.sliding_window
            )

    @property
    def _is_windowed(self) -> bool:
        return self._config.window_size > 0 and self._window is not None and self._window.is_started

    def _guarded(self, run: Callable[[], T]) -> T:
        """Run the model; after an error, which may leave some blocks with a frame and others without, begin anew."""
        try:
            with torch.no_grad():
                return run()
        except BaseException:
            self.reset()
            raise

    def _start_window(self) -> HandOver:
        begin = time.perf_counter()
        shared, config = list(self._shared), self._config
        self._window = Window(self._model, self._state)

        def rerun() -> tuple[Prediction, Similarity, float, float, str]:
            images = [image for _, image, _ in shared]
            predictions = self._window.start(torch.stack(images[: config.scale_frames]))
            predictions += [self._window.step(image, config.keyframe_policy) for image in images[config.scale_frames :]]
            return predictions[-1], *align([mapped for *_, mapped in shared], predictions, self._similarity)

        last, self._similarity, *found = self._guarded(rerun)
        self._window_index += 1
        self._refiner.start_window()
        self._hand_over = HandOver(
            self._next_index, len(shared), self._similarity.scale, *found, seconds=time.perf_counter() - begin,
            last_index=shared[-1][0], last_T_world_camera=self._similarity.map(last).T_world_camera,
        )  # fmt: skip
        return self._hand_over

    def _run_next(
        self, image: torch.Tensor, known: tuple[object, np.ndarray | None], meanwhile: Callable[[], None] | None = None
    ) -> FrameResult:
        begin = time.perf_counter()
        prediction = self._guarded(lambda: self._window.step(image, self._config.keyframe_policy, meanwhile))
        return self._result(prediction, image, known, time.perf_counter() - begin)

    def _result(
        self, prediction: Prediction, image: torch.Tensor, known: tuple[object, np.ndarray | None], seconds: float
    ) -> FrameResult:
        """Map a prediction into the world, correct its pose, remember it for the next window, and pass it on.

        known: the image's stamp and intrinsics. seconds: on CUDA the time to submit the work, since waiting for its end
        would hold up the caller; only correcting the pose waits.
        """
        stamp, known_intrinsics = known
        if self._window_index > 0:
            prediction = self._similarity.map(prediction)
        begin, continues = time.perf_counter(), False
        if self._config.refine_poses:
            prediction, continues = self._refiner.refine(image, prediction, known_intrinsics)
        elif self._refiner.is_correcting:  # it was switched off: to the end of the window
            prediction, continues = self._refiner.carry(prediction)
        refine_seconds = time.perf_counter() - begin
        if self._config.window_size > 0 and (prediction.is_keyframe or self._config.flow_threshold == 0):
            self._shared.append((self._next_index, image, prediction))
        hand_over, self._hand_over = self._hand_over, None
        result = FrameResult(
            index=self._next_index,
            stamp=stamp,
            image=image,
            window=self._window_index,
            hand_over=hand_over,
            continues=continues,
            timings={"model": seconds, "refine": refine_seconds,
                     "hand_over": 0.0 if hand_over is None else hand_over.seconds},
            **vars(prediction),
        )
        self._next_index += 1
        return result
