# SPDX-License-Identifier: Apache-2.0
"""The node's topics, services and frames: the one table of their names, types and qualities of service."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseArray, PoseStamped, PoseWithCovarianceStamped
from nav_msgs.msg import OccupancyGrid, Odometry, Path
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.qos import QoSPolicyKind, QoSProfile, QoSDurabilityPolicy, QoSHistoryPolicy, QoSReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.ros.parameter_table import ParameterError

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # not everywhere where rclpy is: the node then goes without /tf
    TFMessage = None

Entity = TypeVar("Entity")
# What the parameters qos_overrides.<topic>.<publisher or subscription>.<policy> can change.
QOS_POLICIES = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY, QoSPolicyKind.DURABILITY)
DEFAULT_CAMERA_FRAME = "camera_optical_frame"  # of images that name none
DEFAULT_ODOM_FRAME = "odom"  # of ~/visual_odometry where odom_frame names none


def _qos(depth: int, reliable: bool = True, latched: bool = False) -> QoSProfile:
    return QoSProfile(
        history=QoSHistoryPolicy.KEEP_LAST,
        depth=depth,
        reliability=QoSReliabilityPolicy.RELIABLE if reliable else QoSReliabilityPolicy.BEST_EFFORT,
        durability=QoSDurabilityPolicy.TRANSIENT_LOCAL if latched else QoSDurabilityPolicy.VOLATILE,
    )


@dataclass(frozen=True)
class Topic:
    """A topic that the node subscribes to or publishes."""

    name: str  # relative, private (~) or absolute, before remapping
    message: type | None
    qos: QoSProfile
    description: str

    def of(self, camera: str) -> Self:
        """Return the topic of one of several cameras; itself for the camera without a name."""
        return replace(self, name=_name_of(self.name, camera))

    @property
    def type_name(self) -> str:
        """Return the message's type as `package/msg/Name`."""
        if self.message is None:
            return "tf2_msgs/msg/TFMessage"
        return "/msg/".join((self.message.__module__.split(".")[0], self.message.__name__))

    def create(self, create: Callable[..., Entity], *arguments: object, name: str = "", **options: object) -> Entity:
        """Return what a node's method makes for this topic, under another name if one is given.

        Its QoS may be overridden by parameters. ParameterError, naming the topic, for values that cannot be.
        """
        name = name or self.name
        try:
            # A copy: rclpy writes the overrides to it.
            return create(self.message, name, *arguments, qos_profile=copy.copy(self.qos),
                          qos_overriding_options=QoSOverridingOptions(QOS_POLICIES), **options)
        except (RuntimeError, InvalidParameterTypeException) as error:
            resolved = create.__self__.resolve_topic_name(name)
            raise ParameterError(f"qos_overrides of {resolved}: {error}") from error

    @property
    def qos_text(self) -> str:
        """Return the policies in words."""
        reliable = self.qos.reliability == QoSReliabilityPolicy.RELIABLE
        latched = self.qos.durability == QoSDurabilityPolicy.TRANSIENT_LOCAL
        return (f"{'reliable' if reliable else 'best effort'}, {'transient local' if latched else 'volatile'}, "
                f"depth {self.qos.depth}")


# Sensor data: a best-effort subscription receives from reliable and from best-effort cameras. Outputs are offered as
# reliable, which both kinds of subscription receive.
IMAGE = Topic("image", Image, _qos(5, reliable=False), "The camera's images; only the newest one is processed.")
COMPRESSED_IMAGE = Topic("image/compressed", CompressedImage, _qos(5, reliable=False), "The same as JPEG or PNG, with "
                         "`image_transport: compressed`; a remapping of `image` counts: /camera/image_raw/compressed "
                         "for /camera/image_raw.")
CAMERA_INFO = Topic("camera_info", CameraInfo, _qos(5, reliable=False), "The camera's calibration, optional (see "
                    "`calibration` and `undistort`). Unless it is remapped, the topic is `camera_info` beside the "
                    "images', as image_transport has it: /camera/camera_info for /camera/image_raw.")
INITIAL_POSE = Topic("initialpose",
                     PoseWithCovarianceStamped, _qos(5), "Where the camera is in the map frame, its axes as a robot's "
                     "(x ahead, z up): the map frame is moved and turned about z so that it is there now, or with the "
                     "first pose. RViz's 2D Pose Estimate; the covariance is not used.")
ODOM = Topic("odom",
             Odometry, _qos(50, reliable=False), "With `scale_source: odometry`, the robot's own odometry in metres, "
             "which the distances of the map are compared with.")
