# SPDX-License-Identifier: Apache-2.0
"""Recorded images with their stamps: folders, videos, ROS 2 bags and TUM-format datasets, read one at a time."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np

from lingbot_map_ros.image_files import NANOSECONDS, Frames, ReplayError, stamp_from_name
from lingbot_map_ros.mapping.evaluation.requirements import require
from lingbot_map_ros.mapping.image_message import ImageError, compressed_to_rgb, to_rgb

IMAGE_TYPES = {"sensor_msgs/msg/Image": to_rgb, "sensor_msgs/msg/CompressedImage": compressed_to_rgb}
BAG_SUFFIXES = (".mcap", ".db3")


@dataclass(frozen=True)
class Frame:
    """One recorded image."""

    name: str  # for messages
    stamp_ns: int
    rgb: np.ndarray  # uint8 [height, width, 3]
    depth_file: Path | None = None  # 16-bit PNG taken at nearly the same time


class Source(Protocol):
    """Yields frames in the order in which they were recorded."""

    kind: str  # folder, video, bag or TUM dataset
    ground_truth: Path | None  # trajectory in TUM format

    def __len__(self) -> int:
        """Frames that there are, or that there seem to be: the header of a video may be wrong."""

    def __iter__(self) -> Iterator[Frame]:
        """Yield every frame. Raises ReplayError, naming it, for one that cannot be read."""


def open_source(
    path: str | Path, *, topic: str | None = None, rate: float = 30.0, max_time_difference: float = 0.02
) -> Source:
    """Recognise what is at a path and open it.

    A folder with `rgb.txt` is a TUM-format dataset, one with `metadata.yaml`, or a .mcap or .db3 file in one, is a bag;
    other folders hold images; other files are videos.

    Args:
        topic: of a bag; None: its only image topic.
        rate: images a second where neither the files' names nor the video tell the time.
        max_time_difference: seconds between an image and a depth image that belong together.

    Raises ReplayError, with the reason, for what cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise ReplayError(f"{path} does not exist")
    is_bag = path.suffix in BAG_SUFFIXES if path.is_file() else (path / "metadata.yaml").is_file()
    if is_bag:
        return BagSource(path, topic)
    if topic is not None:
        raise ReplayError(f"a topic was given, but {path} is no bag (a folder with metadata.yaml)")
    if (path / "rgb.txt").is_file():
        return TumSource(path, max_time_difference)
    return FilesSource(path, rate)


class FilesSource:
    """A folder of images, or a video."""

    def __init__(self, path: Path, rate: float = 30.0) -> None:
        """A folder's stamps are its files' names where all of them are times; else they count from 0 at the rate.

        A video's count at its own frame rate. Raises ReplayError if there is nothing to read.
        """
        self.kind = "folder" if path.is_dir() else "video"
        self.ground_truth = None
        self._frames = Frames(path)
        self._rate, self._length = rate, len(self._frames.files)
        self._has_stamps = self._length > 0 and all(_is_stamp(file.stem) for file in self._frames.files)
        if self._has_stamps:  # names of times need not be equally long
            self._frames.files.sort(key=lambda file: stamp_from_name(file.stem))
        if self.kind == "video":
            video = cv2.VideoCapture(str(path))
            self._rate = video.get(cv2.CAP_PROP_FPS) or rate
            self._length = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
            video.release()

    def __len__(self) -> int:
        """See Source."""
        return self._length

    def __iter__(self) -> Iterator[Frame]:
        """See Source."""
        for index, (name, bgr) in enumerate(self._frames):
            stamp_ns = stamp_from_name(name) if self._has_stamps else round(index * NANOSECONDS / self._rate)
            yield Frame(name, stamp_ns, cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB))


class TumSource:
    """A dataset in the format of the TUM RGB-D benchmark: rgb.txt, and groundtruth.txt and depth.txt if they are there.

    Format: https://cvg.cit.tum.de/data/datasets/rgbd-dataset/file_formats
    """

    kind = "TUM dataset"

    def __init__(self, path: Path, max_time_difference: float = 0.02) -> None:
        """Raises ReplayError for lists that cannot be read or are empty."""
        self._path = path
        self._images = _read_list(path / "rgb.txt")
        if not self._images:
            raise ReplayError(f"{path / 'rgb.txt'} names no images")
        ground_truth = path / "groundtruth.txt"
        self.ground_truth = ground_truth if ground_truth.is_file() else None
        depths = sorted(_read_list(path / "depth.txt")) if (path / "depth.txt").is_file() else []
        self._depth_stamps = np.array([stamp_ns for stamp_ns, _ in depths], dtype=np.int64)
        self._depth_files = [name for _, name in depths]
        self._max_difference_ns = round(max_time_difference * NANOSECONDS)

    def __len__(self) -> int:
        """See Source."""
        return len(self._images)

    def __iter__(self) -> Iterator[Frame]:
        """See Source."""
        for stamp_ns, name in self._images:
            bgr = cv2.imread(str(self._path / name), cv2.IMREAD_COLOR)
            if bgr is None:
                raise ReplayError(f"{self._path / name}, named in rgb.txt, cannot be read as an image")
            yield Frame(name, stamp_ns, cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB), self._depth_file(stamp_ns))

    def _depth_file(self, stamp_ns: int) -> Path | None:
        """Return the depth image nearest in time, if it is near enough."""
        if not self._depth_files:
            return None
        after = int(np.searchsorted(self._depth_stamps, stamp_ns))
        nearest = min((i for i in (after - 1, after) if 0 <= i < len(self._depth_files)),
                      key=lambda i: abs(int(self._depth_stamps[i]) - stamp_ns))
        if abs(int(self._depth_stamps[nearest]) - stamp_ns) > self._max_difference_ns:
            return None
        return self._path / self._depth_files[nearest]


