# SPDX-License-Identifier: Apache-2.0
"""The mapping node's parameters: the one table of their names, defaults, ranges and descriptions."""
from __future__ import annotations

import re
from dataclasses import dataclass, fields

from lingbot_map_ros.ros import interfaces
from lingbot_map_ros.ros.parameter_table import Change, ParameterError, ParameterTable, frame_error, parameter


OUTPUTS = tuple(topic.name.removeprefix("~/") for topic in interfaces.OUTPUTS)


@dataclass(frozen=True)
class Parameters(ParameterTable):
    """All parameters of the node, or of one of its cameras. The fields of this class are the table."""

    scale_frames: int = parameter(
        0, "Frames at the start of a sequence that are predicted together, fix the scale and stay visible for ever; "
        "more of them wait for the next window or reset. 0: the model's own.", Change.NOW, 0, 64)
    sliding_window: int = parameter(
        0, "Newest keyframes that are visible in full; each costs memory and time. 0: the model's own, or what "
        "cache_memory_mib holds.", Change.NOW, 0, 1024)
    max_sliding_window: int = parameter(
        0, "Memory is reserved for a sliding_window of up to this, so that it can be raised while the node runs. 0: "
        "for the window that the node starts with.", Change.CONFIGURE, 0, 1024)
    cache_memory_mib: int = parameter(
        0, "Memory for the caches in MiB, in place of max_sliding_window: room for the largest window that fits, "
        "within the model's trained range. Several cameras divide it. The images that windows share come on top. 0: "
        "off.", Change.CONFIGURE, 0, 1_000_000)
    remembered_frames: int = parameter(
        0, "Keyframes, scale frames and window included, of which at least the special tokens are remembered; the "
        "oldest are forgotten. Can be lowered while the node runs, and raised up to what it started with. 0: the "
        "range that the model was trained on.", Change.NOW, 0, 100_000)
    keyframe_policy: str = parameter(
        "motion", "Which frames after the scale frames are keyframes, which are remembered and enter the map (others "
        "get a pose only): `motion`, those that the image has moved for, so that a standing camera adds none; "
        "`interval`, every keyframe_interval-th.", Change.NOW, choices=("motion", "interval"))
    flow_threshold: float = parameter(
        0.0, "With motion: pixels of the model's image that it must have moved by on average since the last keyframe. "
        "0: the model's own.", Change.NOW, 0.0, 1000.0)
    max_keyframe_gap: int = parameter(
        0, "With motion: most frames from one keyframe to the next, moved or not. 0: any number.", Change.NOW,
        0, 100_000)
    keyframe_interval: int = parameter(
        1, "With interval: every n-th frame is a keyframe.", Change.NOW, 1, 1000)
    windowed: bool = parameter(
        True, "Start the model anew whenever window_size keyframes are kept, from the last of them, and map what "
        "follows into the same map: a run may be longer than those the model was trained on.", Change.NOW)
    window_size: int = parameter(
        0, "Keyframes that one window keeps, scale frames and overlap included. 0: the model's own.", Change.NOW,
        0, 100_000)
    overlap_keyframes: int = parameter(
        0, "Keyframes that two windows share: they tell how the windows lie to each other. 0: the model's own.",
        Change.NOW, 0, 1000)
    init_motion: float = parameter(
        0.01, "How far the image must have moved from one scale frame to the next: the median over its pixels, as a "
        "fraction of its width. 0: every image is taken.", Change.NOW, 0.0, 1.0)
    max_init_wait: float = parameter(
        5.0, "Seconds of image time after which a sequence starts without that motion; tracking is then degraded. 0: "
        "it waits for ever.", Change.NOW, 0.0, 3600.0)
    jump_factor: float = parameter(
        10.0, "A step of the camera this many times longer than usual, and long for the scene, is implausible: the "
        "pose is withheld.", Change.NOW, 1.0, 1e6)
    lost_after: int = parameter(
        5, "Implausible poses in a row after which tracking is lost. The model then starts anew from the last good "
        "keyframes (see windowed), in the same map.", Change.NOW, 1, 1000)
    reset_when_lost: bool = parameter(
        False, "When tracking is lost, start a new sequence instead, whose scale and origin are others: path and map "
        "are cleared. That is also done where there is nothing to start anew from.", Change.NOW)
    refine_poses: str = parameter(
        "auto", "Correct each pose by how the corners of the image have moved since the one before: `always`, `never`, "
        "or as the model recommends, `auto`: the `default` model's poses jitter without. Runs on the CPU.", Change.NOW,
        choices=("auto", "always", "never"))
    camera_iterations: int = parameter(
        0, "Refinement passes of a pose; 0: the model's own. Fewer are faster and may be less accurate.", Change.RESET,
        0, 8)
    attention_backend: str = parameter(
        "auto", "Kernel of the attention over the cache: auto takes the fastest that works on the device. triton and "
        "flashinfer need a GPU. Frames are recorded as CUDA graphs with auto and triton alone.", Change.CONFIGURE,
        choices=("auto", "sdpa", "triton", "flashinfer-fa2", "flashinfer-fa3"))
    checkpoint: str = parameter(
        "", "File with the model's weights (.pt or .safetensors). Empty: the preset's own.", Change.CONFIGURE)
    preset: str = parameter(
        "default", "Model: `default` ships with the package, `lingbot_map` is the published one and needs a "
        "checkpoint, `tiny` is for tests.", Change.CONFIGURE)
    device: str = parameter(
        "auto", "Where the model runs: auto (CUDA if there is a GPU), cpu, cuda or cuda:N.", Change.CONFIGURE)
    dtype: str = parameter(
        "auto", "Number format of the model: auto is float32 on a CPU, bfloat16 on a GPU that has it, else float16.",
        Change.CONFIGURE, choices=("auto", "float32", "bfloat16", "float16"))
    cache_dtype: str = parameter(
        "auto", "Number format of the cache, most of the memory of a large model: auto is the model's. float8_e4m3fn "
        "takes little more than half of bfloat16, is a little less exact and, but on GPUs from Hopper on, a little "
        "slower. On a CPU bfloat16 is half of float32.",
        Change.CONFIGURE, choices=("auto", "bfloat16", "float8_e4m3fn"))
    image_width: int = parameter(
        0, "Width in pixels that images are resized to; a multiple of the model's patch size, 14, up to "
        "the model's own. 0: the model's own.",
        Change.CONFIGURE, 0, 2048)
    camera_size: str = parameter(
        "640x480", "Width and height of the camera's images, which the node is made ready for before the first one "
        "comes. Others are mapped all the same, but on a GPU, for a model of many sizes, their first one waits until "
        "kernels are compiled.", Change.CONFIGURE)
    cameras: tuple[str, ...] = parameter(
        ("",), "Names of the cameras, 16 at most, which share the model and are served in turn. Each has its name in "
        "all its topics, services, files and its map frame: front/image, ~/front/map, ~/front/reset, front_map.ply, "
        "front/map; and a map and a path of its own. What differs from camera to camera can be set for one: "
        "front.image_rotation, likewise camera_size, image_transport, calibration, undistort, max_rate, "
        "confidence_threshold, metric_scale, camera_height, camera_frame and publish_tf. One empty name: a single "
        "camera, without all that.", Change.START)
    image_transport: str = parameter(
        "raw", "How images come: `raw`, on image, or `compressed`, on image/compressed.", Change.CONFIGURE,
        choices=("raw", "compressed"))
    max_rate: float = parameter(
        0.0, "Most images a second, by their stamps, that are mapped; the others are skipped. 0: all that there is "
        "time for.", Change.NOW, 0.0, 1000.0)
    calibration: str = parameter(
        "auto",
        "Which intrinsics of camera_info are used in place of the predicted ones, for points and depth: `auto`, P if "
        "the image topic's name says that images are rectified (image_rect...), else K; `K`; `P`; `none`.", Change.NOW,
        choices=("auto", "K", "P", "none"))
    undistort: bool = parameter(
        False, "Remove the lens' distortion (plumb_bob, rational_polynomial, equidistant) by camera_info before "
        "mapping; images wait for it. A change starts a new sequence.", Change.NOW)
    image_rotation: int = parameter(
        0, "Degrees clockwise, 0, 90, 180 or 270, that turn the camera's images upright, which the model sees best; "
        "poses and depth remain the camera's own. A change starts a new sequence.", Change.NOW, 0, 270)
    confidence_threshold: float = parameter(
        1.0, "Pixels below this confidence enter neither ~/points nor ~/map. Confidence is 1 or more: 1 keeps all.",
        Change.NOW, 1.0, 1e6)
    scale_source: str = parameter(
        "none",
        "How lengths become metres: `none`, they stay in the model's unit, another one in each sequence; `fixed`, by "
        "metric_scale; `odometry`, by the distances that the topic odom tells; `height`, by camera_height over a floor "
        "that is in view, where the camera is level or base_frame is set.", Change.CONFIGURE,
        choices=("none", "fixed", "odometry", "height"))
    metric_scale: float = parameter(
        1.0, "With scale_source fixed: metres per model unit.", Change.NOW, 1e-6, 1e6)
    camera_height: float = parameter(
        1.0, "With scale_source height: of the camera over the floor in metres.", Change.NOW, 0.01, 1000.0)
    covariance_noise: float = parameter(
        0.005, "Deviation of one pose in ~/odometry's covariance, by rule of thumb: of its position as a fraction of "
        "the image's median depth, of its rotation in radians. 0, and covariance_drift too: covariances are not known.",
        Change.NOW,
        0.0, 1.0)
    covariance_drift: float = parameter(
        0.015, "Deviation of the position that is added as a fraction of the path's length since the sequence began.",
        Change.NOW, 0.0, 1.0)
    voxel_size: float = parameter(
        0.05, "Edge of a map voxel in metres, once the scale is known (scale_source). A scale that is found or changes "
        "sizes the voxels of the present map anew: those that come to share one are fused.", Change.RESET, 1e-3, 10.0)
    voxel_fraction: float = parameter(
        0.015, "Edge of a map voxel while the scale is not known, as a fraction of the scale frames' median depth.",
        Change.RESET, 1e-4, 0.5)
    max_map_points: int = parameter(
        500_000, "Most points of a camera's map; a full map drops those that were seen little and long ago.",
        Change.RESET, 1, 20_000_000)
    max_path_length: int = parameter(
        1000, "Most poses of ~/path; the oldest are dropped. A message holds up the images by its length: 100,000 "
        "poses by about 0.3 s.", Change.RESET, 1, 100_000)
    map_period: float = parameter(
        2.0, "Seconds between two messages on ~/map, if the map has changed.", Change.NOW, 0.05, 3600.0)
    map_updates_period: float = parameter(
        0.5, "Seconds between two messages on ~/map_updates, if the map has changed.", Change.NOW, 0.0, 3600.0)
    publish_grid: bool = parameter(
        False, "Publish ~/grid, the map as a flat plan. It knows of keyframes that came while this was on.", Change.NOW)
    grid_resolution: float = parameter(
        0.05, "Edge of a cell of ~/grid in metres; while the scale is not known, in units of the scale frames' median "
        "depth.", Change.NOW, 0.001, 10.0)
    grid_min_height: float = parameter(
        -0.3, "Points of the map below this z are not in the way: the floor. In metres or that depth, likewise; z is "
        "0 at the height of the first camera or, with base_frame, of the robot's body.", Change.NOW, -1000.0, 1000.0)
    grid_max_height: float = parameter(
        0.2, "Points above this z, likewise, are not in the way.", Change.NOW, -1000.0, 1000.0)
    path_period: float = parameter(
        0.5, "Seconds between two messages on ~/path, if the path has grown.", Change.NOW, 0.0, 3600.0)
    diagnostics_period: float = parameter(
        1.0, "Seconds between two messages on /diagnostics.", Change.NOW, 0.1, 60.0)
    image_timeout: float = parameter(
        3.0, "Seconds without an image, or without one that the model has taken, after which tracking is degraded and "
        "a warning is given.", Change.NOW, 0.1, 3600.0)
    save_directory: str = parameter(
        "~/.ros/lingbot_map",
        "The one folder that files are written to and read from, made when it is needed. Empty: none "
        "are.", Change.START)
    map_file: str = parameter(
        "map.ply", "Name of the file in save_directory that ~/save_map writes and ~/load_map reads: .ply or .pcd.",
        Change.NOW)
    trajectory_file: str = parameter(
        "trajectory.txt", "Name of the file in save_directory that ~/save_trajectory writes.", Change.NOW)
    disabled_outputs: tuple[str, ...] = parameter(
        ("",), f"Topics that are not offered at all, of {', '.join(OUTPUTS)}. Those that are cost nothing without a "
        "subscriber, but for poses. An empty name counts for nothing.", Change.CONFIGURE)
    map_frame: str = parameter(
        "map", "Frame of all outputs: z up, x forward at the first image of a level camera.", Change.NOW)
    camera_frame: str = parameter(
        "", "Name of the camera's optical frame. Empty: the frame_id of the images. Of several cameras each needs its "
        "own: front.camera_frame.", Change.NOW)
    publish_tf: bool = parameter(
        False, "Publish the transform map_frame -> camera frame on /tf, or map_frame -> odom_frame if that is set. "
        "Leave it off where that frame has a parent already.", Change.NOW)
    odom_frame: str = parameter(
        "", "The robot's odometry frame, where it publishes odom -> base -> camera: /tf then carries map_frame -> "
        "odom_frame (REP-105). Its unit is the metre: see scale_source. Empty: none.", Change.CONFIGURE)
    base_frame: str = parameter(
        "",
        "The robot's body, x ahead and z up. Where it is set, the map starts at the body and is as level as the robot, "
        "by base -> camera from TF, and initialpose is the body's. Empty: the camera is taken to be level.",
        Change.CONFIGURE)
    frame_prefix: str = parameter(
        "", "Put before map_frame, odom_frame, base_frame and camera_frame, such as `robot1/`.", Change.CONFIGURE)
    transform_tolerance: float = parameter(
        0.2, "Seconds that map -> odom is stamped into the future, so that it is known until the next image; and by "
        "which odometry may be older than the image.", Change.NOW, 0.0, 10.0)
    autostart: bool = parameter(
        True, "Configure and activate the node when it starts. Off: a lifecycle manager does.", Change.START)

    def _content_error(self, name: str, value: object) -> str | None:
        if name == "cameras":
            return _names_error(value)
        if name == "disabled_outputs":
            wrong = [output for output in value if output not in ("", *OUTPUTS)]
            return f"expected some of {', '.join(OUTPUTS)}" if wrong else None
        if name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            return "expected auto, cpu, cuda or cuda:N"
        if name == "map_frame" and not value:
            return "a frame needs a name"
        if name in ("map_frame", "camera_frame", "odom_frame", "base_frame", "frame_prefix"):
            return frame_error(value)
        if name == "save_directory" and value and not value.startswith(("/", "~")):
            return "expected an absolute path"
        if name in ("map_file", "trajectory_file") and not re.fullmatch(r"\w[\w .-]*", value):
            return "expected the name of a file, without a folder"
        if name == "map_file" and not value.endswith((".ply", ".pcd")):
            return "expected a name that ends with .ply or .pcd"
        if name == "camera_size" and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", value):
            return "expected WIDTHxHEIGHT in pixels, such as 1280x720, of at most four digits each"
        if name == "image_rotation" and value % 90:
            return "expected 0, 90, 180 or 270"
        if name == "preset" and not re.fullmatch(r"\w+", value):
            return "expected the name of a model"
        return None

    def _check_together(self) -> None:
        """Refuse values that exclude each other whatever the model; the session refuses the others."""
        least = self.scale_frames + self.sliding_window
        if self.remembered_frames and self.remembered_frames < least:
            raise ParameterError(f"remembered_frames is {self.remembered_frames}: it counts the scale frames and the "
                                 f"window, so it must be at least scale_frames + sliding_window, {least}")
        if self.grid_min_height >= self.grid_max_height:
            raise ParameterError(f"grid_min_height is {self.grid_min_height}: it must be below grid_max_height, "
                                 f"{self.grid_max_height}")
        if len(self.cameras) == 1:  # of several, each has its own parameters
            for name in ("odom_frame", "camera_frame"):
                if self.frame(name) == self.frame("map_frame"):
                    raise ParameterError(f"{name} is {self.frame(name)!r}, which is map_frame too: they must differ")
        if self.max_sliding_window and self.cache_memory_mib:
            raise ParameterError(f"max_sliding_window is {self.max_sliding_window} and cache_memory_mib "
                                 f"{self.cache_memory_mib}: only one of them can reserve the memory, set the other to "
                                 "0")

    @property
    def camera(self) -> str:
        """Name of the one camera that these parameters are of; empty for the only one.

        ValueError for the parameters of several cameras: NodeParameters has those of each.
        """
        (camera,) = self.cameras
        return camera

    def frame(self, name: str) -> str:
        """Return the name of a frame of this camera's, by its parameter; empty if it is not set.

        It has the prefix and, if it is the map's, the camera's name.
        """
        value = getattr(self, name)
        if not value:
            return ""
        return self.own_frame(value) if name == "map_frame" else self.frame_prefix + value

    def own_frame(self, name: str) -> str:
        """Return the full name of a frame that is this camera's own."""
        return self.frame_prefix + (f"{self.camera}/{name}" if self.camera else name)

    def file(self, name: str) -> str:
        """Return the name of this camera's file, by its parameter."""
        value = getattr(self, name)
        return f"{self.camera}_{value}" if self.camera else value


