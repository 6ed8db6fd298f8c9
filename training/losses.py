# SPDX-License-Identifier: Apache-2.0
"""What the model is trained to predict, and how wrong it is."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_map_ros.gct import GCTConfig
from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.synthetic import Sequences
from training.parallel import Predictions

CONFIDENCE = 0.2  # a confidence c says that the depth is expected to be off by this over c, as a share
SKY_ERROR = 1.0  # share by which the depth of the sky counts as off: it has none, so its confidence is to be low
FLOW_UNIT = 28.0  # pixels
AUXILIARY_BLOCKS = {1: 1, 2: 3, 3: 1}  # global block: distance in frames over which its first head is to match
MOTION_FLOOR = 0.005  # units; a sequence that moves less a frame counts as moving this much
MOST_SCALE_FRAMES = 8  # frames that measure the unit, at most
NAMES = ("total", "translation", "rotation", "fov", "step_translation", "step_rotation", "depth", "confidence",
         "matches", "flow", "points")


@dataclass
class Targets:
    """Ground truth in the model's frame and unit: the first camera's optical frame; the mean distance of the points
    that the scale frames see is 1."""

    translation: Tensor  # [b, s, 3]
    rotation: Tensor  # [b, s, 3, 3], camera to world
    quaternion: Tensor  # [b, s, 4] x y z w
    fov: Tensor  # [b, 2] of height and width, radians
    depth: Tensor  # [b, s, h, w]; inf: the sky
    focal: Tensor  # [b, 2] of x and y, pixels
    unit: Tensor  # [b] metres a unit


def matrix_to_quaternion(rotation: Tensor) -> Tensor:
    """Return unit quaternions [..., 4] (x, y, z, w; w >= 0) of rotations [..., 3, 3].

    The largest of four equivalent forms is taken (S. W. Shepperd, "Quaternion from rotation matrix", 1978).
    """
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (row.unbind(-1) for row in rotation.unbind(-2))
    forms = torch.stack([
        torch.stack([1 + xx - yy - zz, xy + yx, xz + zx, zy - yz], -1),
        torch.stack([xy + yx, 1 - xx + yy - zz, yz + zy, xz - zx], -1),
        torch.stack([xz + zx, yz + zy, 1 - xx - yy + zz, yx - xy], -1),
        torch.stack([zy - yz, xz - zx, yx - xy, 1 + xx + yy + zz], -1),
    ], dim=-2)
    largest = torch.diagonal(forms, dim1=-2, dim2=-1).argmax(-1)
    form = forms.gather(-2, largest[..., None, None].expand(*forms.shape[:-2], 1, 4))[..., 0, :]
    quaternion = F.normalize(form, dim=-1)
    return torch.where(quaternion[..., 3:] < 0, -quaternion, quaternion)


def unproject(depth: Tensor, focal: Tensor, x: Tensor, y: Tensor, size: tuple[int, int]) -> Tensor:
    """Lift depths [b, s, rows, columns] at pixels x [columns] and y [rows] (pixel 0's centre: 0.5) of images of
    (height, width) into their cameras: [b, s, rows, columns, 3]."""
    across = (x - size[1] / 2) / focal[:, 0, None]  # [b, columns]
    down = (y - size[0] / 2) / focal[:, 1, None]
    return torch.stack([across[:, None, None] * depth, down[:, None, :, None] * depth, depth], dim=-1)


def make_targets(sequences: Sequences, scale_frames: int | Tensor, stride: int = 4) -> Targets:
    """Turn rendered sequences into what the model is to predict.

    scale_frames: up to MOST_SCALE_FRAMES. stride: every such pixel measures the unit.
    """
    T, depth, intrinsics = sequences.T_world_camera, sequences.depth, sequences.intrinsics
    size = tuple(depth.shape[-2:])
    first = T[:, :1]
    rotation = first[..., :3, :3].mT @ T[..., :3, :3]
    translation = (first[..., :3, :3].mT @ (T[..., :3, 3] - first[..., :3, 3])[..., None])[..., 0]
    focal = torch.stack([intrinsics[:, 0, 0], intrinsics[:, 1, 1]], -1)

    most = min(MOST_SCALE_FRAMES, depth.shape[1])
    seen = depth[:, :most, stride // 2::stride, stride // 2::stride]
    y = torch.arange(size[0], device=depth.device)[stride // 2::stride] + 0.5
    x = torch.arange(size[1], device=depth.device)[stride // 2::stride] + 0.5
    is_known = seen.isfinite() & (torch.arange(most, device=depth.device) < scale_frames)[:, None, None]
    points = unproject(torch.where(is_known, seen, 0.0), focal, x, y, size)
    points = (rotation[:, :most, None, None] @ points[..., None])[..., 0] + translation[:, :most, None, None]
    distance = points.norm(dim=-1) * is_known
    unit = distance.sum((1, 2, 3)) / is_known.sum((1, 2, 3)).clamp_min(1)
    unit = torch.where(unit > 1e-3, unit, 1.0)  # scale frames that see nothing but sky measure none
    return Targets(
        translation=translation / unit[:, None, None],
        rotation=rotation,
        quaternion=matrix_to_quaternion(rotation),
        fov=torch.stack([2 * torch.atan(size[0] / 2 / focal[:, 1]), 2 * torch.atan(size[1] / 2 / focal[:, 0])], -1),
        depth=depth / unit[:, None, None, None],
        focal=focal,
        unit=unit,
    )


@dataclass
class Matches:
    """Where the middle of each patch of a frame is in an earlier frame."""

    pixel: Tensor  # [b, s - distance, patches, 2] x, y in the earlier frame
    is_seen: Tensor  # [b, s - distance, patches] float: it is inside of that image and not hidden
    here: Tensor  # [patches, 2] x, y of the patches' middles
    points: Tensor  # [b, s, patches, 3] the middles' points, in the world; 0 in the sky
    log_depth: Tensor  # [b, s, patches] at the middles; 0 in the sky
    is_known: Tensor  # [b, s, patches] float: not the sky


def match_patches(targets: Targets, distance: int, patch: int, tolerance: float = 0.06) -> Matches:
    """Find the true matches of frames in those `distance` before. tolerance: share of depth that hides nothing."""
    b, s, height, width = targets.depth.shape
    device = targets.depth.device
    middle = targets.depth[:, :, patch // 2::patch, patch // 2::patch]
    y = torch.arange(middle.shape[2], device=device) * patch + patch // 2 + 0.5
    x = torch.arange(middle.shape[3], device=device) * patch + patch // 2 + 0.5
    here = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)
    is_known = middle.isfinite().flatten(2)
    near = torch.where(middle.isfinite(), middle, 1.0)
    points = unproject(near, targets.focal, x, y, (height, width)).flatten(2, 3)
    points = (targets.rotation[:, :, None] @ points[..., None])[..., 0] + targets.translation[:, :, None]

    R, t = targets.rotation[:, :s - distance], targets.translation[:, :s - distance]
    seen = (R.mT[:, :, None] @ (points[:, distance:] - t[:, :, None])[..., None])[..., 0]
    depth = seen[..., 2]
    ahead = depth.clamp_min(1e-3)
    u = seen[..., 0] / ahead * targets.focal[:, None, None, 0] + width / 2
    v = seen[..., 1] / ahead * targets.focal[:, None, None, 1] + height / 2
    inside = (depth > 1e-3) & (u > 1) & (u < width - 1) & (v > 1) & (v < height - 1)
    column, row = u.clamp(0, width - 1).long(), v.clamp(0, height - 1).long()
    there = targets.depth[:, :s - distance].flatten(2).gather(2, row * width + column)
    is_seen = inside & is_known[:, distance:] & ((there - depth).abs() < tolerance * depth)
    known = is_known.float()
    return Matches(
        pixel=torch.stack([u, v], -1),
        is_seen=is_seen.float(),
        here=here,
        points=points * known[..., None],
        log_depth=near.flatten(2).log() * known,
        is_known=known,
    )


def mean_where(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean, 0 where nothing has weight."""
    return (values * weights).sum() / weights.sum().clamp_min(1)


def matching_loss(query: Tensor, key: Tensor, matches: Matches, distance: int, grid: tuple[int, int], patch: int,
                  ) -> Tensor:
    """Cross-entropy of attention against the true match, which is shared bilinearly by the four patches around it.

    query, key: [b, s, patches, head_dim] of one head.
    """
    rows, columns = grid
    x, y = matches.pixel[..., 0] / patch - 0.5, matches.pixel[..., 1] / patch - 0.5
    left, top = x.floor().clamp(0, columns - 2), y.floor().clamp(0, rows - 2)
    across, down = (x - left).clamp(0, 1), (y - top).clamp(0, 1)
    corner = (top * columns + left).long()
    scores = (query[:, distance:] @ key[:, :key.shape[1] - distance].mT).float() * query.shape[-1] ** -0.5
    log_share = scores.log_softmax(-1)

    def at(offset: int) -> Tensor:
        return log_share.gather(-1, (corner + offset)[..., None])[..., 0]

    loss = -(at(0) * (1 - across) * (1 - down) + at(1) * across * (1 - down)
             + at(columns) * (1 - across) * down + at(columns + 1) * across * down)
    return mean_where(loss, matches.is_seen)


class AuxiliaryHeads(nn.Module):
    """Read motion, position and depth of each patch off inner outputs; only training has them."""

    def __init__(self, config: GCTConfig) -> None:
        super().__init__()
        dim = 2 * config.embed_dim
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 6)) for _ in config.output_groups[1:])

    def forward(self, outputs: list[Tensor], special: int) -> list[Tensor]:
        """Return [b, s, patches, 6] (motion x y, point x y z, log depth) for all outputs but the first."""
        return [head(output[:, :, special:]).float() for head, output in zip(self.heads, outputs[1:])]


