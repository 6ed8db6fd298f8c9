# SPDX-License-Identifier: Apache-2.0
"""One camera's way from an RGB array to poses and a map: model, session, map and path. No publishing."""
from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from std_msgs.msg import Header

from lingbot_map_ros.gct import PRESETS, build_model
from lingbot_map_ros.gct.image import prepare_image
from lingbot_map_ros.mapping import FrameResult, MappingSession, SessionConfig
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD
from lingbot_map_ros.mapping.map_builder import MapBuilder
from lingbot_map_ros.mapping.trajectory import Trajectory
from lingbot_map_ros.ros.messages import nanoseconds, twist_between
from lingbot_map_ros.ros.parameters import Parameters

MAX_DISTANCE = 1e5  # of a pose from the origin; scenes of the model are a few units deep, so more is a lost track


@dataclass(frozen=True)
class MappedFrame:
    """A frame with a plausible pose."""

    result: FrameResult
    header: Header  # of its image
    T_map_camera: np.ndarray  # [4, 4] float64, camera points into map
    twist: tuple[np.ndarray, np.ndarray] | None  # linear, angular in the camera's axes; None: not known


class Mapper:
    """Feeds a session, fuses its keyframes into a map and keeps its path, all of fixed size. For one thread."""

    def __init__(self, parameters: Parameters) -> None:
        """Load the model and run it once, so that the first image waits for no allocation or compilation.

        Raises the errors of `build_model` and of the session for what cannot be loaded or does not fit into memory.
        """
        if parameters.preset not in PRESETS:
            raise ValueError(f"preset is {parameters.preset!r}: expected one of {', '.join(PRESETS)}")
        if parameters.preset == "lingbot_map" and not parameters.checkpoint:
            raise ValueError("preset lingbot_map has no weights of its own: set the parameter checkpoint to its file")
        self.device = _device(parameters.device)
        self.model = build_model(
            parameters.preset,
            checkpoint=parameters.checkpoint or None,
            device=self.device,
            dtype=None if parameters.dtype == "auto" else getattr(torch, parameters.dtype),
        )
        self._checkpoint = parameters.checkpoint or "the model's own"
        self._image_width = parameters.image_width or None
        self._session_config = _session_config(parameters)
        self.session = MappingSession(self.model, self._session_config)
        self.map = MapBuilder(parameters.max_map_points, parameters.voxel_size, parameters.confidence_threshold,
                              device=self.device)
        self.path = Trajectory(parameters.max_path_length)
        self._start_sequence()
        self._warm_up()

    def prepare(self, rgb: np.ndarray) -> torch.Tensor:
        """Turn uint8 [H, W, 3] into the model's image [3, h, w]; ValueError if it cannot be."""
        return prepare_image(rgb, self.model.config, self._image_width, self.device)[0]

    def step(self, image: torch.Tensor, header: Header) -> list[MappedFrame]:
        """Take the next image; return the frames that are ready, oldest first, and fuse them into map and path.

        Frames whose pose is not plausible leave no trace but in `rejected`.
        """
        frames = [self._place(result) for result in self.session.step(image, header)]
        frames = [frame for frame in frames if frame is not None]
        self.map.add([frame.result for frame in frames])
        return frames

    def reset(self, parameters: Parameters) -> None:
        """Start a new sequence with an empty map and path; parameters that wait for a reset take effect."""
        config = _session_config(parameters)
        if config == self._session_config:
            self.session.reset()
        else:
            self.session = None  # gives its memory back before the new one takes its own
            self.session = MappingSession(self.model, config)
            self._session_config = config
        if parameters.max_map_points == self.map.voxels.max_points:
            self.map.voxel_size = parameters.voxel_size
            self.map.reset()
        else:
            self.map = None
            self.map = MapBuilder(parameters.max_map_points, parameters.voxel_size, parameters.confidence_threshold,
                                  device=self.device)
        self.path = Trajectory(parameters.max_path_length)
        self._start_sequence()

    def check(self, parameters: Parameters) -> None:
        """Raise ValueError, with the reason, for a window that the model cannot have."""
        MappingSession(self.model, _session_config(parameters))  # allocates nothing

    def state_values(self) -> dict[str, int]:
        """Return the counters of cache, map and path."""
        voxels, config = self.map.voxels, self.session.config
        return {
            "frame_count": 0,  # until the first image after a change of the window
            **self.session.cache_stats(),
            "cache_bytes": self.session.memory_bytes,
            "scale_frames": config.scale_frames,
            "sliding_window": config.sliding_window,
            "keyframe_interval": config.keyframe_interval,
            "remembered_frames": config.remembered_frames,
            "map_points": len(voxels),
            "map_points_dropped": voxels.dropped,
            "map_bytes": voxels.memory_bytes,
            "path_length": len(self.path),
            "path_dropped": self.path.dropped,
        }

    def model_values(self) -> dict[str, object]:
        """Return what describes the model and the memory that it takes."""
        return {
            "model": self.model.config.name,
            "checkpoint": self._checkpoint,
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "trained_frames": self.model.config.trained_frames,
            "device_memory_bytes": self.device_memory(),
        }

    def device_name(self) -> str:
        """Return the name of the hardware that the model runs on."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def device_memory(self) -> int:
        """Return the bytes that torch holds on the GPU; on a CPU the resident memory of this process."""
        if self.device.type == "cuda":
            return torch.cuda.memory_reserved(self.device)
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _start_sequence(self) -> None:
        self.rejected = 0  # implausible poses of this sequence
        self._last: tuple[int, np.ndarray] | None = None  # stamp in nanoseconds and pose of the last frame

    def _place(self, result: FrameResult) -> MappedFrame | None:
        T_map_camera = T_MAP_WORLD @ result.T_world_camera.double().cpu().numpy()
        if not _is_plausible(T_map_camera):
            self.rejected += 1
            return None
        stamp_ns = nanoseconds(result.stamp.stamp)
        twist = None
        if self._last is not None and stamp_ns > self._last[0]:
            twist = twist_between(self._last[1], T_map_camera, (stamp_ns - self._last[0]) / 1e9)
        self._last = stamp_ns, T_map_camera
        self.path.append(stamp_ns, T_map_camera)
        return MappedFrame(result, result.stamp, T_map_camera, twist)

    def _warm_up(self) -> None:
        image = self.prepare(np.full((480, 640, 3), 128, np.uint8))
        for _ in range(self.session.config.scale_frames + 1):
            self.session.step(image)
        self.session.reset()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}: torch {torch.__version__} sees no CUDA GPU here")
    return device


def _session_config(parameters: Parameters) -> SessionConfig:
    return SessionConfig(
        scale_frames=parameters.scale_frames or None,
        sliding_window=parameters.sliding_window or None,
        keyframe_interval=parameters.keyframe_interval,
        remembered_frames=parameters.remembered_frames or None,
        camera_iterations=parameters.camera_iterations,
    )


def _is_plausible(T: np.ndarray) -> bool:
    return bool(np.isfinite(T).all() and np.abs(T[:3, 3]).max() < MAX_DISTANCE
                and abs(np.linalg.det(T[:3, :3]) - 1) < 0.01)
