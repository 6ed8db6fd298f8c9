# SPDX-License-Identifier: Apache-2.0
"""A mapping session: frames in, poses and depth out. Knows nothing of ROS."""
from lingbot_map_ros.mapping.session import FrameResult, MappingSession, SessionConfig

__all__ = ["FrameResult", "MappingSession", "SessionConfig"]
