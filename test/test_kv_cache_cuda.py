# SPDX-License-Identifier: Apache-2.0
"""Every attention backend of the KV cache on a GPU, against the dense float64 oracle."""
import gc
import random
import sys

import pytest
import torch
from dense_cache import DenseBlock, dense_attention, poison

from lingbot_map_ros.cache import FlashInferKVCacheManager, notice, token_store
from lingbot_map_ros.cache.attention import VisibleTokens
from lingbot_map_ros.cache.flash import FlashBackend, check_flash
from lingbot_map_ros.cache.fp8 import FP8, decode_on_device

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

HEADS, HEAD_DIM = 2, 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the result's norm
HALF_BACKENDS = ["sdpa", "triton", "flashinfer-fa2", "flashinfer-fa3", "auto"]
CASES = [
    *((backend, dtype) for backend in HALF_BACKENDS for dtype in (torch.bfloat16, torch.float16, FP8)),
    ("auto", torch.float32),
]


def make_cache(backend, dtype, **changes):
    if backend.startswith("flashinfer"):
        pytest.importorskip("flashinfer")
    if backend == "triton" and (reason := check_flash(torch.device("cuda"), dtype, 1, HEAD_DIM)):
        pytest.skip(reason)
    if backend == "flashinfer-fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashInfer's fa3 kernels are for compute capability 9.0")
    arguments = dict(
        num_blocks=1, max_num_frames=9, tokens_per_frame=37, num_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype,
        device="cuda", num_special_tokens=6, scale_frames=2, sliding_window=5, max_total_frames=11, backend=backend,
    )  # fmt: skip
    cache = FlashInferKVCacheManager(**(arguments | changes))
    poison(cache)  # a slot that is attended to without having been written shows
    return cache


def random_frame(cache, generator, frames=1):
    shape = (frames * cache.tokens_per_frame, HEADS, HEAD_DIM)
    stored = torch.randn(shape, generator=generator, device="cuda").to(cache._store.blocks[0][0].dtype)
    return stored.to(cache._read_dtype)


def assert_right(out, q, k, v):
    expected = dense_attention(q, k, v)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype], f"relative error {error}"  # false for NaN as well


