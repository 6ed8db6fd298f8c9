# SPDX-License-Identifier: Apache-2.0
"""From `sensor_msgs/Image` to an RGB array."""
from lingbot_map_ros.mapping.image_message import ENCODINGS, ImageError, to_rgb

__all__ = ["ENCODINGS", "ImageError", "to_rgb"]
