# SPDX-License-Identifier: Apache-2.0
"""The streaming geometric context transformer: configuration, layers, heads, checkpoints."""
from lingbot_map_ros.gct.config import PRESETS, GCTConfig
from lingbot_map_ros.gct.model import GCT, GCTOutput, GCTState, build_model

__all__ = ["GCT", "GCTConfig", "GCTOutput", "GCTState", "PRESETS", "build_model"]