ODOMETRY = Topic("~/odometry", Odometry, _qos(10), "Pose of the camera in the map frame, and its twist in the camera's "
                 "axes from the last two poses. Not continuous: it may jump, as the map frame does. Covariances are a "
                 "rule of thumb (`covariance_noise`, `covariance_drift`), three times the deviation while tracking is "
                 "degraded. Lengths are in the model's unit unless `scale_source` tells of metres.")
VISUAL_ODOMETRY = Topic("~/visual_odometry",
                        Odometry, _qos(10), "Pose of the camera in `odom`, and its twist in the camera's axes: its "
                        "motion from image to image, added up. Continuous: hand-overs, another scale and `initialpose` "
                        "do not move it, nor does a new sequence, except by `~/reset`; it drifts instead. Each motion "
                        "is one that the image tells (`refine_poses`) or a single window of the model has seen; where "
                        "neither has (tracking was lost, or the sequence is new) the camera is taken to have stood "
                        "still. It starts at the map's pose or, with `odom_frame`, at that of the robot's odometry. "
                        "Lengths are in the model's unit until the scale is known, and are not rescaled afterwards. "
                        "Covariances as above, by its own length.")
POSE = Topic("~/pose", PoseStamped, _qos(10), "The same pose.")
PATH = Topic("~/path", Path, _qos(1), "The last `max_path_length` poses, every `path_period`.")
POINTS = Topic("~/points", PointCloud2, _qos(2), "Points of the newest keyframe in the map frame: x, y, z, rgb, "
               "confidence.")
MAP = Topic("~/map", PointCloud2, _qos(1, latched=True), "The whole map, one point a voxel, every `map_period` if it "
            "has changed: x, y, z, rgb, confidence.")
MAP_UPDATES = Topic("~/map_updates",
                    PointCloud2, _qos(10), "The voxels that are new or have changed since the last message here, every "
                    "`map_updates_period`; all of them after the map was moved or scaled. Voxels that leave a full map "
                    "are not told of.")
GRID = Topic("~/grid",
             OccupancyGrid, _qos(1, latched=True), "With `publish_grid`, a flat plan for planners such as Nav2, every "
             "`map_period` if it has changed: occupied (100) by points between `grid_min_height` and "
             "`grid_max_height`, free (0) by the rays of the keyframes, else unknown (-1). Other heights, or another "
             "scale, are followed at once: by all of the map, and by the rays of earlier keyframes, which end at what "
             "is in the way then but get no longer.")
DEPTH = Topic("~/depth", Image, _qos(2), "Depth of each frame along the optical axis (32FC1) at the pixels of the "
              "camera's image (without distortion if `undistort`); NaN where the model saw nothing (it may crop the "
              "image) or is not sure enough (`confidence_threshold`). In metres if the scale is known, else in the "
              "model's unit.")
DEPTH_INFO = Topic("~/depth/camera_info", CameraInfo, _qos(2), "Intrinsics of `~/depth` and `~/confidence`: those of "
                   "`camera_info`, else as the model predicts them, with `refine_poses` as estimated so far.")
CONFIDENCE = Topic("~/confidence", Image, _qos(2), "Confidence in that depth, 1 or more (32FC1), likewise.")
MODEL_IMAGE = Topic("~/image", Image, _qos(2), "The image as the model saw it: cropped, resized (rgb8).")
KEYFRAMES = Topic("~/keyframes", PoseArray, _qos(1), "Poses of the last `max_path_length` keyframes, every "
                  "`path_period`.")
TRACKING_STATE = Topic("~/tracking_state", DiagnosticStatus, _qos(10, latched=True), "How good the poses are, when "
                       "that changes: INITIALIZING (no poses yet), TRACKING, DEGRADED or LOST (no poses), and why.")
EVENTS = Topic("~/events", DiagnosticStatus, _qos(10, latched=True), "What happened: a sequence started; a window was "
               "joined to the one before it (hand_over), by which the map frame may have jumped, and how far; tracking "
               "was lost, or found again (relocated); the window was changed (resized); the camera was placed by "
               "`initialpose` (placed); the scale was found or has changed (scaled), and all outputs with it.")
DIAGNOSTICS = Topic("/diagnostics", DiagnosticArray, _qos(10), "State of the camera, tracking, the cache and the "
                    "model, every `diagnostics_period`.")
TF = Topic("/tf",
           TFMessage, _qos(100), "Transform map -> camera frame, if `publish_tf`; with `odom_frame`, map -> odom.")
TF_STATIC = Topic("/tf_static",
                  TFMessage, _qos(100, latched=True), "With `odom_frame` or `base_frame`: the robot's frames, as "
                  "on /tf.")

