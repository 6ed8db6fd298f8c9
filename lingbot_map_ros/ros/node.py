# SPDX-License-Identifier: Apache-2.0
"""The node: its life and its parameters. What happens to an image is the pipeline's.

Threads: the executor's callbacks leave the newest image in a mailbox; one worker owns the model, steps and publishes;
diagnostics have a thread of their own.
Torch is imported when the node is configured, so that a machine without it gets an error of one line.
"""
from __future__ import annotations

import lingbot_map_ros.ros.sharing  # noqa: F401 isort: skip - before whatever starts threads

import gc
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseWithCovarianceStamped
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.event_handler import QoSRequestedIncompatibleQoSInfo, SubscriptionEventCallbacks
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import qos_policy_name_from_kind
from rclpy.subscription import Subscription
from rclpy.topic_endpoint_info import TopicEndpointInfo
from std_msgs.msg import Header

from lingbot_map_ros.ros import diagnostics, interfaces, parameters, process
from lingbot_map_ros.ros.logs import LogForwarder, one_line
from lingbot_map_ros.ros.parameter_table import Change, ParameterError
from lingbot_map_ros.ros.parameters import Parameters
from lingbot_map_ros.ros.reports import Reports
from lingbot_map_ros.ros.services import NotRunning, Services
from lingbot_map_ros.ros.worker import Mailbox, Ticker, Worker

if TYPE_CHECKING:
    from lingbot_map_ros.ros.pipeline import Arrival, Pipeline

NODE_NAME = "lingbot_map_node"
PROFILE_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")
INSTALL_TORCH = "pip install torch safetensors"


