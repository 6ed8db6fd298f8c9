# SPDX-License-Identifier: Apache-2.0
"""A frame as it is compiled and recorded on a GPU, against the same launched kernel by kernel."""
import pytest
import torch

from lingbot_map_ros.cache import notice
from lingbot_map_ros.gct import build_model
from lingbot_map_ros.gct import model as gct_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SIZE = (42, 56)
WINDOW = {"scale_frames": 3, "sliding_window": 4, "remembered_frames": 9}
KEEPS = (True, False, True, None, True, True, False, None)


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def images():
    return torch.rand((30, 3, *SIZE), generator=torch.Generator().manual_seed(3)).to("cuda")


def steps(model, state, images):
    """Run scale frames and frames that are kept, not kept, kept late and rolled back; yield what is predicted."""
    yield model.step(images[:3], state)
    for index, image in enumerate(images[3:]):
        keep = KEEPS[index % len(KEEPS)]
        output = model.step(image[None], state, keep=keep)
        if keep is None:
            state.keep_last() if index % 2 else state.rollback_last()
        yield output


def gathered(outputs):
    outputs = list(outputs)
    return [torch.cat([getattr(output, name) for output in outputs]).double()
            for name in ("pose_encoding", "depth", "confidence")]


def error(found, expected):
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected)]


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_a_recorded_frame_is_as_exact_as_one_that_is_launched(model, images, cache_dtype):
    recorded, launched = (
        model.new_state(SIZE, graph=graph, cache_dtype=cache_dtype, **WINDOW) for graph in (True, False))
    assert recorded.frame_graph is not None and launched.frame_graph is None
    exact = build_model("tiny", device="cuda", dtype=torch.float32)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    truth = gathered(steps(exact, exact.new_state(SIZE, graph=False, **WINDOW), images))
    found = error(gathered(steps(model, recorded, images)), truth)
    plain = error(gathered(steps(model, launched, images)), truth)
    assert all(a < 1.5 * b for a, b in zip(found, plain)), (found, plain)
    for cache, other in ((recorded.cache, launched.cache), (recorded.camera_cache, launched.camera_cache)):
        for block in range(cache.num_blocks):
            assert cache.get_cache_stats(block) == other.get_cache_stats(block)


def test_sequences_do_not_disturb_one_another(model, images):
    alone = gathered(steps(model, model.new_state(SIZE, **WINDOW), images))
    one, other = model.new_state(SIZE, **WINDOW), model.new_state((28, 56), **WINDOW)
    together = []
    for output, _ in zip(steps(model, one, images), steps(model, other, images[:, :, :28])):
        together.append(output)
    assert all(torch.equal(a, b) for a, b in zip(gathered(together), alone))


def test_the_window_changes_and_a_sequence_begins_anew(model, images):
    def run(graph):
        state = model.new_state(SIZE, graph=graph, **WINDOW)
        list(steps(model, state, images[:12]))
        state.resize(sliding_window=2)
        first = [model.step(image[None], state) for image in images[12:16]]
        state.reset()
        return gathered([*first, *steps(model, state, images[:10])])

    assert max(error(run(True), run(False))) < 0.02


def test_what_was_predicted_stays(model, images):
    state = model.new_state(SIZE, **WINDOW)
    model.step(images[:3], state)
    output = model.step(images[3:4], state)
    before = output.depth.clone()
    model.step(images[4:5], state)
    assert torch.equal(output.depth, before)


def test_images_may_come_from_the_host(model, images):
    state, other = model.new_state(SIZE, **WINDOW), model.new_state(SIZE, **WINDOW)
    for held, batch in ((state, images), (other, images.cpu())):
        model.step(batch[:3], held)
    assert torch.equal(model.step(images[3:4], state).depth, model.step(images[3:4].cpu(), other).depth)


def test_without_a_compiler_frames_are_launched(model, images, monkeypatch, caplog):
    def fails(*arguments):
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(gct_model, "FrameGraph", fails)
    notice.warn_once.cache_clear()
    state = model.new_state(SIZE, **WINDOW)
    assert state.frame_graph is None
    assert "no compiler here" in caplog.text and "and much more" not in caplog.text
    list(steps(model, state, images[:8]))


def test_weights_that_have_moved_are_not_read(images):
    model = build_model("tiny", device="cuda", dtype=torch.bfloat16)
    state = model.new_state(SIZE, **WINDOW)
    model.step(images[:3], state)
    model.set_dtype(torch.float16)
    with pytest.raises(RuntimeError, match="weights have moved"):
        model.step(images[3:4], state)


def test_a_backend_that_was_asked_for_is_used(model):
    state = model.new_state(SIZE, backend="sdpa", **WINDOW)
    assert state.frame_graph is None and state.cache.backend.name.startswith("sdpa")


@pytest.mark.parametrize("preset, size, cache_dtype", [
    ("tiny", SIZE, None), ("default", (112, 154), None), ("lingbot_map", (378, 518), None),
    ("lingbot_map", (378, 518), torch.float8_e4m3fn)])
def test_memory_is_as_predicted(preset, size, cache_dtype):
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = build_model(preset, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    state = model.new_state(size, cache_dtype=cache_dtype)
    images = torch.rand((8, 3, *size), device="cuda")
    model.step(images[: state.cache.scale_frames], state)
    for index in range(5):
        model.step(images[index : index + 1], state)
    peak = torch.cuda.max_memory_allocated() - before
    predicted = model.peak_bytes(state.sizes)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    print(f"{preset}: peak {peak / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f}, of which weights and caches "
          f"{(weights + state.memory_bytes) / 2**20:.0f}")
    assert peak <= predicted <= weights + state.memory_bytes + 1.5e9
