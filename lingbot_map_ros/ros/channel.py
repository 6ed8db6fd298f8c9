# SPDX-License-Identifier: Apache-2.0
"""One camera of the node: its topics and services and, while a model is loaded, its way to a map."""
from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

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
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.services import NotRunning, Services
from lingbot_map_ros.ros.worker import Inbox, Mailbox, Worker

if TYPE_CHECKING:
    from lingbot_map_ros.ros.camera_info import CameraInfos
    from lingbot_map_ros.ros.intake import Arrival, Intake
    from lingbot_map_ros.ros.loaded_model import LoadedModel
    from lingbot_map_ros.ros.mapper import Mapper
    from lingbot_map_ros.ros.metric_scale import MetricScale, RobotOdometry
    from lingbot_map_ros.ros.outputs import Outputs
    from lingbot_map_ros.ros.pipeline import Pipeline
    from lingbot_map_ros.ros.placement import Placement
    from lingbot_map_ros.ros.transform_listener import TransformListener

PROFILE_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")


class Loaded(NamedTuple):
    """What there is of a channel while a model is loaded: all of it or nothing."""

    worker: Worker[Arrival]
    intake: Intake
    mapper: Mapper
    pipeline: Pipeline
    camera_infos: CameraInfos
    scale: MetricScale
    outputs: Outputs
    placement: Placement


