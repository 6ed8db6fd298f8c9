# SPDX-License-Identifier: Apache-2.0
"""A pose that is continuous: the camera's motion from frame to frame, added up."""
from __future__ import annotations

import numpy as np

from lingbot_map_ros.mapping.geometry import rigid


class VisualOdometry:
    """Adds up motions. Where the map is corrected, by another window, scale or place, the pose goes on as it was."""

    def __init__(self) -> None:
        """Start with no pose."""
        self.reset()

    def reset(self) -> None:
        """Forget the pose: the next one is where it is said to start."""
        self.T_odom_camera: np.ndarray | None = None  # [4, 4]
        self.path_length = 0.0

    def move(self, motion: np.ndarray | None, scale: float) -> np.ndarray | None:
        """Go on by a motion, once `T_odom_camera` is set.

        Args:
            motion: T_before_now [4, 4], of the camera in its own axes; None: not known, and the camera stands still.
            scale: unit of the odometry per unit of the motion, by now.

        Returns the motion in the odometry's unit.
        """
        if motion is None:
            return None
        motion = motion.copy()
        motion[:3, 3] *= scale
        self.T_odom_camera = rigid(self.T_odom_camera @ motion)
        self.path_length += float(np.linalg.norm(motion[:3, 3]))
        return motion
