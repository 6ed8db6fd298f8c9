# SPDX-License-Identifier: Apache-2.0
"""What the entries of /diagnostics mean, for the documentation; a test holds them against what the node sends."""
from __future__ import annotations

# By status, as `NODE: STATUS`, or `NODE: CAMERA/STATUS` of several cameras; the model is all cameras'.
STATUSES: dict[str, dict[str, str]] = {
    "camera": {
        "topic, publishers": "where images come from, and how many publish there",
        "image_width, image_height": "of the camera's images",
        "images_per_second, mapped_per_second": "since the last message: that came, and that went through the model",
        "frames_received, frames_processed, frames_dropped, frames_failed":
            "totals: without duplicates and late ones; that went through the model; that a newer one displaced; that "
            "could not be read or that the model failed on",
        "duplicate_stamps, late_images, skipped_images": "totals: dropped for their stamp; too many for `max_rate`",
        "stamp_gaps, stamps_back": "totals: pauses in the stamps; stamps that started a new sequence",
        "camera_info_topic, intrinsics":
            "where the calibration comes from; `camera_info` or `predicted`: which are used",
        "focal_length_predicted, focal_length_camera_info, focal_length_difference_percent":
            "in pixels of the camera's image, by the model (with `refine_poses` and no calibration: as estimated) and "
            "by the calibration",
    },
    "tracking": {
        "reasons": "why the state, which is the message, is not better",
        "window, frame": "of the sequence, from 0",
        "sequences, poses_published, poses_rejected": "totals; rejected ones were not plausible",
        "times_lost, relocations": "totals: tracking lost; found again in the same map",
        "hand_overs, hand_over_problems": "totals: windows joined; of these, such whose scale could not be measured",
        "hand_over_window, hand_over_frame, hand_over_shared_frames":
            "of the last one: the window that began, its first frame, the frames that both windows saw",
        "hand_over_scale": "of the last one: of the new window's unit to the map's",
        "hand_over_translation_jump, hand_over_rotation_jump":
            "of the last one: by how much the two windows disagree about the shared frames at most, in the model's "
            "unit and in radians",
        "hand_over_seconds, hand_over_seconds_max, hand_over_problem":
            "how long the last one and the longest one took; what was wrong with the last one",
    },
    "cache": {
        "frame_count": "keyframes of this window",
        "scale_pages, live_pages, free_pages, peak_pages":
            "pages of scale frames, of the sliding window, of none; the most that were taken at once",
        "special_tokens, special_frames, special_slots": "remembered tokens, of how many frames, of at most so many",
        "evicted_pages, evicted_specials": "keyframes of this window whose patches, or special tokens, are forgotten",
        "unkept_frames": "frames of this window that are no keyframes",
        "resizes": "changes of the window since the start",
        "bytes, cache_bytes, shared_images_bytes":
            "of the model's cache; with the camera head's; of the images that windows share, at most",
        "cache_dtype": "the number format of what is kept",
        "attention_backend": "the kernel in use",
        "window": "of the sequence, from 0",
        "scale_frames, sliding_window, max_sliding_window, remembered_frames, window_size, overlap_keyframes, "
        "keyframe_interval, flow_threshold, max_keyframe_gap, refine_poses":
            "the parameters in use, the model's own in place of 0 or `auto`",
        "window_problem": "why fewer frames are in the window than were set",
        "map_points, map_points_dropped, map_voxel_size, map_bytes": "of the map; dropped ones had no room",
        "path_length, path_dropped": "poses kept; poses that had no room",
        "metres_per_unit": "the scale, if it is known",
    },
    "model": {
        "state": "of the lifecycle, or `loading`",
        "model, checkpoint, device, dtype, trained_frames":
            "what runs, and where; the keyframes that it was trained on",
        "device_memory_bytes": "that PyTorch holds on the GPU; on a CPU the resident memory of the process",
        "frames_per_second, latency_mean_ms, latency_max_ms":
            "since the last message, of all cameras: images mapped; from an image's arrival to its pose",
    },
}


def keys(status: str) -> set[str]:
    """Return the keys of a status."""
    return {key for group in STATUSES[status] for key in group.split(", ")}


def diagnostics_table() -> str:
    """Return the table of what is on /diagnostics for the documentation."""
    lines = ["| status | values | meaning |", "|---|---|---|"]
    for status, groups in STATUSES.items():
        for group, meaning in groups.items():
            names = ", ".join(f"`{key}`" for key in group.split(", "))
            lines.append(f"| `{status}` | {names} | {meaning} |")
    return "\n".join(lines) + "\n"
