# SPDX-License-Identifier: Apache-2.0
"""What the node's parameters mean for a session of a model: its own values in place of 0."""
from __future__ import annotations

from lingbot_map_ros.gct import GCTConfig, dtype_named
from lingbot_map_ros.mapping import SessionConfig
from lingbot_map_ros.mapping.session_config import REFINE_POSES
from lingbot_map_ros.ros.parameters import Parameters


def session_config(configured: Parameters, camera_iterations: int, own: GCTConfig) -> SessionConfig:
    """Return what the node was configured with, as far as it sizes memory; `window` has the rest."""
    by_budget = configured.cache_memory_mib > 0
    return SessionConfig(
        scale_frames=configured.scale_frames or None,
        sliding_window=configured.sliding_window or None,
        remembered_frames=configured.remembered_frames or None,
        # Said even where it is the window, so that it stays when the window shrinks.
        max_sliding_window=configured.max_sliding_window or (
            None if by_budget else configured.sliding_window or own.sliding_window),
        cache_memory_mib=configured.cache_memory_mib or None,
        camera_iterations=camera_iterations or None,
        backend=configured.attention_backend,
        cache_dtype=dtype_named(configured.cache_dtype),
    )


def window(
    parameters: Parameters, configured: Parameters, max_sliding_window: int | None, own: GCTConfig
) -> dict[str, int | float | None]:
    """Return the values of all that may change within a sequence.

    configured: what memory was reserved by. max_sliding_window: of the session; with a budget for the caches it is
    None until the images' size is known, and so is the window's own value.
    """
    by_budget = configured.cache_memory_mib > 0
    refine_poses = REFINE_POSES[parameters.refine_poses]
    reserved = (configured.scale_frames or own.scale_frames) + (max_sliding_window or 0)
    return {
        "scale_frames": parameters.scale_frames or own.scale_frames,
        "sliding_window": parameters.sliding_window or (max_sliding_window if by_budget else own.sliding_window),
        "remembered_frames": parameters.remembered_frames or max(own.trained_frames, reserved),
        "keyframe_interval": parameters.keyframe_interval,
        "flow_threshold": (parameters.flow_threshold or own.flow_threshold)
        if parameters.keyframe_policy == "motion" else 0.0,
        "max_keyframe_gap": parameters.max_keyframe_gap,
        "window_size": (parameters.window_size or own.window_size) if parameters.windowed else 0,
        "overlap_keyframes": parameters.overlap_keyframes or own.overlap_keyframes,
        "init_motion": parameters.init_motion * (configured.image_width or own.image_width),
        "max_init_wait": parameters.max_init_wait,
        "refine_poses": own.refine_poses if refine_poses is None else refine_poses,
    }
