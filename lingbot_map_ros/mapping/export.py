# SPDX-License-Identifier: Apache-2.0
"""Maps as PLY and PCD files, and files that appear whole or not at all."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

PLY_VERTEX = np.dtype(
    [("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("red", "u1"), ("green", "u1"), ("blue", "u1"), ("confidence", "<f4")]
)
_PLY_TYPES = {"<f4": "float", "|u1": "uchar"}
# `rgb` is 0x00RRGGBB in the bits of a float, as PCL has it.
PCD_POINT = np.dtype([("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("rgb", "<u4"), ("confidence", "<f4")])
SUFFIXES = (".ply", ".pcd")


@contextmanager
def replace_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for binary writing, and rename it to `path` when the block succeeds.

    A reader of `path` sees the old file or the whole new one; after an error the old file is still there and nothing
    else is left behind. Raises FileNotFoundError if the folder does not exist, else the OSError of the system.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_ply(path: str | Path, xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> None:
    """Write points as a binary little-endian PLY with x, y, z, red, green, blue and confidence.

    Args:
        path: file to write or replace; its folder must exist.
        xyz: [n, 3] float, in map, model units.
        rgb: [n, 3] uint8.
        confidence: [n] float.

    Raises ValueError on arrays of other shapes or types, OSError when the file cannot be written.
    """
    xyz, rgb, confidence = _checked(xyz, rgb, confidence)
    vertices = np.empty(len(xyz), PLY_VERTEX)
    for i, axis in enumerate("xyz"):
        vertices[axis] = xyz[:, i]
    for i, color in enumerate(("red", "green", "blue")):
        vertices[color] = rgb[:, i]
    vertices["confidence"] = confidence
    with replace_file(path) as file:
        file.write(_ply_header(len(xyz)))
        vertices.tofile(file)


def read_ply(path: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a file of `write_ply`: xyz [n, 3] float32, rgb [n, 3] uint8, confidence [n] float32.

    Raises ValueError if the file has another layout or ends early.
    """
    with open(path, "rb") as file:
        lines = []
        while not lines or lines[-1] not in ("end_header", ""):
            lines.append(file.readline(256).decode("ascii", "replace").strip())
        count = [line.split()[-1] for line in lines if line.startswith("element vertex ")]
        if len(count) != 1 or not count[0].isdecimal() or _ply_header(int(count[0])).decode().split("\n")[:-1] != lines:
            raise ValueError(f"{path} is not a PLY file of this package's layout")
        vertices = _records(path, file, PLY_VERTEX, int(count[0]))
    xyz = np.stack([vertices["x"], vertices["y"], vertices["z"]], axis=-1)
    rgb = np.stack([vertices["red"], vertices["green"], vertices["blue"]], axis=-1)
    return xyz, rgb, vertices["confidence"].copy()


def write_pcd(path: str | Path, xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> None:
    """Write points as a binary PCD (version 0.7) with x, y, z, rgb and confidence; see `write_ply`."""
    xyz, rgb, confidence = _checked(xyz, rgb, confidence)
    points = np.empty(len(xyz), PCD_POINT)
    for i, axis in enumerate("xyz"):
        points[axis] = xyz[:, i]
    colour = rgb.astype(np.uint32)
    points["rgb"] = colour[:, 0] << 16 | colour[:, 1] << 8 | colour[:, 2]
    points["confidence"] = confidence
    with replace_file(path) as file:
        file.write(_pcd_header(len(xyz)))
        points.tofile(file)


def read_pcd(path: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a file of `write_pcd`; see `read_ply`."""
    with open(path, "rb") as file:
        lines = []
        while not lines or not lines[-1].startswith("DATA") and lines[-1] != "":
            lines.append(file.readline(256).decode("ascii", "replace").strip())
        count = [line.split()[-1] for line in lines if line.startswith("POINTS ")]
        if len(count) != 1 or not count[0].isdecimal() or _pcd_header(int(count[0])).decode().split("\n")[:-1] != lines:
            raise ValueError(f"{path} is not a PCD file of this package's layout")
        points = _records(path, file, PCD_POINT, int(count[0]))
    xyz = np.stack([points["x"], points["y"], points["z"]], axis=-1)
    rgb = (points["rgb"][:, None] >> np.array([16, 8, 0], np.uint32) & 0xFF).astype(np.uint8)
    return xyz, rgb, points["confidence"].copy()


def write_map(path: str | Path, xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> None:
    """Write points as PLY or PCD, by the file's suffix; see `write_ply`. ValueError for another suffix."""
    {".ply": write_ply, ".pcd": write_pcd}[_suffix(path)](path, xyz, rgb, confidence)


def read_map(path: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a file of `write_map`; points that are not finite are left out. Raises ValueError and OSError."""
    xyz, rgb, confidence = {".ply": read_ply, ".pcd": read_pcd}[_suffix(path)](path)
    good = np.isfinite(xyz).all(axis=1) & np.isfinite(confidence)
    return xyz[good], rgb[good], confidence[good]


def _suffix(path: str | Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must end with one of {', '.join(SUFFIXES)}")
    return suffix


def _checked(xyz: np.ndarray, rgb: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of a map; ValueError for other shapes or types."""
    xyz, rgb, confidence = np.asarray(xyz), np.asarray(rgb), np.asarray(confidence)
    n = len(xyz)
    if xyz.shape != (n, 3) or rgb.shape != (n, 3) or confidence.shape != (n,):
        raise ValueError(
            f"expected xyz [n, 3], rgb [n, 3] and confidence [n], got {xyz.shape}, {rgb.shape} and {confidence.shape}"
        )
    if rgb.dtype != np.uint8:
        raise ValueError(f"expected rgb of uint8, got {rgb.dtype}")
    return xyz, rgb, confidence


def _records(path: str | Path, file: BinaryIO, kind: np.dtype, count: int) -> np.ndarray:
    """Read the rest of a file; ValueError where it ends early. Nothing is allocated for a count that is made up."""
    present = (os.fstat(file.fileno()).st_size - file.tell()) // kind.itemsize
    if present < count:
        raise ValueError(f"{path} ends after {present} of {count} points")
    return np.fromfile(file, kind, count)


def _pcd_header(count: int) -> bytes:
    n = len(PCD_POINT.names)
    lines = ["VERSION 0.7", f"FIELDS {' '.join(PCD_POINT.names)}", f"SIZE{' 4' * n}", f"TYPE{' F' * n}",
             f"COUNT{' 1' * n}", f"WIDTH {count}", "HEIGHT 1", "VIEWPOINT 0 0 0 1 0 0 0", f"POINTS {count}",
             "DATA binary", ""]
    return "\n".join(lines).encode("ascii")


def _ply_header(count: int) -> bytes:
    properties = [f"property {_PLY_TYPES[PLY_VERTEX[name].str]} {name}" for name in PLY_VERTEX.names]
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {count}", *properties, "end_header", ""]
    return "\n".join(lines).encode("ascii")
