# SPDX-License-Identifier: Apache-2.0
"""The node: its life and its parameters. Each camera has a channel; what happens to an image is the pipeline's.

Threads: the executor's callbacks leave the newest image in a mailbox, one a camera; one worker owns the model, steps
and publishes; diagnostics have a thread of their own.
Torch is imported when the node is configured, so that a machine without it gets an error of one line.
"""
from __future__ import annotations

import lingbot_map_ros.ros.sharing  # noqa: F401 isort: skip - before whatever starts threads

import gc
import sys
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.subscription import Subscription
from std_msgs.msg import Header

from lingbot_map_ros.ros import diagnostics, interfaces, process
from lingbot_map_ros.ros.channel import Channel
from lingbot_map_ros.ros.logs import LogForwarder, one_line
from lingbot_map_ros.ros.node_parameters import NodeParameters, change_of, refuse_late, refuse_unchecked
from lingbot_map_ros.ros.parameter_table import Change, ParameterError
from lingbot_map_ros.ros.parameters import Parameters
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.worker import Inbox, Ticker, Worker

if TYPE_CHECKING:
    from lingbot_map_ros.ros.intake import Arrival
    from lingbot_map_ros.ros.loaded_model import LoadedModel
    from lingbot_map_ros.ros.metric_scale import RobotOdometry
    from lingbot_map_ros.ros.transform_listener import TransformListener

NODE_NAME = "lingbot_map_node"
INSTALL_TORCH = "pip install torch safetensors"


