# SPDX-License-Identifier: Apache-2.0
"""A camera's publishers: what is sent of a mapped frame, and when."""
from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseArray, PoseStamped
from nav_msgs.msg import Path
from rclpy.event_handler import PublisherEventCallbacks, QoSOfferedIncompatibleQoSInfo
from rclpy.lifecycle import LifecyclePublisher
from rclpy.qos import qos_policy_name_from_kind
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header

from lingbot_map_ros.mapping.alignment import Alignment
from lingbot_map_ros.mapping.occupancy import Occupancy
from lingbot_map_ros.mapping.transforms import TransformError
from lingbot_map_ros.mapping.uncertainty import Uncertainty, uncertainty
from lingbot_map_ros.mapping.visual_odometry import VisualOdometry
from lingbot_map_ros.mapping.voxel_map import MapPoints
from lingbot_map_ros.ros import image_messages, interfaces, messages
from lingbot_map_ros.ros.mapped_frame import MappedFrame
from lingbot_map_ros.ros.mapper import Mapper
from lingbot_map_ros.ros.parameter_table import ParameterError
from lingbot_map_ros.ros.parameters import Parameters
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.transform_listener import TransformListener


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


class _NoPublisher:
    """Stands for an output that is switched off: nobody listens."""

    topic_name = ""

    def publish(self, message: object) -> None:
        """Send nothing."""

    def get_subscription_count(self) -> int:
        """Return 0."""
        return 0


class _Track:
    """Publishes a growing list of poses at its own pace, and whenever there are more listeners: it is not latched."""

    def __init__(self, publisher: LifecyclePublisher, build: Callable[..., Path | PoseArray], max_length: int) -> None:
        self._publisher = publisher
        self._build = build  # (poses, stamp, frame) -> message
        self._pace = _Pace()
        self._listeners = 0
        self._version = 0
        self.clear(max_length)

    def clear(self, max_length: int) -> None:
        # In the session's map, and as it is given out: a message that is built at its pace would hold up an image.
        self._poses: deque[tuple[np.ndarray, PoseStamped]] = deque(maxlen=max_length)
        self._version += 1

    def append(self, T_map_camera: np.ndarray, pose: PoseStamped) -> None:
        self._poses.append((T_map_camera, pose))
        self._version += 1

    def align(self, alignment: Alignment) -> None:
        for T, message in self._poses:
            message.pose = messages.pose(alignment.pose(T))
        self._version += 1

    def publish_due(self, period: float, stamp: Time, frame: str) -> None:
        listeners = self._publisher.get_subscription_count()
        if listeners > self._listeners:
            self._pace.renew()
        self._listeners = listeners
        if not (listeners and self._pace.due(period, self._version)):
            return
        poses = [pose for _, pose in self._poses]
        for pose in poses:
            if pose.header.frame_id != frame:  # it was renamed
                pose.header.frame_id = frame
        self._publisher.publish(self._build(poses, stamp, frame))
        self._pace.done(self._version)


