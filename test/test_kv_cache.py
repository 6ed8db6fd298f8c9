# SPDX-License-Identifier: Apache-2.0
"""The KV cache against a dense float64 oracle, and its errors."""
import copy
import gc
import weakref

import pytest
import torch
from dense_cache import DenseBlock, dense_attention, poison
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lingbot_map_ros.cache import CACHE_DTYPES, FlashInferKVCacheManager
from lingbot_map_ros.cache.flash import divide

HEADS, HEAD_DIM = 2, 8


def make_cache(**changes):
    arguments = dict(
        num_blocks=2, max_num_frames=8, tokens_per_frame=5, num_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32,
        device="cpu", num_special_tokens=2, scale_frames=2, sliding_window=3, max_total_frames=9,
    )  # fmt: skip
    return FlashInferKVCacheManager(**(arguments | changes))


def random_frame(generator, tokens, frames=1, dtype=torch.float32):
    """Return tokens that are stored in dtype as they are."""
    return torch.randn(frames * tokens, HEADS, HEAD_DIM, generator=generator).to(dtype).float()


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of calls, on two blocks that need not be in step."""

    @initialize(
        seed=st.integers(0, 2**31),
        scale_frames=st.integers(1, 3),
        sliding_window=st.integers(1, 4),
        spare=st.integers(0, 3),
        older=st.integers(0, 3),
        num_special=st.integers(1, 3),
        num_patches=st.integers(0, 5),
        poisoned=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]),
    )
    def create(self, seed, scale_frames, sliding_window, spare, older, num_special, num_patches, poisoned, dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.tokens = num_special + num_patches
        self.pages = scale_frames + sliding_window + spare
        self.cache = make_cache(
            max_num_frames=self.pages, tokens_per_frame=self.tokens, num_special_tokens=num_special,
            scale_frames=scale_frames, sliding_window=sliding_window,
            max_total_frames=scale_frames + sliding_window + older, dtype=dtype,
        )  # fmt: skip
        if poisoned:  # a slot that is attended to without having been written gives NaN
            poison(self.cache)
        self.num_special = num_special
        self.bytes = self.cache.get_cache_stats(0)["bytes"]
        self.blocks = [DenseBlock(num_special), DenseBlock(num_special)]

    blocks_drawn = st.integers(0, 1)

    def full(self, block):
        return sum(frame.whole for frame in self.blocks[block].frames) == self.pages

    @rule(block=blocks_drawn)
    def append(self, block):
        k, v = (random_frame(self.generator, self.tokens, dtype=self.dtype) for _ in range(2))
        if self.full(block):
            with pytest.raises(RuntimeError, match="full"):
                self.cache.append_frame(block_idx=block, k=k, v=v)
        else:
            self.cache.append_frame(block_idx=block, k=k, v=v)
            self.blocks[block].append(k, v)

    @rule(block=blocks_drawn)
    def evict(self, block):
        kv = self.cache
        kv.evict_frames(block_idx=block, scale_frames=kv.scale_frames, sliding_window=kv.sliding_window)
        self.blocks[block].evict(kv.scale_frames, kv.sliding_window, kv.remembered_frames)

    @rule(block=blocks_drawn, scale_frames=st.integers(1, 4), sliding_window=st.integers(1, 5))
    def evict_for_another_window(self, block, scale_frames, sliding_window):
        self.cache.evict_frames(block_idx=block, scale_frames=scale_frames, sliding_window=sliding_window)
        self.blocks[block].evict(scale_frames, sliding_window, self.cache.remembered_frames)

    @rule(block=blocks_drawn)
    def rollback(self, block):
        if self.blocks[block].frames:
            self.cache.rollback_last_frame(block_idx=block)
            self.blocks[block].rollback()
        else:
            with pytest.raises(RuntimeError, match="no frame"):
                self.cache.rollback_last_frame(block_idx=block)

    @rule(block=blocks_drawn, keep=st.booleans())
    def attend_frame(self, block, keep):
        kv, dense = self.cache, self.blocks[block]
        q, k, v = (random_frame(self.generator, self.tokens, dtype=self.dtype) for _ in range(3))
        expected = copy.copy(dense)
        expected.frames = [copy.copy(frame) for frame in dense.frames]
        if keep:
            # Only what is displaced by the new frame may go before it is stored.
            expected.evict(kv.scale_frames, kv.sliding_window - 1, kv.remembered_frames - 1)
        if sum(frame.whole for frame in expected.frames) == self.pages:
            with pytest.raises(RuntimeError, match="full"):
                kv.attend_frame(block_idx=block, q=q, k=k, v=v, keep=keep)
            return
        expected.append(k, v)
        if keep:
            expected.evict(kv.scale_frames, kv.sliding_window, kv.remembered_frames)
        out = kv.attend_frame(block_idx=block, q=q, k=k, v=v, keep=keep)
        torch.testing.assert_close(out.double(), dense_attention(q, *expected.visible()), rtol=1e-5, atol=1e-5)
        if keep:
            self.blocks[block] = expected
        self.blocks[block].undo = None

    @rule(scale_frames=st.integers(1, 4), sliding_window=st.integers(1, 6), remembered_frames=st.integers(2, 9))
    def resize(self, scale_frames, sliding_window, remembered_frames):
        kv, frames = self.cache, scale_frames + sliding_window
        sizes = dict(scale_frames=scale_frames, sliding_window=sliding_window, remembered_frames=remembered_frames)
        if frames <= min(self.pages, remembered_frames) and remembered_frames <= kv.max_total_frames:
            kv.resize(**sizes)
            for dense in self.blocks:
                dense.evict(scale_frames, sliding_window, remembered_frames)
                dense.undo = None
        else:
            before = kv.scale_frames, kv.sliding_window, kv.remembered_frames
            with pytest.raises(ValueError, match="at least"):
                kv.resize(**sizes)
            assert before == (kv.scale_frames, kv.sliding_window, kv.remembered_frames)

    @rule()
    def reset(self):
        self.cache.reset()
        self.blocks = [DenseBlock(self.num_special), DenseBlock(self.num_special)]

    @precondition(lambda self: any(block.frames for block in self.blocks))
    @rule(block=blocks_drawn, frames=st.integers(1, 3))
    def attend(self, block, frames):
        q = random_frame(self.generator, self.tokens, frames)
        if not self.blocks[block].frames:
            with pytest.raises(RuntimeError, match="no frame"):
                self.cache.compute_attention(block_idx=block, q=q)
            return
        out = self.cache.compute_attention(block_idx=block, q=q)
        expected = dense_attention(q, *self.blocks[block].visible())
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    @invariant()
    def no_page_is_lost_or_held_twice(self):
        for block, dense in enumerate(self.blocks):
            table = self.cache._tables[block]
            held = [page for _, page in table.pages]
            assert sorted([*held, *table.free_pages]) == list(range(self.pages))
            slots = [slot for _, slot in table.specials]
            assert sorted([*slots, *table.free_specials]) == list(range(len(slots) + len(table.free_specials)))
            stats = self.cache.get_cache_stats(block_idx=block)
            whole = [frame.number for frame in dense.frames if frame.whole]
            assert stats["frame_count"] == len(dense.frames)
            assert stats["scale_pages"] == sum(number < self.cache.scale_frames for number in whole)
            assert stats["live_pages"] == len(whole) - stats["scale_pages"]
            assert stats["free_pages"] == self.pages - len(whole)
            assert stats["special_tokens"] == self.num_special * sum(frame.remembered for frame in dense.frames)
            assert stats["bytes"] == self.bytes


TestAnySequenceOfCalls = CacheMachine.TestCase
TestAnySequenceOfCalls.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def stream(cache, frames, keep=lambda index: True, seed=0):
    """Run `frames` frames through block 0 and return the visible runs of each step."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for index in range(frames):
        q, k, v = (random_frame(generator, cache.tokens_per_frame) for _ in range(3))
        cache.attend_frame(0, q, k, v, keep=keep(index))
        runs.append(cache._visible(cache._tables[0]).runs)
    return runs


