# SPDX-License-Identifier: Apache-2.0
"""The node as a process of its own: exits, start-up errors, memory."""
from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from nav_msgs.msg import Odometry, Path
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from ros_harness import REPOSITORY, TIMEOUT, image_message, wait_until
from sensor_msgs.msg import Image, PointCloud2

from lingbot_map_ros.ros.process import END_TIMEOUT

NODE = "/lingbot_map_node"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_mapping_ends_with_status_0(ros, node_process, number):
    process = node_process()
    odometry = ros.listen(Odometry, f"{NODE}/odometry")
    publisher = ros.publisher(Image, "/image")
    end = time.monotonic() + TIMEOUT
    index = 0
    while len(odometry) < 5:
        assert time.monotonic() < end, process.text()
        publisher.publish(image_message(index))
        index += 1
        time.sleep(0.02)
    process.process.send_signal(number)
    for index in range(index, index + 20):  # still under load
        publisher.publish(image_message(index))
        time.sleep(0.005)
    assert process.stop(number) == 0, process.text()  # a second signal, as launch sends after a terminal's
    assert "Traceback" not in process.text() and "ERROR" not in process.text()


@pytest.mark.parametrize("tenths", range(0, 16, 2))
def test_signal_while_loading_ends_with_status_0(node_process, tenths):
    """Whatever the signal meets: libraries that are imported, weights that are read, the first run of the model."""
    process = node_process({"preset": "default"})
    process.wait_for_text("loading model")
    time.sleep(tenths / 10)
    assert process.stop(signal.SIGTERM if tenths % 4 else signal.SIGINT) == 0, process.text()
    assert "Traceback" not in process.text() and "ERROR" not in process.text()


ANOTHER_THREADS_SIGNAL = """
import multiprocessing, signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})  # in libraries' threads, too
from lingbot_map_ros.ros import node
signal.signal(signal.SIGCHLD, lambda *arguments: print("a child ended", flush=True))
def pass_on():
    signal.sigwait({signal.SIGUSR2})
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    time.sleep(0.5)
    child.terminate()  # it has the node's handlers
    time.sleep(0.5)
    child.kill()
    child.join()
    signal.sigwait({signal.SIGUSR1})
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=pass_on, daemon=True).start()
sys.exit(node.main())
"""


def test_signal_that_another_thread_is_given_ends_with_status_0(node_process):
    """The system gives a process's signal to any thread; not all systems prefer the main one."""
    process = node_process(command=("-c", ANOTHER_THREADS_SIGNAL))
    process.wait_for_text("waiting for images")
    process.process.send_signal(signal.SIGUSR2)
    process.wait_for_text("a child ended")
    with pytest.raises(subprocess.TimeoutExpired):  # neither another signal nor a child's ends the node
        process.process.wait(END_TIMEOUT + 1)
    process.process.send_signal(signal.SIGUSR1)
    assert process.process.wait(TIMEOUT) == 0, process.text()


HANGS = """
import sys, time
from lingbot_map_ros.ros import loaded_model, node
loaded_model.build_model = lambda *arguments, **options: time.sleep(600)
sys.exit(node.main())
"""


@pytest.mark.parametrize("autostart", [True, False])
def test_load_that_does_not_end_is_left_alone(ros, node_process, autostart):
    process = node_process({"autostart": autostart}, command=("-c", HANGS))
    if not autostart:
        client = ros.peer.create_client(ChangeState, f"{NODE}/change_state")
        configure = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CONFIGURE))

        def is_loading() -> bool:  # asked again: the service may still be that of a node that has just ended
            client.call_async(configure)
            time.sleep(0.2)
            return "loading model" in process.text()

        wait_until(is_loading, "loading")
    process.wait_for_text("loading model")
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    wait_until(lambda: any(status.message.startswith("loading") for array in reports for status in array.status),
               "diagnostics of a node that loads, for itself or for a lifecycle manager")
    assert process.stop() == 0, process.text()
    assert "Traceback" not in process.text()
    if not autostart:
        ros.peer.destroy_client(client)


def test_signal_without_model_ends_with_status_0(ros, node_process):
    process = node_process({"autostart": False})
    reports = ros.listen(DiagnosticArray, "/diagnostics")
    wait_until(lambda: any("unconfigured" in status.message for array in reports for status in array.status),
               "an unconfigured node on /diagnostics")
    assert process.stop() == 0, process.text()


