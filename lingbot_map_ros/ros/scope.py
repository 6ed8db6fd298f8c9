# SPDX-License-Identifier: Apache-2.0
"""One camera's view of the node: its names, its parameters and its log."""
from __future__ import annotations

from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode

from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.interfaces import ServiceEntry, Topic
from lingbot_map_ros.ros.node_parameters import NodeParameters
from lingbot_map_ros.ros.parameters import Parameters


class Scope:
    """What the parts of one camera's channel need of the node. For any thread."""

    def __init__(self, node: LifecycleNode, camera: str, parameters: Callable[[], NodeParameters]) -> None:
        """`camera`: its name, empty for a single one; `parameters` returns those in force."""
        self.node = node
        self.node_name = node.get_fully_qualified_name().lstrip("/")  # as diagnostics have it
        self.camera = camera
        logger = node.get_logger()
        self.logger = logger.get_child(camera) if camera else logger
        self._parameters = parameters

    @property
    def parameters(self) -> Parameters:
        """The camera's parameters in force."""
        return self._parameters().of(self.camera)

    def topic(self, topic: Topic) -> Topic:
        """Return the camera's own topic for one of the table."""
        return topic.of(self.camera)

    def service(self, service: ServiceEntry) -> ServiceEntry:
        """Return the camera's own service for one of the table."""
        return service.of(self.camera)

    def resolve(self, topic: Topic) -> str:
        """Return the full name of the camera's own topic for one of the table."""
        return self.node.resolve_topic_name(self.topic(topic).name)

    def part(self, name: str) -> str:
        """Return the name that a part of what serves the camera has in diagnostics, such as cache or front/cache."""
        return f"{self.camera}/{name}" if self.camera else name

    @property
    def image_topic(self) -> str:
        """Full name of the topic that images come on."""
        name, suffix = self.resolve(interfaces.IMAGE), "/compressed"
        return name + suffix if self.parameters.image_transport == "compressed" and not name.endswith(suffix) else name

    @property
    def camera_info_topic(self) -> str:
        """Full name of the calibration's topic: what `camera_info` was remapped to, else beside the images' topic.

        As image_transport has it, the images' topic is that of raw images, for compressed ones too.
        """
        resolved, name = self.resolve(interfaces.CAMERA_INFO), self.topic(interfaces.CAMERA_INFO).name
        if resolved != self.node.resolve_topic_name(name, only_expand=True):
            return resolved
        folder = self.resolve(interfaces.IMAGE).removesuffix("/compressed").rsplit("/", 1)[0]
        return f"{folder}/{interfaces.CAMERA_INFO.name}"