def test_a_sliding_window_stays_one_run_of_tokens():
    cache = make_cache(max_num_frames=6, scale_frames=2, sliding_window=3, max_total_frames=7)
    assert all(len(runs) == 1 for runs in stream(cache, 50))


def test_frames_that_are_not_kept_leave_no_trace():
    sparse, plain = make_cache(), make_cache()
    generator = torch.Generator().manual_seed(3)
    for index in range(30):
        q, k, v = (random_frame(generator, 5) for _ in range(3))
        keep = index < 2 or index % 3 == 0
        out = sparse.attend_frame(0, q, k, v, keep=keep)
        if keep:
            torch.testing.assert_close(out, plain.attend_frame(0, q, k, v), rtol=0, atol=0)
    assert sparse.get_cache_stats(0)["unkept_frames"] == 19
    unaffected = ("frame_count", "scale_pages", "live_pages", "free_pages", "special_tokens", "evicted_pages")
    assert all(sparse.get_cache_stats(0)[key] == plain.get_cache_stats(0)[key] for key in unaffected)


def test_a_hundred_thousand_frames_keep_the_size_and_the_last_answers():
    cache = make_cache(num_blocks=1, tokens_per_frame=2, num_special_tokens=1, max_num_frames=5)
    before = cache.get_cache_stats(0)["bytes"]
    k = torch.randn(2, HEADS, HEAD_DIM)
    for _ in range(100_000 - 10):
        cache.append_frame(block_idx=0, k=k, v=k)
        cache.evict_frames(block_idx=0, scale_frames=2, sliding_window=3 - 1)
    stream(cache, 10)
    stats = cache.get_cache_stats(0)
    assert stats["frame_count"] == 100_000
    assert (stats["bytes"], stats["scale_pages"], stats["live_pages"], stats["special_tokens"]) == (before, 2, 3, 9)


