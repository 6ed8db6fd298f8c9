# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test files use."""
from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: tests and the nodes that they start share the cores
if "PYTEST_XDIST_WORKER" in os.environ:  # runs side by side (pytest -n 2) must not hear each other
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["ROS_DOMAIN_ID"] = str(1 + (int(os.environ.get("ROS_DOMAIN_ID", os.getpid())) + 17 * number) % 101)

_namespaces = itertools.count()


@pytest.fixture(scope="session")
def ros_session() -> Iterator:
    """Yield the process's one rclpy context, executor and peer node."""
    from ros_harness import Ros

    ros = Ros()
    yield ros
    ros.close()


@pytest.fixture
def ros(ros_session) -> Iterator:
    """Yield the session's `Ros`; what a test made with it goes with the test."""
    yield ros_session
    ros_session.forget()


@pytest.fixture
def make_node(ros) -> Iterator:
    """Yield a function that starts a mapping node in this process, in a namespace of its own, and returns it.

    Keyword arguments are parameters; the tiny model, every image as a keyframe and autostart are set unless they say
    otherwise.
    """
    from rclpy.parameter import Parameter

    from lingbot_map_ros.ros.node import LingbotMapNode

    nodes = []

    def make(namespace: str | None = None, **parameters) -> LingbotMapNode:
        parameters = {"preset": "tiny", "device": "cpu", "max_map_points": 20_000, "keyframe_policy": "interval",
                      "init_motion": 0.0, **parameters}
        node = LingbotMapNode(namespace=namespace or f"robot{next(_namespaces)}", parameter_overrides=[
            Parameter(name, value=value) for name, value in parameters.items()])
        nodes.append(node)
        ros.executor.add_node(node)
        if node.parameters.autostart:
            assert node.start()
        return node

    yield make
    for node in nodes:
        ros.executor.remove_node(node)
        node.close()
        node.destroy_node()


@pytest.fixture
def node_process(tmp_path) -> Iterator:
    """Yield a function that starts the mapping node as a process: parameters -> NodeProcess."""
    from ros_harness import NodeProcess

    processes = []

    def start(parameters: dict | None = None, **options) -> NodeProcess:
        parameters = {"preset": "tiny", "device": "cpu", **(parameters or {})}
        processes.append(NodeProcess(tmp_path / f"node{len(processes)}.log", parameters, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
