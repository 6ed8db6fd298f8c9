# SPDX-License-Identifier: Apache-2.0
"""An image's way through the node: message -> decode -> prepare -> step -> publish, and what is done between images."""
from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from lingbot_map_ros.mapping.alignment import T_BODY_OPTICAL
from lingbot_map_ros.mapping.camera_view import CameraView
from lingbot_map_ros.mapping.hand_over import HandOver
from lingbot_map_ros.mapping.image_message import ImageError, compressed_to_rgb, to_rgb
from lingbot_map_ros.mapping.transforms import TransformError
from lingbot_map_ros.ros import diagnostics
from lingbot_map_ros.ros.camera_info import CameraInfos
from lingbot_map_ros.ros.diagnostics import Monitor, TrackingReport
from lingbot_map_ros.ros.logs import one_line
from lingbot_map_ros.ros.mapper import MappedFrame, Mapper, Shot
from lingbot_map_ros.ros.messages import nanoseconds
from lingbot_map_ros.ros.metric_scale import MetricScale
from lingbot_map_ros.ros.outputs import Outputs
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.stamps import Order, RateLimit, Stamps
from lingbot_map_ros.ros.transform_listener import TransformListener
from lingbot_map_ros.ros.worker import Mailbox

WARN_PERIOD = 5.0  # seconds between two warnings of one kind
MANY_SEQUENCES = 5  # within SEQUENCES_PERIOD seconds get one warning instead of a line each
SEQUENCES_PERIOD = 10.0
# Seconds after an image in which the next one is expected: what may wait is done then, while the model has that.
NEXT_IMAGE_WITHIN = 0.05


class Arrival(NamedTuple):
    """An image that waits to be processed."""

    message: Image | CompressedImage
    time: float  # of its arrival, monotonic seconds
    seconds: float  # the image's own time
    starts: int  # how often the camera had started anew by then


