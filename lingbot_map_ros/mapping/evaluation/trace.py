# SPDX-License-Identifier: Apache-2.0
"""A row a frame, written as it comes."""
from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np


class Trace:
    """Writes rows to a CSV file; the first one names the columns. Use it as a context."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8", newline="")
        self._writer: csv.DictWriter | None = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, row: dict[str, object]) -> None:
        """Write a row: numbers in full precision, None as nothing. Raises ValueError for columns that are new."""
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, row, lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow(row)


def read_columns(path: str | Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read columns of numbers: float64 [n] each, NaN where a row has nothing or the file lacks the column."""
    values: dict[str, list[float]] = {name: [] for name in names}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for name, column in values.items():
                column.append(float(row.get(name) or "nan"))
    return {name: np.array(column, dtype=np.float64) for name, column in values.items()}
