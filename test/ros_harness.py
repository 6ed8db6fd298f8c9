# SPDX-License-Identifier: Apache-2.0
"""Real rclpy for tests: one context and executor a process, a peer to talk to nodes, nodes as processes."""
from __future__ import annotations

import array
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

# Before rclpy is initialised: nothing leaves the machine, and runs side by side do not hear each other.
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
os.environ.setdefault("ROS_LOG_DIR", tempfile.mkdtemp(prefix="lingbot_map_ros_log_"))

import numpy as np  # noqa: E402
import rclpy  # noqa: E402
from diagnostic_msgs.msg import DiagnosticStatus  # noqa: E402
from rcl_interfaces.msg import Parameter as ParameterMessage  # noqa: E402
from rcl_interfaces.msg import SetParametersResult  # noqa: E402
from rcl_interfaces.srv import SetParameters  # noqa: E402
from rclpy.executors import MultiThreadedExecutor, SingleThreadedExecutor  # noqa: E402
from rclpy.node import Node  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from rclpy.qos import QoSDurabilityPolicy, QoSProfile  # noqa: E402
from rclpy.signals import SignalHandlerOptions  # noqa: E402
from rclpy.task import Future  # noqa: E402
from sensor_msgs.msg import Image  # noqa: E402

from lingbot_map_ros.ros.process import spin  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
LATCHED = QoSProfile(depth=10, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
SCALE_FRAMES = 3  # of the tiny model
TIMEOUT = 30.0  # seconds, generous: machines that run tests can be slow


def wait_until(condition: Callable[[], object], what: str, timeout: float = TIMEOUT) -> None:
    """Wait for a condition to become true; fail with `what` otherwise."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"after {timeout:.0f} s: not yet {what}"
        time.sleep(0.005)


def image_message(index: int, size: tuple[int, int] = (48, 64), frame_id: str = "camera", **fields) -> Image:
    """Return frame `index` of a textured wall passing by, rgb8 of (height, width), with stamp index / 10 + 100 s.

    `fields` overwrite the message's.
    """
    height, width = size
    wall = np.random.default_rng(0).integers(0, 256, (height // 4 + 1, 64, 3), np.uint8)
    pixels = np.roll(wall.repeat(4, 0).repeat(4, 1), 2 * index, axis=1)
    pixels = np.tile(pixels, (1, width // 256 + 1, 1))[:height, :width]
    message = Image(height=height, width=width, encoding="rgb8", step=3 * width)
    message.header.frame_id = frame_id
    message.header.stamp.sec, message.header.stamp.nanosec = 100 + index // 10, index % 10 * 100_000_000
    message.data = array.array("B", pixels.tobytes())
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def stamp_of(index: int) -> tuple[int, int]:
    """Return seconds and nanoseconds of `image_message(index)`."""
    return 100 + index // 10, index % 10 * 100_000_000


class Ros:
    """The process's context, an executor that spins in a thread, and a node of the test's own."""

    def __init__(self) -> None:
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        self.executor = MultiThreadedExecutor(num_threads=6)  # of the nodes that are tested in this process
        self.peer = Node("peer")
        # One thread: several would submit the subscriptions of one callback group again and again while one of them
        # runs, and keep it from running.
        self._peer_executor = SingleThreadedExecutor()
        self._peer_executor.add_node(self.peer)
        self._stop = Future()
        self._threads = [
            threading.Thread(target=spin, args=(executor, self.peer.get_logger(), self._stop))
            for executor in (self.executor, self._peer_executor)
        ]
        for thread in self._threads:
            thread.start()
        self._entities: list = []

    def close(self) -> None:
        """Stop spinning, then take everything down."""
        self._stop.set_result(None)
        for thread in self._threads:
            thread.join()
        self.executor.shutdown()
        self._peer_executor.shutdown()
        self.peer.destroy_node()
        rclpy.shutdown()

    def listen(
        self, message_type: type, topic: str, qos: QoSProfile | int = 100, keep: int | None = None
    ) -> list | deque:
        """Subscribe; returns the list that messages are appended to, the newest `keep` of them if that is given."""
        received: list | deque = [] if keep is None else deque(maxlen=keep)
        self._entities.append(self.peer.create_subscription(message_type, topic, lambda m: received.append(m), qos))
        return received

    def publisher(self, message_type: type, topic: str, qos: QoSProfile | int = 10):
        """Return a publisher, after a subscription has matched it."""
        publisher = self.peer.create_publisher(message_type, topic, qos)
        self._entities.append(publisher)
        wait_until(publisher.get_subscription_count, f"a subscription on {topic}")
        return publisher

    def call(self, service_type: type, name: str, request: object = None, timeout: float = TIMEOUT):
        """Call a service and return its response; TimeoutError if none comes."""
        client = self.peer.create_client(service_type, name)
        try:
            assert client.wait_for_service(timeout), f"no service {name}"
            end = time.monotonic() + timeout
            future = client.call_async(request or service_type.Request())
            wait_until(lambda: future.done() or time.monotonic() > end, f"an answer of {name}", timeout + 1)
            if not future.done():
                raise TimeoutError(f"no answer of {name} in {timeout:.0f} s")
            return future.result()
        finally:
            self.peer.destroy_client(client)

    def set_parameter(self, node: str, name: str, value: object) -> SetParametersResult:
        """Set a parameter through the node's service."""
        message: ParameterMessage = Parameter(name, value=value).to_parameter_msg()
        response = self.call(SetParameters, f"{node}/set_parameters", SetParameters.Request(parameters=[message]))
        return response.results[0]

    def forget(self) -> None:
        """Destroy what listen() and publisher() made."""
        for entity in self._entities:
            if hasattr(entity, "publish"):
                self.peer.destroy_publisher(entity)
            else:
                self.peer.destroy_subscription(entity)
        self._entities.clear()


class Feed:
    """Sends images to one camera of a node in this process, each after the one before was dealt with."""

    message_type: type = Image

    def __init__(self, ros, node, camera: str = "", **options) -> None:
        self.node = node
        self._channel = next(channel for channel in node.channels if channel.scope.camera == camera)
        self._publisher = ros.publisher(self.message_type, self._channel.scope.image_topic, **options)

    def send(self, message: Image) -> None:
        before = self._done()
        self._publisher.publish(message)
        wait_until(lambda: self._done() > before, "an image processed or refused")

    def images(self, start: int, end: int, **options) -> None:
        for index in range(start, end):
            self.send(image_message(index, **options))

    def _done(self) -> int:
        counts = self._channel.monitor.counts
        return counts.processed + counts.failed + counts.duplicates + counts.late + counts.skipped


def private(node, name: str) -> str:
    return f"{node.get_fully_qualified_name()}/{name}"


def stamps(messages) -> list[tuple[int, int]]:
    return [(message.header.stamp.sec, message.header.stamp.nanosec) for message in messages]


class Statuses(dict):
    """Statuses by part; an empty one for a part that has not reported yet, so that it can be waited for."""

    def __missing__(self, part: str) -> DiagnosticStatus:
        return DiagnosticStatus()


class Values(dict):
    """A status's values; empty text for those of a status that has not come yet."""

    def __missing__(self, key: str) -> str:
        if self:
            raise KeyError(key)
        return ""


def statuses(reports, node) -> Statuses:
    """Return the newest status of each part of a node."""
    prefix = node.get_fully_qualified_name().lstrip("/") + ": "
    return Statuses((status.name.removeprefix(prefix), status) for array in list(reports) for status in array.status
                    if status.name.startswith(prefix))


def values(status: DiagnosticStatus) -> Values:
    return Values((entry.key, entry.value) for entry in status.values)


class NodeProcess:
    """The node as a process of its own."""

    def __init__(self, log: Path, parameters: dict[str, object], arguments: Sequence[str] = (),
                 command: Sequence[str] = ("-m", "lingbot_map_ros.ros.node")) -> None:
        self.log = log
        ros_arguments = [text for name, value in parameters.items()
                         for text in ("-p", f"{name}:={str(value).lower() if isinstance(value, bool) else value}")]
        # One thread for the model: on two cores its threads and those of the test hold each other up.
        environment = {"OMP_NUM_THREADS": "1", **os.environ,
                       "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--ros-args", *ros_arguments, *arguments],
                stdout=file, stderr=subprocess.STDOUT, cwd=log.parent, env=environment)

    def text(self) -> str:
        """Return what the process has printed."""
        return self.log.read_text(errors="replace")

    def wait_for_text(self, text: str) -> None:
        """Wait until the process has printed a text."""
        wait_until(lambda: text in self.text() or self.process.poll() is not None, f"{text!r} printed")
        assert text in self.text(), self.text()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