@pytest.mark.parametrize(("backend", "dtype"), CASES)
@pytest.mark.parametrize("num_patches", [0, 1, 31, 96])
def test_kept_and_other_frames_while_the_ring_wraps_at_every_offset(backend, dtype, num_patches):
    cache = make_cache(backend, dtype, tokens_per_frame=6 + num_patches)
    dense = DenseBlock(6)
    generator = torch.Generator("cuda").manual_seed(num_patches)
    for index in range(40):  # the ring of 9 frames beside the scale frames wraps three times
        q, k, v = (random_frame(cache, generator) for _ in range(3))
        if index % 4 == 3:
            visible_k, visible_v = dense.visible()
            out = cache.attend_frame(0, q, k, v, keep=False)
            assert_right(out, q, torch.cat([visible_k, k]), torch.cat([visible_v, v]))
            continue
        dense.append(k, v)
        dense.evict(cache.scale_frames, cache.sliding_window, cache.remembered_frames)
        assert_right(cache.attend_frame(0, q, k, v), q, *dense.visible())


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_any_sequence_of_calls(backend, dtype):
    cache = make_cache(backend, dtype)
    dense = DenseBlock(6)
    generator = torch.Generator("cuda").manual_seed(0)
    choice = random.Random(0)
    for _ in range(300):
        whole = sum(frame.whole for frame in dense.frames)
        call = choice.choice(["append", "append", "evict", "rollback", "attend", "attend", "resize", "unkept"])
        if call == "append" and whole < cache.max_num_frames:
            k, v = random_frame(cache, generator), random_frame(cache, generator)
            cache.append_frame(0, k, v)
            dense.append(k, v)
        elif call == "evict":
            cache.evict_frames(0, cache.scale_frames, cache.sliding_window)
            dense.evict(cache.scale_frames, cache.sliding_window, cache.remembered_frames)
        elif call == "rollback" and dense.frames:
            cache.rollback_last_frame(0)
            dense.rollback()
        elif call == "attend" and dense.frames:
            q = random_frame(cache, generator, frames=choice.randint(1, 3))
            assert_right(cache.compute_attention(0, q), q, *dense.visible())
        elif call == "resize":
            cache.resize(sliding_window=choice.randint(1, 6), remembered_frames=choice.randint(8, 11))
            dense.evict(cache.scale_frames, cache.sliding_window, cache.remembered_frames)
            dense.undo = None
        elif call == "unkept" and dense.frames and whole < cache.max_num_frames:
            q, k, v = (random_frame(cache, generator) for _ in range(3))
            visible_k, visible_v = dense.visible()
            out = cache.attend_frame(0, q, k, v, keep=False)
            assert_right(out, q, torch.cat([visible_k, k]), torch.cat([visible_v, v]))
            dense.undo = None


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("runs", [[(0, 1001)], [(3, 5), (990, 1000)]])
def test_every_number_of_8_bits_is_decoded_as_torch_does(runs, first):
    """first: 1 leaves out the keys."""
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8)
    stored = numbers.repeat(2 * 1001 // 2 + 1)[: 2 * 1001 * 128].reshape(2, 1001, 2, 64)  # no whole tiles
    decoded = torch.full((2 * 1001 * 128 + 9,), 7, dtype=torch.float16, device="cuda")
    found = decoded[:-9].view(stored.shape)
    decode_on_device(stored[first:], found[first:], VisibleTokens(runs, torch.device("cuda")).counted_runs)
    visible = slice(first, 2), slice(runs[0][0], runs[-1][1])
    torch.testing.assert_close(found[visible].float(), stored[visible].float(), rtol=0, atol=0, equal_nan=True)
    assert (decoded[-9:] == 7).all() and (found[:first] == 7).all()


def test_queries_that_are_rounded_to_fp8_add_little_to_the_error_of_rounded_keys():
    cache = make_cache("auto", FP8)
    if cache._store.decodes_keys:
        pytest.skip("this GPU does not multiply by fp8")
    q, k, v = torch.randn(3, 37, HEADS, HEAD_DIM, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = dense_attention(q, k, v)
    errors = []
    for cache._store.decodes_keys in (True, False):
        out = cache.attend_frame(0, *(x.bfloat16() for x in (q, k, v)))
        errors.append(float((out.double() - expected).norm() / expected.norm()))
        cache.reset()
    assert 0.02 < errors[0] < errors[1] < 1.4 * errors[0] < 0.07, errors
    q[0], q[1] = 1e6, -1e6  # beyond the range
    assert cache.attend_frame(0, q.bfloat16(), k.bfloat16(), v.bfloat16()).isfinite().all()


def test_keys_are_decoded_where_they_cannot_be_multiplied(monkeypatch, caplog):
    attend = FlashBackend.attend

    def fails_in_fp8(self, q, k, v, visible):
        if k.dtype == FP8:
            raise RuntimeError("no such product\nand more")
        return attend(self, q, k, v, visible)

    notice.warn_once.cache_clear()
    monkeypatch.setattr(FlashBackend, "attend", fails_in_fp8)
    cache = make_cache("auto", FP8)
    assert cache._store.decodes_keys
    assert ("no such product" in caplog.text) == (torch.cuda.get_device_capability()[0] >= 9)
    q, k, v = (random_frame(cache, torch.Generator("cuda")) for _ in range(3))
    assert_right(cache.attend_frame(0, q, k, v), q, k, v)


def test_fp8_stores_its_greatest_value_for_what_is_beyond_and_does_without_its_kernel(monkeypatch, caplog):
    def fails(*arguments):
        raise RuntimeError("no compiler\nand more")

    for is_broken in (False, True):
        if is_broken:
            notice.warn_once.cache_clear()
            monkeypatch.setattr(token_store, "decode_on_device", fails)
        cache = make_cache("auto", FP8)
        k, v = torch.zeros(2, 37, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        v[:, 0], v[:, 1] = 1e6, float("-inf")
        out = cache.attend_frame(0, k, k, v)
        assert (out[:, 0] == 448).all() and (out[:, 1] == -448).all()
        assert is_broken == ("no compiler" in caplog.text) and "and more" not in caplog.text


def test_tokens_of_a_joint_projection_are_stored():
    cache = make_cache("sdpa", torch.bfloat16)
    q, k, v = torch.randn(37, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind(1)
    assert_right(cache.attend_frame(0, q, k, v), q, k, v)
    cache.reset()
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))  # heads apart
    assert_right(cache.attend_frame(0, q, k, v), q, k, v)


def test_without_flashinfer_there_is_one_warning(monkeypatch, caplog):
    from lingbot_map_ros.cache import backends

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(backends, "_choices", {})
    monkeypatch.setattr(backends, "check_flash", lambda *arguments: "it is not to be used here")
    notice.warn_once.cache_clear()
    cache = make_cache("auto", torch.bfloat16)
    make_cache("auto", torch.bfloat16, num_blocks=2)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "flashinfer" in warnings[0].getMessage().lower()
    q = random_frame(cache, torch.Generator("cuda"))
    assert_right(cache.attend_frame(0, q, q, q), q, q, q)


@pytest.mark.parametrize("backend", HALF_BACKENDS)
def test_the_host_may_run_ahead_of_the_device(backend):
    """Frame after frame without waiting, while the visible tokens grow: each attends as was planned for it."""
    cache = make_cache(backend, torch.bfloat16)
    dense = DenseBlock(6)
    generator = torch.Generator("cuda").manual_seed(3)
    frames = [[random_frame(cache, generator) for _ in range(3)] for _ in range(12)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s for the device, in which the host plans
    outs = [cache.attend_frame(0, *frame) for frame in frames]
    for (q, k, v), out in zip(frames, outs):
        dense.append(k, v)
        dense.evict(cache.scale_frames, cache.sliding_window, cache.remembered_frames)
        assert_right(out, q, *dense.visible())


def test_without_a_compiler_a_frame_is_stored_all_the_same(monkeypatch, caplog):
    from lingbot_map_ros.cache import append

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(append, "_append_kernel", Broken())
    monkeypatch.setattr(append, "_kernel_works", True)
    cache = make_cache("sdpa", torch.bfloat16)
    assert "no C compiler" in caplog.text
    q, k, v = (random_frame(cache, torch.Generator("cuda")) for _ in range(3))
    assert_right(cache.attend_frame(0, q, k, v), q, k, v)


def test_memory_stays_flat():
    cache = make_cache("auto", torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    allocated = []
    gc.collect()
    for _ in range(200):
        q = random_frame(cache, generator)
        cache.attend_frame(0, q, q, q)
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[100:]) <= max(allocated[50:100])


def test_a_cache_that_is_dropped_frees_its_memory_at_once():
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        cache = make_cache("auto", torch.float32, num_blocks=20)
        size = cache.get_cache_stats()["bytes"]
        assert torch.cuda.memory_allocated() >= before + size
        del cache
        assert torch.cuda.memory_allocated() < before + size
    finally:
        gc.enable()


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize(("num_queries", "at_once"),
                         [(1, 264), (63, 264), (200, 264), (1005, 264), (1005, 5), (130, 4)])
@pytest.mark.parametrize("runs", [
    [(0, 1)], [(5, 132)], [(128, 256)], [(3, 3000)], [(7, 20_001)],
    [(0, 6), (100, 101), (500, 4000), (4090, 4222)], [(i * 40, i * 40 + 37) for i in range(300)],
])  # fmt: skip
def test_our_kernel_over_any_runs_of_tokens(runs, num_queries, at_once, is_copied):
    """Few queries over many keys, and those that are left over once the others fill the GPU: the keys are cut into
    parts. is_copied: by the GPU itself, as none before Hopper can."""
    if reason := check_flash(torch.device("cuda"), torch.bfloat16, 1, HEAD_DIM):
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn((num_queries, HEADS, HEAD_DIM), generator=generator, device="cuda").bfloat16()
    k, v = torch.full((2, 20_010, HEADS, HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
    visible = VisibleTokens(runs, torch.device("cuda"))
    indices = visible.indices.long()
    for tokens in (k, v):
        tokens[indices] = torch.randn((len(indices), HEADS, HEAD_DIM), generator=generator, device="cuda").bfloat16()
    backend = FlashBackend(torch.device("cuda"))
    if is_copied and not backend._is_copied:
        pytest.skip("this GPU does not copy tiles by itself")
    backend._is_copied, backend._tiles_at_once = is_copied, at_once
    assert_right(backend.attend(q, k, v, visible), q, k[indices], v[indices])


@pytest.mark.parametrize("dtype, tokens", [(torch.bfloat16, 37), (torch.float16, 6), (torch.float32, 1), (FP8, 37)])
def test_a_frame_that_is_placed_first_attends_as_any(dtype, tokens):
    """The same launches for every frame, in a CUDA graph; kept, not kept, undecided."""
    cache = make_cache("auto", dtype, num_blocks=2, tokens_per_frame=tokens, num_special_tokens=min(6, tokens))
    assert cache.can_place, cache.why_not_placed
    dense = DenseBlock(cache.num_special_tokens)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (random_frame(cache, generator) for _ in range(3))
    cache.place_frame(keep=False)
    cache.attend_placed(0, q, k, v)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend_placed(0, q, k, v), cache.attend_placed(1, q, k, v)
    for index in range(40):
        keep = (True, True, False, None, None)[index % 5]
        for tensor in (q, k, v):
            tensor.copy_(random_frame(cache, generator))
        cache.place_frame(keep)
        graph.replay()
        visible_k, visible_v = dense.visible() if index else (k[:0], v[:0])
        if keep:
            dense.append(k.clone(), v.clone())
            dense.evict(cache.scale_frames, cache.sliding_window, cache.remembered_frames)
            visible_k, visible_v = dense.visible()
        else:
            visible_k, visible_v = torch.cat([visible_k, k]), torch.cat([visible_v, v])
        for one in out:
            assert_right(one, q, visible_k, visible_v)
        if keep is None:
            for block in range(2):
                cache.rollback_last_frame(block)


def test_blocks_that_hold_different_frames_have_no_place_in_common():
    cache = make_cache("auto", torch.bfloat16, num_blocks=2)
    q, k, v = (random_frame(cache, torch.Generator("cuda")) for _ in range(3))
    cache.append_frame(1, k, v)
    with pytest.raises(RuntimeError, match="blocks 0 and 1 hold different frames"):
        cache.place_frame(keep=True)