NAMES = tuple(entry.name for entry in fields(Parameters))
# Only the loaded model can tell whether it takes these.
JUDGED_BY_MODEL = (
    "scale_frames", "sliding_window", "remembered_frames", "keyframe_policy", "flow_threshold", "max_keyframe_gap",
    "keyframe_interval", "windowed", "window_size", "overlap_keyframes", "refine_poses", "camera_iterations",
    "max_map_points",
)


# What may differ from camera to camera: set as CAMERA.NAME it holds for that camera only.
PER_CAMERA = ("camera_size", "image_transport", "image_rotation", "calibration", "undistort", "max_rate",
              "confidence_threshold", "metric_scale", "camera_height", "camera_frame", "publish_tf")
MAX_CAMERAS = 16


def size_of(text: str) -> tuple[int, int]:
    """Return the height and width of a camera_size."""
    width, height = text.split("x")
    return int(height), int(width)


def _names_error(names: tuple[str, ...]) -> str | None:
    if names == ("",):
        return None
    if not 1 <= len(names) <= MAX_CAMERAS:
        return f"expected 1 to {MAX_CAMERAS} names"
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z](_?[A-Za-z0-9]){,63}", name):
            return (f"{name!r} cannot be in the name of a topic: expected letters, digits and single underscores, a "
                    "letter first, 64 at most")
        if names.count(name) > 1:
            return f"{name!r} is there twice"
    return None
