# SPDX-License-Identifier: Apache-2.0
"""The streaming step: what a state remembers, and what it refuses."""
import pytest
import torch

from lingbot_map_ros.gct import PRESETS, GCTConfig, build_model
from lingbot_map_ros.gct.model import initialise

SIZE = (42, 56)
SCALE_FRAMES = PRESETS["tiny"].scale_frames
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def model():
    return build_model("tiny")


@pytest.fixture(scope="module")
def images():
    return torch.rand(16, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def run(model, state, images, keeps=None):
    """Step through images after the scale frames; returns the pose encodings [n, 9]."""
    outputs = [model.step(images[:SCALE_FRAMES], state)]
    for i in range(SCALE_FRAMES, len(images)):
        outputs.append(model.step(images[i : i + 1], state, keep=keeps is None or keeps[i]))
    return torch.cat([output.pose_encoding for output in outputs])


def assert_equal(left, right):
    for field in ("pose_encoding", "depth", "confidence"):
        torch.testing.assert_close(getattr(left, field), getattr(right, field), rtol=0, atol=0)


def test_outputs_have_the_documented_shapes_and_ranges(model, images):
    state = model.new_state(SIZE)
    first = model.step(images[:SCALE_FRAMES], state)
    later = model.step(images[3:4], state)
    for output, n in ((first, SCALE_FRAMES), (later, 1)):
        assert output.pose_encoding.shape == (n, 9)
        assert output.depth.shape == output.confidence.shape == (n, *SIZE)
        for tensor in (output.pose_encoding, output.depth, output.confidence):
            assert tensor.dtype == torch.float32 and not tensor.requires_grad and tensor.isfinite().all()
        assert (output.depth > 0).all() and (output.confidence >= 1).all()
    assert state.num_kept == 4


def test_random_weights_are_the_same_every_time(model, images):
    again = build_model("tiny")
    assert_equal(model.step(images[:2], model.new_state(SIZE)), again.step(images[:2], again.new_state(SIZE)))


def test_any_image_of_whole_patches_is_taken(model):
    for size in ((14, 56), (56, 56), (28, 14)):
        output = model.step(torch.rand(1, 3, *size), model.new_state(size))
        assert output.depth.shape == (1, *size) and output.depth.isfinite().all()


def test_a_frame_sees_frames_before_it(model, images):
    one, other = model.new_state(SIZE), model.new_state(SIZE)
    model.step(images[:3], one)
    model.step(images[3:6], other)
    same_frame = [model.step(images[8:9], state).pose_encoding for state in (one, other)]
    assert (same_frame[0] - same_frame[1]).abs().max() > 1e-4


def test_frames_that_are_not_kept_leave_no_trace(model, images):
    keeps = [True] * SCALE_FRAMES + [False, True, False, False] * 3
    kept = [i for i, keep in enumerate(keeps) if keep]
    mixed, pure = model.new_state(SIZE), model.new_state(SIZE)
    poses = run(model, mixed, images[: len(keeps)], keeps)
    torch.testing.assert_close(poses[kept], run(model, pure, images[kept]), rtol=0, atol=1e-6)
    assert mixed.num_kept == len(kept)
    pages = ("frame_count", "scale_pages", "live_pages", "free_pages", "special_tokens", "bytes")
    caches = [(mixed.cache, pure.cache, block) for block in (0, PRESETS["tiny"].depth - 1)]
    for left, right, block in [*caches, (mixed.camera_cache, pure.camera_cache, 0)]:
        left, right = left.get_cache_stats(block), right.get_cache_stats(block)
        assert [left[key] for key in pages] == [right[key] for key in pages]


def test_two_states_of_a_model_are_independent(model, images):
    alone = run(model, model.new_state(SIZE), images[:8])
    one, other = model.new_state(SIZE), model.new_state((28, 56))
    outputs = [model.step(images[:SCALE_FRAMES], one)]
    model.step(images[:SCALE_FRAMES, :, :28], other)
    for i in range(SCALE_FRAMES, 8):
        outputs.append(model.step(images[i : i + 1], one))
        model.step(images[i : i + 1, :, 14:], other)
    torch.testing.assert_close(torch.cat([o.pose_encoding for o in outputs]), alone, rtol=0, atol=0)


def test_a_reset_state_is_as_new(model, images):
    state = model.new_state(SIZE)
    before = run(model, state, images[:10])
    state.reset()
    assert state.num_kept == 0
    torch.testing.assert_close(run(model, state, images[:10]), before, rtol=0, atol=0)


def test_outputs_stay_as_they_are_while_the_model_goes_on(model, images):
    state = model.new_state(SIZE)
    model.step(images[:SCALE_FRAMES], state)
    output = model.step(images[3:4], state)
    copies = [tensor.clone() for tensor in (output.pose_encoding, output.depth, output.confidence)]
    model.step(images[4:5], state)
    for tensor, copy in zip((output.pose_encoding, output.depth, output.confidence), copies):
        assert torch.equal(tensor, copy)


def test_a_long_sequence_stays_finite_and_bounded(model, images):
    state = model.new_state(SIZE, remembered_frames=12)
    model.step(images[:SCALE_FRAMES], state)
    size = state.cache.get_cache_stats()["bytes"]
    for i in range(60):
        output = model.step(images[i % 16][None], state)
    stats = state.cache.get_cache_stats()
    assert output.pose_encoding.isfinite().all()
    assert stats["bytes"] == size and stats["special_tokens"] == 12 * 6 and stats["frame_count"] == 63
    assert state.camera_cache.get_cache_stats()["special_tokens"] == 12
    state.num_kept = 10**7  # time has no end
    assert model.step(images[:1], state, keep=False).pose_encoding.isfinite().all()


def test_the_scale_phase_takes_fewer_frames_than_the_window(model, images):
    state = model.new_state(SIZE)
    model.step(images[:1], state)
    assert model.step(images[1:2], state).pose_encoding.shape == (1, 9)
    assert state.cache.get_cache_stats()["scale_pages"] == 2


@pytest.mark.parametrize("shape", [(3, *SIZE), (1, 1, *SIZE), (1, 3, 56, 42), (0, 3, *SIZE), (4, 3, *SIZE)])
def test_images_that_do_not_fit_are_refused(model, shape):
    with pytest.raises(ValueError, match=r"images must have the shape \[n, 3, 42, 56\]|1 to 3 scale frames"):
        model.step(torch.rand(shape), model.new_state(SIZE))


def test_misuse_is_refused(model, images):
    state = model.new_state(SIZE)
    with pytest.raises(ValueError, match="scale frames must be kept"):
        model.step(images[:1], state, keep=False)
    with pytest.raises(TypeError, match="uint8"):
        model.step((images[:1] * 255).to(torch.uint8), state)
    model.step(images[:2], state)
    with pytest.raises(ValueError, match="one frame at a time"):
        model.step(images[2:4], state)
    assert state.num_kept == 2 and state.cache.get_cache_stats()["frame_count"] == 2


@pytest.mark.parametrize("arguments, message", [
    ({"scale_frames": 0}, "scale_frames"),
    ({"sliding_window": 0}, "sliding_window"),
    ({"remembered_frames": 3}, "remembered_frames"),
    ({"camera_iterations": 0}, "camera_iterations"),
    ({"spare_frames": -1}, "spare_frames"),
])
def test_a_state_that_can_not_be_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.new_state(SIZE, **arguments)


def test_image_sizes_that_can_not_be_are_refused(model):
    with pytest.raises(ValueError, match="multiples of 14"):
        model.new_state((40, 56))
    with pytest.raises(ValueError, match="154x112 only"):
        build_model("default").new_state((112, 140))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_confined_to_the_aggregators_products_and_cache(model, images, dtype):
    half = build_model("tiny", dtype=dtype)
    assert half.dtype == dtype
    parameters = dict(half.named_parameters())
    for name in ("aggregator.global_blocks.0.attn.qkv.weight", "aggregator.patch_embed.patch_embed.proj.weight",
                 "aggregator.frame_blocks.1.mlp.fc2.bias"):
        assert parameters[name].dtype == dtype
    for name in ("aggregator.frame_blocks.0.norm1.weight", "aggregator.frame_blocks.0.attn.q_norm.bias",
                 "aggregator.camera_token", "camera_head.trunk.0.attn.qkv.weight", "depth_head.projects.0.weight"):
        assert parameters[name].dtype == torch.float32
    state = half.new_state(SIZE)
    assert 2 * state.cache.get_cache_stats()["bytes"] == model.new_state(SIZE).cache.get_cache_stats()["bytes"]
    half.load_state_dict(model.state_dict())  # casts
    exact = run(model, model.new_state(SIZE), images[:8])
    assert (run(half, half.new_state(SIZE), images[:8]) - exact).abs().max() < 0.02


def test_unknown_presets_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="lingbot_map, default, tiny"):
        build_model("huge")
    with pytest.raises(ValueError, match="float64"):
        build_model("tiny", dtype=torch.float64)


