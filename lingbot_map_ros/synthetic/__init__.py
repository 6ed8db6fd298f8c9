# SPDX-License-Identifier: Apache-2.0
"""Rendered scenes with known geometry: a batched ray-caster for training, a demo camera and tests. Knows nothing of ROS."""
from lingbot_map_ros.synthetic.generator import SceneGenerator, Sequences, intrinsics_from_fov
from lingbot_map_ros.synthetic.options import DEMO, MIXED, ROOMS, SceneOptions
from lingbot_map_ros.synthetic.place import Place, make_place, render

__all__ = [
    "DEMO",
    "MIXED",
    "ROOMS",
    "Place",
    "SceneGenerator",
    "SceneOptions",
    "Sequences",
    "intrinsics_from_fov",
    "make_place",
    "render",
]