def step_loss(encoding: Tensor, targets: Targets, distance: int) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of the motion over `distance` frames: translation, the same as a share of the motion, rotation."""
    R, t = quaternion_to_matrix(encoding[..., 3:7]), encoding[..., :3]

    def motion(R: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return (R[:, :-distance].mT @ R[:, distance:],
                (R[:, :-distance].mT @ (t[:, distance:] - t[:, :-distance])[..., None])[..., 0])

    R_step, t_step = motion(R, t)
    R_true, t_true = motion(targets.rotation, targets.translation)
    error = (t_step - t_true).abs().sum(-1).clamp(max=1.0)
    moved = t_true.norm(dim=-1).mean(1, keepdim=True) + MOTION_FLOOR * distance
    return error.mean(), (error / moved).clamp(max=4.0).mean(), (R_step - R_true).abs().sum((-1, -2)).mean()


def pose_loss(encodings: list[Tensor], targets: Targets, decay: float = 0.6) -> tuple[Tensor, list[Tensor]]:
    """Loss of the pose encodings after each iteration, later ones weighted more, and the last one's parts."""
    total, weights = 0.0, 0.0
    for index, encoding in enumerate(encodings):
        weight = decay ** (len(encodings) - 1 - index)
        translation = F.huber_loss(encoding[..., :3], targets.translation, delta=0.5, reduction="none")
        translation = 2 * translation.sum(-1).mean()
        q = encoding[..., 3:7]
        rotation = torch.minimum((q - targets.quaternion).abs().sum(-1), (q + targets.quaternion).abs().sum(-1)).mean()
        fov = (encoding[..., 7:] - targets.fov[:, None]).abs().sum(-1).mean()
        steps = [step_loss(encoding, targets, distance) for distance in (1, 4) if distance < encoding.shape[1]]
        loss = translation + rotation + 0.5 * fov
        loss = loss + sum(3.0 * moved + 0.1 * share + 1.5 * turned for moved, share, turned in steps)
        total, weights = total + weight * loss, weights + weight
    return total / weights, [translation, rotation, fov, steps[0][1], steps[0][2]]


