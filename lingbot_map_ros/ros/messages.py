# SPDX-License-Identifier: Apache-2.0
"""From poses and points to messages. Poses are float64 [4, 4] arrays that map camera points into the map frame."""
from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Point, Pose, PoseArray, PoseStamped, Quaternion, TransformStamped, Vector3
from nav_msgs.msg import MapMetaData, OccupancyGrid, Odometry, Path
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from lingbot_map_ros.mapping.geometry import matrix_from_quaternion, quaternion_from_matrix
from lingbot_map_ros.mapping.occupancy import Grid
from lingbot_map_ros.mapping.uncertainty import Uncertainty

NANOSECONDS = 1_000_000_000
UNKNOWN_COVARIANCE = -1.0  # in element 0, as sensor_msgs/Imu defines for "no estimate"

# One point of a cloud. `rgb` is 0x00RRGGBB in the bits of a float, as PCL and RViz read it.
POINT_TYPE = np.dtype([("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("rgb", "<u4"), ("confidence", "<f4")])
_POINT_FIELDS = [
    PointField(name=name, offset=POINT_TYPE.fields[name][1], datatype=PointField.FLOAT32, count=1)
    for name in POINT_TYPE.names
]


def nanoseconds(stamp: Time) -> int:
    """Return the stamp as nanoseconds."""
    return stamp.sec * NANOSECONDS + stamp.nanosec


def time(stamp_ns: int) -> Time:
    """Return nanoseconds as a stamp."""
    return Time(sec=stamp_ns // NANOSECONDS, nanosec=stamp_ns % NANOSECONDS)


def twist_between(T_map_before: np.ndarray, T_map_now: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean linear [3] and angular [3] velocity between two poses, in the axes of the later one.

    Lengths a second and radians a second. `seconds` must be positive.
    """
    rotation_map_now = T_map_now[:3, :3]
    linear = rotation_map_now.T @ (T_map_now[:3, 3] - T_map_before[:3, 3]) / seconds
    x, y, z, w = quaternion_from_matrix(T_map_before[:3, :3].T @ rotation_map_now)
    axis = np.array([x, y, z])  # of length sin(angle / 2); the rotation's axis is the same in both poses' axes
    sine = float(np.linalg.norm(axis))
    scale = 2 * math.atan2(sine, w) / sine if sine > 1e-12 else 2.0
    return linear, axis * scale / seconds


def pose(T_map_camera: np.ndarray) -> Pose:
    """Return a pose [4, 4] as a message."""
    message = Pose()
    message.position.x, message.position.y, message.position.z = T_map_camera[:3, 3].tolist()
    orientation = message.orientation
    orientation.x, orientation.y, orientation.z, orientation.w = quaternion_from_matrix(T_map_camera[:3, :3]).tolist()
    return message


def pose_matrix(position: Point | Vector3, orientation: Quaternion) -> np.ndarray:
    """Return a pose as a matrix [4, 4]. ValueError, naming the field, for values that are none."""
    T, q = np.eye(4), np.array([orientation.x, orientation.y, orientation.z, orientation.w])
    T[:3, 3] = position.x, position.y, position.z
    if not np.isfinite(T).all():
        raise ValueError(f"position is {T[:3, 3].tolist()}: expected finite numbers")
    if not (np.isfinite(q).all() and 0.9 < np.linalg.norm(q) < 1.1):
        raise ValueError(f"orientation is {q.tolist()}: expected a quaternion of length 1")
    T[:3, :3] = matrix_from_quaternion(q)
    return T


def pose_stamped(T_map_camera: np.ndarray, stamp: Time, map_frame: str) -> PoseStamped:
    """Return the camera's pose in the map."""
    return PoseStamped(header=Header(stamp=stamp, frame_id=map_frame), pose=pose(T_map_camera))


def odometry(
    T_map_camera: np.ndarray,
    twist: tuple[np.ndarray, np.ndarray] | None,
    deviations: Uncertainty | None,
    stamp: Time,
    map_frame: str,
    camera_frame: str,
) -> Odometry:
    """Return the camera's pose in the map and its twist (linear, angular) in the camera's axes; None: not known.

    deviations: of pose and twist; element 0 of a covariance that is not known is -1.
    """
    message = Odometry(header=Header(stamp=stamp, frame_id=map_frame), child_frame_id=camera_frame)
    message.pose.pose = pose(T_map_camera)
    if twist is not None:
        velocity = message.twist.twist
        velocity.linear.x, velocity.linear.y, velocity.linear.z = twist[0].tolist()
        velocity.angular.x, velocity.angular.y, velocity.angular.z = twist[1].tolist()
    message.pose.covariance[0] = message.twist.covariance[0] = UNKNOWN_COVARIANCE
    if deviations is not None:
        message.pose.covariance = _covariance(deviations.position, deviations.rotation)
        if twist is not None:
            message.twist.covariance = _covariance(deviations.linear, deviations.angular)
    return message


def _covariance(linear: float, angular: float) -> np.ndarray:
    """Return the covariance [36] of independent deviations along and about x, y, z."""
    return np.diag([linear**2] * 3 + [angular**2] * 3).ravel()


def transform_stamped(T_map_camera: np.ndarray, stamp: Time, map_frame: str, camera_frame: str) -> TransformStamped:
    """Return the transform of the camera's frame in the map frame."""
    message = TransformStamped(header=Header(stamp=stamp, frame_id=map_frame), child_frame_id=camera_frame)
    where = pose(T_map_camera)
    translation = message.transform.translation
    translation.x, translation.y, translation.z = where.position.x, where.position.y, where.position.z
    message.transform.rotation = where.orientation
    return message


def path(poses: Iterable[PoseStamped], stamp: Time, map_frame: str) -> Path:
    """Return poses, oldest first, as a path."""
    return Path(header=Header(stamp=stamp, frame_id=map_frame), poses=list(poses))


def pose_array(poses: Iterable[PoseStamped], stamp: Time, map_frame: str) -> PoseArray:
    """Return poses, oldest first, as an array."""
    return PoseArray(header=Header(stamp=stamp, frame_id=map_frame), poses=[pose.pose for pose in poses])


def occupancy_grid(grid: Grid, stamp: Time, map_frame: str) -> OccupancyGrid:
    """Return a plan, cells in rows along x from the lower left corner."""
    rows, columns = grid.cells.shape
    info = MapMetaData(map_load_time=stamp, resolution=grid.resolution, width=columns, height=rows)
    info.origin.position.x, info.origin.position.y = grid.origin
    data = array("b")
    data.frombytes(np.ascontiguousarray(grid.cells).tobytes())
    return OccupancyGrid(header=Header(stamp=stamp, frame_id=map_frame), info=info, data=data)


def point_cloud(data: array, stamp: Time, frame_id: str) -> PointCloud2:
    """Return the bytes of points of POINT_TYPE, none of them NaN, as an unordered cloud."""
    return PointCloud2(
        header=Header(stamp=stamp, frame_id=frame_id), height=1, width=len(data) // POINT_TYPE.itemsize,
        fields=_POINT_FIELDS, is_bigendian=False, point_step=POINT_TYPE.itemsize, row_step=len(data), data=data,
        is_dense=True,
    )