class BagSource:
    """The images on one topic of a ROS 2 bag (mcap or sqlite3). Stamps: the headers', the bag's where they are 0."""

    kind = "bag"
    ground_truth = None

    def __init__(self, path: Path, topic: str | None = None) -> None:
        """Raises ReplayError for a bag that cannot be read, and, listing the topics, for one without that topic."""
        require("rosbags", "reading bags")
        if path.is_file():
            path = path.parent
            if not (path / "metadata.yaml").is_file():
                raise ReplayError(f"{path} lacks the bag's metadata.yaml: run `ros2 bag reindex {path}`")
        self._path = path
        with self._open() as reader:
            types = {name: info.msgtype or "several types" for name, info in reader.topics.items()}
            counts = {name: info.msgcount for name, info in reader.topics.items()}
        images = [name for name, kind in types.items() if kind in IMAGE_TYPES]
        listing = ", ".join(f"{name} ({kind})" for name, kind in sorted(types.items())) or "none"
        if topic is None:
            if len(images) != 1:
                which = "no image topic" if not images else f"{len(images)} image topics: choose one with --topic"
                raise ReplayError(f"{path} has {which}; its topics are: {listing}")
            topic = images[0]
        elif topic not in types:
            raise ReplayError(f"{path} has no topic {topic}; its topics are: {listing}")
        elif topic not in images:
            raise ReplayError(f"{topic} is of {types[topic]}, expected {' or '.join(IMAGE_TYPES)}")
        if counts[topic] == 0:
            raise ReplayError(f"{topic} has no messages in {path}")
        self.topic = topic
        self._length = counts[topic]

    def __len__(self) -> int:
        """See Source."""
        return self._length

    def __iter__(self) -> Iterator[Frame]:
        """See Source."""
        with self._open() as reader:
            connections = [connection for connection in reader.connections if connection.topic == self.topic]
            for index, (connection, bag_ns, data) in enumerate(reader.messages(connections)):
                name = f"message {index} on {self.topic}"
                message = reader.deserialize(data, connection.msgtype)
                try:
                    rgb = IMAGE_TYPES[connection.msgtype](message)
                except ImageError as error:
                    raise ReplayError(f"{name}: {error}") from None
                stamp = message.header.stamp
                yield Frame(name, stamp.sec * NANOSECONDS + stamp.nanosec or bag_ns, rgb)

    @contextmanager
    def _open(self) -> Iterator:
        from rosbags.highlevel import AnyReader, AnyReaderError
        from rosbags.rosbag2 import ReaderError
        from rosbags.typesys import Stores, get_typestore

        try:
            # sqlite3 bags of older distributions do not hold the definitions of their messages.
            with AnyReader([self._path], default_typestore=get_typestore(Stores.LATEST)) as reader:
                yield reader
        except (AnyReaderError, ReaderError, OSError) as error:
            raise ReplayError(f"{self._path} cannot be read as a bag: {error}") from None


def read_depth(path: Path, factor: float) -> np.ndarray:
    """Read a 16-bit depth image of `factor` steps a metre: float32 [height, width], metres; 0 where it is not known.

    Raises ReplayError for another kind of image.
    """
    depth = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if depth is None:
        raise ReplayError(f"{path} cannot be read as an image")
    if depth.dtype != np.uint16 or depth.ndim != 2:
        raise ReplayError(f"{path} is {depth.dtype} {list(depth.shape)}, expected 16-bit depth in one channel")
    return depth.astype(np.float32) / np.float32(factor)


def _read_list(path: Path) -> list[tuple[int, str]]:
    """Read a list of the TUM format: stamps in nanoseconds and file names."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            stamp, name = line.split(None, 1)
            entries.append((stamp_from_name(stamp if "." in stamp else f"{stamp}.0"), name))
        except (ValueError, ReplayError):
            raise ReplayError(f"{path}, line {number}: {line!r} is not a time in seconds and a file name") from None
    return entries


def _is_stamp(name: str) -> bool:
    try:
        stamp_from_name(name)
    except ReplayError:
        return False
    return True