@pytest.mark.parametrize("name", PRESETS)
def test_configurations_survive_json(name):
    assert GCTConfig.from_json(PRESETS[name].to_json()) == PRESETS[name]


@pytest.mark.parametrize("text, message", [
    ("nonsense", "no JSON"),
    ("[1]", "no JSON object"),
    ('{"name": "x"}', "incomplete"),
    ('{"name": "x", "colour": 1}', "unknown entries: colour"),
])
def test_broken_configurations_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        GCTConfig.from_json(text)


@pytest.mark.parametrize("change, message", [
    ({"image_width": 100}, "multiple of the patch size"),
    ({"num_heads": 5}, "embed_dim"),
    ({"output_groups": (0, 1, 2)}, "four inputs"),
    ({"output_groups": (0, 1, 3, 9)}, "below depth"),
    ({"output_groups": (0, 1, 2, 2)}, "ascend"),
    ({"depth": 5}, "last group"),
    ({"scale_frames": 0}, "scale_frames"),
    ({"compact": True}, "image_height"),
])
def test_dimensions_that_do_not_fit_are_refused(change, message):
    values = {"name": "x", "image_width": 56, "image_height": None, "trained_frames": 8, "scale_frames": 2,
              "sliding_window": 2, "embed_dim": 64, "num_heads": 1, "depth": 4, "output_groups": (0, 1, 2, 3)}
    with pytest.raises(ValueError, match=message):
        GCTConfig(**{**values, **change})


