# SPDX-License-Identifier: Apache-2.0
"""How a session chooses frames and what it remembers."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lingbot_map_ros.cache import check_cache_dtype
from lingbot_map_ros.gct import GCT, StateSizes, resolve_sizes
from lingbot_map_ros.mapping.keyframes import EveryNthFrame, ImageMotion, KeyframePolicy

SIZES = ("scale_frames", "sliding_window", "remembered_frames", "max_sliding_window")  # what a state reserves
REFINE_POSES = {"auto": None, "always": True, "never": False}  # words for `refine_poses`; None: the model's own
RUNNING = (  # what may change while a sequence runs
    "scale_frames", "sliding_window", "remembered_frames", "keyframe_interval", "flow_threshold", "max_keyframe_gap",
    "window_size", "overlap_keyframes", "init_motion", "max_init_wait", "refine_poses",
)  # fmt: skip


@dataclass(frozen=True)
class SessionConfig:
    """How a session chooses frames and what it remembers. None means the model's own value."""

    scale_frames: int | None = None
    sliding_window: int | None = None
    keyframe_interval: int = 1  # every n-th frame after the scale frames is kept
    # Pixels of mean image motion that make a keyframe, instead of the interval; 0: off.
    flow_threshold: float | None = 0.0
    max_keyframe_gap: int = 0  # with flow_threshold: most frames from one keyframe to the next; 0: any
    window_size: int | None = 0  # kept frames after which the model starts anew, joined to what it saw; 0: never
    overlap_keyframes: int | None = None  # keyframes that two windows share
    init_motion: float = 0.0  # pixels of median image motion between scale frames; 0: take every image
    max_init_wait: float = 0.0  # seconds to wait for that motion; 0: for ever
    refine_poses: bool | None = False  # correct each pose by how the image has moved (see PoseRefiner)
    remembered_frames: int | None = None  # kept frames whose special tokens are remembered
    max_sliding_window: int | None = None  # memory is reserved for a window that may grow to this; None: the window
    cache_memory_mib: int | None = None  # budget of the caches instead: reserves the largest window that fits
    camera_iterations: int | None = None  # refinement passes of a pose
    backend: str = "auto"  # of attention over the cache (see cache.backends)
    device: torch.device | str | None = None  # None: where the model is
    dtype: torch.dtype | None = None  # None: the model's
    cache_dtype: torch.dtype | None = None  # of the kept K and V; None: the model's
    spare_frames: int = 1  # pages of the cache beside the window; one is enough

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for a value that no model could use."""
        for name, least, optional in (
            ("scale_frames", 1, True),
            ("sliding_window", 1, True),
            ("keyframe_interval", 1, False),
            ("max_keyframe_gap", 0, False),
            ("window_size", 0, True),
            ("overlap_keyframes", 1, True),
            ("remembered_frames", 1, True),
            ("max_sliding_window", 1, True),
            ("cache_memory_mib", 1, True),
            ("camera_iterations", 1, True),
            ("spare_frames", 1, False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        check_cache_dtype("cache_dtype", self.cache_dtype, optional=True)
        if self.refine_poses not in (True, False, None):
            raise ValueError(f"refine_poses must be True, False or None, not {self.refine_poses!r}")
        for name in ("flow_threshold", "init_motion", "max_init_wait"):
            value = getattr(self, name)
            if value is None and name == "flow_threshold":
                continue
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")

    @property
    def shared_frames(self) -> int:
        """Frames that two windows share. By interval they are all of the last ones, by motion the last keyframes."""
        interval = 1 if self.flow_threshold > 0 else self.keyframe_interval
        return max(self.scale_frames, self.overlap_keyframes * interval)

    @property
    def held_frames(self) -> int:
        """Images that the session holds for the next window."""
        return self.shared_frames if self.window_size > 0 else 0

    @property
    def size_options(self) -> dict[str, int | torch.dtype | None]:
        """What sizes a state, as `gct.resolve_sizes` takes it."""
        return {
            **{name: getattr(self, name) for name in SIZES},
            "cache_bytes": None if self.cache_memory_mib is None else self.cache_memory_mib * 2**20,
            "camera_iterations": self.camera_iterations,
            "cache_dtype": self.cache_dtype,
            "spare_frames": self.spare_frames,
        }

    def resolve(self, model: GCT, sizes: SessionConfig | StateSizes | None = None) -> SessionConfig:
        """Return the configuration with the model's own values in place of None.

        sizes: of a state that is there, in place of the model's. With a memory budget and no state the window stays
        None. Raises ValueError, naming the field, for what cannot be.
        """
        own = model.config
        if sizes is None and self.cache_memory_mib is None:
            sizes = resolve_sizes(own, model.dtype, own.smallest_image, **self.size_options)
        found = {name: getattr(self, name) or getattr(sizes, name, None) for name in SIZES}
        found["scale_frames"] = found["scale_frames"] or own.scale_frames
        for name in ("window_size", "overlap_keyframes", "flow_threshold", "refine_poses", "camera_iterations"):
            value = getattr(self, name)
            found[name] = getattr(own, name) if value is None else value
        resolved = replace(self, **found, cache_dtype=model.dtype if self.cache_dtype is None else self.cache_dtype)
        resolved._check_windows()
        return resolved

    def _check_windows(self) -> None:
        """Raise ValueError when a window that has just taken over what is shared would be full."""
        interval = 1 if self.flow_threshold > 0 else self.keyframe_interval
        kept = self.scale_frames + -(-(self.shared_frames - self.scale_frames) // interval)
        if 0 < self.window_size <= kept:
            raise ValueError(
                f"window_size must be 0 or more than the {kept} keyframes that a window takes over (scale_frames "
                f"{self.scale_frames}, overlap_keyframes {self.overlap_keyframes}), not {self.window_size}"
            )

    @property
    def keyframe_policy(self) -> KeyframePolicy:
        """How keyframes are chosen after the scale frames."""
        if self.flow_threshold > 0:
            return ImageMotion(self.flow_threshold, self.max_keyframe_gap)
        return EveryNthFrame(self.keyframe_interval)
