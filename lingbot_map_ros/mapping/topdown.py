# SPDX-License-Identifier: Apache-2.0
"""A bird's-eye picture of the map and the path."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lingbot_map_ros.gct.pose import quaternion_to_matrix
from lingbot_map_ros.mapping.export import replace_file

PAPER, GROUND = "#ffffff", "#e4e7eb"  # around the map and under it: light floors and dark walls both show
MARGIN = 0.04  # of the longer side, around the map
CELLS = 800  # along the longer side of the picture
MAX_SPLAT = 9  # cells along a side that one point may cover
LEVEL_PRIOR = 0.01  # trust in the map's z, against 1 in the cameras' x axes
EXTENT_PERCENTILES = (0.5, 99.5)  # strays beyond do not shrink the rest of the picture


def write_topdown(
    path: str | Path,
    xyz: np.ndarray,
    rgb: np.ndarray,
    poses: np.ndarray,
    *,
    point_size: float | None = None,
    title: str | None = None,
    unit: str = "model units",
) -> None:
    """Draw the map from above, with the path, its start and its end, as a PNG.

    The map is z up only as far as the first camera was level, so the picture looks down along the vertical that the
    whole path tells (see `level_rotation`). Points above the cut (see `cut_height`) are left out: a ceiling would
    hide the room. A cell of the picture has the mean colour of its points, and is the more opaque the more of them
    there are: walls stand out from the floor.

    Args:
        path: PNG file to write or replace; its folder must exist.
        xyz: [n, 3], points in map (x forward, y left, z up).
        rgb: [n, 3] uint8.
        poses: [m, 7], rows x, y, z, qx, qy, qz, qw: the camera's optical frame in map, oldest first.
        point_size: edge of the square that a point covers, best the map's voxel size; None: a 180th of the longer side.
        title: replaces the counts above the picture.
        unit: of the axes.

    Raises ModuleNotFoundError if matplotlib is missing, ValueError if there are neither points nor poses.
    """
    xyz, rgb = np.asarray(xyz, dtype=np.float64).reshape(-1, 3), np.asarray(rgb).reshape(-1, 3)
    poses = np.asarray(poses, dtype=np.float64).reshape(-1, 7)
    if len(xyz) + len(poses) == 0:
        raise ValueError("there is nothing to draw: no points and no poses")
    R_level_map = level_rotation(poses)
    xyz, positions = xyz @ R_level_map.T, poses[:, :3] @ R_level_map.T
    low, high = _extent(xyz, positions)
    count = len(xyz)
    if count:
        below = xyz[:, 2] <= cut_height(xyz[:, 2], positions[:, 2])
        xyz, rgb = xyz[below], rgb[below]
    figure, (axes,) = _figure(1, high - low)
    _draw_points(axes, xyz, rgb, low, high, point_size)
    if len(positions):
        _draw_path(axes, positions)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=9)
    axes.set(xlabel=f"x, forward at the start ({unit})", ylabel=f"y, left at the start ({unit})")
    if title is None:
        title = f"{count:,} points, {len(positions):,} poses"
    axes.set_title(title, fontsize=11, loc="left")
    with replace_file(path) as file:
        figure.savefig(file, format="png", facecolor=PAPER)


def write_comparison(
    path: str | Path,
    true_map: tuple[np.ndarray, np.ndarray],
    mapped: tuple[np.ndarray, np.ndarray],
    true_positions: np.ndarray,
    positions: np.ndarray,
    *,
    true_point_size: float | None = None,
    point_size: float | None = None,
    titles: tuple[str, str] = ("the true surfaces", "the map"),
    unit: str = "m",
) -> None:
    """Draw a place from above as it is, and beside it as it was mapped, with the true path and the estimated one.

    All in one frame, z up: align the estimate before. What is too high is left out as in `write_topdown`, at one height
    for both.

    Args:
        path: PNG file to write or replace; its folder must exist.
        true_map: points [n, 3] of the true surfaces and their colours [n, 3] uint8.
        mapped: the same of the map.
        true_positions: [m, 3], of the camera, oldest first.
        positions: [k, 3], estimated.
        true_point_size, point_size: edge of the square that a point covers; None: a 180th of the longer side.
        titles: of the two halves.
        unit: of the axes.

    Raises ModuleNotFoundError if matplotlib is missing, ValueError if there are no true points or no poses.
    """
    if min(len(true_map[0]), len(true_positions), len(positions)) == 0:
        raise ValueError("there is nothing to compare: no true points or no poses")
    low, high = _extent(true_map[0], np.concatenate([true_positions, positions]))
    cut = cut_height(true_map[0][:, 2], true_positions[:, 2])
    figure, (left, right) = _figure(2, high - low)
    for axes, (xyz, rgb), size, title in (
            (left, true_map, true_point_size, titles[0]), (right, mapped, point_size, titles[1])):
        below = xyz[:, 2] <= cut
        _draw_points(axes, xyz[below], rgb[below], low, high, size, least_opacity=1.0)  # as true colours as can be
        axes.plot(*true_positions[:, :2].T, color="black", linewidth=3.5, zorder=3)
        axes.plot(*true_positions[:, :2].T, color="white", linewidth=1.8, zorder=4, label="true path")
        axes.set_title(title, fontsize=11, loc="left")
        axes.set(xlabel=f"x ({unit})")
    right.plot(*positions[:, :2].T, color="#d62728", linewidth=1.8, zorder=5, label="estimated path")
    left.set(ylabel=f"y ({unit})")
    legend = right.legend(loc="lower right", fontsize=9, facecolor="#9aa3ad", framealpha=0.85)
    legend.set_zorder(6)
    with replace_file(path) as file:
        figure.savefig(file, format="png", facecolor=PAPER)


def level_rotation(poses: np.ndarray) -> np.ndarray:
    """Return R_level_map [3, 3], the smallest rotation of map that turns the cameras' common vertical to z.

    Hand-held and robot cameras pitch and yaw but hardly roll, so their x axes are horizontal: the vertical is the
    direction most nearly at right angles to all of them. Where they are nearly parallel (a straight path) the map's
    own z decides.
    """
    if len(poses) == 0:
        return np.eye(3)
    x_axes = quaternion_to_matrix(torch.from_numpy(np.array(poses[:, 3:])))[:, :, 0].numpy()  # [m, 3] in map
    _, vectors = np.linalg.eigh(x_axes.T @ x_axes / len(x_axes) + LEVEL_PRIOR * np.diag([1.0, 1.0, 0.0]))
    up = vectors[:, 0] * (1 if vectors[2, 0] >= 0 else -1)
    # Rotation from up to z (Rodrigues' formula for two unit vectors, which are never opposite here).
    axis = np.cross(up, [0.0, 0.0, 1.0])
    cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    return np.eye(3) + cross + cross @ cross / (1 + up[2])


def cut_height(z: np.ndarray, camera_z: np.ndarray) -> float:
    """Return the height above which points are left out of the picture.

    Halfway from the camera's highest position to the top of the map, the 95th percentile of the points' heights z [n]:
    what the camera looks up to is cut, its surroundings stay. Without camera heights [m] only the topmost 5 % is cut.
    """
    top = float(np.percentile(z, 95))
    if len(camera_z) == 0:
        return top
    camera = float(camera_z.max())
    return camera + 0.5 * (top - camera) if top > camera else float(z.max())


def rasterize(
    xyz: np.ndarray, rgb: np.ndarray, low: np.ndarray, high: np.ndarray, cell: float, splat: int = 1,
    least_opacity: float = 0.5,
) -> np.ndarray:
    """Return the picture of points [n, 3] over the rectangle low [2] to high [2]: float [rows, columns, 4] in [0, 1].

    A point colours splat x splat cells around its own. Row 0 is the lowest y. Cells without points are transparent, and
    those with few of them may be in part, down to `least_opacity`.
    """
    columns, rows = np.maximum(np.ceil((high - low) / cell).astype(int), 1)
    column, row = np.floor((xyz[:, :2] - low) / cell).astype(int).T
    count = np.zeros(rows * columns)
    total = np.zeros((3, rows * columns))
    offsets = range(-(splat // 2), splat - splat // 2)
    for dy in offsets:
        for dx in offsets:
            x, y = column + dx, row + dy
            inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
            index = y[inside] * columns + x[inside]
            count += np.bincount(index, minlength=rows * columns)
            for channel in range(3):
                total[channel] += np.bincount(index, rgb[inside, channel] / 255.0, minlength=rows * columns)
    picture = np.zeros((rows * columns, 4))
    filled = count > 0
    if filled.any():
        picture[filled, :3] = (total[:, filled] / count[filled]).T
        full = np.percentile(count[filled], 90)
        picture[filled, 3] = np.clip(least_opacity + (1 - least_opacity) * count[filled] / full, 0, 1)
    return np.clip(picture, 0, 1).reshape(rows, columns, 4)


def _extent(xyz: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners low [2] and high [2] of the picture: most points, every position, and a margin."""
    corners = [positions[:, :2]]
    if len(xyz):
        corners.append(np.percentile(xyz[:, :2], EXTENT_PERCENTILES, axis=0))
    corners = np.concatenate(corners)
    low, high = corners.min(axis=0), corners.max(axis=0)
    margin = MARGIN * max((high - low).max(), 1e-6)
    return low - margin, high + margin