@pytest.mark.parametrize(("parameters", "words"), [
    ({"checkpoint": "/no/such/file.pt"}, ("/no/such/file.pt",)),
    ({"preset": "huge"}, ("preset", "huge", "tiny")),
    ({"preset": "lingbot_map"}, ("checkpoint",)),
    ({"image_width": 50}, ("image_width", "50")),
    ({"sliding_window": -3}, ("sliding_window", "-3")),
    ({"cache_memory_mib": 1}, ("a cache of 1 MiB is too small", "needs 3 MiB")),
    ({"window_size": 3}, ("window_size", "scale_frames 3")),
    ({"sliding_window": 8, "max_sliding_window": 4}, ("max_sliding_window must be at least 8",)),
    ({"attention_backend": "flashinfer-fa2"}, ("flashinfer-fa2", "CUDA")),
])
def test_what_cannot_start_ends_with_status_1_and_the_reason(node_process, parameters, words):
    process = node_process(parameters)
    assert process.process.wait(TIMEOUT) == 1
    errors = [line for line in process.text().splitlines() if "ERROR" in line]
    assert len(errors) == 1 and all(word in errors[0] for word in words), process.text()
    assert "Traceback" not in process.text()


def test_shipped_parameter_file_and_a_namespace(ros, node_process):
    process = node_process(arguments=(
        "--params-file", str(REPOSITORY / "config" / "lingbot_map.yaml"),
        "-r", "__ns:=/robot", "-r", "image:=eye/image"))
    process.wait_for_text("waiting for images on /robot/eye/image")
    assert "model default is ready" in process.text()  # the file's preset, which comes after the fixture's
    wait_until(lambda: ros.peer.count_publishers("/robot/lingbot_map_node/odometry"), "outputs below the namespace")
    assert process.stop() == 0


def test_missing_torch_is_one_line_with_the_command_to_type(node_process):
    process = node_process(command=(
        "-c", "import sys; sys.modules['torch'] = None; from lingbot_map_ros.ros.node import main; sys.exit(main())"))
    assert process.process.wait(TIMEOUT) == 1
    errors = [line for line in process.text().splitlines() if "ERROR" in line]
    assert len(errors) == 1 and "torch is not installed" in errors[0] and "-m pip install torch" in errors[0]
    assert "Traceback" not in process.text()


def test_memory_does_not_grow(ros, node_process):
    """From frame 500 to 2,500 with every output subscribed and every bound reached before: at most 2 MB.

    Keyframes are chosen after their prediction, and a window follows another every 54 frames.
    """
    namespace = f"/memory{os.getpid()}"  # of its own: another camera's images would be mapped, too
    node = namespace + NODE
    process = node_process({
        "max_map_points": 3000, "max_path_length": 100, "map_period": 0.2, "path_period": 0.1,
        "confidence_threshold": 1.0, "flow_threshold": 1000.0, "max_keyframe_gap": 3, "window_size": 24,
        "overlap_keyframes": 6, "init_motion": 0.0, "jump_factor": 1e6, "camera_iterations": 1,
        "refine_poses": "always",
    }, arguments=("-r", f"__ns:={namespace}"))
    poses = ros.listen(PoseStamped, f"{node}/pose", keep=1)
    paths = ros.listen(Path, f"{node}/path", keep=1)
    points = ros.listen(PointCloud2, f"{node}/points", keep=1)
    maps = ros.listen(PointCloud2, f"{node}/map", QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL),
                      keep=1)
    events = ros.listen(DiagnosticStatus, f"{node}/events", 1000)
    publisher = ros.publisher(Image, f"{namespace}/image")
    first = 0
    while not poses:  # the scale frames, and whatever comes before both sides have found each other
        assert process.process.poll() is None and first < 300, process.text()
        publisher.publish(image_message(first))
        first += 1
        time.sleep(0.2)
    # Over 100 frames each, since messages on their way take memory for a moment.
    resident = {frame: [] for frame in range(500, 2501, 500)}
    sent_again = 0
    for index in range(first, 2500):
        message = image_message(index)
        publisher.publish(message)
        end = time.monotonic() + 1
        while poses[0].header.stamp != message.header.stamp:
            time.sleep(0.001)
            if time.monotonic() > end:  # best effort may lose one, and a busy machine be late
                assert process.process.poll() is None, process.text()
                sent_again += 1
                assert sent_again < 100, f"no answer to image {index}: {process.text()[-2000:]}"
                publisher.publish(message)
                end = time.monotonic() + 1
        for frame, sizes in resident.items():
            if frame - 100 < index + 1 <= frame:
                sizes.append(process.resident_bytes())
    assert len(paths[0].poses) == 100 and 0 < maps[0].width <= 3000 and points[0].width > 0  # the bounds are full
    assert sum(event.name.endswith("hand_over") for event in events) > 40
    least = {frame: min(sizes) for frame, sizes in resident.items()}
    growth = least[2500] - least[500]
    print("resident memory: " + ", ".join(f"{size / 1e6:.2f} MB at frame {frame:,}" for frame, size in least.items()))
    assert growth <= 2 << 20
    assert process.stop() == 0, process.text()