def test_a_cache_that_is_dropped_frees_its_memory_at_once():
    cache = make_cache()
    stream(cache, 5)
    memory = weakref.ref(cache._store._kv)
    gc.disable()
    try:
        del cache
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("scale_frames", [1, 2, 8, 9, 16])
def test_blocks_in_step_share_what_is_computed_for_a_frame(scale_frames):
    cache = make_cache(num_blocks=4, scale_frames=scale_frames, max_num_frames=20, max_total_frames=24)
    frame = torch.zeros(5, HEADS, HEAD_DIM)
    for block in range(4):  # a scale phase: a block's frames all at once
        for _ in range(scale_frames):
            cache.append_frame(block, frame, frame)
        cache.compute_attention(block, frame)
    assert len(set(map(id, cache._tables))) == 1
    for index in range(30):
        for block in range(4):
            if index % 3 == 0:
                cache.append_frame(block, frame, frame)
                cache.rollback_last_frame(block)
            cache.attend_frame(block, frame, frame, frame, keep=index % 2 == 0)
            if index % 7 == 0:
                cache.rollback_last_frame(block)
        assert len(set(map(id, cache._tables))) == 1


def test_frames_with_gradients_are_stored_without():
    cache = make_cache()
    frame = torch.ones(5, HEADS, HEAD_DIM, requires_grad=True)
    cache.append_frame(0, frame, frame)
    cache.append_frame(0, frame, frame)
    assert not cache._store._kv.requires_grad


