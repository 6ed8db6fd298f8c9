# SPDX-License-Identifier: Apache-2.0
"""What the node counts, and its parts' states as diagnostic messages (REP-107)."""
from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

MANY_REPEATS = 10  # images in a row with one stamp that are worth a warning: a driver may send an image twice


@dataclass
class Counts:
    """Totals since the node was activated first."""

    received: int = 0  # images that arrived, without duplicates and late ones
    processed: int = 0  # images that went through the model
    failed: int = 0  # images that could not be read or that the model failed on
    poses: int = 0  # poses published
    rejected: int = 0  # poses withheld because they were not plausible
    sequences: int = 0  # started, for whatever reason
    duplicates: int = 0  # images that came with the stamp of the one before, and were dropped
    late: int = 0  # images that another one had overtaken, and were dropped
    skipped: int = 0  # images that were too many for max_rate
    gaps: int = 0  # between two images' stamps
    stamps_back: int = 0  # images whose earlier stamp started a new sequence
    hand_overs: int = 0  # from one window to the next
    hand_over_problems: int = 0  # of these, such whose scale could not be measured
    lost: int = 0  # times that tracking was lost
    relocations: int = 0  # times that a lost sequence was anchored anew


@dataclass
class Interval:
    """What happened since the last report."""

    seconds: float = 0.0
    received: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds from an image's arrival to its publication
    camera_error: str = ""
    model_error: str = ""
    rejected: int = 0


@dataclass(frozen=True)
class TrackingReport:
    """How good the poses are, as a snapshot."""

    state: str  # of mapping.tracking.TrackingState
    reasons: tuple[str, ...]
    window: int  # of the sequence
    frame: int  # of the sequence, the next one


class Monitor:
    """Counts what the node's threads report; `report` empties the current interval."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        self._interval = Interval()
        self._interval_start = time.monotonic()
        self._last_image = self._active_since = -float("inf")  # monotonic seconds
        self._waiting_since: float | None = None  # likewise, of the first image since one was processed
        self.repeats = 0  # images in a row that carried the stamp of the one before
        self.hand_over: dict[str, object] = {}  # figures of the last one; replaced, never changed
        self._hand_over_seconds_max = 0.0

    @property
    def counts(self) -> Counts:
        """Return a copy of the totals."""
        with self._lock:
            return Counts(**vars(self._counts))

    @property
    def silence(self) -> float:
        """Seconds since the last image, of whatever stamp, or since the node listens."""
        return time.monotonic() - max(self._last_image, self._active_since)

    @property
    def stall(self) -> float:
        """Seconds for which images have come without one that went through the model."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def activated(self) -> None:
        """Note that the node listens from now on."""
        with self._lock:
            self._active_since = time.monotonic()
            self._waiting_since = None

    def count(self, name: str) -> None:
        """Add one to a total."""
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + 1)

    def image_received(self) -> None:
        """Count an image that arrived."""
        with self._lock:
            self._counts.received += 1
            self._interval.received += 1
            self.repeats = 0
            self._arrived()

    def image_dropped(self, name: str) -> None:
        """Count, under the total's name, an image that arrived but is not for the model because of its stamp."""
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + 1)
            self.repeats = self.repeats + 1 if name == "duplicates" else 0
            self._arrived()

    def image_skipped(self) -> None:
        """Count an image that arrived but was too many; nobody waits for it."""
        with self._lock:
            self._counts.skipped += 1
            self.repeats = 0
            self._last_image = time.monotonic()

    def nobody_waits(self) -> None:
        """Note that the images that waited were dropped on purpose."""
        with self._lock:
            self._waiting_since = None

    def _arrived(self) -> None:
        self._last_image = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._last_image

    def image_processed(self, latency: float, poses: int, rejected: int) -> None:
        """Count an image that went through the model, with the poses that came of it."""
        with self._lock:
            self._counts.processed += 1
            self._counts.poses += poses
            self._counts.rejected += rejected
            self._waiting_since = None
            if len(self._interval.latencies) < 10_000:  # a bound where nobody asks for reports
                self._interval.latencies.append(latency)
            self._interval.rejected += rejected

    def image_failed(self, reason: str, in_model: bool) -> None:
        """Count an image that could not be read, or that the model failed on."""
        with self._lock:
            self._counts.failed += 1
            if in_model:
                self._interval.model_error = reason
            else:
                self._interval.camera_error = reason

    def handed_over(self, figures: Mapping[str, object], problem: str, seconds: float) -> None:
        """Count a hand-over that took so long, and keep its figures."""
        with self._lock:
            self._counts.hand_overs += 1
            self._counts.hand_over_problems += bool(problem)
            self._hand_over_seconds_max = max(seconds, self._hand_over_seconds_max)
            self.hand_over = {**figures, "seconds_max": f"{self._hand_over_seconds_max:.4f}"}

    def report(self) -> tuple[Counts, Interval]:
        """Return the totals and what happened since the last call."""
        with self._lock:
            now = time.monotonic()
            interval, self._interval = self._interval, Interval()
            interval.seconds, self._interval_start = now - self._interval_start, now
            return Counts(**vars(self._counts)), interval


