# SPDX-License-Identifier: Apache-2.0
"""A model's poses, corrected by how the image has moved from frame to frame."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cv2
import numpy as np
import torch

from lingbot_map_ros.mapping.focal_length import FocalLength
from lingbot_map_ros.mapping.geometry import is_rigid, rigid
from lingbot_map_ros.mapping.prediction import Prediction, moved, with_focal_lengths

MAX_CORNERS = 250
CORNER_QUALITY = 0.003  # of the best corner's
MAX_RETURN_ERROR = 0.3  # pixels that a corner may be off when it is tracked to the next image and back
PIXEL_NOISE = 0.15  # deviation of a tracked corner, pixels
DEPTH_NOISE = 0.2  # deviation of a predicted depth, as a fraction of it
HUBER = 2.0  # deviations beyond which a corner's weight falls
OUTLIER = 4.0  # deviations beyond which a corner does not agree with a pose
FAR_OUTLIER, FAR_WEIGHT = 8.0, 0.1  # those beyond get a tenth of Huber's weight, which never lets go of them
ITERATIONS = 5
MIN_DEPTH = 0.01  # of the depth that a point had: one that would come nearer than that, or behind, does not count
MIN_CORNERS = 12  # fewer tell no motion
MIN_INLIERS = 0.5  # of the corners
MAX_TURN, MAX_SHIFT = np.radians(10.0), 0.5  # from the model's own motion; the shift as a fraction of the median depth
STILL = 0.5  # pixels of mean flow below which the next frame is compared with the same one again
FOCAL_STEP = 0.01  # of the focal length, by which its effect is measured
FOCAL_TURN = np.radians(0.5)  # below it errors of depth move corners more than a wrong focal length does


@dataclass(frozen=True)
class _Reference:
    """A frame that the next one is compared with."""

    grey: np.ndarray  # [h, w] uint8
    depth: np.ndarray  # [h, w] float32
    T_world_camera: np.ndarray  # [4, 4] float64, as refined


@dataclass(frozen=True)
class _State:
    """What is known after a frame; replaced, never changed."""

    reference: _Reference | None
    T_world_camera: np.ndarray  # [4, 4] of the frame, as refined
    T_model: np.ndarray | None  # as the model has it; None: as another window of the model has it


class _Motion(NamedTuple):
    """What an image says of the motion since the reference."""

    T_camera_reference: np.ndarray  # [4, 4]
    flow: float  # of the corners, mean, pixels
    focal: tuple[float, float]  # see `focal_evidence`


class PoseRefiner:
    """Moves each pose on from the one before it as the image tells, where it does; else as the model does.

    Corners of the frame before are tracked into the next image (Lucas and Kanade's method, as OpenCV has it), lifted
    with that frame's depth, and the camera moves so that they project to where they were found. A model whose patches
    are coarse predicts depth well, and where it is in the long run, but its poses jitter by a part of a patch's width
    from frame to frame; tracked corners tell the motion to a tenth of a pixel. What is left adds up, as odometry's
    errors do: the model's own poses are not gone back to. While the image stands still, so does the frame that it is
    compared with, so that a standing camera does not drift. Corners of a camera that turns tell its focal length, too.
    """

    def __init__(self) -> None:
        """Know no frame."""
        self._clahe = cv2.createCLAHE(clipLimit=3.0, tileGridSize=(4, 4))  # so that exposure may change
        self.reset()

    def reset(self) -> None:
        """Begin a sequence: take the next pose as it comes, and know nothing of the focal length."""
        self._focal = self._focal_before = FocalLength()
        self._is_focal_known = False
        self.lose()

    def lose(self) -> None:
        """Take the next pose as it comes; the camera is the same."""
        self._state: _State | None = None
        self._before: _State | None = None  # the last frame, to go back to; so is _focal_before

    def start_window(self) -> None:
        """Note that the poses to come are another window's: they do not tell the motion from the last frame on."""
        if self._state is not None:
            self._state = self._before = replace(self._state, T_model=None)

    def discard(self) -> None:
        """Forget the last frame, whose pose is implausible: the next one is compared with the one before it."""
        self._state, self._focal = self._before, self._focal_before

    @property
    def is_correcting(self) -> bool:
        """Whether there is a correction that `carry` would go on with."""
        return self._state is not None and self._state.T_model is not None

    def refine(
        self, image: torch.Tensor, prediction: Prediction, known_intrinsics: np.ndarray | None = None
    ) -> tuple[Prediction, bool]:
        """Correct the pose of the next frame. Waits for the device.

        Args:
            image: [3, h, w] in [0, 1].
            prediction: of that image, in the world.
            known_intrinsics: [3, 3] in pixels of the image; None: the focal lengths are estimated (see FocalLength).

        Returns the prediction with its pose corrected, and its focal lengths unless they are known; and whether that
        pose goes on from the last frame's. One whose pose or intrinsics cannot be comes back as it is, and counts for
        nothing.
        """
        T_model = prediction.T_world_camera.double().cpu().numpy()
        intrinsics = prediction.intrinsics.double().cpu().numpy()
        self._focal_before = self._focal
        if not (is_rigid(T_model) and _is_usable(intrinsics)):
            self._before = self._state  # which is what `discard` then keeps
            return prediction, False
        self._focal = self._focal.with_prediction(intrinsics[[0, 1], [0, 1]])
        self._is_focal_known = known_intrinsics is not None and _is_usable(np.asarray(known_intrinsics))
        if self._is_focal_known:
            intrinsics = np.asarray(known_intrinsics, np.float64)
        else:
            intrinsics[[0, 1], [0, 1]] = self._focal.value
            prediction = with_focal_lengths(prediction, intrinsics[[0, 1], [0, 1]])
        grey, depth = self._grey(image), np.ascontiguousarray(prediction.depth.float().cpu().numpy())
        T, continues = self._predicted(T_model)
        reference = None if self._state is None else self._state.reference
        is_still = False
        if reference is not None:
            found = _motion(reference, grey, intrinsics, np.linalg.inv(T) @ reference.T_world_camera)
            if found is not None:
                T, continues = rigid(reference.T_world_camera @ np.linalg.inv(found.T_camera_reference)), True
                is_still = found.flow < STILL
                information, growth = found.focal
                if not is_still:  # else the same corners would count again and again
                    used = np.log(intrinsics[[0, 1], [0, 1]]).mean()
                    self._focal = self._focal.with_corners(information, used + growth)
        self._before = self._state
        self._state = _State(reference if is_still else _Reference(grey, depth, T), T, T_model)
        return (prediction if self._before is None else moved(prediction, T)), continues

    def carry(self, prediction: Prediction) -> tuple[Prediction, bool]:
        """Move the next pose on as the model does, without a look at the image, so that corrections may end unseen.

        Returns what `refine` does. The next window's poses are then the model's own.
        """
        T_model = prediction.T_world_camera.double().cpu().numpy()
        self._before, self._focal_before = self._state, self._focal
        if not is_rigid(T_model):
            return prediction, False
        T, continues = self._predicted(T_model)
        self._state = _State(None, T, T_model)
        if self._focal.predicted and not self._is_focal_known:
            prediction = with_focal_lengths(prediction, self._focal.value)
        return moved(prediction, T), continues

    def _predicted(self, T_model: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the last pose, moved on as the model moves, and True; the model's own where that tells no motion."""
        if not self.is_correcting:
            return T_model, False
        return rigid(self._state.T_world_camera @ np.linalg.inv(self._state.T_model) @ T_model), True

    def _grey(self, image: torch.Tensor) -> np.ndarray:
        rgb = (image * 255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
        return self._clahe.apply(cv2.cvtColor(np.ascontiguousarray(rgb), cv2.COLOR_RGB2GRAY))


def _motion(
    reference: _Reference, grey: np.ndarray, intrinsics: np.ndarray, T_guess: np.ndarray
) -> _Motion | None:
    """Return what corners that are tracked into an image say of its motion; None: nothing.

    T_guess: the model's, which it must not be far from.
    """
    before, after = _track(reference.grey, grey)
    if len(before) < MIN_CORNERS:
        return None
    depth = cv2.remap(reference.depth, before[:, 0], before[:, 1], cv2.INTER_LINEAR).ravel()
    usable = np.isfinite(depth) & (depth > 0)
    before, after, depth = before[usable].astype(np.float64), after[usable].astype(np.float64), depth[usable]
    if len(before) < MIN_CORNERS:
        return None
    points = _lift(before, depth, intrinsics)
    try:
        T, inliers = solve_pose(points, after, intrinsics, T_guess)
    except np.linalg.LinAlgError:  # depths or a guess beyond all measure
        return None
    if inliers.sum() < max(MIN_CORNERS, MIN_INLIERS * len(points)) or not np.isfinite(T).all():
        return None
    difference = T @ np.linalg.inv(T_guess)
    turn = np.linalg.norm(cv2.Rodrigues(difference[:3, :3])[0])
    shift = np.linalg.norm(T[:3, 3] - T_guess[:3, 3])
    if turn > MAX_TURN or shift > MAX_SHIFT * np.median(depth):
        return None
    focal = 0.0, 0.0
    if np.linalg.norm(cv2.Rodrigues(T[:3, :3])[0]) >= FOCAL_TURN:
        focal = focal_evidence(before[inliers], depth[inliers], after[inliers], intrinsics, T)
    return _Motion(T, float(np.linalg.norm(after - before, axis=1).mean()), focal)


def _track(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the corners of an image are, and where they are in the next one, as pixels [n, 2] float32."""
    width = before.shape[1]
    corners = cv2.goodFeaturesToTrack(before, MAX_CORNERS, CORNER_QUALITY, max(3, width // 50), blockSize=3)
    if corners is None:
        return np.empty((0, 2), np.float32), np.empty((0, 2), np.float32)
    corners = corners.reshape(-1, 1, 2)  # shapes differ between OpenCV 4 and 5
    side = min(21, max(9, width // 14 | 1))
    options = {"winSize": (side, side), "maxLevel": 3, "criteria": (3, 30, 0.01)}  # iterations, pixels
    found, there, _ = cv2.calcOpticalFlowPyrLK(before, after, corners, None, **options)
    returned, back, _ = cv2.calcOpticalFlowPyrLK(after, before, found, None, **options)
    corners, found, returned = (points.reshape(-1, 2) for points in (corners, found, returned))
    error = np.linalg.norm(returned - corners, axis=1)
    good = (there.ravel() == 1) & (back.ravel() == 1) & (error < MAX_RETURN_ERROR)
    return corners[good], found[good]


def solve_pose(
    points: np.ndarray, pixels: np.ndarray, intrinsics: np.ndarray, T_guess: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the pose from which points, whose depths are uncertain, are seen at some pixels.

    Generalised least squares by Gauss and Newton's method, made robust by Huber's weights: a point's error in the image
    has the covariance s^2 I + (d e)(d e)^T, with s = PIXEL_NOISE, d = DEPTH_NOISE and e how far the pixel moves as the
    logarithm of its point's depth grows by 1. So errors along the epipolar line, where a wrong depth shows, count for
    little, and those across it for all they tell of the rotation.

    Args:
        points: [n, 3], in the frame of a reference camera at their origin.
        pixels: [n, 2], where they are seen.
        intrinsics: [3, 3], of the image that the pixels are of.
        T_guess: [4, 4], maps points into the camera's frame, to start from.

    Returns T_camera_reference [4, 4] and which points agree with it [n].
    """
    T = T_guess.copy()
    for _ in range(ITERATIONS):
        error, deviation, information, jacobian = _errors(points, pixels, intrinsics, T)
        weight = np.minimum(1.0, HUBER / deviation.clip(1e-9)) * np.where(deviation > FAR_OUTLIER, FAR_WEIGHT, 1.0)
        weighted = np.einsum("nia,nij->naj", jacobian, information) * weight[:, None, None]
        step = np.linalg.lstsq(np.einsum("naj,njb->ab", weighted, jacobian),
                               np.einsum("naj,nj->a", weighted, error), rcond=None)[0]
        moved_on = np.eye(4)
        moved_on[:3, :3], moved_on[:3, 3] = cv2.Rodrigues(step[3:])[0], step[:3]
        T = moved_on @ T
    return T, _errors(points, pixels, intrinsics, T)[1] < OUTLIER


def focal_evidence(
    before: np.ndarray, depth: np.ndarray, after: np.ndarray, intrinsics: np.ndarray, T: np.ndarray
) -> tuple[float, float]:
    """Tell from corners of two images by how much the focal length should grow.

    A camera that turns moves corners at the image's edge farther than those in its middle, the more so the shorter the
    focal length is. The errors of `solve_pose` are looked at as functions of the pose and of the logarithm of the focal
    length, which both lifts and projects the corners; the pose is eliminated (Schur's complement).

    Args:
        before, depth: [n, 2] pixels of the reference's corners, and [n] their depths.
        after: [n, 2], where they are in the image.
        intrinsics: [3, 3] of both.
        T: [4, 4], T_camera_reference as solved.

    Returns the information (inverse of the variance, were the corners' errors independent; 0: they say nothing) and the
    growth of the logarithm that would fit best.
    """
    def errors(growth: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        scaled = intrinsics.copy()
        scaled[[0, 1], [0, 1]] *= np.exp(growth)
        return _errors(_lift(before, depth, scaled), after, scaled, T)

    error, deviation, information, jacobian = errors(0.0)
    by_focal = (errors(-FOCAL_STEP)[0] - errors(FOCAL_STEP)[0]) / (2 * FOCAL_STEP)  # of the projections
    jacobian = np.concatenate([jacobian, by_focal[:, :, None]], axis=2)
    weight = np.minimum(1.0, HUBER / deviation.clip(1e-9))
    weighted = np.einsum("nia,nij->naj", jacobian, information) * weight[:, None, None]
    normal = np.einsum("naj,njb->ab", weighted, jacobian)
    right = np.einsum("naj,nj->a", weighted, error)
    try:
        eliminate = np.linalg.lstsq(normal[:6, :6], np.column_stack([normal[:6, 6], right[:6]]), rcond=None)[0]
    except np.linalg.LinAlgError:
        return 0.0, 0.0
    left = float(normal[6, 6] - normal[6, :6] @ eliminate[:, 0])
    return left, float(right[6] - normal[6, :6] @ eliminate[:, 1]) / left if left > 0 else 0.0


def _lift(pixels: np.ndarray, depth: np.ndarray, intrinsics: np.ndarray) -> np.ndarray:
    """Return the points [n, 3] of pixels [n, 2] with depths [n], in their camera's frame."""
    rays = (pixels - intrinsics[:2, 2]) / intrinsics[[0, 1], [0, 1]]
    return np.column_stack([rays, np.ones(len(rays))]) * depth[:, None]


def _errors(
    points: np.ndarray, pixels: np.ndarray, intrinsics: np.ndarray, T: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, for points seen from a pose, what `solve_pose` goes by.

    These are the errors in pixels [n, 2]; as deviations [n], infinite for points that are not ahead; the inverses of
    their covariances [n, 2, 2]; and their derivatives by a shift v and a turn w, which move a point by v + w x point
    [n, 2, 6].
    """
    focal, centre = intrinsics[[0, 1], [0, 1]], intrinsics[:2, 2]
    seen = points @ T[:3, :3].T + T[:3, 3]
    is_ahead = seen[:, 2] > MIN_DEPTH * points[:, 2]
    z = np.where(is_ahead, seen[:, 2], points[:, 2])
    ray = seen[:, :2] / z[:, None]
    error = pixels - (ray * focal + centre)
    projection = np.zeros((len(points), 2, 3))  # of a pixel by its point
    projection[:, 0, 0], projection[:, 1, 1] = focal[0] / z, focal[1] / z
    projection[:, :, 2] = -focal * ray / z[:, None]
    by_depth = DEPTH_NOISE * np.einsum("nij,nj->ni", projection, seen - T[:3, 3])
    # The covariance's inverse, by Sherman and Morrison's formula.
    outer = by_depth[:, :, None] * by_depth[:, None, :]
    information = (np.eye(2) - outer / (PIXEL_NOISE**2 + (by_depth**2).sum(1))[:, None, None]) / PIXEL_NOISE**2
    deviation = np.sqrt(np.einsum("ni,nij,nj->n", error, information, error).clip(0))
    deviation[~is_ahead] = np.inf
    jacobian = np.concatenate([projection, -projection @ _cross_matrices(seen)], axis=2)
    return error, deviation, information, jacobian


def _cross_matrices(vectors: np.ndarray) -> np.ndarray:
    """Return the matrices [n, 3, 3] that multiply as the cross product from the left with vectors [n, 3]."""
    x, y, z = vectors.T
    zero = np.zeros_like(x)
    return np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)


def _is_usable(intrinsics: np.ndarray) -> bool:
    """Say whether intrinsics [3, 3] are those of a camera: within reason, so that nothing overflows."""
    return bool(np.isfinite(intrinsics).all() and (np.abs(np.log(np.diag(intrinsics).clip(1e-30))) < 20).all())
