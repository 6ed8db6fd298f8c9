# SPDX-License-Identifier: Apache-2.0
"""A camera in a rendered place, with the truth about it: `ros2 run lingbot_map_ros synthetic_camera`."""
from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import rclpy
import torch
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import SetParametersResult
from rclpy.parameter import Parameter
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header

from lingbot_map_ros.image_files import NANOSECONDS, ReplayError
from lingbot_map_ros.ros import diagnostics, image_messages, interfaces, messages
from lingbot_map_ros.ros.camera import QOS, Camera, CameraRun
from lingbot_map_ros.ros.parameter_table import Change, ParameterError, ParameterTable, frame_error, parameter
from lingbot_map_ros.synthetic import DEMO, Place, make_place, render
from lingbot_map_ros.synthetic.picture import Picture, RenderedLoop, motion_blur

POSE_TIMEOUT = 60.0  # seconds to wait for a pose in lockstep
REPORT_PERIOD = 1.0  # seconds between two messages on /diagnostics
LATE = 0.5  # of the time between two images: an image that goes out later than this is late
# By the parameter `place`.
PLACES = {"room": DEMO, "kitchen": dataclasses.replace(DEMO, furnished=1.0),
          "office": dataclasses.replace(DEMO, office=1.0),
          "corridor": dataclasses.replace(DEMO, corridor=1.0, floor_size=(8.0, 14.0)),
          "outdoors": dataclasses.replace(DEMO, outdoors=1.0)}
HEADROOM = 2.0  # rendering may get slower by this once images go out and are mapped on the same processor


@dataclass(frozen=True)
class SyntheticCameraParameters(ParameterTable):
    """All parameters of the camera. The fields of this class are the table."""

    seed: int = parameter(
        0, "Which place, and which images are dropped or blurred: equal seeds give equal images.", Change.START,
        0, 2**31 - 1)
    place: str = parameter("room", "What kind of place.", Change.START, choices=tuple(PLACES))
    rate: float = parameter(10.0, "Images a second.", Change.NOW, 0.1, 240.0)
    image_width: int = parameter(308, "Pixels.", Change.START, 16, 4096)
    image_height: int = parameter(224, "Pixels.", Change.START, 16, 4096)
    fov: float = parameter(75.0, "Horizontal field of view in degrees.", Change.START, 20.0, 150.0)
    supersampling: int = parameter(
        2, "Rays along each side of a pixel; more are smoother and slower.", Change.START, 1, 8)
    loop_frames: int = parameter(
        360, "Images of one round through the place, which ends where it began; the more, the slower the camera moves.",
        Change.START, 8, 1_000_000)
    loops: int = parameter(0, "Rounds after which the node ends. 0: it does not.", Change.START, 0, 1_000_000)
    memory_mib: int = parameter(
        512, "Memory for rendered images in MiB. Where a whole round fits, each image is rendered once and played from "
        "memory after that; else rendering goes on, as far ahead as there is room.", Change.START, 1, 1_000_000)
    render_ahead: int = parameter(
        0, "Images that are rendered before the first one goes out. 0: as many as an even pace needs, going by the "
        "time that the first ones take.", Change.START, 0, 1_000_000)
    render_threads: int = parameter(1, "Threads that render.", Change.START, 1, 256)
    wait_for_subscriber: bool = parameter(
        False, "Start when somebody subscribes to the images, rather than at once.", Change.START)
    wait_for: str = parameter(
        "", "Odometry or pose topic of a mapping node: the next image goes out after the last one's pose has come, at "
        "most at the rate, so that no image is dropped. Empty: real time.", Change.START)
    stamps: str = parameter(
        "clock", "Time stamps: the node's clock's, or from zero at the rate.", Change.START, choices=("clock", "zero"))
    dropped: float = parameter(0.0, "Share of images that are lost.", Change.NOW, 0.0, 1.0)
    blurred: float = parameter(0.0, "Share of images that are blurred by the camera's motion.", Change.NOW, 0.0, 1.0)
    exposure: float = parameter(
        1.0, "Exposure of a blurred image, as a share of the time between two images.", Change.NOW, 0.0, 10.0)
    gap_period: float = parameter(
        0.0, "Seconds from one gap to the next: the camera moves on, but no image comes. 0: no gaps.", Change.NOW,
        0.0, 3600.0)
    gap_length: float = parameter(1.0, "Seconds that a gap lasts.", Change.NOW, 0.0, 3600.0)
    world_frame: str = parameter(
        "world", "Frame of the ground truth: metres, z up, the floor at z = 0.", Change.START)
    ground_truth_frame: str = parameter(
        "camera_ground_truth", "The camera's optical frame as it truly is. Where camera_frame is, is the mapping "
        "node's word.", Change.START)
    camera_frame: str = parameter("camera_optical_frame", "The images' frame_id.", Change.START)
    publish_tf: bool = parameter(
        True, "Publish the transform world_frame -> ground_truth_frame on /tf.", Change.START)

    def _content_error(self, name: str, value: object) -> str | None:
        if name.endswith("_frame"):
            return frame_error(value) if value else "a frame needs a name"
        return None

    def _check_together(self) -> None:
        names = ("world_frame", "ground_truth_frame", "camera_frame")
        if len({getattr(self, name) for name in names}) < 3:
            raise ParameterError(f"{', '.join(names)} are {', '.join(repr(getattr(self, name)) for name in names)}: "
                                 "they must differ")
        if self.gap_period and self.gap_length >= self.gap_period:
            raise ParameterError(f"gap_length is {self.gap_length} and gap_period {self.gap_period}: gaps must be "
                                 "shorter than what is from one to the next")

    def intrinsics(self) -> np.ndarray:
        """Return K [3, 3] in pixels, their centres at +0.5."""
        f = self.image_width / 2 / math.tan(math.radians(self.fov) / 2)
        return np.array([[f, 0.0, self.image_width / 2], [0.0, f, self.image_height / 2], [0.0, 0.0, 1.0]])

    def make_place(self) -> Place:
        """Return the place and the loop through it: what takes seconds."""
        return make_place(self.seed, options=PLACES[self.place], frames=self.loop_frames)

    def fault(self, number: int) -> str:
        """Return what befalls an image, counted from 0: `gap`, `dropped`, `blurred` or nothing."""
        if self.gap_period and (number / self.rate) % self.gap_period >= self.gap_period - self.gap_length:
            return "gap"
        is_dropped, is_blurred = np.random.default_rng((self.seed, number)).random(2) < (self.dropped, self.blurred)
        return "dropped" if is_dropped else "blurred" if is_blurred else ""


