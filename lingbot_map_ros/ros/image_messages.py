# SPDX-License-Identifier: Apache-2.0
"""Images and calibrations as messages. Light: does not import the model."""
from __future__ import annotations

from array import array

import numpy as np
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header


def image(pixels: np.ndarray, header: Header, colours: str = "rgb8") -> Image:
    """Return float32 [h, w] as a 32FC1 image, or uint8 [h, w, 3] as one whose encoding is `colours`, rgb8 or bgr8."""
    encoding = colours if pixels.ndim == 3 else "32FC1"
    pixels = np.ascontiguousarray(pixels, np.uint8 if pixels.ndim == 3 else "<f4")
    data = array("B")  # the one type that rclpy takes without looking at every byte
    data.frombytes(pixels.view(np.uint8).data)
    height, width = pixels.shape[:2]
    return Image(header=header, height=height, width=width, encoding=encoding, is_bigendian=0,
                 step=pixels.nbytes // height, data=data)


def camera_info(intrinsics: np.ndarray, size: tuple[int, int], header: Header) -> CameraInfo:
    """Return intrinsics [3, 3] of an image of (height, width), pixels' centres at integers, without distortion."""
    return CameraInfo(
        header=header, height=size[0], width=size[1], distortion_model="plumb_bob", d=[0.0] * 5,
        k=np.ravel(intrinsics), r=np.eye(3).ravel(), p=np.hstack([intrinsics, np.zeros((3, 1))]).ravel())