def test_initialise_depends_on_the_seed(model, images):
    other = build_model("tiny")
    initialise(other, seed=1)
    poses = [m.step(images[:1], m.new_state(SIZE)).pose_encoding for m in (model, other)]
    assert not torch.equal(*poses)


@needs_cuda
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (None, 0.05)])
def test_a_gpu_gives_the_cpus_numbers(model, images, dtype, tolerance):
    gpu = build_model("tiny", device="cuda", dtype=dtype)
    gpu.load_state_dict(model.state_dict())
    expected = run(model, model.new_state(SIZE), images)
    assert (run(gpu, gpu.new_state(SIZE), images).cpu() - expected).abs().max() < tolerance


@needs_cuda
def test_a_step_does_not_wait_for_the_gpu(images):
    gpu = build_model("tiny", device="cuda")
    state = gpu.new_state(SIZE)
    images = images.to("cuda")
    run(gpu, state, images)  # whatever is prepared once is prepared here
    torch.cuda.set_sync_debug_mode("error")
    try:
        for keep in (True, False, True):
            gpu.step(images[:1], state, keep=keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_undecided_frame_sees_what_one_that_is_not_kept_sees():
    model = build_model("tiny")
    images = torch.rand(16, 3, *SIZE, generator=torch.Generator().manual_seed(4))
    decided, plain = (model.new_state(SIZE, sliding_window=20) for _ in range(2))  # as long as nothing is evicted
    for state in (decided, plain):
        model.step(images[:3], state)
    for index in range(3, 16):
        image, keep = images[index : index + 1], index % 3 != 0
        output = model.step(image, decided, keep=None)
        with pytest.raises(RuntimeError, match="kept or rolled back first"):
            model.step(image, decided)
        decided.keep_last() if keep else decided.rollback_last()
        reference = model.step(image, plain, keep=keep)
        assert decided.num_kept == plain.num_kept
        assert (output.pose_encoding - reference.pose_encoding).abs().max() < 1e-5
        assert (output.depth - reference.depth).abs().max() < 1e-5
    with pytest.raises(RuntimeError, match="no frame waits"):
        decided.rollback_last()


def test_a_frame_that_is_rolled_back_leaves_no_trace():
    """Also while the window slides and the ring of remembered frames wraps."""
    model = build_model("tiny")
    images = torch.rand(40, 3, *SIZE, generator=torch.Generator().manual_seed(5))
    sparse, plain = (model.new_state(SIZE, sliding_window=3, remembered_frames=8) for _ in range(2))
    for state in (sparse, plain):
        model.step(images[:3], state)
    for index in range(3, 40):
        image = images[index : index + 1]
        output = model.step(image, sparse, keep=None)
        if index % 3:
            sparse.rollback_last()
            continue
        sparse.keep_last()
        reference = model.step(image, plain, keep=None)
        plain.keep_last()
        assert (output.pose_encoding - reference.pose_encoding).abs().max() < 1e-5
        for name in ("frame_count", "live_pages", "free_pages", "special_tokens"):
            assert sparse.cache.get_cache_stats()[name] == plain.cache.get_cache_stats()[name]
            assert sparse.camera_cache.get_cache_stats()[name] == plain.camera_cache.get_cache_stats()[name]
