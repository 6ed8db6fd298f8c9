# SPDX-License-Identifier: Apache-2.0
"""A frame on its way from the mapper to the publishers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from std_msgs.msg import Header

from lingbot_map_ros.mapping import FrameResult, MapPoints
from lingbot_map_ros.mapping.camera_view import CameraView


class Shot(NamedTuple):
    """What is known of an image beside its pixels. The session hands it back with the frame."""

    header: Header
    view: CameraView  # what the model saw of it


@dataclass(frozen=True)
class MappedFrame:
    """A frame whose pose may be used."""

    result: FrameResult
    header: Header  # of its image
    view: CameraView  # likewise
    T_map_camera: np.ndarray  # [4, 4] float64, camera points into the session's map: see Mapper.alignment
    # Of the camera since the frame before [4, 4], in the model's unit, as one window sees both or as the image tells;
    # None: neither does.
    motion: np.ndarray | None
    twist: tuple[np.ndarray, np.ndarray] | None  # linear, angular in the camera's axes; None: not known
    seconds: float  # since the frame before; 0: not known
    path_length: float  # of this sequence so far, in the model's unit
    median_depth: float  # likewise
    is_degraded: bool  # tracking, at this frame
    points: MapPoints | None = None  # likewise, as they entered the map; None: no keyframe, or not there yet
