# SPDX-License-Identifier: Apache-2.0
"""What the model sees of a camera's image, and the way back: its predictions in the camera's own geometry."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from lingbot_map_ros.gct.config import GCTConfig
from lingbot_map_ros.gct.image import ImageGeometry, prepare_image
from lingbot_map_ros.mapping.calibration import NO_LENS, Lens
from lingbot_map_ros.mapping.map_builder import MAX_DEPTH_STEP
from lingbot_map_ros.mapping.prediction import Prediction

# Camera points into the camera turned clockwise by 90 degrees about the optical axis, as its image is.
_QUARTER_TURN = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
ROTATIONS = (0, 90, 180, 270)


@dataclass(frozen=True)
class CameraView:
    """How one image of a camera became the model's: undistorted, turned upright, then cropped and resized.

    "The camera's" image, pixels and frame are those after lens distortion was removed, if it was.
    """

    geometry: ImageGeometry  # of the upright image
    rotation: int = 0  # degrees clockwise that the camera's image was turned by, one of ROTATIONS
    lens: Lens = field(default=NO_LENS, compare=False)

    @property
    def camera_size(self) -> tuple[int, int]:
        """Height and width of the camera's image."""
        height, width = self.geometry.camera_size
        return (height, width) if self.rotation % 180 == 0 else (width, height)

    @property
    def T_upright_camera(self) -> np.ndarray:
        """[4, 4], maps points of the camera's optical frame into that of the upright camera, which the model predicts.
        """
        T = np.eye(4)
        T[:3, :3] = np.linalg.matrix_power(_QUARTER_TURN, self.rotation // 90).round()
        return T

    def to_camera_image(self, values: torch.Tensor, max_step: float = float("inf")) -> torch.Tensor:
        """Return values [h, w] of the model's image at the camera's pixels, [H, W]; NaN where it saw nothing.

        See ImageGeometry.to_camera_image.
        """
        return torch.rot90(self.geometry.to_camera_image(values, max_step), self.rotation // 90)

    def to_camera_intrinsics(self, intrinsics: np.ndarray | torch.Tensor) -> np.ndarray:
        """Turn intrinsics [3, 3] in pixels of the model's image into the camera's: float64 [3, 3], no skew."""
        K = np.asarray(self.geometry.to_camera_intrinsics(np.asarray(intrinsics, dtype=np.float64)))
        width = self.geometry.camera_size[1]
        for _ in range(self.rotation // 90):  # back by a quarter: column u is row u of before, row v column w - 1 - v
            K = np.array([[K[1, 1], 0, K[1, 2]], [0, K[0, 0], width - 1 - K[0, 2]], [0, 0, 1]])
            width = sum(self.geometry.camera_size) - width
        return K

    def to_image_intrinsics(self, intrinsics: np.ndarray) -> np.ndarray:
        """Turn the camera's intrinsics [3, 3] into pixels of the model's image: float64 [3, 3], no skew."""
        K, height = np.asarray(intrinsics, dtype=np.float64), self.camera_size[0]
        for _ in range(self.rotation // 90):  # row v becomes column h - 1 - v, column u row u
            K = np.array([[K[1, 1], 0, height - 1 - K[1, 2]], [0, K[0, 0], K[0, 2]], [0, 0, 1]])
            height = sum(self.camera_size) - height
        return self.geometry.to_image_intrinsics(K)

    def depth(self, prediction: Prediction, confidence_threshold: float = 1.0) -> torch.Tensor:
        """Return the depth [H, W] along the optical axis at the camera's pixels, in the prediction's unit.

        NaN where the model saw nothing, its confidence is below the threshold, or the depth is not above 0.
        """
        depth, confidence = prediction.depth.float(), prediction.confidence
        is_known = torch.isfinite(depth) & (depth > 0) & (confidence >= confidence_threshold)
        return self.to_camera_image(torch.where(is_known, depth, torch.nan), MAX_DEPTH_STEP)

    def confidence(self, prediction: Prediction) -> torch.Tensor:
        """Return the confidence [H, W], 1 or more, at the camera's pixels; NaN where the model saw nothing."""
        return self.to_camera_image(prediction.confidence.float())


def view_image(
    rgb: np.ndarray, config: GCTConfig, image_width: int | None = None, device: torch.device | str = "cpu",
    rotation: int = 0, lens: Lens = NO_LENS,
) -> tuple[torch.Tensor, CameraView]:
    """Turn a camera's image, uint8 RGB [H, W, 3], into the model's [3, h, w] on `device`, and say how.

    rotation: degrees clockwise that turn it upright. lens: for images of this size; what is to be done about its
    distortion is done. Raises the errors of `prepare_image`.
    """
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation is {rotation}: expected one of {', '.join(map(str, ROTATIONS))}")
    rgb = lens.undistort(rgb)
    image, geometry = prepare_image(np.rot90(rgb, -(rotation // 90)) if rotation else rgb, config, image_width, device)
    return image, CameraView(geometry, rotation, lens)
