# SPDX-License-Identifier: Apache-2.0
"""A mapping session: frames in, poses and depth out; the map, the path and their files. Knows nothing of ROS."""
from lingbot_map_ros.mapping.map_builder import MapBuilder, frame_points
from lingbot_map_ros.mapping.session import FrameResult, MappingSession
from lingbot_map_ros.mapping.session_config import SessionConfig
from lingbot_map_ros.mapping.trajectory import Trajectory
from lingbot_map_ros.mapping.voxel_map import MapPoints, VoxelMap

__all__ = [
    "FrameResult",
    "MapBuilder",
    "MapPoints",
    "MappingSession",
    "SessionConfig",
    "Trajectory",
    "VoxelMap",
    "frame_points",
]
