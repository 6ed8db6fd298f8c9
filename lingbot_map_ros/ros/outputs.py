# SPDX-License-Identifier: Apache-2.0
"""The node's publishers: what is sent of a mapped frame, and when."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped
from rclpy.event_handler import PublisherEventCallbacks, QoSOfferedIncompatibleQoSInfo
from rclpy.lifecycle import LifecycleNode, LifecyclePublisher
from rclpy.qos import qos_policy_name_from_kind
from sensor_msgs.msg import PointCloud2

from lingbot_map_ros.mapping.voxel_map import MapPoints
from lingbot_map_ros.ros import interfaces, messages
from lingbot_map_ros.ros.mapper import MappedFrame, Mapper
from lingbot_map_ros.ros.parameters import Parameters


class _Pace:
    """Says when to publish what has a version: when that has changed, at most once a period."""

    def __init__(self) -> None:
        self._time = -float("inf")
        self._version: object = None

    def due(self, period: float, version: object) -> bool:
        """Say whether `version` is new and `period` seconds have passed."""
        return version != self._version and time.monotonic() - self._time >= period

    def renew(self) -> None:
        """Let even what was published be due when the period is over."""
        self._version = None

    def done(self, version: object) -> None:
        """Note that `version` was published now."""
        self._time, self._version = time.monotonic(), version


class Outputs:
    """Publishes poses at once, path and map at their own pace. Clouds and the path are built for subscribers only."""

    def __init__(self, node: LifecycleNode, parameters: Callable[[], Parameters]) -> None:
        """Create the publishers; `parameters` returns the current ones."""
        self._node = node
        self._parameters = parameters
        self._odometry = self._publisher(interfaces.ODOMETRY)
        self._pose = self._publisher(interfaces.POSE)
        self._path = self._publisher(interfaces.PATH)
        self._points = self._publisher(interfaces.POINTS)
        self._map = self._publisher(interfaces.MAP)
        self._tf = None  # made when it is first needed: where it is off, no publisher shows up on /tf
        self._tf_warned = False
        self._path_pace = _Pace()
        self._map_pace = _Pace()
        self._stamp = Time()  # of the newest frame
        self._sequence = 0
        self._appended = 0
        self._path_frame = ""  # of the poses
        self._path_listeners = 0
        self._path_poses = self._empty_path()

    def destroy(self) -> None:
        """Take the publishers down."""
        for publisher in (self._odometry, self._pose, self._path, self._points, self._map):
            self._node.destroy_lifecycle_publisher(publisher)
        if self._tf is not None:
            self._node.destroy_publisher(self._tf)

    def publish(self, frame: MappedFrame) -> None:
        """Publish a frame's pose and, of a keyframe, its points."""
        parameters = self._parameters()
        stamp, map_frame = frame.header.stamp, parameters.map_frame
        camera_frame = self._camera_frame(frame, parameters)
        T = frame.T_map_camera
        if parameters.publish_tf:
            self._publish_tf(messages.transform_stamped(T, stamp, map_frame, camera_frame))
        self._odometry.publish(messages.odometry(T, frame.twist, stamp, map_frame, camera_frame))
        pose = messages.pose_stamped(T, stamp, map_frame)
        self._pose.publish(pose)
        self._path_poses.append(pose)  # as it is: a path that is built at its pace would hold up an image
        if frame.points is not None and self._points.get_subscription_count():
            self._points.publish(_cloud(frame.points, stamp, map_frame))
        self._stamp = stamp
        self._appended += 1

    def publish_due(self, mapper: Mapper) -> None:
        """Publish the path and the map if they have changed, their periods are over and somebody listens.

        The path is also published when more listen than before, since it is not latched.
        """
        parameters, listeners = self._parameters(), self._path.get_subscription_count()
        if listeners > self._path_listeners:
            self._path_pace.renew()
        self._path_listeners = listeners
        version = (self._sequence, self._appended)
        if listeners and self._path_pace.due(parameters.path_period, version):
            self._publish_path(parameters.map_frame)
            self._path_pace.done(version)
        if self._map.get_subscription_count():
            self._publish_map(mapper, parameters.map_period)

    def publish_last_map(self, mapper: Mapper) -> None:
        """Publish the map if it has changed, though nobody listens: it is what those get who come while we pause."""
        self._publish_map(mapper, period=0.0)

    def start_sequence(self) -> None:
        """Note that map and path were cleared, so that subscribers get the empty ones."""
        self._sequence += 1
        self._path_poses = self._empty_path()

    def _empty_path(self) -> deque[PoseStamped]:
        return deque(maxlen=self._parameters().max_path_length)

    def _publish_path(self, map_frame: str) -> None:
        if map_frame != self._path_frame:  # it was renamed
            for pose in self._path_poses:
                pose.header.frame_id = map_frame
            self._path_frame = map_frame
        self._path.publish(messages.path(self._path_poses, self._stamp, map_frame))

    def _publish_map(self, mapper: Mapper, period: float) -> None:
        version = (self._sequence, mapper.map.voxels.version)
        if self._map_pace.due(period, version):
            self._map.publish(_cloud(mapper.map.voxels.points(), self._stamp, self._parameters().map_frame))
            self._map_pace.done(version)

    def _publisher(self, topic: interfaces.Topic) -> LifecyclePublisher:
        def warn(event: QoSOfferedIncompatibleQoSInfo) -> None:
            self._node.get_logger().warning(
                f"a subscription to {self._node.resolve_topic_name(topic.name)} receives nothing: it asks for another "
                f"{qos_policy_name_from_kind(event.last_policy_kind)} than is offered ({topic.qos_text})")
        return self._node.create_lifecycle_publisher(
            topic.message, topic.name, topic.qos, event_callbacks=PublisherEventCallbacks(incompatible_qos=warn))

    def _camera_frame(self, frame: MappedFrame, parameters: Parameters) -> str:
        if parameters.camera_frame:
            return parameters.camera_frame
        given = frame.header.frame_id
        name = "_".join(given.lstrip("/").split())  # what TF takes
        if name in ("", parameters.map_frame):
            name = interfaces.DEFAULT_CAMERA_FRAME
        if name != given:
            self._node.get_logger().warning(
                f"the images' header.frame_id is {given[:80]!r}: their frame is called {name[:80]}; set the camera "
                "driver's frame or the parameter camera_frame", throttle_duration_sec=60.0)
        return name

    def _publish_tf(self, transform) -> None:
        if interfaces.TF.message is None:
            if not self._tf_warned:
                self._node.get_logger().warning(
                    "publish_tf is on, but tf2_msgs cannot be imported: /tf is not published")
                self._tf_warned = True
            return
        if self._tf is None:
            self._tf = self._node.create_publisher(interfaces.TF.message, interfaces.TF.name, interfaces.TF.qos)
        self._tf.publish(interfaces.TF.message(transforms=[transform]))


def _cloud(points: MapPoints, stamp: Time, frame_id: str) -> PointCloud2:
    xyz, rgb, confidence = (values.cpu().numpy() for values in points)
    return messages.point_cloud(xyz, rgb, confidence, stamp, frame_id)
