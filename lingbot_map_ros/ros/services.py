# SPDX-License-Identifier: Apache-2.0
"""A camera's services: requests go to the worker between two images; threads of their own wait and write files."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from std_srvs.srv import Trigger

from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.logs import one_line
from lingbot_map_ros.ros.scope import Scope
from lingbot_map_ros.ros.worker import Worker

if TYPE_CHECKING:
    from lingbot_map_ros.ros.pipeline import Pipeline

THREADS = 4  # requests that are worked on at once: one that writes to a slow disk does not hold up a reset
CALL_TIMEOUT = 60.0  # seconds for the frame that is being processed


class NotRunning(Exception):
    """Why there is no model to answer."""


class Services:
    """Answers the services for as long as the node lives. The executor only passes requests on and never waits."""

    def __init__(self, scope: Scope, running: Callable[[], tuple[Worker, Pipeline]]) -> None:
        """Offer the services; `running` returns the worker and the camera's pipeline, or raises NotRunning."""
        self._scope = scope
        self._running = running
        self._threads = ThreadPoolExecutor(THREADS, "service")
        for entry, answer in (
            (interfaces.RESET, self._reset),
            (interfaces.PAUSE, lambda: self._call(lambda pipeline: pipeline.set_paused(True))),
            (interfaces.RESUME, lambda: self._call(lambda pipeline: pipeline.set_paused(False))),
            (interfaces.SAVE_MAP, self._save_map),
            (interfaces.LOAD_MAP, self._load_map),
            (interfaces.SAVE_TRAJECTORY, self._save_trajectory),
            (interfaces.DESCRIBE_CACHE, lambda: self._call(lambda pipeline: pipeline.describe_cache())),
        ):
            self._offer(entry, answer)

    def close(self) -> None:
        """Finish the requests that are worked on."""
        self._threads.shutdown()

    def _offer(self, entry: interfaces.ServiceEntry, answer: Callable[[], str]) -> None:
        """Offer a service whose answers are sent when they are ready, from another thread than the executor's.

        A coroutine would do, too, but rclpy's executors resume one again and again until it ends.
        """
        service = self._scope.node.create_service(
            entry.service, self._scope.service(entry).name, lambda request, response: response)
        send = service.send_response
        respond = self._responder(entry, answer)
        service.send_response = lambda response, header: self._threads.submit(lambda: send(respond(response), header))

    def _responder(
        self, entry: interfaces.ServiceEntry, answer: Callable[[], str]
    ) -> Callable[[Trigger.Response], Trigger.Response]:
        def respond(response: Trigger.Response) -> Trigger.Response:
            try:
                response.message, response.success = answer(), True
            except TimeoutError:
                response.message = (f"not done within {CALL_TIMEOUT:.0f} s, as the model is still busy: it will be "
                                    "done when it no longer is")
            except CancelledError:
                response.message = "that was not done: the model was taken down"
            except NotRunning as error:
                response.message = one_line(error)
            except Exception as error:
                response.message = f"that failed: {one_line(error)}"
            if entry is not interfaces.DESCRIBE_CACHE:
                self._scope.logger.info(f"{entry.name.removeprefix('~/')}: {response.message}")
            return response
        return respond

    def _call(self, call: Callable[[Pipeline], object]):
        """Return what a call of the pipeline returns, on its worker."""
        worker, pipeline = self._running()
        return worker.submit(lambda: call(pipeline)).result(CALL_TIMEOUT)

    def _reset(self) -> str:
        return self._call(lambda pipeline: pipeline.reset())

    def _save_map(self) -> str:
        from lingbot_map_ros.mapping.export import write_map

        points = self._call(lambda pipeline: pipeline.map_points())
        path = self._file(self._scope.parameters.file("map_file"), make_folder=True)
        write_map(path, *points)
        return f"{len(points[0])} points in {path}"

    def _load_map(self) -> str:
        from lingbot_map_ros.mapping.export import read_map

        self._running()  # before the file is looked for
        path = self._file(self._scope.parameters.file("map_file"))
        points = read_map(path)
        self._call(lambda pipeline: pipeline.load_map(*points))
        return f"{len(points[0])} points of {path}"

    def _save_trajectory(self) -> str:
        from lingbot_map_ros.mapping.trajectory import write_tum

        stamps_ns, poses = self._call(lambda pipeline: pipeline.trajectory())
        path = self._file(self._scope.parameters.file("trajectory_file"), make_folder=True)
        write_tum(path, stamps_ns, poses)
        return f"{len(poses)} poses in {path}"

    def _file(self, name: str, make_folder: bool = False) -> Path:
        """Return the path of a file in the one folder that files are in. ValueError and OSError where there is none."""
        if not self._scope.parameters.save_directory:
            raise ValueError("save_directory is empty: set it when the node is started")
        folder = Path(self._scope.parameters.save_directory).expanduser().resolve()
        if make_folder:
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / name  # of no folder, as the parameters have checked
        if path.is_symlink():  # it may lead out of the folder
            raise ValueError(f"{path} is a link: expected a file")
        return path
