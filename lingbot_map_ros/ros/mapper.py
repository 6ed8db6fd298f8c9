# SPDX-License-Identifier: Apache-2.0
"""One camera's way from an RGB array to poses and a map: session, map and path. No publishing."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch

from lingbot_map_ros.gct import dtype_name
from lingbot_map_ros.gct.state import MIB, free_bytes
from lingbot_map_ros.mapping import FrameResult, MappingSession, MapPoints, SessionConfig
from lingbot_map_ros.mapping.alignment import Alignment
from lingbot_map_ros.mapping.calibration import NO_LENS, Lens
from lingbot_map_ros.mapping.camera_view import CameraView, view_image
from lingbot_map_ros.mapping.geometry import T_MAP_WORLD, matrix_from_quaternion, quaternion_from_matrix
from lingbot_map_ros.mapping.hand_over import HandOver
from lingbot_map_ros.mapping.map_builder import MapBuilder
from lingbot_map_ros.mapping.prediction import Figures, figures_of
from lingbot_map_ros.mapping.side_stream import SideStream
from lingbot_map_ros.mapping.tracking import Tracker, TrackingState
from lingbot_map_ros.mapping.trajectory import Trajectory
from lingbot_map_ros.mapping.voxel_map import VoxelMap
from lingbot_map_ros.ros import session_parameters
from lingbot_map_ros.ros.loaded_model import LoadedModel
from lingbot_map_ros.ros.mapped_frame import MappedFrame, Shot
from lingbot_map_ros.ros.messages import nanoseconds, twist_between
from lingbot_map_ros.ros.parameters import Parameters, size_of

RECOVERY_FRAMES = 5  # at least, from one attempt to find a lost track to the next
MAX_RECOVERIES = 3  # attempts without a usable pose in between, after which only a new sequence helps
# Of the session's configuration, what the diagnostics show.
SHOWN = ("scale_frames", "sliding_window", "max_sliding_window", "remembered_frames", "window_size",
         "overlap_keyframes", "keyframe_interval", "flow_threshold", "max_keyframe_gap", "refine_poses")


class Mapper:
    """Feeds a session, fuses its keyframes into a map and keeps its path, all of fixed size. For one thread."""

    def __init__(self, loaded: LoadedModel, parameters: Parameters) -> None:
        """Run the model once, so that the first image waits for no allocation or compilation.

        Raises the errors of the session for what cannot be or does not fit into memory.
        """
        self.model, self.device = loaded.gct, loaded.device
        self._image_width = parameters.image_width or None
        self._configured = parameters  # they say how much memory is reserved
        self.session = self._new_session(parameters)
        self.map = self._new_map(parameters)
        self._beside_model = SideStream(self.device)
        self.path = Trajectory(parameters.max_path_length)
        self.tracker = Tracker()
        self.loaded: MapPoints | None = None  # in map, on the CPU: of an earlier run
        self._start_sequence()
        self.apply(parameters)
        self._warm_up()
        self.apply(parameters)

    def prepare(self, rgb: np.ndarray, lens: Lens = NO_LENS, rotation: int = 0) -> tuple[torch.Tensor, CameraView]:
        """Turn uint8 [H, W, 3] into the model's image [3, h, w], and say how; ValueError if it cannot be."""
        return view_image(rgb, self.model.config, self._image_width, self.device, rotation, lens)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the model runs by itself once it has a frame, so that there is time to do other things."""
        return self.device.type == "cuda"

    def beside_model(self) -> AbstractContextManager[None]:
        """Let what is done within with the map and frames of earlier steps not wait for the model; see SideStream."""
        return self._beside_model.running()

    def step(
        self, image: torch.Tensor, shot: Shot, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> list[MappedFrame]:
        """Take the next image, of a time in seconds; return the frames that are ready and to be used, oldest first.

        They are in the path then, and `fuse` puts them into the map: their poses need not wait for that. Frames whose
        pose is not plausible leave no trace but in `rejected`; `tracker` says why, and whether the track is lost.
        meanwhile: see MappingSession.step; it may fuse frames of earlier steps.
        """
        self._image_size = (image.shape[1], image.shape[2])
        results = self.session.step(image, shot, seconds, _known_intrinsics(shot.view), meanwhile)
        frames = [self._place(self._calibrate(result, figures), figures)
                  for result, figures in zip(results, map(figures_of, results)) if self._judge(result, figures)]
        self._beside_model.mark()
        return frames

    def fuse(self, frames: list[MappedFrame]) -> list[MappedFrame]:
        """Put the keyframes among a step's frames into the map; return the frames with their points."""
        with self.beside_model():
            clouds = self.map.add([frame.result for frame in frames])
        depth = self.map.scene_depth
        if not self._is_metric and depth is not None and depth != self.alignment.unit:
            self.alignment = replace(self.alignment, unit=depth)
        return [replace(frame, points=points) for frame, points in zip(frames, clouds)]

    def set_scale(self, scale: float) -> None:
        """Take the metres per model unit: the alignment's from now on, and voxels are as large as they are in metres.

        ValueError for one that is not finite and above 0.
        """
        alignment = self.alignment.scaled(scale)
        with self.beside_model():
            self.map.set_scale(scale)
        self.alignment, self._is_metric = alignment, True

    def _calibrate(self, result: FrameResult, figures: Figures) -> FrameResult:
        """Put known intrinsics in place of the predicted ones, and note both focal lengths."""
        view: CameraView = result.stamp.view
        predicted = view.to_camera_intrinsics(figures.intrinsics)
        known = view.lens.intrinsics
        self.focal_lengths = (float(predicted[0, 0]), None if known is None else float(known[0, 0]))
        if known is None:
            return result
        return replace(result, intrinsics=torch.from_numpy(_known_intrinsics(view)).to(result.intrinsics))

    def map_points(self) -> MapPoints:
        """Return the map as it is given out, what was loaded included: on the CPU then, else where the map is."""
        with self.beside_model():
            points = self.alignment.points(self.map.voxels.points())
        if self.loaded is None:
            return points
        return MapPoints(*(torch.cat((values.cpu(), others)) for values, others in zip(points, self.loaded)))

    def trajectory(self) -> tuple[np.ndarray, np.ndarray]:
        """Return stamps in nanoseconds [n] and poses [n, 7] of the path as it is given out."""
        poses = self.path.poses()
        T = np.tile(np.eye(4), (len(poses), 1, 1))
        T[:, :3, 3], T[:, :3, :3] = poses[:, :3], matrix_from_quaternion(poses[:, 3:])
        T = np.array([self.alignment.pose(one) for one in T]).reshape(-1, 4, 4)
        return self.path.stamps_ns(), np.concatenate([T[:, :3, 3], quaternion_from_matrix(T[:, :3, :3])], axis=1)

    def load_map(self, xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> None:
        """Add an earlier map, in map, to what `map_points` returns. ValueError if it has more than max_map_points."""
        most = self.map.voxels.max_points
        if len(xyz) > most:
            raise ValueError(f"the map has {len(xyz)} points, but max_map_points is {most}")
        self.loaded = MapPoints(*(torch.from_numpy(values) for values in (xyz, rgb, confidence)))

    def advance(self) -> HandOver | None:
        """Start the next window if the present one is full; to be called between two images."""
        hand_over = self.session.advance()
        if hand_over is not None:
            self.last_hand_over = hand_over
        return hand_over

    @property
    def may_recover(self) -> bool:
        """Whether the track is lost and the last attempt to find it is long enough ago."""
        return self.tracker.is_lost and self._frames_since_recovery >= RECOVERY_FRAMES

    def recover(self) -> HandOver | None:
        """Start a window from the last good keyframes, because the track is lost; None: only a new sequence helps."""
        if self._recoveries >= MAX_RECOVERIES:
            return None
        hand_over = self.session.relocate()
        if hand_over is not None:
            self.last_hand_over = hand_over
            self._recoveries += 1
            self._frames_since_recovery = 0
            self.tracker.relocated()
        return hand_over

    def reset(self, parameters: Parameters) -> list[str]:
        """Start a new sequence with an empty map and path; parameters that wait for a reset take effect.

        Returns what did not take effect, and why: what it would have replaced stays, empty.
        """
        # What is old goes first, whatever fails afterwards.
        self.session.reset()
        with self.beside_model():
            self.map.reset()
        self.path.reset()
        self._start_sequence()
        problems = []
        for change in (self._renew_session, self.apply, self._renew_map, self._renew_path):
            try:
                change(parameters)
            except (ValueError, RuntimeError, MemoryError) as error:
                problems.append(" ".join(str(error).split()))
        return problems

    def apply(self, parameters: Parameters) -> dict[str, int | float]:
        """Let parameters that may change within a sequence take effect; return the window's new values, by name.

        A sliding_window that was set for smaller images is cut down to what a memory budget holds (`window_problem`).
        Raises ValueError for a window that the memory reserved does not hold.
        """
        self.map.confidence_threshold = parameters.confidence_threshold
        self.tracker.jump_factor = parameters.jump_factor
        self.tracker.lost_after = parameters.lost_after
        present = self.session.config
        window = self._window(parameters, present)
        if self._configured.cache_memory_mib and present.max_sliding_window is not None:
            window["sliding_window"] = min(window["sliding_window"], present.max_sliding_window)
        self._asked_window = parameters.sliding_window
        changed = {name: value for name, value in window.items() if value != getattr(present, name)}
        self.session.resize(**changed)
        return changed

    def check(self, parameters: Parameters, before: Parameters | None = None) -> None:
        """Raise ValueError, with the reason, for what cannot be had now or at the next reset. For any thread.

        before: the parameters in force, which are not to blame for a change of others; None: everything is checked.
        """
        session, present = self.session, before or self._configured
        old = {} if before is None else self._window(before, session.config)
        window = {name: value for name, value in self._window(parameters, session.config).items()
                  if name not in old or value != old[name]}
        session.check_resize(**window)
        if parameters.camera_iterations != self._configured.camera_iterations and (
                window or parameters.camera_iterations != present.camera_iterations):
            coming = self._new_session(parameters)
            coming.resize(**self._window(parameters, coming.config))
            coming.check_sizes(self._image_size)
        if parameters.max_map_points != present.max_map_points:
            self._check_map(parameters.max_map_points)

    @property
    def window_problem(self) -> str:
        """Why fewer frames are in the window than the parameters say; empty: they are not."""
        used = self.session.config.sliding_window
        if used is None or used >= self._asked_window:
            return ""
        budget = self._configured.cache_memory_mib
        why = f": for images of this size no more fit into the {budget} MiB of cache_memory_mib" if budget else ""
        return f"sliding_window is {used}, not the {self._asked_window} that were set{why}"

    def describe_cache(self) -> str:
        """Return the cache's page table as text."""
        return self.session.describe_pages() or "the cache is empty"

    def state_values(self) -> dict[str, object]:
        """Return the counters of cache, map and path."""
        voxels, config = self.map.voxels, self.session.config
        return {
            "frame_count": 0,  # until the first image after a new session
            **self.session.cache_stats(),
            "cache_bytes": self.session.memory_bytes,
            "shared_images_bytes": self.session.held_bytes,
            "cache_dtype": dtype_name(config.cache_dtype),
            "attention_backend": self.session.attention_backend,
            "window": self.session.window_index,
            **{name: getattr(config, name) for name in SHOWN},
            "window_problem": self.window_problem,
            "map_points": len(voxels),
            "map_points_dropped": voxels.dropped,
            "map_voxel_size": f"{self.alignment.scale * voxels.voxel_size:.4g}" if len(voxels) else "",
            "map_bytes": voxels.memory_bytes,
            "path_length": len(self.path),
            "path_dropped": self.path.dropped,
        }

    def _start_sequence(self) -> None:
        self.alignment = Alignment()  # replaced, never changed
        self._is_metric = False  # whether its scale is known
        # In pixels of the camera's image, of the newest frame: as predicted, and as it is known.
        self.focal_lengths: tuple[float, float | None] | None = None
        self.rejected = 0  # implausible poses of this sequence
        self.last_hand_over: HandOver | None = None
        self.tracker.reset()
        self._recoveries = 0  # since the last usable pose
        self._frames_since_recovery = RECOVERY_FRAMES
        self._path_length = 0.0
        self._last: tuple[int, np.ndarray] | None = None  # stamp in nanoseconds and pose of the last frame
        self._last_result = (-1, -1)  # its index and window

    def _judge(self, result: FrameResult, figures: Figures) -> bool:
        if result.hand_over is not None:  # of a window that the session started itself
            self.last_hand_over = result.hand_over
        reasons = []
        if self.session.lacked_motion and result.window == 0:
            reasons.append("the camera hardly moved between the scale frames")
        if self.last_hand_over is not None and self.last_hand_over.problem:
            reasons.append(f"the scale is that of the window before: {self.last_hand_over.problem}")
        is_usable = self.tracker.judge(figures, tuple(reasons))
        self._frames_since_recovery += 1
        if is_usable:
            self._recoveries = 0
        else:
            self.rejected += 1
            self.session.discard(result)
        return is_usable

    def _place(self, result: FrameResult, figures: Figures) -> MappedFrame:
        shot: Shot = result.stamp
        T_map_camera = self._in_map(figures.T_world_camera, shot.view)
        stamp_ns = nanoseconds(shot.header.stamp)
        twist, seconds, motion = None, 0.0, self._motion(result, shot, T_map_camera)
        if self._last is not None:
            self._path_length += float(np.linalg.norm(T_map_camera[:3, 3] - self._last[1][:3, 3]))
            if stamp_ns > self._last[0]:
                seconds = (stamp_ns - self._last[0]) / 1e9
                twist = twist_between(self._last[1], T_map_camera, seconds)
        self._last = stamp_ns, T_map_camera
        self._last_result = result.index, result.window
        self.path.append(stamp_ns, T_map_camera)
        return MappedFrame(result, shot.header, shot.view, T_map_camera, motion, twist, seconds, self._path_length,
                           figures.median_depth, self.tracker.tracking.state is TrackingState.DEGRADED)

    def _motion(self, result: FrameResult, shot: Shot, T_map_camera: np.ndarray) -> np.ndarray | None:
        """Return T_before_now [4, 4] from the last frame to this one as this one's window sees both; None: it does not.

        A window's start is joined to the one before by what both see, which corrects the camera's place: no motion.
        Refined poses go on from one another whatever the window.
        """
        if self._last is None:
            return None
        (index, window), T_map_before = self._last_result, self._last[1]
        if result.window != window and not result.continues:
            hand_over = self.last_hand_over
            if hand_over is None or hand_over.last_index != index:
                return None
            T_map_before = self._in_map(hand_over.last_T_world_camera.double().cpu().numpy(), shot.view)
        motion = np.linalg.inv(T_map_before) @ T_map_camera
        return motion if np.isfinite(motion).all() else None

    @staticmethod
    def _in_map(T_world_camera: np.ndarray, view: CameraView) -> np.ndarray:
        return T_MAP_WORLD @ T_world_camera @ view.T_upright_camera

    def _warm_up(self) -> None:
        size = size_of(self._configured.camera_size)
        image, _ = self.prepare(np.full((*size, 3), 128, np.uint8), rotation=self._configured.image_rotation)
        self._image_size = (image.shape[1], image.shape[2])  # of the newest image
        self.session.resize(init_motion=0.0)  # this image does not move
        results = []
        for _ in range(self.session.config.scale_frames + 2):
            results += self.session.step(image)
        self._beside_model.mark()
        with self.beside_model():
            self.map.add(results)
        self.map_points()
        self.session.reset()
        self.map.reset()

    def _renew_session(self, parameters: Parameters) -> None:
        if parameters.camera_iterations != self._configured.camera_iterations:
            self.session = self._new_session(parameters)  # takes memory with its first image, when the old one is gone
            self._configured = replace(self._configured, camera_iterations=parameters.camera_iterations)

    def _renew_map(self, parameters: Parameters) -> None:
        self.map.voxel_size, self.map.voxel_fraction = parameters.voxel_size, parameters.voxel_fraction
        present = self.map.voxels.max_points
        if parameters.max_map_points == present:
            return
        try:
            self._check_map(parameters.max_map_points)
            with self.beside_model():
                self.map = self._new_map(parameters)  # beside the present one, which stays if this fails
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ValueError(f"the map stays at {present} points: {error}") from error

    def _renew_path(self, parameters: Parameters) -> None:
        if parameters.max_path_length != self.path.max_length:
            self.path = Trajectory(parameters.max_path_length)

    def _check_map(self, max_points: int) -> None:
        """Raise ValueError where a map of that many points does not fit beside the present one."""
        needed, free = VoxelMap.required_bytes(max_points), free_bytes(self.device)
        if needed > free:
            raise ValueError(f"max_map_points is {max_points}: such a map needs {needed // MIB} MiB, but "
                             f"{free // MIB} MiB are free on {self.device}")

    def _new_session(self, parameters: Parameters) -> MappingSession:
        return MappingSession(self.model, session_parameters.session_config(
            self._configured, parameters.camera_iterations, self.model.config))

    def _new_map(self, parameters: Parameters) -> MapBuilder:
        return MapBuilder(parameters.max_map_points, parameters.voxel_fraction, parameters.confidence_threshold,
                          device=self.device, voxel_size=parameters.voxel_size)

    def _window(self, parameters: Parameters, present: SessionConfig) -> dict[str, int | float | None]:
        return session_parameters.window(
            parameters, self._configured, present.max_sliding_window, self.model.config)


def _known_intrinsics(view: CameraView) -> np.ndarray | None:
    """Return the camera's intrinsics [3, 3] in pixels of the model's image, if they are known."""
    known = view.lens.intrinsics
    return None if known is None else view.to_image_intrinsics(known)
