# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, and maps in them."""
import numpy as np
import pytest

from lingbot_map_ros.mapping.export import read_map, read_pcd, read_ply, replace_file, write_map, write_pcd, write_ply


def make_points(count, seed=0):
    generator = np.random.default_rng(seed)
    return (
        generator.normal(size=(count, 3)).astype(np.float32),
        generator.integers(0, 256, (count, 3)).astype(np.uint8),
        generator.uniform(1, 9, count).astype(np.float32),
    )


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_ply_round_trip(tmp_path, count):
    points = make_points(count)
    write_ply(tmp_path / "map.ply", *points)
    for read, written in zip(read_ply(tmp_path / "map.ply"), points):
        assert read.dtype == written.dtype and np.array_equal(read, written)


def test_ply_bytes(tmp_path):
    """The layout that other programs read, spelled out."""
    write_ply(
        tmp_path / "map.ply", np.array([[1.0, -2.0, 0.5]]), np.array([[1, 2, 255]], np.uint8), np.array([1.0])
    )
    header = (
        b"ply\nformat binary_little_endian 1.0\nelement vertex 1\n"
        b"property float x\nproperty float y\nproperty float z\n"
        b"property uchar red\nproperty uchar green\nproperty uchar blue\nproperty float confidence\nend_header\n"
    )
    body = bytes.fromhex("0000803f 000000c0 0000003f 0102ff 0000803f")
    assert (tmp_path / "map.ply").read_bytes() == header + body


def test_ply_refuses_other_arrays(tmp_path):
    xyz, rgb, confidence = make_points(4)
    with pytest.raises(ValueError, match=r"\(4, 3\), \(3, 3\) and \(4,\)"):
        write_ply(tmp_path / "map.ply", xyz, rgb[:3], confidence)
    with pytest.raises(ValueError, match="uint8.*float64"):
        write_ply(tmp_path / "map.ply", xyz, rgb / 255, confidence)
    assert list(tmp_path.iterdir()) == []


def test_reading_says_what_is_wrong(tmp_path):
    path = tmp_path / "map.ply"
    path.write_bytes(b"\x00\xffnot a map")
    with pytest.raises(ValueError, match="map.ply is not a PLY file"):
        read_ply(path)
    write_ply(path, *make_points(10))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="ends after 9 of 10 points"):
        read_ply(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="midway"):
        with replace_file(path) as file:
            file.write(b"new")
            raise RuntimeError("midway")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder .*missing does not exist"):
        write_ply(tmp_path / "missing" / "map.ply", *make_points(1))
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_ply(tmp_path, *make_points(1))


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_pcd_round_trip(tmp_path, count):
    points = make_points(count)
    write_pcd(tmp_path / "map.pcd", *points)
    for read, written in zip(read_pcd(tmp_path / "map.pcd"), points):
        assert read.dtype == written.dtype and np.array_equal(read, written)


def test_pcd_bytes(tmp_path):
    """The layout that PCL reads, spelled out."""
    write_pcd(tmp_path / "map.pcd", np.array([[1.0, -2.0, 0.5]]), np.array([[1, 2, 255]], np.uint8), np.array([1.0]))
    header = (
        b"VERSION 0.7\nFIELDS x y z rgb confidence\nSIZE 4 4 4 4 4\nTYPE F F F F F\nCOUNT 1 1 1 1 1\nWIDTH 1\n"
        b"HEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 1\nDATA binary\n"
    )
    body = bytes.fromhex("0000803f 000000c0 0000003f ff020100 0000803f")
    assert (tmp_path / "map.pcd").read_bytes() == header + body


def test_reading_pcd_says_what_is_wrong(tmp_path):
    path = tmp_path / "map.pcd"
    path.write_bytes(b"\x00\xffnot a map")
    with pytest.raises(ValueError, match="map.pcd is not a PCD file"):
        read_pcd(path)
    write_pcd(path, *make_points(10))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="ends after 9 of 10 points"):
        read_pcd(path)
    count = b"99999999999999"
    path.write_bytes(whole.replace(b"WIDTH 10", b"WIDTH " + count).replace(b"POINTS 10", b"POINTS " + count))
    with pytest.raises(ValueError, match="ends after 10 of 99999999999999 points"):
        read_pcd(path)


@pytest.mark.parametrize("suffix", [".ply", ".pcd", ".PLY"])
def test_maps_are_written_by_their_suffix(tmp_path, suffix):
    xyz, rgb, confidence = make_points(5)
    xyz[2, 1], confidence[3] = np.nan, np.inf
    write_map(tmp_path / f"map{suffix}", xyz, rgb, confidence)
    for read, written in zip(read_map(tmp_path / f"map{suffix}"), (xyz, rgb, confidence)):
        assert np.array_equal(read, written[[0, 1, 4]])
    with pytest.raises(ValueError, match="map.las must end with one of .ply, .pcd"):
        write_map(tmp_path / "map.las", xyz, rgb, confidence)
