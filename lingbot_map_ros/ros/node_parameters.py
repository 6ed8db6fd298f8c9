# SPDX-License-Identifier: Apache-2.0
"""The parameters in force: those of the node, and what single cameras have in their place."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rcl_interfaces.msg import ParameterDescriptor
from rclpy.node import Node

from lingbot_map_ros.ros.parameter_table import Change, ParameterError
from lingbot_map_ros.ros.parameters import JUDGED_BY_MODEL, PER_CAMERA, Parameters

_CHANGES = {entry.name: entry.metadata["change"] for entry in dataclasses.fields(Parameters)}


@dataclass(frozen=True)
class NodeParameters:
    """The node's parameters and, by their full names such as front.image_rotation, those of single cameras.

    Making one raises ParameterError for what cannot be, such as two maps that are the odometry frame's parent.
    """

    shared: Parameters = Parameters()
    own: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cameras = [self._make(camera) for camera in self.shared.cameras]
        object.__setattr__(self, "_cameras", dict(zip(self.shared.cameras, cameras)))
        parents = [camera.camera for camera in cameras if camera.odom_frame and camera.publish_tf]
        if len(parents) > 1:
            raise ParameterError(f"publish_tf is on for {' and '.join(parents)}, but odom_frame can have one parent "
                                 f"only: set publish_tf to false, and {parents[0]}.publish_tf to true")
        names = [camera.camera_frame for camera in cameras if camera.camera_frame]
        if len(set(names)) < len(names):
            raise ParameterError(f"camera_frame is {names[0]!r} for more than one camera: set "
                                 f"{cameras[0].camera}.camera_frame and so on")

    @classmethod
    def declare(cls, node: Node) -> Self:
        """Declare all parameters on a node and return their values, overrides included.

        Raises ParameterError if an override cannot be, with the reason.
        """
        shared = Parameters.declare(node)
        values = {name: node.declare_parameter(name, None, _own_descriptor(name)).value for name in own_names(shared)}
        return cls(shared, {name: value for name, value in values.items() if value is not None})

    def declare_again(self, node: Node) -> None:
        """Declare those of single cameras that were taken back, which rclpy undeclares, so that they may be set again.
        """
        for name in own_names(self.shared):
            if not node.has_parameter(name):
                node.declare_parameter(name, None, _own_descriptor(name), ignore_override=True)

    def of(self, camera: str) -> Parameters:
        """Return the parameters of one camera: `cameras` is that camera, memory is its share."""
        return self._cameras[camera]

    def known(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return those of some values that are this package's (use_sim_time is rclpy's, for example)."""
        names = (*_CHANGES, *own_names(self.shared))
        return {name: value for name, value in values.items() if name in names}

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return the parameters with some values replaced; None takes back what a single camera has.

        Raises ParameterError for a bad value.
        """
        shared = {name: value for name, value in values.items() if name in _CHANGES}
        own = {name: value for name, value in {**self.own, **values}.items()
               if name not in _CHANGES and value is not None}
        return type(self)(dataclasses.replace(self.shared, **shared), own)

    def differences(self, after: Self) -> list[str]:
        """Return the names of the parameters that differ."""
        return [*(name for name in _CHANGES if getattr(self.shared, name) != getattr(after.shared, name)),
                *(name for name in own_names(self.shared) if self.own.get(name) != after.own.get(name))]

    def _make(self, camera: str) -> Parameters:
        shared = self.shared
        own = {name: self.own[f"{camera}.{name}"] for name in PER_CAMERA if f"{camera}.{name}" in self.own}
        if shared.cache_memory_mib:
            own["cache_memory_mib"] = shared.cache_memory_mib // len(shared.cameras)
            if not own["cache_memory_mib"]:
                raise ParameterError(f"cache_memory_mib is {shared.cache_memory_mib}: {len(shared.cameras)} cameras "
                                     "share it, so it must be at least that many")
        try:
            return dataclasses.replace(shared, cameras=(camera,), **own)
        except ParameterError as error:
            raise ParameterError(f"{camera}.{error}") from error


def own_names(shared: Parameters) -> list[str]:
    """Return the full names of what can be set for single cameras."""
    return [f"{camera}.{name}" for camera in shared.cameras if camera for name in PER_CAMERA]


def change_of(name: str) -> Change:
    """Return when a new value of a parameter, by its full name, takes effect."""
    return _CHANGES[name.rpartition(".")[2]]


def refuse_late(names: list[str], configured: bool) -> None:
    """Raise ParameterError for changes that cannot be made any more; `configured`: the model is loaded."""
    for name in names:
        if change_of(name) is Change.START:
            raise ParameterError(f"{name} can be set only when the node is started")
        if change_of(name) is Change.CONFIGURE and configured:
            raise ParameterError(f"{name} can be set only while the node is unconfigured: deactivate it and clean it "
                                 "up (ros2 lifecycle set NODE deactivate, then cleanup) before")


def refuse_unchecked(names: list[str]) -> None:
    """Raise ParameterError for changes that cannot be judged while the model is being loaded."""
    for name in names:
        if name.rpartition(".")[2] in JUDGED_BY_MODEL:
            raise ParameterError(f"{name} cannot be set while the model is being loaded: set it again afterwards")


def _own_descriptor(name: str) -> ParameterDescriptor:
    camera, _, shared = name.rpartition(".")
    # Of any type, so that it can be without a value; with one, it has the range of the other.
    return ParameterDescriptor(description=f"As {shared}, for {camera} only; without a value, {shared} holds.",
                               additional_constraints=f"A change takes effect: {change_of(name).value}. Values: those "
                               f"of {shared}.", dynamic_typing=True)