def test_stats_count_what_happened():
    cache = make_cache()
    stream(cache, 20, keep=lambda index: index < 2 or index % 2 == 0)
    cache.resize(sliding_window=2)
    stats = cache.get_cache_stats(0)
    assert stats == {
        "frame_count": 11, "scale_pages": 2, "live_pages": 2, "free_pages": 4, "peak_pages": 6, "special_tokens": 18,
        "special_frames": 9, "special_slots": 9, "evicted_pages": 7, "evicted_specials": 2, "unkept_frames": 9,
        "resizes": 1, "bytes": cache._store._kv.nbytes,
    }  # fmt: skip
    assert cache.get_cache_stats(1)["frame_count"] == 0


def test_the_bytes_of_a_cache_are_known_before_it_is_made():
    sizes = dict(num_blocks=2, max_num_frames=8, tokens_per_frame=5, num_heads=HEADS, head_dim=HEAD_DIM,
                 num_special_tokens=2, max_total_frames=9)  # fmt: skip
    for dtype in CACHE_DTYPES:
        expected = FlashInferKVCacheManager.required_bytes(dtype=dtype, **sizes)
        assert make_cache(dtype=dtype).get_cache_stats(0)["bytes"] == expected


def test_a_window_made_smaller_keeps_its_newest_frames_and_becomes_one_run_again():
    cache = make_cache(max_num_frames=9, scale_frames=1, sliding_window=7, max_total_frames=12)
    stream(cache, 21)
    pages = cache._tables[0].pages
    cache.resize(sliding_window=2)
    assert cache._tables[0].pages == (pages[0], *pages[-2:])  # the same pages, nothing moved
    assert len(stream(cache, 6)[-1]) == 1


def test_a_resize_beyond_what_is_reserved_names_the_size_to_raise():
    cache = make_cache()
    with pytest.raises(ValueError, match="max_num_frames must be at least 9 for .* sliding_window 7, not 8"):
        cache.resize(sliding_window=7)
    with pytest.raises(ValueError, match="max_total_frames must be at least 10, not 9"):
        cache.resize(remembered_frames=10)


def test_the_page_table_can_be_read_as_text():
    cache = make_cache()
    stream(cache, 7)
    text = cache.describe_pages(0)
    assert "block 0: 7 frames kept, window 2 + 3, 7 of 9 frames remembered, visible tokens [18, 47)" in text
    assert "page 0: frame 0 scale" in text
    assert "page 2: frame 5" in text
    assert "page 7: free" in text
    assert text.endswith("special slots (slot:frame): 0:0 1:1 2:2 3:3 4:4 5:5 6:6")
    assert "visible tokens none" in make_cache().describe_pages(1)


