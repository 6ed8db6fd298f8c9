# SPDX-License-Identifier: Apache-2.0
"""The streaming geometric context transformer: configuration, layers, heads, checkpoints."""
from lingbot_map_ros.gct.config import PRESETS, GCTConfig
from lingbot_map_ros.gct.dtypes import dtype_name, dtype_named, preferred_dtype
from lingbot_map_ros.gct.image import ImageGeometry, image_geometry, prepare_image
from lingbot_map_ros.gct.model import GCT, GCTOutput, build_model
from lingbot_map_ros.gct.pose import decode_pose_encoding
from lingbot_map_ros.gct.state import GCTState, InsufficientMemoryError, StateSizes, resolve_sizes

__all__ = [
    "GCT",
    "GCTConfig",
    "GCTOutput",
    "GCTState",
    "ImageGeometry",
    "InsufficientMemoryError",
    "PRESETS",
    "StateSizes",
    "build_model",
    "decode_pose_encoding",
    "image_geometry",
    "dtype_name",
    "dtype_named",
    "preferred_dtype",
    "prepare_image",
    "resolve_sizes",
]
