# SPDX-License-Identifier: Apache-2.0
"""Pictures of an evaluation, as PNG files."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from lingbot_map_ros.mapping.evaluation.metrics import TrajectoryErrors
from lingbot_map_ros.mapping.evaluation.trace import read_columns
from lingbot_map_ros.mapping.export import replace_file

TRUTH, ESTIMATE, OTHER, HAND_OVER = "#444444", "#d62728", "#1f77b4", "#00000030"
MAX_POINTS = 5000  # of a curve: more cannot be told apart
PAGES = ("cache_scale_pages", "cache_live_pages", "cache_free_pages")


def write_plots(folder: Path, trace: Path, positions: np.ndarray, errors: TrajectoryErrors | None) -> None:
    """Draw trajectory.png, cache.png, timings.png, and errors.png if there are errors, from the rows of a trace.

    positions: of the estimated trajectory, [n, 3] in map; drawn as they are where there is no ground truth.
    """
    names = ("index", "window", "step_ms", "hand_over_ms", "cache_special_frames", "depth_abs_rel", *PAGES)
    columns = read_columns(trace, names)
    _draw_trajectory(folder / "trajectory.png", positions, errors)
    _draw_cache(folder / "cache.png", columns)
    _draw_timings(folder / "timings.png", columns)
    if errors is not None or np.isfinite(columns["depth_abs_rel"]).any():
        _draw_errors(folder / "errors.png", columns, errors)


def _figure(rows: int = 1, size: tuple[float, float] = (9, 4)):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, squeeze=False)[:, 0]
    for each in axes:
        each.grid(True, color="#00000014", linewidth=0.6)
    return figure, axes


def _save(figure, path: Path) -> None:
    with replace_file(path) as file:
        figure.savefig(file, format="png")


def _thin(*arrays: np.ndarray) -> list[np.ndarray]:
    step = -(-len(arrays[0]) // MAX_POINTS) or 1
    return [array[::step] for array in arrays]


def _mark_hand_overs(axes, columns: dict[str, np.ndarray]) -> None:
    starts = np.flatnonzero(np.diff(columns["window"]) > 0) + 1
    for start in starts[: MAX_POINTS // 10]:
        axes.axvline(columns["index"][start], color=HAND_OVER, linewidth=0.8)


def _draw_trajectory(path: Path, positions: np.ndarray, errors: TrajectoryErrors | None) -> None:
    """Draw the path over the two axes along which it extends most."""
    figure, (axes,) = _figure(size=(7, 7))
    curves = [(positions, ESTIMATE, "estimate")]
    unit = "model units"
    if errors is not None:
        unit = "units of the ground truth"
        curves = [(errors.reference, TRUTH, "ground truth"), (errors.aligned, ESTIMATE, "estimate, aligned")]
    extent = np.ptp(curves[0][0], axis=0) if len(curves[0][0]) else np.zeros(3)
    x, y = sorted(np.argsort(-extent, kind="stable")[:2])
    for points, color, label in curves:
        axes.plot(*_thin(points[:, x], points[:, y]), color=color, linewidth=1.5, label=label)
        if len(points):
            axes.plot(points[0, x], points[0, y], "o", color=color, markersize=5)
    axes.set(aspect="equal", xlabel=f"{'xyz'[x]} ({unit})", ylabel=f"{'xyz'[y]} ({unit})")
    if errors is not None:
        ate = errors.summary["ate"]["translation"]
        share = f", {ate['rmse_percent_of_path']:.2f} % of the path" if "rmse_percent_of_path" in ate else ""
        axes.set_title(f"ATE rmse {ate['rmse']:.4g}{share}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, path)


def _draw_errors(path: Path, columns: dict[str, np.ndarray], errors: TrajectoryErrors | None) -> None:
    has_depth = np.isfinite(columns["depth_abs_rel"]).any()
    figure, axes = _figure(rows=2 * (errors is not None) + has_depth, size=(9, 7))
    if errors is not None:
        seconds = errors.stamps - errors.stamps[0]
        for each, values, label in ((axes[0], errors.translation, "position error\n(units of the ground truth)"),
                                    (axes[1], errors.rotation, "rotation error (degrees)")):
            each.plot(*_thin(seconds, values), color=ESTIMATE, linewidth=1.2)
            each.set(ylabel=label, xlabel="seconds", ylim=(0, None))
    if has_depth:
        index, values = columns["index"], columns["depth_abs_rel"]
        known = np.isfinite(values)
        axes[-1].plot(*_thin(index[known], values[known]), color=OTHER, linewidth=1.2)
        axes[-1].set(ylabel="depth AbsRel", xlabel="frame", ylim=(0, None))
        _mark_hand_overs(axes[-1], columns)
    _save(figure, path)


def _draw_cache(path: Path, columns: dict[str, np.ndarray]) -> None:
    figure, (pages, specials) = _figure(rows=2, size=(9, 6))
    index, *counts = _thin(columns["index"], *(columns[name] for name in PAGES))
    labels = ("scale frames", "window", "free")
    pages.stackplot(index, *counts, labels=labels, colors=("#2ca02c", OTHER, "#e4e7eb"), step="post")
    pages.set(ylabel="pages (frames in full)", xlabel="frame")
    pages.legend(loc="lower right", fontsize=9)
    specials.plot(*_thin(columns["index"], columns["cache_special_frames"]), color=ESTIMATE, linewidth=1.2)
    specials.set(ylabel="frames with special tokens", xlabel="frame", ylim=(0, None))
    for axes in (pages, specials):
        _mark_hand_overs(axes, columns)
    _save(figure, path)


def _draw_timings(path: Path, columns: dict[str, np.ndarray]) -> None:
    figure, (axes,) = _figure()
    axes.plot(*_thin(columns["index"], columns["step_ms"]), color=OTHER, linewidth=1.0,
              label="frame, hand-over included")
    is_first = columns["hand_over_ms"] > 0
    axes.plot(columns["index"][is_first], columns["hand_over_ms"][is_first], ".", color=ESTIMATE, label="hand-over")
    axes.set(xlabel="frame", ylabel="milliseconds", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    _save(figure, path)
