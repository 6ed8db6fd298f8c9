# SPDX-License-Identifier: Apache-2.0
"""One camera of the node: its topics and services and, while a model is loaded, its way to a map."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING

import rclpy
from diagnostic_msgs.msg import DiagnosticStatus
from geometry_msgs.msg import PoseWithCovarianceStamped
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.event_handler import QoSRequestedIncompatibleQoSInfo, SubscriptionEventCallbacks
from rclpy.qos import qos_policy_name_from_kind
from rclpy.subscription import Subscription
from rclpy.topic_endpoint_info import TopicEndpointInfo

from lingbot_map_ros.ros import diagnostics, interfaces
from lingbot_map_ros.ros.diagnostics import Interval, Monitor
from lingbot_map_ros.ros.parameters import Parameters
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.services import NotRunning, Services
from lingbot_map_ros.ros.worker import Inbox, Mailbox, Worker

if TYPE_CHECKING:
    from lingbot_map_ros.ros.camera_info import CameraInfos
    from lingbot_map_ros.ros.loaded_model import LoadedModel
    from lingbot_map_ros.ros.mapper import Mapper
    from lingbot_map_ros.ros.metric_scale import MetricScale
    from lingbot_map_ros.ros.outputs import Outputs
    from lingbot_map_ros.ros.pipeline import Arrival, Pipeline
    from lingbot_map_ros.ros.transform_listener import TransformListener

PROFILE_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")


class Channel:
    """Makes, connects and takes down what serves one camera. For the threads that change the node's state."""

    def __init__(self, scope: Scope, inbox: Inbox[Arrival]) -> None:
        """Offer what lasts as long as the node: services, the tracking state and events. Images go to `inbox`."""
        self.scope = scope
        self.mailbox = Mailbox(inbox, lambda arrival: self.pipeline.process(arrival))
        self.monitor = Monitor()
        self.reports = Reports(scope)
        self.mapper: Mapper | None = None
        self.outputs: Outputs | None = None
        self.pipeline: Pipeline | None = None
        self.camera_infos: CameraInfos | None = None
        self.scale: MetricScale | None = None
        self._worker: Worker[Arrival] | None = None
        self._images = MutuallyExclusiveCallbackGroup()  # one after the other, in their order
        self._subscriptions: list[Subscription] = []
        self._services = Services(scope, self._running)

    def load(self, model: LoadedModel, transforms: TransformListener) -> None:
        """Reserve the camera's memory, run the model once and create the publishers.

        Raises the errors of Mapper, and ParameterError for a publisher's QoS; `unload` then takes down what there is.
        """
        from lingbot_map_ros.ros.camera_info import CameraInfos
        from lingbot_map_ros.ros.mapper import Mapper
        from lingbot_map_ros.ros.metric_scale import MetricScale
        from lingbot_map_ros.ros.outputs import Outputs
        from lingbot_map_ros.ros.pipeline import Pipeline

        scope = self.scope
        self.mapper = Mapper(model, scope.parameters)
        self.scale = MetricScale(scope)
        self.outputs = Outputs(scope, transforms)
        self.camera_infos = CameraInfos(scope)
        self.pipeline = Pipeline(scope, self.mapper, self.outputs, self.reports, self.monitor, self.camera_infos,
                                 transforms, self.scale, self.mailbox)

    def start(self, worker: Worker[Arrival]) -> None:
        """Let the worker serve this camera from now on."""
        self._worker = worker
        worker.submit(self.pipeline.apply_parameters)  # those that changed while the model was loaded

    def subscribe(self) -> None:
        """Listen and publish from now on. Raises ParameterError for a subscription's QoS."""
        self.mailbox.clear()  # of what arrived while the last subscription went
        self.monitor.activated()
        self.pipeline.is_active = True
        images = interfaces.IMAGES[self.scope.parameters.image_transport]
        events = SubscriptionEventCallbacks(incompatible_qos=self._warn_of_qos)
        for topic, receive, name, options in (
            (images, self.pipeline.receive, self.scope.image_topic, {"event_callbacks": events}),
            (interfaces.CAMERA_INFO, self.camera_infos.receive, self.camera_infos.topic, {}),
            (interfaces.INITIAL_POSE, self._on_initial_pose, "", {}),
        ):
            self._subscriptions.append(self.scope.topic(topic).create(
                self.scope.node.create_subscription, receive, name=name, callback_group=self._images, **options))
        self.scope.logger.info(f"waiting for images on {self.scope.image_topic}")

    def pause(self) -> None:
        """Stop listening and publishing; the sequence and its map stay."""
        while self._subscriptions:
            self.scope.node.destroy_subscription(self._subscriptions.pop())
        if self._worker is not None:
            self.mailbox.clear()
            self._worker.submit(self.pipeline.pause).result()  # the frame in work is still published

    def unload(self) -> None:
        """Take down what `load` made, after the worker has ended."""
        self._worker = None
        if self.outputs is not None:
            self.outputs.destroy()
        self.mapper = self.outputs = self.pipeline = self.camera_infos = self.scale = None

    def close(self) -> None:
        """Finish the services' requests."""
        self._services.close()

    def check(self, after: Parameters, before: Parameters) -> None:
        """Raise ValueError, with the reason, for parameters that the model does not take. For any thread."""
        mapper = self.mapper
        if mapper is not None:
            mapper.check(after, before)

    def apply_parameters(self) -> None:
        """Let changed parameters take effect from the next image on."""
        worker, pipeline = self._worker, self.pipeline
        if worker is not None:
            worker.submit(pipeline.apply_parameters)

    def report(
        self, node: str, hardware: str, is_active: bool, clock_hint: str
    ) -> tuple[list[DiagnosticStatus], Interval]:
        """Return the states of the camera, its cache and tracking, and what happened since the last call.

        Warns of silence; `clock_hint` is what simulated time may have to do with it.
        """
        scope, monitor, mapper, pipeline, infos = (
            self.scope, self.monitor, self.mapper, self.pipeline, self.camera_infos)
        parameters, topic = scope.parameters, scope.image_topic
        counts, interval = monitor.report()
        silence, timeout = monitor.silence, parameters.image_timeout
        publishers = scope.node.get_publishers_info_by_topic(topic)
        if is_active and silence > timeout:
            reason = _why_silent(publishers, parameters.image_transport) + clock_hint
            scope.logger.warning(f"no image on {topic} for {silence:.0f} s: {reason}", throttle_duration_sec=30.0)
        statuses = [
            diagnostics.camera_status(
                node, scope.part("camera"), topic, is_active, len(publishers), silence, monitor.repeats, timeout,
                self.mailbox.displaced, pipeline.image_size if pipeline is not None else None, counts, interval,
                infos.problem if infos is not None and parameters.calibration != "off" else "",
                diagnostics.intrinsics_values(infos.topic, mapper.focal_lengths) if infos and mapper else {}),
            diagnostics.cache_status(
                node, scope.part("cache"), hardware, pipeline.state_values if pipeline is not None else None,
                mapper.model.config.trained_frames if mapper is not None else 0),
        ]
        if pipeline is not None:
            pipeline.report_tracking()  # the worker does so, too, unless the model hangs
            statuses.append(diagnostics.tracking_status(
                node, scope.part("tracking"), topic, pipeline.tracking,
                diagnostics.tracking_values(counts, monitor.hand_over)))
        return statuses, interval

    def _running(self) -> tuple[Worker, Pipeline]:
        worker, pipeline = self._worker, self.pipeline
        if worker is None or pipeline is None:
            raise NotRunning(f"there is no model: the node is {self.scope.node.state_name}")
        return worker, pipeline

    def _on_initial_pose(self, message: PoseWithCovarianceStamped) -> None:
        try:
            frame, map_frame = message.header.frame_id.lstrip("/"), self.scope.parameters.frame("map_frame")
            if frame not in ("", map_frame):
                raise ValueError(f"header.frame_id is {frame!r}: expected {map_frame!r}")
            from lingbot_map_ros.ros.messages import pose_matrix

            T_map_body = pose_matrix(message.pose.pose.position, message.pose.pose.orientation)
        except ValueError as error:
            topic = self.scope.resolve(interfaces.INITIAL_POSE)
            self.scope.logger.warning(f"a message on {topic} has no effect: {error}", throttle_duration_sec=5.0)
            return
        if self._worker is not None:
            self._worker.submit(lambda: self.pipeline.place(T_map_body))

    def _warn_of_qos(self, event: QoSRequestedIncompatibleQoSInfo) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self.scope.logger.warning(f"a publisher on {self.scope.image_topic} is not received: its {policy} does not fit "
                                  f"the subscription's (by default {interfaces.IMAGE.qos_text})")