IMAGES = {"raw": IMAGE, "compressed": COMPRESSED_IMAGE}  # by transport
SUBSCRIBED = (IMAGE, COMPRESSED_IMAGE, CAMERA_INFO, INITIAL_POSE, ODOM, TF_STATIC)
OUTPUTS = (ODOMETRY, VISUAL_ODOMETRY, POSE, PATH, KEYFRAMES, POINTS, MAP, MAP_UPDATES, GRID, DEPTH, DEPTH_INFO,
           CONFIDENCE, MODEL_IMAGE)  # which parameters may switch off
PUBLISHED = (*OUTPUTS, TRACKING_STATE, EVENTS, DIAGNOSTICS, TF)


@dataclass(frozen=True)
class ServiceEntry:
    """A service of the node."""

    name: str
    service: type
    description: str

    def of(self, camera: str) -> Self:
        """Return the service of one of several cameras; itself for the camera without a name."""
        return replace(self, name=_name_of(self.name, camera))

    @property
    def type_name(self) -> str:
        """Return the service's type as `package/srv/Name`."""
        return "/srv/".join((self.service.__module__.split(".")[0], self.service.__name__))


RESET = ServiceEntry("~/reset",
                     Trigger, "Start a new sequence at the next image: the map, a loaded one too, and the path "
                     "are cleared, and parameters that wait for a reset take effect.")
PAUSE = ServiceEntry("~/pause", Trigger, "Map no images until `~/resume`; sequence, map and path stay.")
RESUME = ServiceEntry("~/resume", Trigger, "Go on with the same sequence at the next image.")
SAVE_MAP = ServiceEntry("~/save_map", Trigger, "Write the map as it is published to `map_file` in `save_directory`, as "
                        "binary PLY or PCD; an older file is replaced when the new one is complete.")
LOAD_MAP = ServiceEntry("~/load_map",
                        Trigger, "Read `map_file` in `save_directory`, and publish it with the map until a "
                        "reset or another is loaded. Where the camera is in it, `initialpose` tells.")
SAVE_TRAJECTORY = ServiceEntry("~/save_trajectory",
                               Trigger, "Write the last `max_path_length` poses to `trajectory_file` "
                               "in `save_directory`, in TUM format.")
DESCRIBE_CACHE = ServiceEntry("~/describe_cache", Trigger, "Return the page table of the cache as text.")
SERVICES = (RESET, PAUSE, RESUME, SAVE_MAP, LOAD_MAP, SAVE_TRAJECTORY, DESCRIBE_CACHE)

FRAMES = (
    ("map", "`map_frame`: origin at the first camera, z up and x forward if that camera was level (REP-103); with "
     "`base_frame`, at the robot's first place and as level as that. It may "
     "jump a little from window to window (`~/events` says how far), and starts anew with each sequence. Its unit is "
     "the model's, or the metre where `scale_source` tells how long that is."),
    (DEFAULT_ODOM_FRAME, "Of `~/visual_odometry`, continuous (REP-105): `odom_frame`, or this name, with "
     "`frame_prefix`. The node does not publish where it is on /tf unless `odom_frame` is set: then it is the "
     "robot's."),
    (DEFAULT_CAMERA_FRAME, "The camera's optical frame (x right, y down, z forward): the image's `frame_id`, unless "
     "`camera_frame` names another; this name, with `frame_prefix`, if both are empty."),
)


def _name_of(name: str, camera: str) -> str:
    """Return a topic's or service's name for a camera: front/image for image, ~/front/map for ~/map."""
    if not camera or name.startswith("/"):
        return name
    private, relative = ("~/", name[2:]) if name.startswith("~/") else ("", name)
    return f"{private}{camera}/{relative}"


def topics_table(subscribed: tuple[Topic, ...] = SUBSCRIBED, published: tuple[Topic, ...] = PUBLISHED) -> str:
    """Return the table of topics, of the mapping node unless others are given, for the documentation."""
    lines = ["| topic | type | QoS | description |", "|---|---|---|---|"]
    for topics, verb in ((subscribed, "In: "), (published, "")):
        lines += [f"| `{t.name}` | {t.type_name} | {t.qos_text} | {verb}{t.description} |" for t in topics]
    return "\n".join(lines) + "\n"


def services_table() -> str:
    """Return the table of services for the documentation."""
    lines = ["| service | type | description |", "|---|---|---|"]
    lines += [f"| `{s.name}` | {s.type_name} | {s.description} |" for s in SERVICES]
    return "\n".join(lines) + "\n"


def frames_table() -> str:
    """Return the table of frames for the documentation."""
    lines = ["| frame | description |", "|---|---|"]
    lines += [f"| `{name}` | {description} |" for name, description in FRAMES]
    return "\n".join(lines) + "\n"