TOPICS = (
    interfaces.Topic("image", Image, QOS, "The images, rgb8."),
    interfaces.Topic("camera_info", CameraInfo, QOS, "Their calibration: no distortion."),
    interfaces.Topic("ground_truth/odometry", Odometry, QOS, "The camera's true pose in the world frame, and its twist "
                     "in the camera's axes, at every image's stamp; of images that are dropped, too."),
    interfaces.Topic("ground_truth/depth", Image, QOS, "The images' true depth along the optical axis, 32FC1, metres; "
                     "inf in the sky. With `camera_info`."),
    interfaces.Topic("/diagnostics", DiagnosticArray, QOS, "Images published, dropped and late, and how fast "
                     "they are rendered, every second."),
    interfaces.Topic("/tf", interfaces.TFMessage, interfaces.TF.qos, "Transform world -> camera_ground_truth, if "
                     "`publish_tf`."),
)


class SyntheticCamera(Camera):
    """Goes round in a place and publishes what it sees, in real time."""

    def __init__(self, **options) -> None:
        """options: of rclpy's Node. Raises ParameterError."""
        super().__init__("synthetic_camera", calibrated=True, **options)
        self.parameters = SyntheticCameraParameters.declare(self)
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self.counts = {"published": 0, "dropped": 0, "blurred": 0, "gap": 0, "late": 0}
        self._late_before = 0  # as last reported
        self._loop: RenderedLoop | None = None
        self._last_truth: tuple[int, np.ndarray] | None = None  # stamp in nanoseconds, pose
        _, _, odometry, depth, reports, tf = TOPICS
        self._odometry = self.create_publisher(Odometry, odometry.name, odometry.qos)
        self._depth = self.create_publisher(Image, depth.name, depth.qos)
        self._reports = self.create_publisher(DiagnosticArray, reports.name, reports.qos)
        self._tf = None
        if self.parameters.publish_tf and tf.message is not None:
            self._tf = self.create_publisher(tf.message, tf.name, tf.qos)
        if self.parameters.wait_for:
            self.wait_for(self.parameters.wait_for, POSE_TIMEOUT)
        self.create_timer(REPORT_PERIOD, self._report)

    def run(self) -> None:
        """Go round `loops` times. Raises ReplayError if, in lockstep, a pose does not come."""
        parameters = self.parameters
        torch.set_num_threads(parameters.render_threads)
        begin = time.monotonic()
        place = parameters.make_place()
        poses = place.T_world_camera.numpy().astype(np.float64)
        size = (parameters.image_height, parameters.image_width)
        K = torch.from_numpy(parameters.intrinsics()).float()

        @torch.inference_mode()
        def render_one(index: int) -> Picture:
            images, depth = render(place, place.T_world_camera[index:index + 1], K, size,
                                   supersampling=parameters.supersampling)
            rgb = (images[0] * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
            return Picture(rgb.numpy(), depth[0].numpy())

        picture_bytes = size[0] * size[1] * (3 + 4)
        capacity = max(1, parameters.memory_mib * 2**20 // picture_bytes)
        self._loop = RenderedLoop(render_one, len(poses), capacity)
        way = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0, append=poses[:1, :3, 3]), axis=1).sum()
        self.get_logger().info(f"{parameters.place} {parameters.seed}: a round of {way:.1f} m in {len(poses)} images, "
                               f"made in {time.monotonic() - begin:.1f} s")
        try:
            if parameters.wait_for:
                self.wait_for_node()
            elif parameters.wait_for_subscriber:
                self.spin_until(self.images.get_subscription_count, math.inf)
            self.spin_until(lambda: self._is_far_enough_ahead(len(poses)), math.inf)
            self._go_round(poses)
        finally:
            self._loop.close()
        self.spin_for(0.5)  # let the middleware deliver the last one
        self._report()

    def _is_far_enough_ahead(self, length: int) -> bool:
        """Say whether enough is rendered for the first image to go out."""
        loop, wanted = self._loop, self.parameters.render_ahead
        loop.take(0)  # raises what rendering has raised
        if not wanted:
            if math.isnan(loop.seconds_each):
                return False
            # While the camera plays n images, n * period / seconds_each are rendered.
            share = 1 - 1 / (self.parameters.rate * loop.seconds_each * HEADROOM)
            wanted = math.ceil(max(0.0, share) * length) + 3
        return loop.ahead >= min(wanted, loop.capacity, length)

    def _go_round(self, poses: np.ndarray) -> None:
        """Publish every image when it is due; one that is late does not hurry those after it."""
        length, loops = len(poses), self.parameters.loops
        number = 0
        due = self.get_clock().now().nanoseconds
        while not loops or number < loops * length:
            due = self._wait_until(due)
            picture = self._loop.take(number)
            while picture is None:  # it cannot be waited for without the mapping node's messages being handled
                self.spin_for(0.002)
                picture = self._loop.take(number)
            period = round(NANOSECONDS / self.parameters.rate)
            now = self.get_clock().now().nanoseconds
            stamp = due
            if now - due > LATE * period:
                self._late(number)
                stamp = now
            message = self._publish(number, stamp, poses, picture)
            due = stamp + period
            number += 1
            if message is not None and self.parameters.wait_for:
                self.wait_for_pose(message)
                due = max(due, self.get_clock().now().nanoseconds)

    def _wait_until(self, due: int) -> int:
        """Wait until the node's clock, which may be simulated, shows `due` [ns]; return when the image was due."""
        clock = self.get_clock()
        begin = now = clock.now().nanoseconds
        while now < due:
            if now < begin:  # the clock was set back: a simulation starts anew
                return now
            self.spin_until(lambda: clock.now().nanoseconds >= due, min((due - now) / NANOSECONDS, 0.1))
            now = clock.now().nanoseconds
        return due

    def _publish(self, number: int, stamp: int, poses: np.ndarray, picture: Picture) -> Image | None:
        """Publish the truth, and the image unless it is lost: then return None."""
        parameters = self.parameters
        index = number % len(poses)
        if parameters.stamps == "zero":
            stamp = round(number * NANOSECONDS / parameters.rate)
        time_message = messages.time(stamp)
        self._publish_truth(stamp, time_message, poses[index])
        header = Header(stamp=time_message, frame_id=parameters.camera_frame)
        if self._depth.get_subscription_count():
            self._depth.publish(image_messages.image(picture.depth, header))
        fault = parameters.fault(number)
        if fault:
            self.counts[fault] += 1
        if fault in ("gap", "dropped"):
            return None
        rgb, K = picture.rgb, parameters.intrinsics()
        if fault == "blurred":
            T_next_camera = np.linalg.inv(poses[(index + 1) % len(poses)]) @ poses[index]
            rgb = motion_blur(picture, K, T_next_camera, parameters.exposure)
        K[:2, 2] -= 0.5  # ROS has pixels' centres at integers
        message = image_messages.image(rgb, header)
        self.publish_image(message, image_messages.camera_info(K, picture.depth.shape, header))
        self.counts["published"] += 1
        return message

    def _publish_truth(self, stamp: int, time_message: Time, T_world_camera: np.ndarray) -> None:
        parameters = self.parameters
        message = Odometry(header=Header(stamp=time_message, frame_id=parameters.world_frame),
                           child_frame_id=parameters.ground_truth_frame)
        message.pose.pose = messages.pose(T_world_camera)
        if self._last_truth is not None and stamp > self._last_truth[0]:
            before, T_before = self._last_truth
            linear, angular = messages.twist_between(T_before, T_world_camera, (stamp - before) / NANOSECONDS)
            twist = message.twist.twist
            twist.linear.x, twist.linear.y, twist.linear.z = linear.tolist()
            twist.angular.x, twist.angular.y, twist.angular.z = angular.tolist()
        self._last_truth = (stamp, T_world_camera)
        self._odometry.publish(message)
        if self._tf is not None:
            self._tf.publish(interfaces.TFMessage(transforms=[messages.transform_stamped(
                T_world_camera, time_message, parameters.world_frame, parameters.ground_truth_frame)]))

    def _late(self, number: int) -> None:
        self.counts["late"] += 1
        self.get_logger().warning(
            f"image {number} is late, {self.counts['late']} so far: rendering takes {self._loop.seconds_each:.3f} s an "
            f"image; lower rate ({self.parameters.rate:g}), image_width or supersampling, or raise render_ahead",
            throttle_duration_sec=10.0)

    def _report(self) -> None:
        late = self.counts["late"] - self._late_before
        self._late_before = self.counts["late"]
        level = DiagnosticStatus.WARN if late else DiagnosticStatus.OK
        text = f"{late} images were late" if late else f"{self.counts['published']} images published"
        loop = self._loop
        values = {
            **{name if name != "gap" else "left_out_in_gaps": count for name, count in self.counts.items()},
            "rendered_ahead": loop.ahead if loop else 0,
            "render_ms": f"{1e3 * loop.seconds_each:.1f}" if loop else "",
            "plays_from_memory": bool(loop and loop.is_whole and loop.ahead == loop.capacity),
        }
        name = self.get_fully_qualified_name().lstrip("/")
        self._reports.publish(DiagnosticArray(
            header=Header(stamp=self.get_clock().now().to_msg()),
            status=[diagnostics.status(name, "camera", self.images.topic_name, level, text, values)]))

    def _on_set_parameters(self, changes: Sequence[Parameter]) -> SetParametersResult:
        names = {entry.name for entry in dataclasses.fields(self.parameters)}
        try:
            self.parameters = dataclasses.replace(
                self.parameters, **{change.name: change.value for change in changes if change.name in names})
        except ParameterError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)


def main() -> None:
    """Run the executable: status 0 at the end or when interrupted, 1 with one line if it cannot go on."""
    status = 0
    with CameraRun() as run:
        try:
            rclpy.init(args=sys.argv)
            run.camera = node = SyntheticCamera()
            node.run()
            counts = node.counts
            node.get_logger().info(
                f"{counts['published']} images published on {node.images.topic_name}, {counts['late']} of them late, "
                f"{counts['blurred']} blurred; {counts['dropped'] + counts['gap']} left out")
        except (ParameterError, ReplayError) as error:
            print(f"synthetic_camera: {error}", file=sys.stderr)
            status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