def _why_silent(publishers: list[TopicEndpointInfo], transport: str) -> str:
    """Return what can be told of a topic's publishers when no image comes from them, and what may help."""
    expected = interfaces.IMAGES[transport].type_name
    count = diagnostics.publishers_text(len(publishers))
    fitting = [info.qos_profile for info in publishers if info.topic_type == expected]
    if not publishers:
        return f"{count}; ros2 topic list -t shows where there are images ({expected}), remap image to that"
    if not fitting:
        types = ", ".join(sorted({info.topic_type for info in publishers}))
        other = next((name for name, topic in interfaces.IMAGES.items() if topic.type_name == types), None)
        hint = f"; set image_transport to {other}" if other else ""
        return f"{count} of {types}, which is not read: expected {expected}{hint}"
    qualities = sorted({f"{qos.reliability.name}, {qos.durability.name}".lower().replace("_", " ") for qos in fitting})
    text = f"{count}, of {expected} ({'; '.join(qualities)}): it has stopped, or its images are lost on the way"
    if "fastrtps" in rclpy.get_rmw_implementation_identifier():  # Fast DDS
        variable = next((name for name in PROFILE_VARIABLES if name in os.environ), None)
        text += (f"; is {variable} set for the camera's driver, too (see README)?" if variable else
                 f". Large ones are, unless {PROFILE_VARIABLES[0]} is set, on jazzy {PROFILE_VARIABLES[1]} (see "
                 "README)")
    return text
