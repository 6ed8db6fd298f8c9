# SPDX-License-Identifier: Apache-2.0
"""What a sequence's memory is sized by: windows, budgets, and changes while running."""
from dataclasses import replace

import pytest
import torch

from lingbot_map_ros.gct import PRESETS, InsufficientMemoryError, build_model, resolve_sizes
from lingbot_map_ros.gct import state as state_module
from lingbot_map_ros.mapping import MappingSession, SessionConfig

MIB = 2**20
TINY, PUBLISHED = PRESETS["tiny"], PRESETS["lingbot_map"]
SIZE = (42, 56)


@pytest.fixture(scope="module")
def model():
    return build_model("tiny")


def images(count, seed=0):
    return torch.rand(count, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def test_the_model_states_its_own_window():
    sizes = resolve_sizes(PUBLISHED, torch.bfloat16, (378, 518))
    assert (sizes.scale_frames, sizes.sliding_window, sizes.remembered_frames) == (8, 64, 320)
    assert sizes.max_sliding_window == 64


def test_bytes_are_known_before_anything_is_allocated(model):
    for options in ({}, {"sliding_window": 9, "remembered_frames": 30}, {"max_sliding_window": 20, "spare_frames": 3}):
        sizes = resolve_sizes(TINY, torch.float32, SIZE, **options)
        assert model.new_state(SIZE, **options).memory_bytes == sizes.cache_bytes(TINY)


def test_the_peak_is_weights_caches_and_work(model):
    sizes = resolve_sizes(TINY, torch.float32, SIZE)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    work = model.peak_bytes(sizes) - weights - sizes.cache_bytes(TINY)
    assert work == sizes.working_bytes(TINY, torch.device("cpu")) > 0
    assert sizes.working_bytes(TINY, torch.device("cuda")) > work
    published = PRESETS["lingbot_map"]
    sizes = resolve_sizes(published, torch.bfloat16, (378, 518))
    assert sizes.working_bytes(published, torch.device("cuda")) < 1.5e9


def test_the_models_own_camera_iterations():
    for name, own in (("lingbot_map", 4), ("default", 1), ("tiny", 4)):
        config = PRESETS[name]
        assert resolve_sizes(config, torch.float32, config.smallest_image).camera_iterations == own
        assert resolve_sizes(config, torch.float32, config.smallest_image, camera_iterations=3).camera_iterations == 3
    assert MappingSession(build_model("default")).config.camera_iterations == 1


def test_a_frame_of_the_published_model_costs_what_its_shape_says():
    sizes = resolve_sizes(PUBLISHED, torch.bfloat16, (378, 518))
    one_more = replace(sizes, max_sliding_window=65)
    # 999 patches, 24 blocks, K and V, 16 heads of 64, 2 bytes; beside it the spare slot of its special tokens
    patches, specials, camera = 999 * 24 * 2 * 1024 * 2, 6 * 24 * 2 * 1024 * 2, 16 * 2 * 2048 * 4
    assert one_more.cache_bytes(PUBLISHED) - sizes.cache_bytes(PUBLISHED) == (
        patches + specials + camera)


@pytest.mark.parametrize("mebibytes, cache_dtype, window", [
    (4000, None, 30), (6000, None, 51), (7000, None, 62), (12000, None, 115), (4096, torch.float8_e4m3fn, 67)])
def test_a_budget_gives_the_largest_window_that_fits(mebibytes, cache_dtype, window):
    sizes = resolve_sizes(PUBLISHED, torch.bfloat16, (378, 518), cache_bytes=mebibytes * MIB, cache_dtype=cache_dtype)
    assert sizes.sliding_window == window
    assert sizes.sliding_window == sizes.max_sliding_window
    assert sizes.cache_bytes(PUBLISHED) <= mebibytes * MIB
    one_more = replace(sizes, max_sliding_window=sizes.max_sliding_window + 1)
    assert one_more.cache_bytes(PUBLISHED) > mebibytes * MIB


def test_a_budget_never_goes_beyond_the_trained_range():
    sizes = resolve_sizes(TINY, torch.float32, SIZE, cache_bytes=10**12)
    assert sizes.scale_frames + sizes.sliding_window == TINY.trained_frames == sizes.remembered_frames


def test_a_window_given_beside_a_budget_stays():
    sizes = resolve_sizes(TINY, torch.float32, SIZE, cache_bytes=10**12, sliding_window=5)
    assert (sizes.sliding_window, sizes.max_sliding_window) == (5, 61)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": MIB}, r"cache of 1 MiB is too small: a sliding_window of 1 .* needs \d+ MiB"),
        ({"cache_bytes": MIB, "sliding_window": 64}, r"a sliding_window of 64 with 8 scale_frames .* needs \d+ MiB"),
        ({"cache_bytes": 10**12, "sliding_window": 400, "remembered_frames": 500}, "must not exceed the 320 frames"),
        ({"cache_bytes": 10**10, "max_sliding_window": 70}, "exclude each other"),
        ({"cache_dtype": torch.int8}, "cache_dtype must be one of .*float8_e4m3fn, not torch.int8"),
        ({"sliding_window": 10, "max_sliding_window": 9}, "max_sliding_window must be at least 10, not 9"),
        ({"remembered_frames": 71}, "remembered_frames must be at least 72"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        resolve_sizes(PUBLISHED, torch.bfloat16, (378, 518), **options)


def test_too_little_memory_is_an_error_that_names_what_would_fit(model, monkeypatch):
    def free_for(window):
        sizes = resolve_sizes(TINY, torch.float32, SIZE, sliding_window=window)
        return sizes.cache_bytes(TINY) + sizes.working_bytes(TINY, torch.device("cpu"))

    free = free_for(17)
    monkeypatch.setattr(state_module, "free_bytes", lambda device: free)
    model.new_state(SIZE, sliding_window=17)
    with pytest.raises(InsufficientMemoryError, match=r"of 56x42 .* free on cpu: a sliding_window of 17 fits"):
        model.new_state(SIZE, sliding_window=40)
    free = 0
    with pytest.raises(InsufficientMemoryError, match="no sliding_window fits, use smaller images"):
        model.new_state(SIZE)


def test_images_that_windows_share_must_fit_beside_the_caches(model, monkeypatch):
    """The session holds them; they are in no budget for the caches."""
    sizes = resolve_sizes(TINY, torch.float32, SIZE, sliding_window=17)
    free = sizes.cache_bytes(TINY) + sizes.working_bytes(TINY, torch.device("cpu"))
    monkeypatch.setattr(state_module, "free_bytes", lambda device: free)
    image = images(1)[0]
    config = SessionConfig(sliding_window=17, window_size=60, overlap_keyframes=20)
    one_window = MappingSession(model, replace(config, window_size=0))
    one_window.step(image)
    assert one_window.held_bytes == 0
    session = MappingSession(model, config)
    with pytest.raises(InsufficientMemoryError, match="beside 1 MiB for 20 held frames: .* or hold fewer frames"):
        session.step(image)
    free += 20 * 8 * 42 * 56 * 4
    session = MappingSession(model, config)
    session.step(image)
    assert session.held_bytes == 20 * 8 * 42 * 56 * 4
    assert session.memory_bytes == one_window.memory_bytes


def test_held_bytes_are_not_below_what_is_held(model):
    """Of both windows' predictions, when one gives way to the next, and the frames themselves."""
    session = MappingSession(model, SessionConfig(window_size=12, overlap_keyframes=8))
    for image in images(30):
        session.step(image)
    tensors = [tensor for _, image, prediction in session._shared for tensor in (image, *vars(prediction).values())
               if isinstance(tensor, torch.Tensor)]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    again = 8 * 3 * 42 * 56 * 4  # depth, confidence and their ratio, in the next window
    assert 0.9 * session.held_bytes < held + again <= 1.02 * session.held_bytes


def test_more_shared_images_than_memory_holds_are_refused(model, monkeypatch):
    from lingbot_map_ros.mapping import session as session_module

    session = MappingSession(model, SessionConfig(window_size=60, overlap_keyframes=4))
    session.step(images(1)[0])
    monkeypatch.setattr(session_module, "free_bytes", lambda device: 10 * 8 * 42 * 56 * 4)
    with pytest.raises(ValueError, match="overlap_keyframes 15: the 15 images .* 0 MiB are free on cpu"):
        session.resize(overlap_keyframes=15)
    assert session.config.overlap_keyframes == 4
    session.resize(overlap_keyframes=14)
    session.resize(window_size=0)
    assert session.held_bytes == 0


def test_free_memory_is_read():
    assert state_module.free_bytes(torch.device("cpu")) > 100 * MIB


def test_a_window_made_smaller_then_larger_forgets_only_what_did_not_fit(model):
    """From a resize on, a sequence goes on as one with that window; its past stays what it was."""
    frames = images(40)
    resized = MappingSession(model, SessionConfig(sliding_window=6, max_sliding_window=12, remembered_frames=30))
    for frame in frames[:15]:
        resized.step(frame)
    bytes_before, pages = resized.memory_bytes, resized._state.cache._tables[0].pages
    resized.resize(sliding_window=2)
    assert resized._state.cache._tables[0].pages == (*pages[:3], *pages[-2:])  # the newest, where they were
    assert resized.cache_stats()["live_pages"] == 2
    for frame in frames[15:20]:
        resized.step(frame)
    assert resized.cache_stats()["live_pages"] == 2
    resized.resize(sliding_window=12)
    live = []
    for frame in frames[20:]:
        result = resized.step(frame)[0]
        live.append(resized.cache_stats()["live_pages"])
        assert torch.isfinite(result.pose_encoding).all()
    assert live == [3, 4, 5, 6, 7, 8, 9, 10, 11, *[12] * 11]
    assert resized.memory_bytes == bytes_before
    assert resized.cache_stats()["resizes"] == 2


def test_after_a_smaller_window_results_are_those_of_the_tokens_left(model):
    """The same frames are visible, so the outputs are the same, wherever the pages lie."""
    frames = images(20, seed=3)
    resized = MappingSession(model, SessionConfig(sliding_window=5))
    plain = MappingSession(model, SessionConfig(sliding_window=2))
    first = [session.step(frame) for session in (resized, plain) for frame in frames[:3]]
    assert torch.equal(first[2][0].pose_encoding, first[5][0].pose_encoding)
    resized.resize(sliding_window=2)
    for frame in frames[3:]:
        a, b = resized.step(frame)[0], plain.step(frame)[0]
        assert (a.pose_encoding - b.pose_encoding).abs().max() < 1e-5


def test_scale_frames_shrink_at_once_and_grow_at_the_next_reset(model):
    session = MappingSession(model, SessionConfig(sliding_window=5))
    for frame in images(6):
        session.step(frame)
    session.resize(scale_frames=1)
    assert session.cache_stats()["scale_pages"] == 1
    session.resize(scale_frames=4, sliding_window=4)
    for frame in images(6):
        session.step(frame)
    assert session.cache_stats()["scale_pages"] == 1
    session.reset()
    results = [session.step(frame) for frame in images(5)]
    assert [len(result) for result in results] == [0, 0, 0, 4, 1]
    assert session.cache_stats()["scale_pages"] == 4


def test_fewer_scale_frames_while_they_gather(model):
    session = MappingSession(model)
    assert not session.step(images(1)[0]) and not session.step(images(1)[0])
    session.resize(scale_frames=1)
    results = session.step(images(1)[0])
    assert [result.index for result in results] == [0, 1, 2]
    assert all(result.is_keyframe for result in results)


def test_changes_beyond_what_is_reserved_are_refused_and_change_nothing(model):
    session = MappingSession(model, SessionConfig(sliding_window=4, max_sliding_window=6, remembered_frames=20))
    for frame in images(8):
        session.step(frame)
    before, stats = session.config, session.cache_stats()
    with pytest.raises(ValueError, match="9 frames that memory was reserved for: raise max_sliding_window"):
        session.resize(sliding_window=7)
    with pytest.raises(ValueError, match="remembered_frames 21 is beyond the 20"):
        session.resize(remembered_frames=21)
    with pytest.raises(ValueError, match="keyframe_interval must be"):
        session.resize(keyframe_interval=-1)
    assert session.config == before and session.cache_stats() == stats


def test_what_was_reserved_stays_reserved_for_images_of_another_size(model):
    session = MappingSession(model, SessionConfig(sliding_window=10))
    session.step(images(1)[0])
    session.resize(sliding_window=2)
    session.reset()
    session.step(torch.rand(3, 28, 56))
    assert session.config.sliding_window == 2
    session.resize(sliding_window=10)
    assert session.config.sliding_window == 10


def test_the_keyframe_interval_changes_with_the_next_frame(model):
    session = MappingSession(model)
    for frame in images(4):
        session.step(frame)
    session.resize(keyframe_interval=3)
    kept = [session.step(frame)[0].is_keyframe for frame in images(6)]  # frames 4 to 9; 3 scale frames
    assert kept == [False, False, True, False, False, True]


def test_the_window_that_a_budget_gives_is_logged(model, caplog):
    caplog.set_level("INFO", "lingbot_map_ros")
    state = model.new_state(SIZE, cache_bytes=8 * MIB)
    window = state.cache.sliding_window
    assert f"a sliding window of {window} (reserved: {window}) at 56x42" in caplog.text


def test_a_budget_makes_the_window_known_with_the_first_image(model):
    session = MappingSession(model, SessionConfig(cache_memory_mib=8))
    assert session.config.sliding_window is None
    session.step(images(1)[0])
    expected = resolve_sizes(TINY, torch.float32, SIZE, cache_bytes=8 * MIB).sliding_window
    assert session.config.sliding_window == session.config.max_sliding_window == expected
    assert session.memory_bytes <= 8 * MIB
    # Larger images, the same budget: a smaller window.
    session.reset()
    session.step(torch.rand(3, 56, 56))
    assert session.config.sliding_window < expected
    assert session.memory_bytes <= 8 * MIB


def test_a_resize_can_be_checked_before(model):
    session = MappingSession(model, SessionConfig(sliding_window=4, max_sliding_window=6, remembered_frames=20))
    for frame in images(8):
        session.step(frame)
    before, stats = session.config, session.cache_stats()
    session.check_resize(sliding_window=6, window_size=30, keyframe_interval=2)
    for change, reason in (
        ({"sliding_window": 7}, "max_sliding_window"),
        ({"remembered_frames": 21}, "at start"),
        ({"remembered_frames": 5}, "remembered_frames must be at least 7"),
        ({"window_size": 3}, "window_size must be"),
        ({"keyframe_interval": 0}, "keyframe_interval must be"),
    ):
        for act in (session.check_resize, session.resize):
            with pytest.raises(ValueError, match=reason):
                act(**change)
    assert session.config == before and session.cache_stats() == stats
    session.resize(keyframe_interval=2)  # touches no memory
    assert session.config.keyframe_interval == 2 and session.cache_stats() == stats
    assert session.attention_backend == "sdpa"