class Channel:
    """Makes, connects and takes down what serves one camera.

    `loaded` is replaced as a whole, by the threads that change the node's state; all others read it once and go on with
    what they found.
    """

    def __init__(self, scope: Scope, inbox: Inbox[Arrival], state: Callable[[], str]) -> None:
        """Offer what lasts as long as the node: services, the tracking state and events.

        Images go to `inbox`; `state` returns the node's.
        """
        self.scope = scope
        self.mailbox = Mailbox(inbox, self._process)
        self.monitor = Monitor()
        self.reports = Reports(scope)
        self.loaded: Loaded | None = None
        self._state = state
        self._images = MutuallyExclusiveCallbackGroup()  # one after the other, in their order
        self._subscriptions: list[Subscription] = []
        self._services = Services(scope, self._running)

    @property
    def mapper(self) -> Mapper | None:
        """The camera's session and map; None without a model."""
        loaded = self.loaded
        return None if loaded is None else loaded.mapper

    @property
    def pipeline(self) -> Pipeline | None:
        """The camera's way to its outputs; None without a model."""
        loaded = self.loaded
        return None if loaded is None else loaded.pipeline

    def load(
        self, model: LoadedModel, worker: Worker[Arrival], transforms: TransformListener, odometry: RobotOdometry,
        catch_up_others: Callable[[], None],
    ) -> None:
        """Reserve the camera's memory, run the model once and create the publishers.

        catch_up_others: calls `catch_up` of the other cameras' channels.
        Raises the errors of Mapper, and ParameterError for a publisher's QoS; then there is nothing to unload.
        """
        from lingbot_map_ros.ros.camera_info import CameraInfos
        from lingbot_map_ros.ros.intake import Intake
        from lingbot_map_ros.ros.mapper import Mapper
        from lingbot_map_ros.ros.metric_scale import MetricScale
        from lingbot_map_ros.ros.outputs import Outputs
        from lingbot_map_ros.ros.pipeline import Pipeline
        from lingbot_map_ros.ros.placement import Placement

        scope = self.scope
        mapper, scale, camera_infos = Mapper(model, scope.parameters), MetricScale(scope, odometry), CameraInfos(scope)
        outputs, intake = Outputs(scope, transforms), Intake(scope, self.monitor, self.mailbox)
        placement = Placement(scope, mapper, outputs, self.reports, transforms)
        pipeline = Pipeline(scope, intake, mapper, outputs, self.reports, self.monitor, camera_infos, placement, scale,
                            catch_up_others)
        self.loaded = Loaded(worker, intake, mapper, pipeline, camera_infos, scale, outputs, placement)
        self.apply_parameters()  # those that changed while the model was loaded

    def subscribe(self) -> None:
        """Listen and publish from now on. Raises ParameterError for a subscription's QoS."""
        loaded = self.loaded
        camera_infos = loaded.camera_infos
        self.mailbox.clear()  # of what arrived while the last subscription went
        self.monitor.activated()
        loaded.pipeline.is_active = True
        images = interfaces.IMAGES[self.scope.parameters.image_transport]
        events = SubscriptionEventCallbacks(incompatible_qos=self._warn_of_qos)
        for topic, receive, name, options in (
            (images, loaded.intake.receive, self.scope.image_topic, {"event_callbacks": events}),
            (interfaces.CAMERA_INFO, camera_infos.receive, camera_infos.topic, {}),
            (interfaces.INITIAL_POSE, self._on_initial_pose, "", {}),
        ):
            self._subscriptions.append(self.scope.topic(topic).create(
                self.scope.node.create_subscription, receive, name=name, callback_group=self._images, **options))
        self.scope.logger.info(f"waiting for images on {self.scope.image_topic}")

    def pause(self) -> Future | None:
        """Stop listening, and publishing once the frame in work is published, which the future waits for.

        The sequence and its map stay. None: there is nothing to wait for.
        """
        while self._subscriptions:
            self.scope.node.destroy_subscription(self._subscriptions.pop())
        self.mailbox.clear()
        loaded = self.loaded
        return None if loaded is None else loaded.worker.submit(loaded.pipeline.pause)

    def unload(self) -> None:
        """Take down what `load` made, after the worker has ended."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.outputs.destroy()

    def close(self) -> None:
        """Finish the services' requests."""
        self._services.close()

    def idle(self) -> None:
        """Publish what has its own pace. For the worker."""
        loaded = self.loaded
        if loaded is not None:
            loaded.pipeline.idle()

    def catch_up(self) -> None:
        """Map and publish what was left for later. For the worker."""
        loaded = self.loaded
        if loaded is not None:
            loaded.pipeline.catch_up()

    def apply_parameters(self) -> None:
        """Let changed parameters take effect from the next image on."""
        loaded = self.loaded
        if loaded is not None:
            loaded.worker.submit(loaded.pipeline.apply_parameters)

    def report(self, hardware: str, clock_hint: str) -> tuple[list[DiagnosticStatus], Interval]:
        """Return the states of the camera, its cache and tracking, and what happened since the last call.

        Warns of silence; `clock_hint` is what simulated time may have to do with it.
        """
        scope, monitor, loaded, is_active = self.scope, self.monitor, self.loaded, self._state() == "active"
        parameters, topic = scope.parameters, scope.image_topic
        counts, interval = monitor.report()
        silence, timeout = monitor.silence, parameters.image_timeout
        publishers = scope.node.get_publishers_info_by_topic(topic)
        if is_active and silence > timeout:
            name = scope.topic(interfaces.IMAGE).name
            reason = _why_silent(publishers, parameters.image_transport, name) + clock_hint
            scope.logger.warning(f"no image on {topic} for {silence:.0f} s: {reason}", throttle_duration_sec=30.0)
        calibration_problem, values, image_size, state_values, trained_frames = "", {}, None, None, 0
        if loaded is not None:
            image_size, state_values = loaded.pipeline.image_size, loaded.pipeline.state_values
            trained_frames = loaded.mapper.model.config.trained_frames
            values = diagnostics.intrinsics_values(loaded.camera_infos.topic, loaded.mapper.focal_lengths)
            if parameters.calibration != "none":
                calibration_problem = loaded.camera_infos.problem
        statuses = [
            diagnostics.camera_status(
                scope.node_name, scope.part("camera"), topic, is_active, len(publishers), silence, monitor.repeats,
                timeout, self.mailbox.displaced, image_size, counts, interval, calibration_problem, values),
            diagnostics.cache_status(scope.node_name, scope.part("cache"), hardware, state_values, trained_frames),
        ]
        if loaded is not None:
            loaded.pipeline.report_tracking()  # the worker does so, too, unless the model hangs
            statuses.append(diagnostics.tracking_status(
                scope.node_name, scope.part("tracking"), topic, loaded.pipeline.tracking,
                diagnostics.tracking_values(counts, monitor.hand_over)))
        return statuses, interval

    def _process(self, arrival: Arrival) -> None:
        loaded = self.loaded
        if loaded is not None:
            loaded.pipeline.process(arrival)

    def _running(self) -> tuple[Worker, Pipeline]:
        loaded = self.loaded
        if loaded is None:
            raise NotRunning(f"there is no model: the node is {self._state()}")
        return loaded.worker, loaded.pipeline

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
        loaded = self.loaded
        if loaded is not None:
            loaded.worker.submit(lambda: loaded.placement.place(T_map_body))

    def _warn_of_qos(self, event: QoSRequestedIncompatibleQoSInfo) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self.scope.logger.warning(f"a publisher on {self.scope.image_topic} is not received: its {policy} does not fit "
                                  f"the subscription's (by default {interfaces.IMAGE.qos_text})")


def _why_silent(publishers: list[TopicEndpointInfo], transport: str, name: str) -> str:
    """Return what can be told of a topic's publishers when no image comes from them, and what may help.

    name: the topic's, before remapping.
    """
    expected = interfaces.IMAGES[transport].type_name
    count = diagnostics.publishers_text(len(publishers))
    fitting = [info.qos_profile for info in publishers if info.topic_type == expected]
    if not publishers:
        return f"{count}; ros2 topic list -t shows where there are images ({expected}), remap {name} to that"
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
