# SPDX-License-Identifier: Apache-2.0
"""From the content of `sensor_msgs/CameraInfo` to intrinsics and to images without lens distortion.

K is the matrix of the image as it comes from the sensor, P that of the rectified one; see the message's definition.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import cv2
import numpy as np

DISTORTION_MODELS = {  # counts of coefficients
    "plumb_bob": (4, 5),
    "rational_polynomial": (8,),
    "equidistant": (4,),
}
MAX_FOCAL_LENGTH = 100.0  # in image widths, and MAX_OFFSET likewise: beyond, numbers are garbage
MAX_OFFSET = 10.0
MAX_ASPECT_ERROR = 0.01  # of an image's shape against the calibrated one: resizing rounds to whole pixels
COARSE = 16  # pixels between those that the distortion is measured at


class RegionMessage(Protocol):
    """The fields of `sensor_msgs/RegionOfInterest` that matter here."""

    x_offset: int
    y_offset: int
    height: int
    width: int


class CameraInfoMessage(Protocol):
    """The fields of `sensor_msgs/CameraInfo` that matter here."""

    height: int
    width: int
    distortion_model: str
    d: Sequence[float]
    k: Sequence[float]
    r: Sequence[float]
    p: Sequence[float]
    binning_x: int
    binning_y: int
    roi: RegionMessage


class CalibrationError(ValueError):
    """A calibration that cannot be used: says which `field`, its `value` and what is wrong with it."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        text = str(value)
        super().__init__(f"{field} is {text if len(text) <= 120 else text[:120] + '...'}: {reason}")
        self.field = field
        self.value = value


