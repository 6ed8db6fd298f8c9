# SPDX-License-Identifier: Apache-2.0
"""The camera's calibration as it comes on `camera_info`, and what it says of an image."""
from __future__ import annotations

from typing import NamedTuple

from sensor_msgs.msg import CameraInfo

from lingbot_map_ros.mapping.calibration import NO_LENS, Calibration, CalibrationError, Lens, make_lens
from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.scope import Scope

WARN_PERIOD = 30.0  # seconds between two warnings of one kind
MUCH_DISTORTION = 0.02  # of the image's width: beyond, straight walls come out bent


class _Request(NamedTuple):
    """What a lens was made for."""

    calibration: Calibration
    size: tuple[int, int]
    source: str
    undistort: bool


class CameraInfos:
    """Keeps the newest valid calibration. `receive` is the executor's, `lens` the worker's, the rest anyone's."""

    def __init__(self, scope: Scope) -> None:
        """Know nothing of the camera."""
        self.topic = scope.camera_info_topic
        self.problem = ""  # with the newest message, or its use
        self._scope = scope
        # By convention rectified images are on topics such as image_rect and image_rect_color.
        images = scope.resolve(interfaces.IMAGE).removesuffix("/compressed")
        self._is_rectified = "rect" in images.rsplit("/", 1)[-1]
        self._content: tuple | None = None  # of the newest message
        self._calibration: Calibration | None = None
        self._request: _Request | None = None
        self._lens = NO_LENS

    def receive(self, message: CameraInfo) -> None:
        """Take a message; one that cannot be used is warned of and leaves the calibration as it is."""
        roi = message.roi
        content = (message.width, message.height, message.distortion_model, bytes(message.d), message.k.tobytes(),
                   message.r.tobytes(), message.p.tobytes(), message.binning_x, message.binning_y,
                   (roi.x_offset, roi.y_offset, roi.width, roi.height))
        if content == self._content:
            if self.problem:
                self._warn()
            return
        self._content = content
        try:
            self._calibration = Calibration.from_message(message)
        except CalibrationError as error:
            self.problem = str(error)
            self._warn()
            return
        self.problem = ""
        self._tell_of_distortion(self._calibration)

    def lens(self, size: tuple[int, int]) -> Lens:
        """Return what is to be done about images of (height, width); the same object while nothing changes.

        Raises CalibrationError where distortion is to be removed and cannot be.
        """
        calibration, parameters = self._calibration, self._scope.parameters
        if calibration is None:
            if parameters.undistort:
                raise CalibrationError("camera_info", "missing",
                                       f"undistort is on, but nothing valid has come on {self.topic}")
            return NO_LENS
        request = _Request(calibration, size, parameters.calibration, parameters.undistort)
        if request == self._request:
            return self._lens
        self._request, self._lens = None, NO_LENS
        try:
            self._lens = make_lens(*request, is_rectified=self._is_rectified)
            self.problem = ""
        except CalibrationError as error:
            if parameters.undistort:
                raise
            self.problem = str(error)
            self._warn()
        self._request = request
        return self._lens

    def _warn(self) -> None:
        if self._scope.parameters.calibration != "none":
            self._scope.logger.warning(f"camera_info on {self.topic} is not used: {self.problem}",
                                       throttle_duration_sec=WARN_PERIOD)

    def _tell_of_distortion(self, calibration: Calibration) -> None:
        pixels = calibration.max_distortion()
        is_raw = not self._is_rectified and not self._scope.parameters.undistort
        if is_raw and pixels > MUCH_DISTORTION * calibration.size[1]:
            self._scope.logger.warning(
                f"camera_info on {self.topic}: the lens moves pixels by up to {pixels:.0f}, which bends the map: set "
                "undistort, or take rectified images", throttle_duration_sec=WARN_PERIOD)