class LingbotMapNode(LifecycleNode):
    """Turns one camera's images into poses and a map."""

    def __init__(self, **kwargs) -> None:
        """Declare the parameters and offer the services; takes rclpy.node.Node's keyword arguments.

        Raises ParameterError for a parameter that cannot be.
        """
        super().__init__(NODE_NAME, **kwargs)
        try:
            self.parameters = Parameters.declare(self)
        except ParameterError:
            self.destroy_node()
            raise
        self._state = "unconfigured"
        self._load_error = ""
        self._is_ending = threading.Event()
        self._mapper = None
        self._outputs = None
        self._pipeline = None
        self._mailbox: Mailbox[Arrival] = Mailbox()
        self._worker: Worker[Arrival] | None = None
        self._camera_infos = None
        self._transforms = self._scale = None
        self._own_subscriptions: list[Subscription] = []
        self._log_forwarder = LogForwarder(self.get_logger())
        self.monitor = diagnostics.Monitor()

        self.add_on_set_parameters_callback(self._check_parameters)
        self.add_post_set_parameters_callback(self._take_parameters)
        self._image_group = MutuallyExclusiveCallbackGroup()
        self._reports = Reports(self, lambda: self._image_topic)
        self._own_services = Services(self, self.running, lambda: self.parameters)
        topic = interfaces.DIAGNOSTICS
        self._diagnostics = topic.create(self.create_publisher)
        # No timer: they go on while the executor loads the model for a lifecycle manager, and while simulated time
        # stands still.
        self._diagnostics_ticker = Ticker(
            self.parameters.diagnostics_period, self._publish_diagnostics,
            lambda error: self.get_logger().error(f"no diagnostics: {one_line(error)}", throttle_duration_sec=5.0))

    @property
    def _image_topic(self) -> str:
        return interfaces.image_topic(self, self.parameters.image_transport)

    # Lifecycle

    def start(self) -> bool:
        """Configure and activate; False if that failed, which the log explains."""
        return (self.trigger_configure() == TransitionCallbackReturn.SUCCESS
                and self.trigger_activate() == TransitionCallbackReturn.SUCCESS)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the model and run it once. On failure the node stays unconfigured."""
        self._state, self._load_error = "loading", ""
        self.get_logger().info(f"loading model {self.parameters.checkpoint or self.parameters.preset}")
        begin = time.monotonic()
        self._log_forwarder.install()
        try:
            from lingbot_map_ros.ros.camera_info import CameraInfos
            from lingbot_map_ros.ros.mapper import Mapper
            from lingbot_map_ros.ros.metric_scale import MetricScale
            from lingbot_map_ros.ros.outputs import Outputs
            from lingbot_map_ros.ros.pipeline import Pipeline
            from lingbot_map_ros.ros.transform_listener import TransformListener

            self._check_ending()
            self._mapper = Mapper(self.parameters)
            self._check_ending()
            self._transforms = TransformListener(self)
            self._scale = MetricScale(self, lambda: self.parameters)
            self._outputs = Outputs(self, self._transforms, lambda: self.parameters)
            self._camera_infos = CameraInfos(self, lambda: self.parameters)
            self._pipeline = Pipeline(
                self, self._mapper, self._outputs, self._reports, self.monitor, self._camera_infos, self._transforms,
                self._scale, self._mailbox, lambda: self.parameters)
        except Exception as error:
            if self._is_ending.is_set():
                self.get_logger().info("loading was interrupted")
            else:
                self._load_error = _load_error(error)
                self.get_logger().error(self._load_error)
                self.get_logger().debug(traceback.format_exc())
            self._unload()
            return TransitionCallbackReturn.FAILURE
        self._worker = Worker(self._mailbox, self._pipeline.process, self._pipeline.idle, self._pipeline.failed)
        self._worker.submit(self._pipeline.apply_parameters)  # those that changed while the model was loaded
        self._state = "inactive"
        self.get_logger().info(f"model {self._mapper.model.config.name} is ready on {self._mapper.device_name()} "
                               f"after {time.monotonic() - begin:.1f} s")
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe to the images and publish."""
        result = super().on_activate(state)
        self._mailbox.clear()  # of what arrived while the last subscription went
        self.monitor.activated()
        self._state = "active"
        self._pipeline.is_active = True
        try:
            self._subscribe()
        except ParameterError as error:
            self.get_logger().error(f"cannot subscribe: {error}")
            self._pause()
            return TransitionCallbackReturn.FAILURE
        self.get_logger().info(f"waiting for images on {self._image_topic}")
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop subscribing and publishing; the sequence and its map stay."""
        self._pause()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and all memory of the sequence."""
        self._unload()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything, from any state."""
        self._unload()
        self._state = "finalized"
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything; the node can be configured again."""
        self._unload()
        return TransitionCallbackReturn.SUCCESS

    def stop_loading(self) -> None:
        """Let a configuration that is under way, or comes, fail where it can be broken off. May be called at any time.
        """
        self._is_ending.set()

    def close(self) -> None:
        """Join the node's threads and free the model, before the node is destroyed."""
        self._diagnostics_ticker.stop()
        self._unload()  # what waits for the worker is told
        self._own_services.close()

    def _subscribe(self) -> None:
        images, settings = interfaces.IMAGES[self.parameters.image_transport], self.parameters
        # Those of the images' group are called one after the other; the others do not hold up images.
        wanted = [
            (images, self._pipeline.receive, self._image_topic, self._image_group),
            (interfaces.CAMERA_INFO, self._camera_infos.receive, self._camera_infos.topic, self._image_group),
            (interfaces.INITIAL_POSE, self._on_initial_pose, "", self._image_group),
        ]
        if settings.scale_source == "odometry":
            wanted.append((interfaces.ODOM, self._scale.receive_odometry, "", MutuallyExclusiveCallbackGroup()))
        if (settings.odom_frame or settings.base_frame) and interfaces.TF.message is not None:
            wanted.append((interfaces.TF, self._transforms.receive, "", MutuallyExclusiveCallbackGroup()))
            wanted.append((interfaces.TF_STATIC, self._transforms.receive_static, "", MutuallyExclusiveCallbackGroup()))
        for topic, receive, name, group in wanted:
            events = SubscriptionEventCallbacks(incompatible_qos=self._on_incompatible_qos) if topic is images else None
            self._own_subscriptions.append(topic.create(
                self.create_subscription, receive, name=name, callback_group=group, event_callbacks=events))

    def _check_ending(self) -> None:
        if self._is_ending.is_set():
            raise InterruptedError("the node ends")

    def _pause(self) -> None:
        while self._own_subscriptions:
            self.destroy_subscription(self._own_subscriptions.pop())
        if self._worker is not None:
            self._mailbox.clear()
            self._worker.submit(self._pipeline.pause).result()  # the frame in work is still published
        self._state = "inactive"

    def _unload(self) -> None:
        self._pause()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._outputs is not None:
            self._outputs.destroy()
            self._outputs = None
        self._mapper = self._pipeline = self._camera_infos = None
        self._transforms = self._scale = None
        self._log_forwarder.remove()
        gc.collect()
        self._state = "unconfigured"

    def running(self) -> tuple[Worker, Pipeline]:
        """Return the model's worker and its pipeline. NotRunning while there is no model."""
        worker, pipeline = self._worker, self._pipeline
        if worker is None or pipeline is None:
            raise NotRunning(f"there is no model: the node is {self._state}")
        return worker, pipeline

    def _on_initial_pose(self, message: PoseWithCovarianceStamped) -> None:
        topic = self.resolve_topic_name(interfaces.INITIAL_POSE.name)
        try:
            frame, map_frame = message.header.frame_id.lstrip("/"), self.parameters.frame("map_frame")
            if frame not in ("", map_frame):
                raise ValueError(f"header.frame_id is {frame!r}: expected {map_frame!r}")
            from lingbot_map_ros.ros.messages import pose_matrix

            T_map_body = pose_matrix(message.pose.pose.position, message.pose.pose.orientation)
        except ValueError as error:
            self.get_logger().warning(f"a message on {topic} has no effect: {error}", throttle_duration_sec=5.0)
            return
        if self._worker is not None:
            self._worker.submit(lambda: self._pipeline.place(T_map_body))

    def _on_incompatible_qos(self, event: QoSRequestedIncompatibleQoSInfo) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self.get_logger().warning(f"a publisher on {self._image_topic} is not received: its {policy} does not fit the "
                                  f"subscription's (by default {interfaces.IMAGE.qos_text})")

    # Parameters

    def _check_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        try:
            after = self.parameters.changed(_own(changes), configured=self._state != "unconfigured")
            mapper = self._mapper
            if mapper is not None:
                mapper.check(after, self.parameters)
            elif self._state == "loading":
                parameters.refuse_unchecked(self.parameters, after)
        except ValueError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _take_parameters(self, changes: list[Parameter]) -> None:
        before = self.parameters
        after = self.parameters = before.changed(_own(changes), configured=False)
        changed = [name for name in _own(changes) if getattr(before, name) != getattr(after, name)]
        if "diagnostics_period" in changed:
            self._diagnostics_ticker.set_period(after.diagnostics_period)
        if changed and self._state == "unconfigured":
            self._load_error = ""  # of the values that were
        worker = self._worker
        if worker is None:
            return
        worker.submit(self._pipeline.apply_parameters)
        waiting = [name for name in changed if parameters.change_of(name) is Change.RESET]
        if waiting:
            self.get_logger().info(f"{', '.join(waiting)}: the change takes effect at the next reset")

    # Diagnostics

    def _clock_hint(self) -> str:
        if not self.get_parameter("use_sim_time").value or self.get_clock().now().nanoseconds:
            return ""
        return "; use_sim_time is on, but nothing comes on /clock: does the simulation or recording run?"

    def _publish_diagnostics(self) -> None:
        name = self.get_fully_qualified_name().lstrip("/")
        counts, interval = self.monitor.report()
        active, mapper, pipeline, infos = self._state == "active", self._mapper, self._pipeline, self._camera_infos
        silence, timeout = self.monitor.silence, self.parameters.image_timeout
        publishers = self.get_publishers_info_by_topic(self._image_topic)
        if active and silence > timeout:
            reason = _why_silent(publishers, self.parameters.image_transport) + self._clock_hint()
            self.get_logger().warning(f"no image on {self._image_topic} for {silence:.0f} s: {reason}",
                                      throttle_duration_sec=30.0)
        hardware = mapper.device_name() if mapper is not None else self.parameters.device
        trained_frames = mapper.model.config.trained_frames if mapper is not None else 0
        status = [
            diagnostics.camera_status(
                name, self._image_topic, active, len(publishers), silence, self.monitor.repeats, timeout,
                self._mailbox.displaced, pipeline.image_size if pipeline is not None else None, counts, interval,
                infos.problem if infos is not None and self.parameters.calibration != "off" else "",
                diagnostics.intrinsics_values(infos.topic, mapper.focal_lengths) if infos and mapper else {}),
            diagnostics.cache_status(
                name, hardware, pipeline.state_values if pipeline is not None else None, trained_frames),
            diagnostics.model_status(
                name, hardware, self._state, self._load_error, self._log_forwarder.newest,
                mapper.model_values() if mapper is not None else {}, interval,
                self.monitor.stall if silence <= timeout else 0.0, timeout),
        ]
        if pipeline is not None:
            pipeline.report_tracking()  # the worker does so, too, unless the model hangs
            status.append(diagnostics.tracking_status(
                name, self._image_topic, pipeline.tracking,
                diagnostics.tracking_values(counts, self.monitor.hand_over)))
        self._diagnostics.publish(DiagnosticArray(header=Header(stamp=self.get_clock().now().to_msg()), status=status))


def _own(changes: list[Parameter]) -> dict[str, object]:
    """Return names and values of those parameters that are this package's (use_sim_time is rclpy's, for example)."""
    return {change.name: change.value for change in changes if change.name in parameters.NAMES}


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


def _load_error(error: Exception) -> str:
    """Return in one line why the model could not be loaded, and what to type where that is known."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "safetensors"):
        return f"{error.name} is not installed for {sys.executable}: {sys.executable} -m {INSTALL_TORCH}"
    if type(error).__name__ == "InsufficientMemoryError":  # says itself what fits
        return f"not enough memory: {one_line(error)}"
    # Torch's own error on a GPU; on a CPU it raises a RuntimeError with this text.
    if (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or "can't allocate memory" in str(error)):
        return ("not enough memory for the model and its window: lower sliding_window, remembered_frames, image_width "
                f"or max_map_points, or set device to cpu ({one_line(error)})")
    return f"cannot load the model: {one_line(error)}"


def main(args: list[str] | None = None) -> int:
    """Run the node as this process until a signal ends it; see `process.run`."""
    return process.run(LingbotMapNode, NODE_NAME, args)


if __name__ == "__main__":
    sys.exit(main())