class LingbotMapNode(LifecycleNode):
    """Turns the images of one camera, or of several, into poses and maps."""

    def __init__(self, **kwargs) -> None:
        """Declare the parameters and offer the services; takes rclpy.node.Node's keyword arguments.

        Raises ParameterError for a parameter that cannot be.
        """
        super().__init__(NODE_NAME, **kwargs)
        try:
            self._parameters_in_force = NodeParameters.declare(self)
        except ParameterError:
            self.destroy_node()
            raise
        self.state_name = "unconfigured"
        self._load_error = ""
        self._is_ending = threading.Event()
        self._model: LoadedModel | None = None
        self._transforms: TransformListener | None = None
        self._odometry: RobotOdometry | None = None
        self._inbox: Inbox[Arrival] = Inbox()
        self._worker: Worker[Arrival] | None = None
        self._shared_subscriptions: list[Subscription] = []
        self._log_forwarder = LogForwarder(self.get_logger())

        self.channels: list[Channel] = []
        self.add_on_set_parameters_callback(self._check_parameters)
        self.add_post_set_parameters_callback(self._take_parameters)
        for camera in self.parameters.cameras:
            scope = Scope(self, camera, lambda: self._parameters_in_force)
            self.channels.append(Channel(scope, self._inbox, lambda: self.state_name))
        self._diagnostics = interfaces.DIAGNOSTICS.create(self.create_publisher)
        # No timer: they go on while the executor loads the model for a lifecycle manager, and while simulated time
        # stands still.
        self._diagnostics_ticker = Ticker(
            self.parameters.diagnostics_period, self._publish_diagnostics,
            lambda error: self.get_logger().error(f"no diagnostics: {one_line(error)}", throttle_duration_sec=5.0))

    @property
    def parameters(self) -> Parameters:
        """The parameters in force, as they are for all cameras."""
        return self._parameters_in_force.shared

    # Lifecycle

    def start(self) -> bool:
        """Configure and activate; False if that failed, which the log explains."""
        return (self.trigger_configure() == TransitionCallbackReturn.SUCCESS
                and self.trigger_activate() == TransitionCallbackReturn.SUCCESS)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the model and run it once. On failure the node stays unconfigured."""
        self.state_name, self._load_error = "loading", ""
        self.get_logger().info(f"loading model {self.parameters.checkpoint or self.parameters.preset}")
        begin, camera = time.monotonic(), ""  # the one whose turn it is
        self._log_forwarder.install()
        try:
            from lingbot_map_ros.ros.loaded_model import LoadedModel
            from lingbot_map_ros.ros.metric_scale import RobotOdometry
            from lingbot_map_ros.ros.transform_listener import TransformListener

            self._check_ending()
            self._model = LoadedModel(self.parameters)
            self._transforms, self._odometry = TransformListener(self), RobotOdometry(self)
            # Processing and idling guard themselves; what reaches the worker is an error of this package's.
            self._worker = Worker(self._inbox, self._idle, lambda error: self.get_logger().error(
                f"the worker failed: {one_line(error)}", throttle_duration_sec=5.0))
            for channel in self.channels:
                self._check_ending()
                camera = channel.scope.camera
                channel.load(self._model, self._worker, self._transforms, self._odometry,
                             partial(self._catch_up_others, channel))
            self._check_ending()
        except Exception as error:
            if self._is_ending.is_set():
                self.get_logger().info("loading was interrupted")
            else:
                self._load_error = (f"camera {camera}: " if camera else "") + _load_error(error)
                self.get_logger().error(self._load_error)
                self.get_logger().debug(traceback.format_exc())
            self._unload()
            return TransitionCallbackReturn.FAILURE
        self.state_name = "inactive"
        self.get_logger().info(f"model {self._model.gct.config.name} is ready on {self._model.device_name()} "
                               f"after {time.monotonic() - begin:.1f} s")
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe to the images and publish."""
        result = super().on_activate(state)
        self.state_name = "active"
        try:
            for channel in self.channels:
                channel.subscribe()
            self._subscribe_to_robot()
        except ParameterError as error:
            self.get_logger().error(f"cannot subscribe: {error}")
            self._pause()
            super().on_deactivate(state)  # the publishers
            return TransitionCallbackReturn.FAILURE
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop subscribing and publishing; the sequences and their maps stay."""
        self._pause()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and all memory of the sequences."""
        self._unload()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything, from any state."""
        self._unload()
        self.state_name = "finalized"
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
        for channel in self.channels:
            channel.close()

    def _subscribe_to_robot(self) -> None:
        """Listen to what all cameras share: the robot's odometry and its frames."""
        wanted = []
        if self.parameters.scale_source == "odometry":
            wanted.append((interfaces.ODOM, self._odometry.receive))
        if (self.parameters.odom_frame or self.parameters.base_frame) and interfaces.TF.message is not None:
            wanted.append((interfaces.TF, self._transforms.receive))
            wanted.append((interfaces.TF_STATIC, self._transforms.receive_static))
        for topic, receive in wanted:  # none of them holds up images
            self._shared_subscriptions.append(topic.create(
                self.create_subscription, receive, callback_group=MutuallyExclusiveCallbackGroup()))

    def _idle(self) -> None:
        for channel in self.channels:
            channel.idle()

    def _catch_up_others(self, channel: Channel) -> None:
        for other in self.channels:
            if other is not channel:
                other.catch_up()

    def _check_ending(self) -> None:
        if self._is_ending.is_set():
            raise InterruptedError("the node ends")

    def _pause(self) -> None:
        while self._shared_subscriptions:
            self.destroy_subscription(self._shared_subscriptions.pop())
        # Of all cameras before one is waited for: else the others' images would come in between.
        for paused in [channel.pause() for channel in self.channels]:
            if paused is not None:
                paused.result()
        self.state_name = "inactive"

    def _unload(self) -> None:
        self._pause()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        for channel in self.channels:
            channel.unload()
        self._model = self._transforms = self._odometry = None
        self._log_forwarder.remove()
        gc.collect()
        self.state_name = "unconfigured"

    # Parameters

    def _check_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        before = self._parameters_in_force
        try:
            after = before.changed(self._known(changes))
            names = before.differences(after)
            refuse_late(names, configured=self.state_name != "unconfigured")
            mappers = {channel.scope.camera: channel.mapper for channel in self.channels}
            if all(mapper is not None for mapper in mappers.values()):
                for camera, mapper in mappers.items():
                    mapper.check(after.of(camera), before.of(camera))
            elif self.state_name == "loading":
                refuse_unchecked(names)
        except ValueError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _take_parameters(self, changes: list[Parameter]) -> None:
        before = self._parameters_in_force
        after = self._parameters_in_force = before.changed(self._known(changes))
        changed = before.differences(after)
        if not changed:
            return
        after.declare_again(self)
        if "diagnostics_period" in changed:
            self._diagnostics_ticker.set_period(after.shared.diagnostics_period)
        if self.state_name == "unconfigured":
            self._load_error = ""  # of the values that were
        if self._worker is None:
            return
        for channel in self.channels:
            channel.apply_parameters()
        waiting = [name for name in changed if change_of(name) is Change.RESET]
        if waiting:
            self.get_logger().info(f"{', '.join(waiting)}: the change takes effect at the next reset")

    def _known(self, changes: list[Parameter]) -> dict[str, object]:
        return self._parameters_in_force.known({change.name: change.value for change in changes})

    # Diagnostics

    def _clock_hint(self) -> str:
        if not self.get_parameter("use_sim_time").value or self.get_clock().now().nanoseconds:
            return ""
        return "; use_sim_time is on, but nothing comes on /clock: does the simulation or recording run?"

    def _publish_diagnostics(self) -> None:
        model, timeout = self._model, self.parameters.image_timeout
        hardware = model.device_name() if model is not None else self.parameters.device
        hint = self._clock_hint()
        reports = [channel.report(hardware, hint) for channel in self.channels]
        # A camera that is silent waits for no model: that is said of the camera.
        stalls = [channel.monitor.stall for channel in self.channels if channel.monitor.silence <= timeout]
        status = [status for statuses, _ in reports for status in statuses]
        status.append(diagnostics.model_status(
            self.channels[0].scope.node_name, hardware, self.state_name, self._load_error, self._log_forwarder.newest,
            model.values() if model is not None else {}, diagnostics.together([interval for _, interval in reports]),
            max(stalls, default=0.0), timeout))
        self._warn_of_shared_frames()
        self._diagnostics.publish(DiagnosticArray(header=Header(stamp=self.get_clock().now().to_msg()), status=status))

    def _warn_of_shared_frames(self) -> None:
        loaded = {channel.scope.camera: channel.loaded for channel in self.channels}
        frames = {camera: parts.outputs.camera_frame_in_use for camera, parts in loaded.items() if parts is not None}
        for camera, frame in frames.items():
            others = [other for other in frames if other != camera and frames[other] == frame]
            if frame and others:
                self.get_logger().warning(
                    f"the frame of the cameras {camera} and {' and '.join(others)} is {frame}: set it in their "
                    f"drivers, or {camera}.camera_frame and so on", throttle_duration_sec=60.0)
                return


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
