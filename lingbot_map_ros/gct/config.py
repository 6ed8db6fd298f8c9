# SPDX-License-Identifier: Apache-2.0
"""Configuration of the model, and named presets."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class GCTConfig:
    """Dimensions of a model, the images that it takes and the range that it was trained on.

    Raises ValueError when the dimensions do not fit together.
    """

    name: str
    image_width: int  # pixels
    image_height: int | None  # pixels; None: any multiple of the patch size up to image_width, from the camera's shape
    trained_frames: int  # kept frames seen in training; predictions degrade beyond
    scale_frames: int  # recommended
    sliding_window: int  # recommended
    window_size: int = 128  # recommended: kept frames after which a long sequence starts the model anew
    overlap_keyframes: int = 8  # recommended: keyframes that two such windows share
    flow_threshold: float = 12.0  # recommended: pixels of mean image motion that make a keyframe
    # These two are the embedded model's, since its file is older than they are and does not say so.
    refine_poses: bool = True  # recommended: correct poses by the image's motion, for models of small images
    camera_iterations: int = 1  # recommended: refinement passes of a pose
    patch_size: int = 14

    # Aggregator: `depth` times a frame block, then a global block.
    embed_dim: int = 1024
    num_heads: int = 16
    depth: int = 24
    mlp_ratio: float = 4.0
    register_tokens: int = 4
    output_groups: tuple[int, ...] = (4, 11, 17, 23)  # groups whose outputs feed the heads, from 0

    # Patch embedding: DINOv2, unless `compact`.
    patch_embed_depth: int = 24
    patch_embed_heads: int = 16
    patch_embed_registers: int = 4
    patch_embed_grid: int = 37  # side of the learned position embedding, patches

    # Heads.
    camera_depth: int = 4
    camera_heads: int = 16
    camera_mlp_ratio: float = 4.0
    depth_features: int = 256
    depth_channels: tuple[int, ...] = (256, 512, 1024, 1024)  # of the four inputs, from the finest level

    # The embedded model's departures from the published rules (see compact.py).
    compact: bool = False
    stem_channels: tuple[int, ...] = (32, 48)

    def __post_init__(self) -> None:
        def require(ok: bool, reason: str) -> None:
            if not ok:
                raise ValueError(f"model configuration {self.name!r}: {reason}")

        for field in ("output_groups", "depth_channels", "stem_channels"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # JSON gives lists
        for field in ("image_width", "trained_frames", "scale_frames", "sliding_window", "window_size",
                      "overlap_keyframes", "camera_iterations", "patch_size", "embed_dim", "num_heads", "depth",
                      "camera_depth", "camera_heads"):
            require(getattr(self, field) >= 1, f"{field} must be at least 1, not {getattr(self, field)}")
        for field in ("image_width", "image_height"):
            size = getattr(self, field)
            require(size is None or (size >= self.patch_size and size % self.patch_size == 0),
                    f"{field} must be a multiple of the patch size {self.patch_size}, not {size}")
        require(self.embed_dim % (4 * self.num_heads) == 0, "embed_dim must be a multiple of 4 * num_heads")
        require(self.embed_dim % self.camera_heads == 0, "embed_dim must be a multiple of camera_heads")
        require(len(self.output_groups) == 4 and len(self.depth_channels) == 4, "the depth head takes four inputs")
        require(all(0 <= group < self.depth for group in self.output_groups), "output_groups must be below depth")
        require(list(self.output_groups) == sorted(set(self.output_groups)), "output_groups must ascend")
        require(self.output_groups[-1] == self.depth - 1, "the last of output_groups must be the last group")
        require(all(channels % 4 == 0 for channels in self.depth_channels), "depth_channels must be multiples of 4")
        require(self.depth_features % 8 == 0, "depth_features must be a multiple of 8")
        require(not self.compact or self.image_height is not None, "a compact model needs an image_height")

    @property
    def num_special_tokens(self) -> int:
        """Tokens of a frame before its patches: camera, registers, scale."""
        return self.register_tokens + 2

    @property
    def head_dim(self) -> int:
        """Channels of one head of the aggregator."""
        return self.embed_dim // self.num_heads

    @property
    def camera_head_dim(self) -> int:
        """Channels of one head of the camera head, which is twice as wide as the aggregator."""
        return 2 * self.embed_dim // self.camera_heads

    @property
    def smallest_image(self) -> tuple[int, int]:
        """Height and width of the smallest images that the model takes."""
        return (self.image_height, self.image_width) if self.image_height else (self.patch_size, self.patch_size)

    def grid_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) of patches of an image of (height, width) pixels.

        Raises ValueError when the model does not take such images.
        """
        height, width = image_size
        patch = self.patch_size
        if self.image_height is not None:
            if (height, width) != (self.image_height, self.image_width):
                raise ValueError(f"model {self.name!r} takes images of {self.image_width}x{self.image_height} only, "
                                 f"not {width}x{height}")
        elif height < patch or width < patch or height % patch or width % patch:
            raise ValueError(f"width and height of an image must be multiples of {patch}, not {width}x{height}")
        return height // patch, width // patch

    def to_json(self) -> str:
        """Return the configuration as a JSON object, as stored in a checkpoint's metadata."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> GCTConfig:
        """Inverse of `to_json`. Raises ValueError when the text is no such configuration."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"model configuration is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError("model configuration is no JSON object")
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"model configuration has unknown entries: {', '.join(unknown)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"model configuration is incomplete or of a wrong type: {error}") from None


PRESETS: dict[str, GCTConfig] = {
    config.name: config
    for config in (
        # The published model (arXiv 2604.14141).
        GCTConfig("lingbot_map", image_width=518, image_height=None, trained_frames=320, scale_frames=8,
                  sliding_window=64, refine_poses=False, camera_iterations=4),
        # The embedded model, whose weights ship with the package.
        GCTConfig("default", image_width=154, image_height=112, trained_frames=128, scale_frames=8, sliding_window=32,
                  flow_threshold=2.0,
                  embed_dim=192, num_heads=3, depth=6, output_groups=(0, 2, 4, 5), camera_depth=2, camera_heads=3,
                  camera_mlp_ratio=2.0, depth_features=64, depth_channels=(48, 64, 96, 96), compact=True),
        # A model of the published architecture that is small enough for tests; never trained.
        GCTConfig("tiny", image_width=56, image_height=None, trained_frames=64, scale_frames=3, sliding_window=4,
                  refine_poses=False, camera_iterations=4, embed_dim=128, num_heads=2, depth=4, mlp_ratio=2.0,
                  output_groups=(0, 1, 2, 3), patch_embed_depth=1, patch_embed_heads=2, camera_depth=1, camera_heads=2,
                  camera_mlp_ratio=1.0, depth_features=16, depth_channels=(16, 16, 16, 16)),
    )
}