class Pipeline:
    """Leads images to the mapper and results to the publishers. `receive` is the executor's, all else the worker's."""

    def __init__(
        self, scope: Scope, mapper: Mapper, outputs: Outputs, reports: Reports, monitor: Monitor,
        camera_infos: CameraInfos, transforms: TransformListener, scale: MetricScale, mailbox: Mailbox[Arrival],
    ) -> None:
        self._view: CameraView | None = None  # of this sequence's images
        self.is_active = False  # whether the node listens and publishes
        self.is_paused = False  # whether images are let pass, by the service
        self._header: Header | None = None  # of the newest frame
        self._is_level = False  # whether the map of this sequence has been turned as the camera's mounting says
        self._pose_to_come: np.ndarray | None = None  # where the first frame's camera is to be
        self._to_map: list[MappedFrame] = []  # frames whose poses were published, and nothing else yet
        self._image_end = -math.inf  # when the last image's poses had been published, monotonic seconds
        self._scope = scope
        self._mapper = mapper
        self._outputs = outputs
        self._reports = reports
        self._monitor = monitor
        self._camera_infos = camera_infos
        self._transforms = transforms
        self._scale = scale
        self._mailbox = mailbox
        self._image_topic = scope.image_topic
        self._stamps = Stamps()
        self._rate_limit = RateLimit()
        self._encoding = ""  # of this sequence's images
        self._starts = 0  # of the camera, as images arrive
        self._mapped_starts = 0  # likewise, as they are processed
        self._sequence_reason = "the first image came"
        self._sequence_times: deque[float] = deque(maxlen=MANY_SEQUENCES)  # of their starts, monotonic seconds
        self._note_state()
        self.report_tracking()

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of this sequence's images; None before the first."""
        view = self._view
        return None if view is None else view.camera_size

    # On the executor

    def receive(self, message: Image | CompressedImage) -> None:
        """Leave an image in the mailbox, unless it has come before, is late, or is one too many for `max_rate`."""
        now = time.monotonic()
        order = self._stamps.judge(nanoseconds(message.header.stamp), now)
        if order is Order.LATE:
            self._monitor.image_dropped("late")
            return
        if order is Order.DUPLICATE:
            self._monitor.image_dropped("duplicates")
            if self._monitor.repeats >= diagnostics.MANY_REPEATS:
                text = diagnostics.repeats_text(self._monitor.repeats)
                self._scope.logger.warning(f"{self._image_topic}: {text}", throttle_duration_sec=30.0)
            return
        if order is Order.BACK:
            self._monitor.count("stamps_back")
            self._starts += 1
            self._rate_limit = RateLimit()
        elif order is Order.GAP:
            self._monitor.count("gaps")
        if self.is_paused or not self._rate_limit.takes(self._stamps.seconds, self._scope.parameters.max_rate):
            self._monitor.image_skipped()
            return
        self._monitor.image_received()
        if order is Order.UNSTAMPED:
            message.header.stamp = self._scope.node.get_clock().now().to_msg()
            carried = ("outputs carry the time of arrival" if nanoseconds(message.header.stamp)
                       else "and simulated time is 0, because nothing comes on /clock: so are the outputs' stamps")
            self._scope.logger.warning(
                f"the images' header.stamp on {self._image_topic} is 0: {carried}; let the camera's driver stamp its "
                "images", throttle_duration_sec=60.0)
        self._mailbox.put(Arrival(message, now, self._stamps.seconds, self._starts))

    # On the worker

    def process(self, arrival: Arrival) -> None:
        """Map one image and publish what comes of it."""
        self._guarded(lambda: self._process(arrival))

    def idle(self) -> None:
        """Publish what has its own pace."""
        self._guarded(self._idle)

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run, and start a new sequence after whatever the model or the GPU threw: the next one may go well."""
        try:
            run()
        except Exception as error:
            logger = self._scope.logger
            whose = f"{self._scope.camera}: " if self._scope.camera else ""  # the model is all cameras'
            self._monitor.image_failed(f"{whose}mapping failed: {one_line(error)}", in_model=True)
            logger.error(f"mapping failed, a new sequence starts: {one_line(error)}", throttle_duration_sec=WARN_PERIOD)
            logger.debug("".join(traceback.format_exception(error)))
            self._to_map = []  # it may fail as well
            try:
                self.start_sequence("mapping failed")
            except Exception as again:
                logger.error(f"a new sequence cannot start: {one_line(again)}", throttle_duration_sec=WARN_PERIOD)

    def _process(self, arrival: Arrival) -> None:
        if not self.is_active:  # it was on its way when the node was paused
            return
        message, mapper = arrival.message, self._mapper
        try:
            rgb = to_rgb(message) if isinstance(message, Image) else compressed_to_rgb(message)
            lens = self._camera_infos.lens(rgb.shape[:2])
            image, view = mapper.prepare(rgb, lens, self._scope.parameters.image_rotation)
        except (ImageError, ValueError, RuntimeError, MemoryError) as error:
            self._monitor.image_failed(f"image on {self._image_topic}: {one_line(error)}", in_model=False)
            self._scope.logger.warning(f"skipped an image on {self._image_topic}: {one_line(error)}",
                                       throttle_duration_sec=WARN_PERIOD)
            return
        self._follow(arrival, view)
        rejected_before, window_before = mapper.rejected, mapper.last_hand_over
        frames = mapper.step(image, Shot(message.header, view), arrival.seconds,
                             self._catch_up if mapper.is_asynchronous else None)
        self._map_frames()  # unless that was done meanwhile
        if self._view is None:  # not before the model has taken the image: one that fails may do so time and again
            self._view, self._encoding = view, _encoding(message)
            self._report_sequence(arrival)
            self.apply_parameters()  # for images of another size they may mean another window
            if mapper.window_problem:
                self._reports.event("resized", mapper.window_problem,
                                    {"sliding_window": mapper.session.config.sliding_window}, DiagnosticStatus.WARN,
                                    is_logged=False)  # the session says so
        if frames:
            self._header = frames[0].header
            self._level(frames[0])
            if self._pose_to_come is not None:
                self._place(frames[0].T_map_camera, frames[0].view)
        # Poses first: a robot steers by them, and the map can wait, unless the scale comes from its points.
        if fuses_first := self._scope.parameters.scale_source == "height":
            frames = mapper.fuse(frames)
        for frame in frames:
            self._update_scale(frame)
            self._outputs.publish_pose(frame, mapper.alignment)
        latency, rejected = time.monotonic() - arrival.time, mapper.rejected - rejected_before
        if fuses_first:
            self._publish_points(frames)
        else:
            self._to_map = frames
            if not mapper.is_asynchronous:
                self._map_frames()
        if mapper.last_hand_over is not window_before:
            self._report_hand_over(mapper.last_hand_over)
        if rejected:
            self._scope.logger.warning(
                f"withheld {rejected} poses: {'; '.join(mapper.tracker.tracking.reasons)}",
                throttle_duration_sec=WARN_PERIOD)
        self._between_images()
        self._note_state()
        self._monitor.image_processed(latency, len(frames), rejected)
        self._image_end = time.monotonic()

    def _idle(self) -> None:
        self.report_tracking()
        if not (self._mapper.is_asynchronous and time.monotonic() - self._image_end < NEXT_IMAGE_WITHIN):
            self._catch_up()

    def _catch_up(self) -> None:
        """Map the last frames and publish what has its own pace."""
        self._map_frames()
        if self.is_active:
            with self._mapper.beside_model():
                self._outputs.publish_due(self._mapper)

    def _map_frames(self) -> None:
        """Put frames whose poses were published into the map, and publish what they show."""
        if not self._to_map:
            return
        frames, self._to_map = self._to_map, []  # not again, should it fail
        self._publish_points(self._mapper.fuse(frames))

    def _publish_points(self, frames: list[MappedFrame]) -> None:
        with self._mapper.beside_model():
            for frame in frames:
                self._outputs.publish_points(frame, self._mapper.alignment)

    def pause(self) -> None:
        """Note that the node does not listen any more; the map that it latches is the newest one."""
        self._map_frames()
        if self.is_active:
            with self._mapper.beside_model():
                self._outputs.publish_last_map(self._mapper)
        self.is_active = False
        self.report_tracking()

    def start_sequence(self, reason: str) -> str:
        """Start a new sequence at the next image, with an empty map and path; return that in words."""
        self._map_frames()
        self._view, self._is_level = None, False
        self._sequence_reason = reason
        problems = self._mapper.reset(self._scope.parameters)
        self._scale.start_sequence()
        self._update_scale(None)
        self._outputs.start_sequence()
        self._note_state()
        if problems:
            self._scope.logger.warning(f"not all parameters took effect: {'; '.join(problems)}",
                                       throttle_duration_sec=WARN_PERIOD)
        return "; but ".join(("a new sequence starts at the next image", *problems))

    def reset(self) -> str:
        """Start a new sequence on request, without what was loaded; return that in words."""
        self._mailbox.clear()  # of what came before it was asked for
        self._mapper.loaded = None
        self._outputs.reset_odometry()
        return self.start_sequence("it was asked for")

    def set_paused(self, is_paused: bool) -> str:
        """Let images pass unmapped from now on, or go on; return that in words."""
        self.is_paused = is_paused
        self._mailbox.clear()
        self._monitor.nobody_waits()
        self.report_tracking()
        return "paused: images are not mapped" if is_paused else "the sequence goes on with the next image"

    def place(self, T_map_body: np.ndarray) -> str:
        """Move the map frame so that the camera is where a body's pose says, now or with the first pose."""
        self._pose_to_come = T_map_body
        if self._mapper.newest_pose is None:
            return "the first pose will be there"
        return self._place(self._mapper.newest_pose, self._view)

    def _place(self, T_model_camera: np.ndarray, view: CameraView) -> str:
        T_map_body, self._pose_to_come = self._pose_to_come, None
        T_body_camera = self._mounting()
        if T_body_camera is None:
            T_body_camera = T_BODY_OPTICAL @ view.T_upright_camera
        try:
            self._mapper.alignment = self._mapper.alignment.placed(T_model_camera, T_map_body, T_body_camera)
        except ValueError as error:  # the session's own pose may head straight up
            self._scope.logger.warning(f"initialpose has no effect: {error}")
            return str(error)
        x, y, z = T_map_body[:3, 3]
        text = f"the camera was placed at {x:.3f}, {y:.3f}, {z:.3f}"
        self._reports.event("placed", text, {"x": x, "y": y, "z": z, "yaw": self._mapper.alignment.yaw})
        return text

    def _level(self, first: MappedFrame) -> None:
        """Let a sequence's map start at the robot's body and be as level as that, if the camera's mounting is known."""
        if self._is_level:
            return
        self._is_level = True
        T_body_camera = self._mounting()
        if T_body_camera is not None:
            self._mapper.alignment = self._mapper.alignment.levelled(first.T_map_camera, T_body_camera)

    def _update_scale(self, frame: MappedFrame | None) -> None:
        """Rescale all outputs if the scale has changed."""
        mounting = None
        if self._scope.parameters.scale_source == "odometry" and frame is not None:
            mounting = self._mounting()
        scale = self._scale.update(frame, self._mapper.alignment, mounting)
        if scale is None:
            return
        before = self._mapper.alignment.scale
        self._mapper.set_scale(scale)
        if scale != before:
            self._reports.event("scaled", f"a unit of the model is {scale:.4g} m: all outputs are scaled by "
                                f"{scale / before:.4g}", {"scale": f"{scale:.9g}", "before": f"{before:.9g}"})

    def _mounting(self) -> np.ndarray | None:
        """Return T_body_camera [4, 4] of the newest frame's camera; None if it is not asked for or not known."""
        base_frame = self._scope.parameters.frame("base_frame")
        if not base_frame:
            return None
        try:
            return self._transforms.lookup(base_frame, self._outputs.camera_frame(self._header),
                                           nanoseconds(self._header.stamp), math.inf)
        except TransformError as error:
            self._scope.logger.warning(f"the camera is taken to be level, since base_frame is of no use: {error}",
                                       throttle_duration_sec=WARN_PERIOD)
            return None

    def map_points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the map as it is given out: xyz [n, 3], rgb [n, 3], confidence [n]."""
        self._map_frames()
        return tuple(values.cpu().numpy() for values in self._mapper.map_points())

    def trajectory(self) -> tuple[np.ndarray, np.ndarray]:
        """See Mapper.trajectory."""
        return self._mapper.trajectory()

    def load_map(self, xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> None:
        """See Mapper.load_map."""
        self._mapper.load_map(xyz, rgb, confidence)

    def describe_cache(self) -> str:
        """See Mapper.describe_cache."""
        return self._mapper.describe_cache()

    def apply_parameters(self) -> None:
        """Let changed parameters take effect from the next image on."""
        self._map_frames()
        try:
            changed = self._mapper.apply(self._scope.parameters)
        except ValueError as error:  # they were checked, but the images' size may have changed since
            self._scope.logger.warning(f"the window stays as it is: {error}")
            return
        if changed:
            self._reports.event("resized", f"from the next image on: {_text(changed)}", changed)
        self._update_scale(None)
        self._note_state()

    def _follow(self, arrival: Arrival, view: CameraView) -> None:
        """Start a new sequence where this image cannot go on with the old one."""
        if arrival.starts != self._mapped_starts:
            self._mapped_starts = arrival.starts
            self.start_sequence("the images' stamps went back: the camera, a recording or a simulation started anew")
        elif self._view is None:
            return
        elif self._view.camera_size != view.camera_size:
            before, now = (f"{width}x{height}" for height, width in (self._view.camera_size, view.camera_size))
            self.start_sequence(f"images on {self._image_topic} changed from {before} to {now}")
        elif self._encoding != _encoding(arrival.message):
            self.start_sequence(
                f"images on {self._image_topic} changed from {self._encoding} to {_encoding(arrival.message)}")
        elif self._view.rotation != view.rotation:
            self.start_sequence(f"image_rotation changed from {self._view.rotation} to {view.rotation}")
        elif self._view.lens.maps is not view.lens.maps:
            self.start_sequence("the removal of the lens' distortion changed")

    def _report_sequence(self, arrival: Arrival) -> None:
        self._monitor.count("sequences")
        now = time.monotonic()
        self._sequence_times.append(now)
        seconds = now - self._sequence_times[0]
        too_many = len(self._sequence_times) == MANY_SEQUENCES and seconds < SEQUENCES_PERIOD
        self._reports.event("sequence", f"a new sequence starts, path and map are empty: {self._sequence_reason}",
                            {"reason": self._sequence_reason, "image_seconds": f"{arrival.seconds:.9f}"},
                            is_logged=not too_many)
        if too_many:
            self._scope.logger.warning(
                f"{MANY_SEQUENCES} sequences started within {seconds:.1f} s, so that none maps much: "
                f"{self._sequence_reason}", throttle_duration_sec=WARN_PERIOD)

    def _between_images(self) -> None:
        """Do what would hold up the next image if it were left until then."""
        mapper = self._mapper
        if mapper.tracker.is_lost:
            if mapper.may_recover:
                self._recover()
            return
        hand_over = mapper.advance()
        if hand_over is not None:
            self._report_hand_over(hand_over)

    def _recover(self) -> None:
        """Anchor a lost sequence anew, or start another one."""
        reasons = "; ".join(self._mapper.tracker.tracking.reasons)
        self._monitor.count("lost")
        self._reports.event("lost", f"tracking is lost: {reasons}", {"reasons": reasons}, DiagnosticStatus.ERROR)
        self.report_tracking()
        hand_over = None if self._scope.parameters.reset_when_lost else self._mapper.recover()
        if hand_over is None:
            self.start_sequence(f"tracking was lost: {reasons}")
            return
        self._monitor.count("relocations")
        self._reports.event("relocated", f"the last {hand_over.shared_frames} good keyframes anchor the sequence anew",
                            self._figures(hand_over), DiagnosticStatus.WARN)

    def _report_hand_over(self, hand_over: HandOver) -> None:
        figures = self._figures(hand_over)
        self._monitor.handed_over(figures, hand_over.problem, hand_over.seconds)
        text = (f"window {figures['window']} starts: scale {hand_over.scale:.4f}, jump "
                f"{hand_over.translation_jump:.4g} units and {math.degrees(hand_over.rotation_jump):.2f} degrees, took "
                f"{hand_over.seconds:.2f} s")
        if hand_over.problem:
            self._reports.event("hand_over", f"{text}; {hand_over.problem}", figures, DiagnosticStatus.WARN)
        else:
            self._reports.event("hand_over", text, figures)

    def _figures(self, hand_over: HandOver) -> dict[str, object]:
        return {
            "window": self._mapper.session.window_index,
            "frame": hand_over.frame_index,
            "shared_frames": hand_over.shared_frames,
            "scale": f"{hand_over.scale:.9g}",
            "translation_jump": f"{hand_over.translation_jump:.9g}",
            "rotation_jump": f"{hand_over.rotation_jump:.9g}",  # radians
            "seconds": f"{hand_over.seconds:.4f}",
            "problem": hand_over.problem,
        }

    def report_tracking(self) -> None:
        """Publish the tracking state, which silence degrades, if it has changed. For any thread: the model may hang."""
        tracking, session = self._mapper.tracker.tracking, self._mapper.session
        state, reasons = tracking.state.value, list(tracking.reasons)
        timeout = self._scope.parameters.image_timeout
        if not self.is_active:
            reasons.append("the node is not active")
        elif self.is_paused:
            reasons.append("mapping is paused")
        elif self._monitor.silence > timeout:
            reasons.append(f"no image on {self._image_topic} for more than {timeout:g} s")
        elif self._monitor.stall > timeout:
            reasons.append(diagnostics.stall_text(timeout))
        if state == "TRACKING" and reasons:
            state = "DEGRADED"
        self.tracking = TrackingReport(state, tuple(reasons), session.window_index, session.frame_count)
        self._reports.tracking(self.tracking)

    def _note_state(self) -> None:
        scale = self._scale.value
        # Replaced, never changed: other threads read it.
        self.state_values = {**self._mapper.state_values(), "metres_per_unit": "" if scale is None else f"{scale:.6g}"}


def _encoding(message: Image | CompressedImage) -> str:
    return message.encoding if isinstance(message, Image) else message.format


def _text(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {('off', 'on')[value] if isinstance(value, bool) else format(value, 'g')}"
                     for name, value in values.items())