class Outputs:
    """Publishes poses at once, paths and the map at their own pace. All but poses are built for subscribers only."""

    def __init__(self, scope: Scope, transforms: TransformListener) -> None:
        """Create the publishers; `transforms` are the robot's. Raises ParameterError for a QoS that cannot be."""
        self._scope = scope
        self._transforms = transforms
        self._publishers: list[LifecyclePublisher] = []
        self._tf = None  # made when it is first needed: where it is off, no publisher shows up on /tf
        self._tf_warned = False
        self.camera_frame_in_use = ""  # of the newest frame
        try:
            self._create()
        except ParameterError:
            self.destroy()
            raise

    def _create(self) -> None:
        scope = self._scope
        self._odometry = self._publisher(interfaces.ODOMETRY)
        self._visual_odometry_publisher = self._publisher(interfaces.VISUAL_ODOMETRY)
        self._visual_odometry = VisualOdometry()
        self._pose = self._publisher(interfaces.POSE)
        path, keyframes = (self._publisher(topic) for topic in (interfaces.PATH, interfaces.KEYFRAMES))
        length = scope.parameters.max_path_length
        self._path = _Track(path, messages.path, length)
        self._keyframes = _Track(keyframes, messages.pose_array, length)
        self._points = self._publisher(interfaces.POINTS)
        self._map = self._publisher(interfaces.MAP)
        self._map_updates = self._publisher(interfaces.MAP_UPDATES)
        self._grid = self._publisher(interfaces.GRID)
        self._occupancy = Occupancy(length)
        self._depth = self._publisher(interfaces.DEPTH)
        self._depth_info = self._publisher(interfaces.DEPTH_INFO)
        self._confidence = self._publisher(interfaces.CONFIDENCE)
        self._model_image = self._publisher(interfaces.MODEL_IMAGE)
        if scope.parameters.publish_tf and interfaces.TF.message is not None:
            self._tf = interfaces.TF.create(scope.node.create_publisher)
        self._map_pace, self._updates_pace, self._grid_pace = _Pace(), _Pace(), _Pace()
        self._sent: tuple[object, int] = (None, 0)  # of updates: what they are relative to, insertions
        self._stamp = Time()  # of the newest frame
        self._sequence = 0
        self._alignment = Alignment()  # of what was published

    def destroy(self) -> None:
        """Take the publishers down."""
        for publisher in self._publishers:
            self._scope.node.destroy_lifecycle_publisher(publisher)
        if self._tf is not None:
            self._scope.node.destroy_publisher(self._tf)

    def publish_pose(self, frame: MappedFrame, alignment: Alignment) -> None:
        """Publish a frame's pose in all its forms, as the alignment maps it."""
        parameters = self._scope.parameters
        stamp, map_frame = frame.header.stamp, parameters.frame("map_frame")
        camera_frame = self.camera_frame_in_use = self.camera_frame(frame.header)
        self._align(alignment)
        T, twist = alignment.pose(frame.T_map_camera), frame.twist
        if twist is not None:
            twist = alignment.scale * twist[0], twist[1]
        if parameters.publish_tf:
            self._publish_transform(T, stamp, map_frame, camera_frame, parameters)
        deviations = _deviations(frame, alignment.scale, alignment.scale * frame.path_length, parameters)
        self._odometry.publish(messages.odometry(T, twist, deviations, stamp, map_frame, camera_frame))
        self._publish_visual_odometry(frame, T, alignment.scale, camera_frame, parameters)
        pose = messages.pose_stamped(T, stamp, map_frame)
        self._pose.publish(pose)
        self._path.append(frame.T_map_camera, pose)
        if frame.result.is_keyframe:
            self._keyframes.append(frame.T_map_camera, pose)
        self._stamp = stamp

    def publish_points(self, frame: MappedFrame, alignment: Alignment) -> None:
        """Publish what a frame whose pose was published shows: images and, of a keyframe, points."""
        parameters = self._scope.parameters
        stamp, map_frame = frame.header.stamp, parameters.frame("map_frame")
        if frame.points is not None and self._points.get_subscription_count():
            self._points.publish(_cloud(alignment.points(frame.points), stamp, map_frame))
        if frame.points is not None and parameters.publish_grid:
            heights = (alignment.height(alignment.unit * z)
                       for z in (parameters.grid_min_height, parameters.grid_max_height))
            xyz, position = frame.points.xyz.double(), frame.T_map_camera[:3, 3]
            self._occupancy.add(alignment.level(xyz), alignment.level(position), *heights)
        self._publish_images(frame, parameters.confidence_threshold, self.camera_frame(frame.header), alignment.scale)

    def publish_due(self, mapper: Mapper) -> None:
        """Publish the paths and the map if they have changed, their periods are over and somebody listens."""
        parameters = self._scope.parameters
        self._align(mapper.alignment)
        for track in (self._path, self._keyframes):
            track.publish_due(parameters.path_period, self._stamp, parameters.frame("map_frame"))
        if self._map.get_subscription_count():
            self._publish_map(mapper, parameters.map_period)
        if self._map_updates.get_subscription_count():
            self._publish_updates(mapper, parameters)
        if parameters.publish_grid and self._grid.get_subscription_count():
            self._publish_grid(mapper, parameters)

    def publish_last_map(self, mapper: Mapper) -> None:
        """Publish the map if it has changed, though nobody listens: it is what those get who come while we pause."""
        self._publish_map(mapper, period=0.0)

    def reset_odometry(self) -> None:
        """Let the visual odometry start anew, too, with the next frame."""
        self._visual_odometry.reset()

    def start_sequence(self) -> None:
        """Note that map and path were cleared, so that subscribers get the empty ones."""
        self._sequence += 1
        for track in (self._path, self._keyframes):
            track.clear(self._scope.parameters.max_path_length)
        self._occupancy.reset()

    def _align(self, alignment: Alignment) -> None:
        if alignment is not self._alignment:
            for track in (self._path, self._keyframes):
                track.align(alignment)
            self._alignment = alignment

    def _publish_visual_odometry(
        self, frame: MappedFrame, T_map_camera: np.ndarray, scale: float, camera_frame: str, parameters: Parameters
    ) -> None:
        odometry, odom_frame, stamp = self._visual_odometry, parameters.frame("odom_frame"), frame.header.stamp
        twist = None
        if odometry.T_odom_camera is None:
            try:
                odometry.T_odom_camera = T_map_camera if not odom_frame else self._transforms.lookup(
                    odom_frame, camera_frame, messages.nanoseconds(stamp), parameters.transform_tolerance)
            except TransformError as error:
                self._scope.logger.warning(
                    f"{self._visual_odometry_publisher.topic_name} starts when the robot's odometry is known: {error}",
                    throttle_duration_sec=30.0)
                return
        else:
            motion = odometry.move(frame.motion, scale)
            if motion is not None and frame.seconds > 0:
                twist = messages.twist_between(np.eye(4), motion, frame.seconds)
        self._visual_odometry_publisher.publish(messages.odometry(
            odometry.T_odom_camera, twist, _deviations(frame, scale, odometry.path_length, parameters), stamp,
            odom_frame or parameters.own_frame(interfaces.DEFAULT_ODOM_FRAME), camera_frame))

    def _publish_images(
        self, frame: MappedFrame, confidence_threshold: float, camera_frame: str, scale: float
    ) -> None:
        view, result = frame.view, frame.result
        header = Header(stamp=frame.header.stamp, frame_id=camera_frame)
        if self._depth.get_subscription_count():
            depth = scale * view.depth(result, confidence_threshold)
            self._depth.publish(image_messages.image(depth.cpu().numpy(), header))
        if self._depth_info.get_subscription_count():
            intrinsics = view.to_camera_intrinsics(result.intrinsics.double().cpu().numpy())
            self._depth_info.publish(image_messages.camera_info(intrinsics, view.camera_size, header))
        if self._confidence.get_subscription_count():
            self._confidence.publish(image_messages.image(view.confidence(result).cpu().numpy(), header))
        if self._model_image.get_subscription_count():
            rgb = (result.image * 255).round().clamp(0, 255).byte().permute(1, 2, 0)
            self._model_image.publish(image_messages.image(rgb.cpu().numpy(), header))

    def _publish_map(self, mapper: Mapper, period: float) -> None:
        version = (self._sequence, mapper.map.voxels.version, mapper.alignment, id(mapper.loaded))
        if self._map_pace.due(period, version):
            self._map.publish(_cloud(mapper.map_points(), self._stamp, self._scope.parameters.frame("map_frame")))
            self._map_pace.done(version)

    def _publish_updates(self, mapper: Mapper, parameters: Parameters) -> None:
        voxels, alignment = mapper.map.voxels, mapper.alignment
        content = (self._sequence, alignment)
        version = (content, voxels.version)
        if voxels.insertions == 0 or not self._updates_pace.due(parameters.map_updates_period, version):
            return
        since = self._sent[1] if self._sent[0] == content else 0
        points = alignment.points(voxels.points(since))
        self._map_updates.publish(_cloud(points, self._stamp, parameters.frame("map_frame")))
        self._sent = content, voxels.insertions
        self._updates_pace.done(version)

    def _publish_grid(self, mapper: Mapper, parameters: Parameters) -> None:
        bounds = tuple(mapper.alignment.unit * length for length in (
            parameters.grid_resolution, parameters.grid_min_height, parameters.grid_max_height))
        version = (self._sequence, mapper.map.voxels.version, mapper.alignment, id(mapper.loaded), bounds)
        if self._grid_pace.due(parameters.map_period, version):
            grid = self._occupancy.grid(mapper.map_points().xyz.cpu().numpy(), mapper.alignment, *bounds)
            self._grid.publish(messages.occupancy_grid(grid, self._stamp, parameters.frame("map_frame")))
            self._grid_pace.done(version)

    def _publisher(self, topic: interfaces.Topic) -> LifecyclePublisher | _NoPublisher:
        if topic.name.removeprefix("~/") in self._scope.parameters.disabled_outputs:
            return _NoPublisher()
        own = self._scope.topic(topic)

        def warn(event: QoSOfferedIncompatibleQoSInfo) -> None:
            self._scope.logger.warning(
                f"a subscription to {self._scope.resolve(topic)} receives nothing: it asks for another "
                f"{qos_policy_name_from_kind(event.last_policy_kind)} than is offered (by default {own.qos_text})")
        publisher = own.create(
            self._scope.node.create_lifecycle_publisher, event_callbacks=PublisherEventCallbacks(incompatible_qos=warn))
        self._publishers.append(publisher)
        return publisher

    def camera_frame(self, header: Header) -> str:
        """Return the name of the camera's frame for an image's header, as TF takes it."""
        parameters = self._scope.parameters
        if parameters.camera_frame:
            return parameters.frame("camera_frame")
        given = header.frame_id
        name = "_".join(given.lstrip("/").split())  # what TF takes
        if name in ("", parameters.frame("map_frame")):
            name = parameters.own_frame(interfaces.DEFAULT_CAMERA_FRAME)
        if name != given:
            self._scope.logger.warning(
                f"the images' header.frame_id is {given[:80]!r}: their frame is called {name[:80]}; set the camera "
                "driver's frame or the parameter camera_frame", throttle_duration_sec=60.0)
        return name

    def _publish_transform(
        self, T_map_camera: np.ndarray, stamp: Time, map_frame: str, camera_frame: str, parameters: Parameters
    ) -> None:
        odom_frame = parameters.frame("odom_frame")
        if not odom_frame:
            self._publish_tf(messages.transform_stamped(T_map_camera, stamp, map_frame, camera_frame))
            return
        tolerance, stamp_ns = parameters.transform_tolerance, messages.nanoseconds(stamp)
        try:
            T_odom_camera = self._transforms.lookup(odom_frame, camera_frame, stamp_ns, tolerance)
        except TransformError as error:
            self._scope.logger.warning(f"{map_frame} -> {odom_frame} is not published: {error}",
                                       throttle_duration_sec=5.0)
            return
        T_map_odom = T_map_camera @ np.linalg.inv(T_odom_camera)
        valid_until = messages.time(stamp_ns + int(tolerance * 1e9))
        self._publish_tf(messages.transform_stamped(T_map_odom, valid_until, map_frame, odom_frame))

    def _publish_tf(self, transform) -> None:
        if interfaces.TF.message is None:
            if not self._tf_warned:
                self._scope.logger.warning(
                    "publish_tf is on, but tf2_msgs cannot be imported: /tf is not published")
                self._tf_warned = True
            return
        if self._tf is None:
            try:
                self._tf = interfaces.TF.create(self._scope.node.create_publisher)
            except ParameterError as error:
                self._scope.logger.warning(f"/tf is not published: {error}", throttle_duration_sec=30.0)
                return
        self._tf.publish(interfaces.TF.message(transforms=[transform]))


def pack(points: MapPoints) -> array:
    """Return points as the bytes of messages.POINT_TYPE. Packed where they are: a GPU's are copied once, to there."""
    red, green, blue = points.rgb.int().unbind(1)
    xyz, confidence = (values.float().contiguous().view(torch.int32) for values in (points.xyz, points.confidence))
    columns = torch.cat([xyz, torch.stack([red << 16 | green << 8 | blue, confidence], 1)], 1)
    data = array("B", b"\0") * columns.nbytes  # the one type that rclpy takes without looking at every byte
    if data:
        torch.frombuffer(data, dtype=torch.int32).copy_(columns.flatten())
    return data


def _cloud(points: MapPoints, stamp: Time, frame_id: str) -> PointCloud2:
    return messages.point_cloud(pack(points), stamp, frame_id)


def _deviations(frame: MappedFrame, scale: float, path_length: float, parameters: Parameters) -> Uncertainty | None:
    """Return those of a frame's pose after a path of a length, in the published unit; None: not asked for."""
    noise, drift = parameters.covariance_noise, parameters.covariance_drift
    if not (noise or drift):
        return None
    return uncertainty(scale * frame.median_depth, path_length, frame.seconds, noise, drift, frame.is_degraded)