def test_caches_share_nothing():
    first, second = make_cache(), make_cache()
    stream(first, 12, seed=1)
    stream(second, 3, seed=2)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (random_frame(generator, 5) for _ in range(3))
    alone = make_cache()
    stream(alone, 3, seed=2)
    torch.testing.assert_close(second.attend_frame(0, q, k, v), alone.attend_frame(0, q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_attention_is_computed_in_fp32(dtype):
    cache = make_cache(dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    frames = [random_frame(generator, 5).to(dtype) for _ in range(3)]
    q = random_frame(generator, 5)
    for frame in frames:
        cache.append_frame(block_idx=0, k=frame, v=frame)
    out = cache.compute_attention(block_idx=0, q=q)
    assert out.dtype == q.dtype
    stored = torch.cat(frames).float()
    torch.testing.assert_close(out.double(), dense_attention(q, stored, stored), rtol=1e-5, atol=1e-5)


def test_fp8_takes_half_the_memory_and_what_is_beyond_its_range_is_its_greatest_value():
    sizes = dict(num_blocks=24, tokens_per_frame=600)
    in_fp8, in_half = (make_cache(dtype=dtype, **sizes) for dtype in (torch.float8_e4m3fn, torch.float16))
    # One block beside them, for what is decoded.
    assert in_fp8.get_cache_stats()["bytes"] == in_half.get_cache_stats()["bytes"] * 13 // 24
    k = torch.zeros(600, HEADS, HEAD_DIM)
    v = torch.full_like(k, 1e6)
    v[:, 1] = float("-inf")
    out = in_fp8.attend_frame(0, k, k, v)
    assert (out[:, 0] == 448).all() and (out[:, 1] == -448).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_num_frames=4), "max_num_frames must be at least 5 for scale_frames 2 and sliding_window 3, not 4"),
        (dict(max_total_frames=4), "remembered frames must be at least 5 for .* sliding_window 3, not 4"),
        (dict(tokens_per_frame=1), "tokens_per_frame must be an integer of at least 2, not 1"),
        (dict(num_blocks=0), "num_blocks must be an integer of at least 1, not 0"),
        (dict(sliding_window=0), "sliding_window must be an integer of at least 1, not 0"),
        (dict(scale_frames=0), "scale_frames must be an integer of at least 1, not 0"),
        (dict(sliding_window=2.5), "sliding_window must be an integer of at least 1, not 2.5"),
        (dict(dtype=torch.int8), "dtype must be one of .*, not torch.int8"),
        (dict(backend="fast"), "backend must be one of .*'fast'"),
        (dict(backend="flashinfer-fa2"), "flashinfer-fa2 needs a CUDA device"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**changes)


def test_wrong_shapes_are_refused_and_leave_the_cache_as_it_was():
    cache = make_cache()
    frame = torch.zeros(5, HEADS, HEAD_DIM)
    cache.append_frame(0, frame, frame)
    stats = cache.get_cache_stats(0)
    with pytest.raises(ValueError, match=r"k must have the shape \(5, 2, 8\), not \(4, 2, 8\)"):
        cache.append_frame(0, frame[:4], frame)
    with pytest.raises(ValueError, match=r"v must have the shape"):
        cache.attend_frame(0, frame, frame, frame[..., :4])
    for attend in (cache.compute_attention, lambda block, q: cache.attend_frame(block, q, frame, frame)):
        with pytest.raises(ValueError, match=r"q must have the shape \(n, 2, 8\), not \(5, 2, 4\)"):
            attend(0, frame[..., :4])
    with pytest.raises(ValueError, match="sliding_window must be an integer of at least 1"):
        cache.evict_frames(0, scale_frames=2, sliding_window=0)
    assert cache.get_cache_stats(0) == stats


def test_frames_are_placed_on_a_gpu_alone():
    cache = make_cache()
    assert not cache.can_place and "cpu is no GPU" in cache.why_not_placed
    with pytest.raises(RuntimeError, match="frames cannot be placed: "):
        cache.place_frame(keep=True)
    assert cache.get_cache_stats()["frame_count"] == 0
    assert make_cache(backend="sdpa").why_not_placed == "the attention backend is sdpa"


@settings(deadline=None)
@given(tiles=st.integers(1, 3000), at_once=st.integers(1, 300), most=st.integers(0, 100))
def test_what_a_gpu_does_not_take_at_once_is_cut(tiles, at_once, most):
    whole, parts = divide(tiles, at_once, most)
    assert 0 <= whole <= tiles and 1 <= parts <= max(1, most) and (parts > 1 or whole == tiles)
    assert parts == 1 or (whole % at_once == 0 and tiles - whole < at_once)

    def rounds(whole, parts):  # as long as one tile takes for all its keys
        return whole / at_once + -(-(tiles - whole) * parts // at_once) / parts

    assert rounds(whole, parts) <= -(-tiles // at_once)  # never longer than uncut


def test_a_frame_hardly_larger_than_a_gpu_takes_at_once_is_hardly_slower():
    assert divide(16 * 16, 264, 70) == (256, 1)
    assert divide(17 * 16, 264, 70) == (264, 32)
    assert divide(1, 264, 70) == (0, 32) and divide(1, 264, 0) == (1, 1)
