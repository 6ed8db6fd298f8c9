# SPDX-License-Identifier: Apache-2.0
"""The model over whole sequences at once: what it gives frame by frame from a cache, here under attention masks.

The layers are the model's own; only what a frame sees comes from a mask instead of the cache's pages. It is how the
model is trained, and equals the stream (see test/test_training.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lingbot_map_ros.gct import GCT
from lingbot_map_ros.gct.aggregator import Attend


@dataclass
class Predictions:
    """Predictions for b sequences of s frames, and what auxiliary losses look at."""

    pose_encodings: list[Tensor]  # [b, s, 9] after each iteration
    log_depth: Tensor  # [n, h, w] of the chosen frames
    confidence: Tensor  # [n, h, w], 1 or more
    outputs: list[Tensor]  # [b, s, tokens, 2 * dim] of the configuration's output groups
    queries_and_keys: dict[int, tuple[Tensor, Tensor]]  # [b, s, tokens, head_dim] of a block's first head


def visible(query_frame: Tensor, key_frame: Tensor, key_is_special: Tensor, scale_frames: int | Tensor,
            window: int | Tensor) -> Tensor:
    """Tell which keys a query sees, by broadcasting.

    Scale frames see one another. A later frame sees the scale frames, itself and the `window` - 1 frames before it,
    and the special tokens of all frames before it.
    """
    among_scale = (query_frame < scale_frames) & (key_frame < scale_frames)
    recent = (key_frame < scale_frames) | (query_frame - key_frame < window) | key_is_special
    return among_scale | ((query_frame >= scale_frames) & (key_frame <= query_frame) & recent)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask of what is seen into what is added to scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def attend_under(mask: Tensor, batch: int, record: dict[int, tuple[Tensor, Tensor]], blocks: Sequence[int]) -> Attend:
    """Return a function that attends within each of `batch` sequences under an additive mask.

    The first head's queries and keys of `blocks` go into `record`, [batch, frames, tokens, head_dim].
    """
    def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if block in blocks:
            record[block] = tuple(x[:, :, 0].unflatten(0, (batch, -1)) for x in (q, k))
        shape = q.shape
        q, k, v = (x.reshape(batch, -1, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype)).transpose(1, 2).reshape(shape)

    return attend


def predict(
    model: GCT,
    images: Tensor,
    *,
    scale_frames: int | Tensor,
    window: int | Tensor,
    times: Tensor | None = None,
    depth_frames: Tensor | None = None,
    iterations: int = 4,
    blocks: Sequence[int] = (),
) -> Predictions:
    """Predict for images [b, s, 3, h, w] in [0, 1] what the model would give for each sequence frame by frame.

    Args:
        model: it may be in autocast; its camera head runs in float32 all the same.
        images: every frame is kept.
        scale_frames: at the start of each sequence; like the window it may be a tensor, so that a CUDA graph can hold
            this function.
        window: frames in the sliding window.
        times: [s], float64, positions in time of the frames; None: 0 .. s - 1.
        depth_frames: [n], numbers in 0 .. b * s - 1 of the frames to decode depth for; None: all.
        iterations: of the camera head.
        blocks: global blocks whose queries and keys to return.
    """
    b, s = images.shape[:2]
    size = tuple(images.shape[-2:])
    device = images.device
    frame = torch.arange(s, device=device)
    times = frame.double() if times is None else times
    aggregator, config = model.aggregator, model.config

    tables = aggregator.tables(size)
    kinds = (frame > 0).long() + (frame >= scale_frames).long()
    token = torch.arange(tables.special.shape[1] + config.grid_size(size)[0] * config.grid_size(size)[1], device=device)
    is_special = token < config.num_special_tokens
    token_frame = frame.repeat_interleave(len(token))
    mask = visible(token_frame[:, None], token_frame[None], is_special.repeat(s)[None], scale_frames, window)
    score_dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    queries_and_keys: dict[int, tuple[Tensor, Tensor]] = {}
    outputs = aggregator(
        images.flatten(0, 1), tables, attend_under(additive(mask, score_dtype), b, queries_and_keys, blocks),
        special=tables.special[kinds].repeat(b, 1, 1), times=times.repeat(b),
    )

    mask = visible(frame[:, None], frame[None], torch.ones_like(frame, dtype=torch.bool)[None], scale_frames, window)
    with torch.autocast(device.type, enabled=False):
        encodings = model.camera_head(
            outputs[-1][:, 0].float(), model.camera_head.tables(),
            attend_under(additive(mask, torch.float32), b, {}, ()), times=times.repeat(b), iterations=iterations,
        )

    patches = [output[:, config.num_special_tokens:] for output in outputs]
    if depth_frames is not None:
        patches = [level.index_select(0, depth_frames) for level in patches]
    log_depth, confidence = model.depth_head.logits(patches, size, model.depth_head.tables(size)).float().unbind(1)
    return Predictions(
        pose_encodings=[encoding.unflatten(0, (b, s)) for encoding in encodings],
        log_depth=log_depth,
        confidence=1 + confidence.exp(),
        outputs=[output.unflatten(0, (b, s)) for output in outputs],
        queries_and_keys=queries_and_keys,
    )
