# SPDX-License-Identifier: Apache-2.0
"""Plots of a training run's log."""
from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CURVES = ("total", "translation", "rotation", "fov", "step_translation", "step_rotation", "depth", "confidence",
          "matches")
ERRORS = ("ate_path", "rotation_step", "translation_step", "abs_rel")


def plot_run(folder: Path) -> None:
    """Draw losses.png from log.jsonl: losses over steps, and errors on held-out sequences as dots."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [row for row in rows if "evaluation" not in row]
    evaluations = [row for row in rows if "evaluation" in row]
    errors = ERRORS if evaluations else ()
    figure, axes = plt.subplots(4, 4, figsize=(18, 14), constrained_layout=True)
    axes = axes.flatten()
    for axis, name in zip(axes, CURVES):
        axis.plot([row["step"] for row in losses], [row[name] for row in losses], linewidth=1)
        axis.set_title(f"loss: {name}")
    for axis, name in zip(axes[len(CURVES):], errors):
        for kind in sorted({row["evaluation"] for row in evaluations}):
            some = [row for row in evaluations if row["evaluation"] == kind]
            axis.plot([row["step"] for row in some], [row[name] for row in some], "o-", label=kind)
        axis.set_title(f"held out: {name}")
        axis.set_ylim(bottom=0)
        axis.legend()
    for axis in axes[len(CURVES) + len(errors):]:
        axis.axis("off")
    figure.savefig(folder / "losses.png", dpi=80)
    plt.close(figure)


def plot_confidence(kinds: dict[str, dict[str, list[float]]], file: Path) -> None:
    """Draw the depth error over confidence (see `metrics.confidence_errors`) of each kind of sequence."""
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for name, curve in kinds.items():
        axis.plot(curve["confidence"], curve["abs_rel"], "o-", label=name)
    axis.set_xlabel("confidence (median of a tenth of the pixels)")
    axis.set_ylabel("depth error, % (mean)")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(file, dpi=90)
    plt.close(figure)
