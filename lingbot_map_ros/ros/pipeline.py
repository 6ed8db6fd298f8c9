# SPDX-License-Identifier: Apache-2.0
"""An image's way through the node: message -> decode -> prepare -> step -> publish, and what is done between images."""
from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus
from sensor_msgs.msg import CompressedImage, Image

from lingbot_map_ros.mapping.camera_view import CameraView
from lingbot_map_ros.mapping.hand_over import HandOver
from lingbot_map_ros.mapping.image_message import ImageError, compressed_to_rgb, to_rgb
from lingbot_map_ros.ros import diagnostics
from lingbot_map_ros.ros.camera_info import CameraInfos
from lingbot_map_ros.ros.diagnostics import Monitor, TrackingReport
from lingbot_map_ros.ros.intake import Arrival, Intake
from lingbot_map_ros.ros.logs import one_line
from lingbot_map_ros.ros.mapped_frame import MappedFrame, Shot
from lingbot_map_ros.ros.mapper import Mapper
from lingbot_map_ros.ros.metric_scale import MetricScale
from lingbot_map_ros.ros.outputs import Outputs
from lingbot_map_ros.ros.placement import Placement
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.scope import Scope

WARN_PERIOD = 5.0  # seconds between two warnings of one kind
MANY_SEQUENCES = 5  # within SEQUENCES_PERIOD seconds get one warning instead of a line each
SEQUENCES_PERIOD = 10.0
MAPPING_SECONDS = 0.02  # that putting a keyframe into the map and publishing it takes, until that has been measured


class Pipeline:
    """Leads images to the mapper and results to the publishers. For the worker."""

    def __init__(
        self, scope: Scope, intake: Intake, mapper: Mapper, outputs: Outputs, reports: Reports, monitor: Monitor,
        camera_infos: CameraInfos, placement: Placement, scale: MetricScale, catch_up_others: Callable[[], None],
    ) -> None:
        """catch_up_others: lets the other cameras' pipelines do what they have left for later."""
        self._view: CameraView | None = None  # of this sequence's images
        self.is_active = False  # whether the node listens and publishes
        self._to_map: list[MappedFrame] = []  # frames whose poses were published, and nothing else yet
        self._mapping_seconds = MAPPING_SECONDS  # of the last keyframe
        self._scope = scope
        self._intake = intake
        self._mapper = mapper
        self._outputs = outputs
        self._reports = reports
        self._monitor = monitor
        self._camera_infos = camera_infos
        self._placement = placement
        self._scale = scale
        self._catch_up_others = catch_up_others
        self._image_topic = scope.image_topic
        self._encoding = ""  # of this sequence's images
        self._starts = 0  # of the camera, by the images processed
        self._sequence_reason = "the first image came"
        self._sequence_times: deque[float] = deque(maxlen=MANY_SEQUENCES)  # of their starts, monotonic seconds
        self._note_state()
        self.report_tracking()

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of this sequence's images; None before the first."""
        view = self._view
        return None if view is None else view.camera_size

    def process(self, arrival: Arrival) -> None:
        """Map one image and publish what comes of it."""
        self._guarded(lambda: self._process(arrival))

    def idle(self) -> None:
        """Map and publish what was left for later, unless that would hold up an image."""
        self._guarded(self._idle)

    def catch_up(self) -> None:
        """Map and publish what was left for later: another camera's image gives the time."""
        self._guarded(self._catch_up)

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
                             self._meanwhile if mapper.is_asynchronous else None)
        if self._view is None:  # not before the model has taken the image: one that fails may do so time and again
            self._view, self._encoding = view, _encoding(message)
            self._report_sequence(arrival)
            self.apply_parameters()  # for images of another size they may mean another window
            if mapper.window_problem:
                self._reports.event("resized", mapper.window_problem,
                                    {"sliding_window": mapper.session.config.sliding_window}, DiagnosticStatus.WARN,
                                    is_logged=False)  # the session says so
        if frames:
            self._placement.take(frames)
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
            self._to_map += frames
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

    def _idle(self) -> None:
        self.report_tracking()
        # What the next image would have to wait for is done while the model has that.
        if not self._mapper.is_asynchronous or self._intake.next_in() > self._mapping_seconds:
            self._catch_up()

    def _meanwhile(self) -> None:
        self._catch_up()
        self._catch_up_others()

    def _catch_up(self) -> None:
        """Map the last frames and publish what has its own pace."""
        if self._to_map:
            self._map_frames()
            self._note_state()  # of the map, which no image may come after
        if self.is_active:
            with self._mapper.beside_model():
                self._outputs.publish_due(self._mapper)

    def _finish(self) -> None:
        """Map the last frames before something else is done with the map; should that fail, that is done all the same.
        """
        self._guarded(self._map_frames)

    def _map_frames(self) -> None:
        """Put frames whose poses were published into the map, and publish what they show."""
        if not self._to_map:
            return
        frames, self._to_map = self._to_map, []  # not again, should it fail
        begin = time.monotonic()
        self._publish_points(self._mapper.fuse(frames))
        if any(frame.result.is_keyframe for frame in frames):
            self._mapping_seconds = time.monotonic() - begin

    def _publish_points(self, frames: list[MappedFrame]) -> None:
        with self._mapper.beside_model():
            for frame in frames:
                self._outputs.publish_points(frame, self._mapper.alignment)

    def pause(self) -> None:
        """Note that the node does not listen any more; the map that it latches is the newest one."""
        self._finish()
        if self.is_active:
            with self._mapper.beside_model():
                self._outputs.publish_last_map(self._mapper)
        self.is_active = False
        self.report_tracking()

    def start_sequence(self, reason: str) -> str:
        """Start a new sequence at the next image, with an empty map and path; return that in words."""
        self._finish()
        self._view = None
        self._placement.start_sequence()
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
        self._intake.clear()  # of what came before it was asked for
        self._mapper.loaded = None
        self._outputs.reset_odometry()
        return self.start_sequence("it was asked for")

    def set_paused(self, is_paused: bool) -> str:
        """Let images pass unmapped from now on, or go on; return that in words."""
        self._intake.is_paused = is_paused
        self._intake.clear()
        self._monitor.nobody_waits()
        self.report_tracking()
        return "paused: images are not mapped" if is_paused else "the sequence goes on with the next image"

    def _update_scale(self, frame: MappedFrame | None) -> None:
        """Rescale all outputs if the scale has changed."""
        is_needed = self._scope.parameters.scale_source == "odometry" and frame is not None
        mounting = self._placement.mounting(frame) if is_needed else None
        scale = self._scale.update(frame, self._mapper.alignment, mounting)
        if scale is None:
            return
        before = self._mapper.alignment.scale
        self._mapper.set_scale(scale)
        if scale != before:
            self._reports.event("scaled", f"a unit of the model is {scale:.4g} m: all outputs are scaled by "
                                f"{scale / before:.4g}", {"scale": f"{scale:.9g}", "before": f"{before:.9g}"})

    def map_points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the map as it is given out: xyz [n, 3], rgb [n, 3], confidence [n]."""
        self._finish()
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
        self._finish()
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
        if arrival.starts != self._starts:
            self._starts = arrival.starts
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
        if mapper.session.is_window_full:
            self._map_frames()  # the next window takes its time
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
        elif self._intake.is_paused:
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