@dataclass(frozen=True, eq=False)
class Calibration:
    """Intrinsics of one camera for images of one size, in pixels with centres at integers; checked."""

    size: tuple[int, int]  # height, width
    K: np.ndarray  # [3, 3]
    P: np.ndarray | None  # [3, 3]; None: not given
    R: np.ndarray  # [3, 3], maps rays of the camera to those of the rectified one
    distortion_model: str
    D: np.ndarray  # [n]; empty: none

    @classmethod
    def from_message(cls, message: CameraInfoMessage) -> Calibration:
        """Read a message. Raises CalibrationError for values that no camera has, all zero (not calibrated) included."""
        for name in ("width", "height"):
            if getattr(message, name) == 0:
                raise CalibrationError(name, 0, "the camera is not calibrated")
        size = (message.height, message.width)
        K = _matrix("k", message.k, size)
        P = np.reshape(np.asarray(message.p, dtype=np.float64), (3, 4))[:, :3]
        D = np.asarray(message.d, dtype=np.float64)
        if not np.isfinite(D).all():
            raise CalibrationError("d", D.tolist(), "expected finite coefficients")
        counts = DISTORTION_MODELS.get(message.distortion_model)
        if counts and D.size and D.size not in counts and D.any():
            expected = " or ".join(map(str, counts))
            raise CalibrationError("d", D.tolist(), f"{message.distortion_model} has {expected} coefficients")
        calibration = cls(size, K, _matrix("p", P, size) if P.any() else None, _rotation(message.r),
                          message.distortion_model, D if D.any() else np.empty(0))
        return calibration._cut(message)

    @property
    def is_distorted(self) -> bool:
        """Whether the lens bends lines."""
        return self.D.size > 0

    def for_size(self, size: tuple[int, int]) -> Calibration:
        """Return the calibration for resized images of (height, width). CalibrationError for another shape."""
        if size == self.size:
            return self
        scale_y, scale_x = size[0] / self.size[0], size[1] / self.size[1]
        if abs(scale_x / scale_y - 1) > MAX_ASPECT_ERROR:
            raise CalibrationError("width x height", f"{self.size[1]}x{self.size[0]}",
                                   f"the images are {size[1]}x{size[0]}, of another shape")
        return self._affine(size, scale_x, scale_y, 0.0, 0.0)

    def max_distortion(self) -> float:
        """Return how far, in pixels, the lens moves a point of the image at most."""
        if not self.is_distorted:
            return 0.0
        height, width = (-(-n // COARSE) for n in self.size)
        coarse = self._affine((height, width), 1 / COARSE, 1 / COARSE, 0.0, 0.0)
        x, y = coarse._maps(np.eye(3), coarse.K, cv2.CV_32FC1)
        rows, columns = np.mgrid[:height, :width]
        return COARSE * float(np.hypot(x - columns, y - rows).max())

    def _cut(self, message: CameraInfoMessage) -> Calibration:
        """Return the calibration of what is left after the region of interest is cut out and pixels are binned."""
        roi, (height, width) = message.roi, self.size
        left = top = 0
        if roi.width and roi.height:
            left, top, width, height = roi.x_offset, roi.y_offset, roi.width, roi.height
        bin_x, bin_y = max(message.binning_x, 1), max(message.binning_y, 1)
        if left + width > self.size[1] or top + height > self.size[0] or width < bin_x or height < bin_y:
            raise CalibrationError("roi and binning", f"{width}x{height} at {left}, {top} by {bin_x}, {bin_y}",
                                   f"the sensor has {self.size[1]}x{self.size[0]} pixels")
        return self._affine((height // bin_y, width // bin_x), 1 / bin_x, 1 / bin_y, left, top)

    def _affine(self, size: tuple[int, int], scale_x: float, scale_y: float, left: float, top: float) -> Calibration:
        """Return the calibration after pixels were cut off and the rest was resized."""
        def change(matrix: np.ndarray | None) -> np.ndarray | None:
            if matrix is None:
                return None
            matrix = matrix.copy()
            matrix[0, 2] += 0.5 - left
            matrix[1, 2] += 0.5 - top
            matrix[0] *= scale_x
            matrix[1] *= scale_y
            matrix[:2, 2] -= 0.5
            return matrix
        return replace(self, size=size, K=change(self.K), P=change(self.P))

    def _maps(self, R: np.ndarray, K: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the pixels of an image without distortion, of the camera turned by R and of matrix K, come from.
        """
        module = cv2.fisheye if self.distortion_model == "equidistant" else cv2
        return module.initUndistortRectifyMap(self.K, self.D, R, K, self.size[::-1], kind)


@dataclass(frozen=True, eq=False)
class Lens:
    """What is done about a camera's lens in images of one size, and the intrinsics of what comes of it."""

    intrinsics: np.ndarray | None = None  # [3, 3] of the image after `undistort`; None: not known
    maps: tuple[np.ndarray, np.ndarray] | None = None  # as cv2.remap takes them; None: images stay as they are

    def undistort(self, rgb: np.ndarray) -> np.ndarray:
        """Return the image [H, W, 3] without distortion; black where the camera saw nothing."""
        return rgb if self.maps is None else cv2.remap(rgb, *self.maps, cv2.INTER_LINEAR)


NO_LENS = Lens()


def make_lens(calibration: Calibration, size: tuple[int, int], source: str = "auto", undistort: bool = False,
              is_rectified: bool = False) -> Lens:
    """Return what to do about images of (height, width).

    Args:
        calibration: of the camera, at any resolution.
        source: which matrix images that stay as they are have: "K", "P", "auto" (P if `is_rectified`, else K), or
            "none", none of them.
        undistort: remove the distortion; the result has P, or K where there is no P.
        is_rectified: the images come without distortion.

    Raises CalibrationError where the calibration does not fit the images, or the distortion cannot be removed.
    """
    calibration = calibration.for_size(size)
    if undistort:
        rectified = calibration.K if calibration.P is None else calibration.P
        maps = None
        if calibration.is_distorted or not np.allclose(rectified, calibration.K) or not np.allclose(
                calibration.R, np.eye(3)):
            if calibration.is_distorted and calibration.distortion_model not in DISTORTION_MODELS:
                raise CalibrationError("distortion_model", repr(calibration.distortion_model),
                                       f"expected one of {', '.join(DISTORTION_MODELS)}")
            maps = calibration._maps(calibration.R, rectified, cv2.CV_16SC2)
        return Lens(None if source == "none" else rectified, maps)
    if source == "none":
        return NO_LENS
    use_P = source == "P" or source == "auto" and is_rectified
    if use_P and calibration.P is None:
        raise CalibrationError("p", "zero", "the rectified image's matrix is not given")
    return Lens(calibration.P if use_P else calibration.K)


def _matrix(field: str, values: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """Return a camera matrix [3, 3] without its skew, or raise CalibrationError."""
    M = np.reshape(np.asarray(values, dtype=np.float64), (3, 3))
    text = M.ravel().tolist()
    if not np.isfinite(M).all():
        raise CalibrationError(field, text, "expected finite numbers")
    if not M.any():
        raise CalibrationError(field, "zero", "the camera is not calibrated")
    length = max(size)
    if not (0 < M[0, 0] <= MAX_FOCAL_LENGTH * length and 0 < M[1, 1] <= MAX_FOCAL_LENGTH * length):
        raise CalibrationError(field, text, f"no focal lengths of an image of {size[1]}x{size[0]}")
    if np.abs(M[:2, 2]).max() > MAX_OFFSET * length:
        raise CalibrationError(field, text, f"no principal point of an image of {size[1]}x{size[0]}")
    return np.array([[M[0, 0], 0, M[0, 2]], [0, M[1, 1], M[1, 2]], [0, 0, 1]])


def _rotation(values: Sequence[float]) -> np.ndarray:
    """Return the rectifying rotation [3, 3]; all zero is none. Raises CalibrationError."""
    R = np.reshape(np.asarray(values, dtype=np.float64), (3, 3))
    if not R.any():
        return np.eye(3)
    if not (np.isfinite(R).all() and np.allclose(R @ R.T, np.eye(3), atol=1e-3) and np.linalg.det(R) > 0):
        raise CalibrationError("r", R.ravel().tolist(), "no rotation")
    return R