def together(intervals: Sequence[Interval]) -> Interval:
    """Return what happened to several cameras in one interval; of errors, the first."""
    return Interval(
        seconds=max(interval.seconds for interval in intervals),
        received=sum(interval.received for interval in intervals),
        latencies=[latency for interval in intervals for latency in interval.latencies],
        camera_error=next((interval.camera_error for interval in intervals if interval.camera_error), ""),
        model_error=next((interval.model_error for interval in intervals if interval.model_error), ""),
        rejected=sum(interval.rejected for interval in intervals))


def camera_status(
    node: str, part: str, topic: str, active: bool, publishers: int, silence: float, repeats: int, timeout: float,
    dropped: int, image_size: tuple[int, int] | None, counts: Counts, interval: Interval,
    calibration_problem: str = "", values: Mapping[str, object] | None = None,
) -> DiagnosticStatus:
    """Say whether readable images arrive. `silence`: seconds without one; more than `timeout` are too many.

    `values`: more of them.
    """
    level, message = DiagnosticStatus.OK, f"{interval.received / interval.seconds:.1f} images/s"
    if not active:
        message = "not subscribed: the node is not active"
    elif interval.camera_error:
        level, message = DiagnosticStatus.ERROR, interval.camera_error
    elif silence > timeout:
        level = DiagnosticStatus.WARN
        message = f"no image on {topic} for {silence:.0f} s, {publishers_text(publishers)}"
    elif repeats >= MANY_REPEATS:
        level, message = DiagnosticStatus.WARN, repeats_text(repeats)
    elif calibration_problem:
        level, message = DiagnosticStatus.WARN, f"camera_info is not used: {calibration_problem}"
    return status(node, part, topic, level, message, {
        "topic": topic,
        "publishers": publishers,
        "image_width": image_size[1] if image_size else "",
        "image_height": image_size[0] if image_size else "",
        "images_per_second": f"{interval.received / interval.seconds:.2f}",
        "mapped_per_second": f"{len(interval.latencies) / interval.seconds:.2f}",
        "frames_received": counts.received,
        "frames_processed": counts.processed,
        "frames_dropped": dropped,
        "frames_failed": counts.failed,
        "duplicate_stamps": counts.duplicates,
        "late_images": counts.late,
        "skipped_images": counts.skipped,
        "stamp_gaps": counts.gaps,
        "stamps_back": counts.stamps_back,
        **(values or {}),
    })


def intrinsics_values(topic: str, focal_lengths: tuple[float, float | None] | None) -> dict[str, object]:
    """Return what /diagnostics shows of the calibration on `topic`: focal lengths in pixels, predicted and known."""
    predicted, known = focal_lengths or (None, None)
    return {
        "camera_info_topic": topic,
        "intrinsics": "predicted" if known is None else "camera_info",
        "focal_length_predicted": "" if predicted is None else f"{predicted:.2f}",
        "focal_length_camera_info": "" if known is None else f"{known:.2f}",
        "focal_length_difference_percent": "" if known is None else f"{100 * (predicted / known - 1):.1f}",
    }


def publishers_text(count: int) -> str:
    """Return a number of publishers in words."""
    return f"{count} publisher{'' if count == 1 else 's'}"


def repeats_text(count: int) -> str:
    """Say that a camera's stamp stands still."""
    return f"{count} images in a row carry the same header.stamp and are dropped: let the camera's driver stamp each"


