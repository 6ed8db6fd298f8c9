# SPDX-License-Identifier: Apache-2.0
"""Rendered scenes with known geometry, for training, a demo camera and tests. Knows nothing of ROS.

    sequences = SceneGenerator(device="cuda").sequences(batch=64, frames=48)    # random scenes, to train on
    place = make_place(seed=4)                                                  # one place with a loop through it
    images, depth = render(place, place.T_world_camera[:1], intrinsics, image_size)
"""
from lingbot_map_ros.synthetic.generator import SceneGenerator, Sequences, intrinsics_from_fov
from lingbot_map_ros.synthetic.options import (
    CORRIDORS, DEMO, INTERIORS, KINDS, MIXED, OFFICES, ROOMS, SceneOptions,
)
from lingbot_map_ros.synthetic.place import Place, make_place, render

__all__ = [
    "CORRIDORS",
    "DEMO",
    "INTERIORS",
    "KINDS",
    "MIXED",
    "OFFICES",
    "ROOMS",
    "Place",
    "SceneGenerator",
    "SceneOptions",
    "Sequences",
    "intrinsics_from_fov",
    "make_place",
    "render",
]
