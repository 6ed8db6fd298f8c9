# SPDX-License-Identifier: Apache-2.0
"""A bird's-eye picture of the map and the path."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from lingbot_map_ros.mapping.export import replace_file

BACKGROUND = "#fbfbf9"
MARGIN = 0.04  # of the longer side, around the map
MAX_CELLS = 1200  # along a side of the picture
EXTENT_PERCENTILES = (0.5, 99.5)  # strays beyond do not shrink the rest of the picture


def write_topdown(
    path: str | Path,
    xyz: np.ndarray,
    rgb: np.ndarray,
    positions: np.ndarray,
    *,
    cell: float | None = None,
    title: str | None = None,
    unit: str = "model units",
) -> None:
    """Draw the map from above, with the path, its start and its end, as a PNG.

    Points above the cut (see `cut_height`) are left out, so that a ceiling does not hide the room. A cell of the picture has the mean
    colour of its points, and is the more opaque the more of them there are: walls stand out from the floor.

    Args:
        path: PNG file to write or replace; its folder must exist.
        xyz: [n, 3], points in map (x forward, y left, z up).
        rgb: [n, 3] uint8.
        positions: [m, 3], the camera's positions in map, oldest first.
        cell: edge of the picture's cells, best the map's voxel size; None: a 400th of the longer side.
        title: replaces the counts above the picture.
        unit: of the axes.

    Raises ModuleNotFoundError if matplotlib is missing, ValueError if there are neither points nor positions.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the top-down picture needs matplotlib: pip install matplotlib") from error

    xyz, rgb = np.asarray(xyz, dtype=np.float64).reshape(-1, 3), np.asarray(rgb).reshape(-1, 3)
    positions = np.asarray(positions, dtype=np.float64).reshape(-1, 3)
    positions = positions[np.isfinite(positions).all(axis=1)]
    if len(xyz) + len(positions) == 0:
        raise ValueError("there is nothing to draw: no points and no positions")
    low, high = _extent(xyz, positions)
    count = len(xyz)
    if count:
        below = xyz[:, 2] <= cut_height(xyz[:, 2], positions[:, 2])
        xyz, rgb = xyz[below], rgb[below]
    size = high - low
    cell = max(cell or size.max() / 400, size.max() / MAX_CELLS)

    # The picture takes the map's shape, within reason.
    width, height = 10 * size / size.max()
    figure = Figure(figsize=(max(width, 4.5) + 1.0, max(height, 3.5) + 1.0), dpi=110, facecolor=BACKGROUND,
                    layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(BACKGROUND)
    axes.imshow(rasterize(xyz, rgb, low, high, cell), origin="lower", interpolation="nearest",
                extent=(low[0], high[0], low[1], high[1]), zorder=1)
    if len(positions):
        _draw_path(axes, positions)
        axes.legend(loc="best", framealpha=0.9, edgecolor="none", fontsize=9)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal",
             xlabel=f"x, forward at the start ({unit})", ylabel=f"y, left at the start ({unit})")
    axes.set_title(title if title is not None else f"{count:,} points, {len(positions):,} poses", fontsize=11)
    axes.grid(True, color="#00000014", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color("#00000040")
    axes.tick_params(colors="#444444", labelsize=8)
    with replace_file(path) as file:
        figure.savefig(file, format="png", facecolor=BACKGROUND)


def cut_height(z: np.ndarray, camera_z: np.ndarray) -> float:
    """Return the height above which points are left out of the picture.

    Halfway from the camera's highest position to the top of the map (95th percentile of the points' heights z [n]): what the camera
    looks up to is cut, its surroundings stay. Without camera heights [m] nothing but the topmost 5 % is cut.
    """
    top = float(np.percentile(z, 95))
    if len(camera_z) == 0:
        return top
    camera = float(camera_z.max())
    return camera + 0.5 * (top - camera) if top > camera else float(z.max())


def rasterize(xyz: np.ndarray, rgb: np.ndarray, low: np.ndarray, high: np.ndarray, cell: float) -> np.ndarray:
    """Return the picture of points [n, 3] over the rectangle low [2] to high [2]: float [rows, columns, 4] in [0, 1].

    Row 0 is the lowest y. Cells without points are transparent.
    """
    columns, rows = np.maximum(np.ceil((high - low) / cell).astype(int), 1)
    column, row = np.floor((xyz[:, :2] - low) / cell).astype(int).T
    inside = (column >= 0) & (column < columns) & (row >= 0) & (row < rows)
    index = row[inside] * columns + column[inside]
    count = np.bincount(index, minlength=rows * columns)
    picture = np.zeros((rows * columns, 4))
    filled = count > 0
    for channel in range(3):
        total = np.bincount(index, rgb[inside, channel] / 255.0, minlength=rows * columns)
        picture[filled, channel] = total[filled] / count[filled]
    if filled.any():
        full = max(np.percentile(count[filled], 90), 1)
        picture[filled, 3] = np.clip(0.35 + 0.65 * count[filled] / full, 0, 1)
    return picture.reshape(rows, columns, 4)


def _extent(xyz: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners low [2] and high [2] of the picture: most points, every position, and a margin."""
    corners = [positions[:, :2]]
    if len(xyz):
        corners.append(np.percentile(xyz[:, :2], EXTENT_PERCENTILES, axis=0))
    corners = np.concatenate(corners)
    low, high = corners.min(axis=0), corners.max(axis=0)
    margin = MARGIN * max((high - low).max(), 1e-6)
    return low - margin, high + margin


def _draw_path(axes, positions: np.ndarray) -> None:
    x, y = positions[:, 0], positions[:, 1]
    axes.plot(x, y, color="white", linewidth=4.0, solid_capstyle="round", zorder=3)
    axes.plot(x, y, color="#d62728", linewidth=2.0, solid_capstyle="round", zorder=4, label="path")
    for i, marker, color, label in ((0, "o", "#2ca02c", "start"), (-1, "s", "#1f77b4", "end")):
        axes.plot(x[i], y[i], marker, color=color, markeredgecolor="white", markersize=10, zorder=5, label=label)
