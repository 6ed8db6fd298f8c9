# SPDX-License-Identifier: Apache-2.0
"""The node's process: how it starts, what ends it, and that it ends."""
from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import rclpy
from rclpy.executors import Executor, ExternalShutdownException, SingleThreadedExecutor
from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from lingbot_map_ros.ros.parameter_table import ParameterError

if TYPE_CHECKING:
    from lingbot_map_ros.ros.node import LingbotMapNode

ENDED, FAILED = 254, 255  # notes that end the process, as signals' numbers do; no signal has these
STATUS = {ENDED: 0, FAILED: 1, signal.SIGINT: 0, signal.SIGTERM: 0}
END_TIMEOUT = 4.0  # seconds for an orderly end: below the 5 s after which ros2 launch sends the next signal


def run(make_node: Callable[[], LingbotMapNode], name: str, args: list[str] | None = None) -> int:
    """Run a node until SIGINT or SIGTERM, and return the exit status: 0.

    Status 1 if a parameter is bad or, with `autostart`, the node cannot start; the log's last line says why. Where
    something does not come to its end in END_TIMEOUT, such as a model that loads, the process ends here, with that
    status.
    """
    # A signal only leaves a note. An exception would strike anywhere, also in libraries that do not expect one, and
    # python itself remembers a KeyboardInterrupt that one of them has caught. The note, its number, comes through a
    # pipe: a handler of python's own would run in this thread alone, which waits on if the system gives the signal to
    # another.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # its signals are its own
    _handle_signals(lambda number, frame: None)

    def note(end: int) -> None:
        os.write(writer, bytes([end]))

    # Not rclpy's handlers: they invalidate the context while the worker still publishes.
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = make_node()
    except ParameterError as error:
        rclpy.logging.get_logger(name).error(str(error))
        _handle_signals(signal.SIG_IGN)
        rclpy.shutdown()
        return 1
    # One thread: callbacks are short, as the model loads and runs on threads of its own. With several, rclpy submits
    # what is ready in one callback group again and again while another of that group runs, and keeps a core busy.
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    stop = Future()

    def start() -> None:
        try:
            if node.parameters.autostart and not node.start():
                note(FAILED)
        except Exception:
            node.get_logger().error(f"the node cannot start: {traceback.format_exc()}")
            note(FAILED)

    def spin_all() -> None:
        spin(executor, node.get_logger(), stop)
        note(ENDED)

    threads = [threading.Thread(target=spin_all, name="executor"), threading.Thread(target=start, name="start")]
    for thread in threads:
        thread.start()
    while (end_note := os.read(reader, 1)[0]) not in STATUS:
        pass  # a signal that a library handles
    status = STATUS[end_note]

    _handle_signals(signal.SIG_IGN)  # a terminal and ros2 launch may both send one
    ended = threading.Event()

    def end() -> None:
        node.stop_loading()
        stop.set_result(None)
        for thread in threads:  # one that still spins when its context goes aborts the process
            thread.join()
        executor.shutdown()
        node.close()
        node.destroy_node()
        rclpy.shutdown()
        ended.set()

    ender = threading.Thread(target=end, name="end", daemon=True)
    ender.start()
    ender.join(END_TIMEOUT)
    if not ended.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no other exit leaves a thread in the midst of a library alone
    return status


def spin(executor: Executor, logger: RcutilsLogger, stop: Future) -> None:
    """Spin until `stop` is done or the context is shut down, through callbacks that raise; `stop` is done in the end.

    Shut the executor down afterwards: while it spins that may destroy what would wake it, and it waits for ever. One
    callback that raises is enough on jazzy: rclpy does so from its own service when a lifecycle transition is asked
    for out of order.
    """
    while not stop.done():
        try:
            executor.spin_until_future_complete(stop)
            stop.set_result(None)
        except ExternalShutdownException:
            stop.set_result(None)
        except Exception:
            logger.error(f"a callback failed: {traceback.format_exc()}")


def _handle_signals(handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
