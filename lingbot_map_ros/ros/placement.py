# SPDX-License-Identifier: Apache-2.0
"""Where a camera's map lies: level as the camera is mounted, and with the camera where it is said to be."""
from __future__ import annotations

import math

import numpy as np

from lingbot_map_ros.mapping.alignment import T_BODY_OPTICAL
from lingbot_map_ros.mapping.transforms import TransformError
from lingbot_map_ros.ros.mapped_frame import MappedFrame
from lingbot_map_ros.ros.mapper import Mapper
from lingbot_map_ros.ros.messages import nanoseconds
from lingbot_map_ros.ros.outputs import Outputs
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.transform_listener import TransformListener

WARN_PERIOD = 5.0  # seconds between two warnings


class Placement:
    """Aligns the map of each sequence. For the worker."""

    def __init__(
        self, scope: Scope, mapper: Mapper, outputs: Outputs, reports: Reports, transforms: TransformListener
    ) -> None:
        """Leave the map as the session has it, until the first frame."""
        self.pose_to_come: np.ndarray | None = None  # T_map_body: where the first frame's camera is to be
        self._scope = scope
        self._mapper = mapper
        self._outputs = outputs
        self._reports = reports
        self._transforms = transforms
        self._newest: MappedFrame | None = None  # of this sequence

    def start_sequence(self) -> None:
        """Note that the map is empty."""
        self._newest = None

    def take(self, frames: list[MappedFrame]) -> None:
        """Take the next frames. With the first one of a sequence the map becomes level, if the camera's mounting is
        known, and the camera is placed, if that was asked for.
        """
        first = frames[0]
        if self._newest is None:
            T_body_camera = self.mounting(first)
            if T_body_camera is not None:  # the map starts at the robot's body
                self._mapper.alignment = self._mapper.alignment.levelled(first.T_map_camera, T_body_camera)
        if self.pose_to_come is not None:
            self._place(first)
        self._newest = frames[-1]

    def place(self, T_map_body: np.ndarray) -> str:
        """Move the map frame so that the camera is where a body's pose says, now or with the first pose."""
        self.pose_to_come = T_map_body
        return "the first pose will be there" if self._newest is None else self._place(self._newest)

    def mounting(self, frame: MappedFrame) -> np.ndarray | None:
        """Return T_body_camera [4, 4] of a frame's camera; None if it is not asked for or not known."""
        base_frame = self._scope.parameters.frame("base_frame")
        if not base_frame:
            return None
        try:
            return self._transforms.lookup(base_frame, self._outputs.camera_frame(frame.header),
                                           nanoseconds(frame.header.stamp), math.inf)
        except TransformError as error:
            self._scope.logger.warning(f"the camera is taken to be level, since base_frame is of no use: {error}",
                                       throttle_duration_sec=WARN_PERIOD)
            return None

    def _place(self, frame: MappedFrame) -> str:
        T_map_body, self.pose_to_come = self.pose_to_come, None
        T_body_camera = self.mounting(frame)
        if T_body_camera is None:
            T_body_camera = T_BODY_OPTICAL @ frame.view.T_upright_camera
        try:
            self._mapper.alignment = self._mapper.alignment.placed(frame.T_map_camera, T_map_body, T_body_camera)
        except ValueError as error:  # the session's own pose may head straight up
            self._scope.logger.warning(f"initialpose has no effect: {error}")
            return str(error)
        x, y, z = T_map_body[:3, 3]
        text = f"the camera was placed at {x:.3f}, {y:.3f}, {z:.3f}"
        self._reports.event("placed", text, {"x": x, "y": y, "z": z, "yaw": self._mapper.alignment.yaw})
        return text