def depth_loss(predictions: Predictions, targets: Targets, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the logarithm of depth and its slopes, loss of confidence, mean error of the logarithm."""
    depth = targets.depth.flatten(0, 1)[frames]
    is_known = depth.isfinite()
    known = is_known.float()
    truth = torch.where(is_known, depth, 1.0).log()
    error = (predictions.log_depth - truth) * known
    mean_error = error.abs().sum() / known.sum().clamp_min(1)
    loss = mean_error
    for step in (1, 4):
        across = (error[..., step:] - error[..., :-step]).abs() * known[..., step:] * known[..., :-step]
        down = (error[:, step:] - error[:, :-step]).abs() * known[:, step:] * known[:, :-step]
        loss = loss + 0.5 * (across.mean() + down.mean())
    # The negative log likelihood of a Laplace distribution whose width is CONFIDENCE / c. The error is taken as it is,
    # so that the depth of pixels that look hard is learned no less than that of others.
    off = torch.where(is_known, error.detach().abs(), SKY_ERROR)
    confidence = (predictions.confidence * off / CONFIDENCE - predictions.confidence.log()).mean()
    return loss, confidence, mean_error


def losses(
    predictions: Predictions, auxiliary: list[Tensor], targets: Targets, depth_frames: Tensor, config: GCTConfig,
    auxiliary_weight: float, depth_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss to minimise and its parts, detached, in the order of NAMES."""
    size = tuple(targets.depth.shape[-2:])
    patch, grid, special = config.patch_size, config.grid_size(size), config.num_special_tokens
    pose, pose_parts = pose_loss(predictions.pose_encodings, targets)
    depth, confidence, depth_error = depth_loss(predictions, targets, depth_frames)

    frames = targets.depth.shape[1]
    by_distance = {d: match_patches(targets, d, patch) for d in {1, *AUXILIARY_BLOCKS.values()} if d < frames}
    matching = torch.zeros((), device=depth.device)
    for block, (q, k) in predictions.queries_and_keys.items():
        distance = AUXILIARY_BLOCKS[block]
        matching = matching + matching_loss(q[:, :, special:], k[:, :, special:], by_distance[distance], distance, grid,
                                            patch) / len(predictions.queries_and_keys)
    matches = by_distance[1]
    motion = (matches.here - matches.pixel) / FLOW_UNIT
    flow = points = torch.zeros((), device=depth.device)
    for read in auxiliary:
        off = (read[:, 1:, :, :2] - motion).abs().sum(-1).clamp(max=4)
        flow = flow + mean_where(off, matches.is_seen) / len(auxiliary)
        off = (read[..., 2:5] - matches.points).abs().sum(-1).clamp(max=4) + (read[..., 5] - matches.log_depth).abs()
        points = points + mean_where(off, matches.is_known) / len(auxiliary)

    total = pose + depth_weight * depth + 0.05 * confidence
    total = total + auxiliary_weight * (0.3 * matching + 0.5 * flow + 0.3 * points)
    parts = [total, *pose_parts, depth_error, confidence, matching, flow, points]
    return total, torch.stack([part.detach().float() for part in parts])