def stall_text(seconds: float) -> str:
    """Say that no image goes through the model."""
    return f"no image was processed for {seconds:.0f} s although images arrive"


_LEVELS = {"INITIALIZING": DiagnosticStatus.OK, "TRACKING": DiagnosticStatus.OK, "DEGRADED": DiagnosticStatus.WARN,
           "LOST": DiagnosticStatus.ERROR}


def tracking_status(
    node: str, part: str, topic: str, report: TrackingReport, values: Mapping[str, object] | None = None
) -> DiagnosticStatus:
    """Say how good the poses are; the message is the state. `values`: more of them."""
    level = _LEVELS[report.state]
    if report.reasons and level == DiagnosticStatus.OK:
        level = DiagnosticStatus.WARN
    return status(node, part, topic, level, report.state, {
        "reasons": "; ".join(report.reasons),
        "window": report.window,
        "frame": report.frame,
        **(values or {}),
    })


def tracking_values(counts: Counts, hand_over: Mapping[str, object]) -> dict[str, object]:
    """Return what /diagnostics shows of tracking beside its state; `hand_over`: the last one's figures."""
    return {
        "sequences": counts.sequences,
        "poses_published": counts.poses,
        "poses_rejected": counts.rejected,
        "times_lost": counts.lost,
        "relocations": counts.relocations,
        "hand_overs": counts.hand_overs,
        "hand_over_problems": counts.hand_over_problems,
        **{f"hand_over_{name}": value for name, value in hand_over.items()},
    }


def cache_status(
    node: str, part: str, hardware: str, values: Mapping[str, object] | None, trained_frames: int
) -> DiagnosticStatus:
    """Say what is remembered: `values` are the cache's, the map's and the path's counters; None without a model."""
    level, message = DiagnosticStatus.OK, "no model is loaded"
    if values is not None:
        message = f"{values['frame_count']} keyframes in the window, {values['map_points']} map points"
        if values["frame_count"] > trained_frames:
            level = DiagnosticStatus.WARN
            message = (f"{values['frame_count']} keyframes are more than the {trained_frames} that the model was "
                       "trained on: poses degrade; turn windowed on, or lower window_size")
        elif values.get("window_problem"):
            level, message = DiagnosticStatus.WARN, values["window_problem"]
    return status(node, part, hardware, level, message, values or {})


def model_status(
    node: str, hardware: str, state: str, load_error: str, progress: str, values: Mapping[str, object],
    interval: Interval, stall: float = 0.0, timeout: float = float("inf"),
) -> DiagnosticStatus:
    """Say whether the model runs, and how fast. `values` describe the model; `progress` is how far loading is.

    A `stall` beyond `timeout` seconds, while images arrive, is worth a warning while the node is active.
    """
    latencies = interval.latencies
    rate = len(latencies) / interval.seconds
    level, message = DiagnosticStatus.OK, state
    if load_error:
        level, message = DiagnosticStatus.ERROR, load_error
    elif interval.model_error:
        level, message = DiagnosticStatus.ERROR, interval.model_error
    elif state == "active" and stall > timeout:
        level, message = DiagnosticStatus.WARN, stall_text(stall)
    elif interval.rejected:
        level, message = DiagnosticStatus.WARN, f"{interval.rejected} poses were not plausible and were withheld"
    elif state == "loading" and progress:
        message = f"loading: {progress}"
    elif state == "active":
        message = f"{rate:.1f} frames/s"
    return status(node, "model", hardware, level, message, {
        "state": state,
        **values,
        "frames_per_second": f"{rate:.2f}",
        "latency_mean_ms": f"{1e3 * sum(latencies) / len(latencies):.1f}" if latencies else "",
        "latency_max_ms": f"{1e3 * max(latencies):.1f}" if latencies else "",
    })


def status(
    node: str, part: str, hardware: str, level: bytes, message: str, values: Mapping[str, object]
) -> DiagnosticStatus:
    """Return a status of a part of the node; values become text."""
    return DiagnosticStatus(
        name=f"{node}: {part}", hardware_id=hardware, level=level, message=message,
        values=[KeyValue(key=key, value=str(value)) for key, value in values.items()],
    )