def _figure(columns: int, size: np.ndarray):
    """Return a figure and its axes, one beside the other, for a rectangle of size [2] each."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the top-down picture needs matplotlib: pip install matplotlib") from error
    # The picture takes the map's shape, within reason.
    width, height = 10 / max(1, columns - 0.6) * size / size.max()
    figure = Figure(figsize=(columns * (max(width, 5.5) + 0.5) + 0.5, max(height, 3.5) + 1.0), dpi=110, facecolor=PAPER,
                    layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _draw_points(
    axes, xyz: np.ndarray, rgb: np.ndarray, low: np.ndarray, high: np.ndarray, point_size: float | None,
    least_opacity: float = 0.5,
) -> None:
    """Draw the rectangle from low [2] to high [2]."""
    longer = (high - low).max()
    cell = longer / CELLS
    # Half as large again, as a voxel is seen askew after levelling: surfaces stay closed.
    splat = int(np.clip(round(1.5 * (point_size or longer / 180) / cell), 1, MAX_SPLAT))
    axes.set_facecolor(GROUND)
    axes.imshow(rasterize(xyz, rgb, low, high, cell, splat, least_opacity), origin="lower", interpolation="nearest",
                extent=(low[0], high[0], low[1], high[1]), zorder=1)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.grid(True, color="#00000014", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color("#00000040")
    axes.tick_params(colors="#444444", labelsize=8)


def _draw_path(axes, positions: np.ndarray) -> None:
    x, y = positions[:, 0], positions[:, 1]
    axes.plot(x, y, color="white", linewidth=4.0, solid_capstyle="round", zorder=3)
    axes.plot(x, y, color="#d62728", linewidth=2.0, solid_capstyle="round", zorder=4, label="path")
    for i, marker, color, label in ((0, "o", "#2ca02c", "start"), (-1, "s", "#1f77b4", "end")):
        axes.plot(x[i], y[i], marker, color=color, markeredgecolor="white", markersize=10, zorder=5, label=label)
