# SPDX-License-Identifier: Apache-2.0
"""Sequences and places: shapes, determinism, options, textures, camera effects, loops."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_map_ros.synthetic import (
    CORRIDORS, DEMO, MIXED, ROOMS, SceneGenerator, SceneOptions, intrinsics_from_fov, make_place, render,
)
from lingbot_map_ros.synthetic.exposure import Camera, even_out, expose
from lingbot_map_ros.synthetic.generator import draw_scenes
from lingbot_map_ros.synthetic.office import draw_offices
from lingbot_map_ros.synthetic.options import KINDS as PLACES
from lingbot_map_ros.synthetic.texture import (
    KINDS, PHOTO, SIDE, TextureBank, draw_numbers, fetch, fetch_modulation, fractal_noise, pack,
)

SIZE = (42, 56)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def generator() -> SceneGenerator:
    return SceneGenerator(SIZE, seed=5, textures=16)


def test_sequences_have_the_shapes_promised_and_repeat_by_seed():
    first, again, other = (SceneGenerator(SIZE, seed=seed, textures=16).sequences(3, 2) for seed in (5, 5, 6))
    assert first.images.shape == (3, 2, 3, *SIZE)
    assert first.depth.shape == (3, 2, *SIZE)
    assert first.T_world_camera.shape == (3, 2, 4, 4)
    assert first.intrinsics.shape == (3, 3, 3)
    assert 0 <= first.images.min() and first.images.max() <= 1
    assert first.depth.min() > 0.1
    for name in ("images", "depth", "T_world_camera", "intrinsics"):
        assert getattr(first, name).dtype == torch.float32
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(other, name)), name


def test_rooms_are_closed_and_streets_have_sky(generator):
    assert generator.sequences(4, 1, options=ROOMS).depth.isfinite().all()
    assert generator.sequences(4, 1, options=SceneOptions(outdoors=1)).depth.isinf().any()


@settings(max_examples=12, deadline=None)
@given(low=st.floats(30, 100), width=st.floats(0, 30), step=st.floats(0.01, 0.2), seed=st.integers(0, 1000))
def test_fields_of_view_and_steps_are_within_their_ranges(low, width, step, seed):
    options = replace(ROOMS, fov=(low, low + width), step=(step, step), hand=0)
    _, T, fov = draw_scenes(4, 12, options, seeded(seed))
    assert (fov.rad2deg() >= low - 1e-3).all() and (fov.rad2deg() <= low + width + 1e-3).all()
    moved = T[..., :3, 3].diff(dim=1).norm(dim=-1)
    assert moved.max() < 2 * step + 0.03  # twice the typical step at the most, and a little shaking


def test_shares_of_kinds_are_kept():
    scenes, _, _ = draw_scenes(400, 2, replace(MIXED, outdoors=0.3), seeded())
    assert 0.22 < scenes.open.float().mean() < 0.38
    bare, _, _ = draw_scenes(8, 2, replace(MIXED, clutter=0), seeded())
    assert (bare.centre[:, 1:, 2] < -100).sum() >= 8 * 20  # only loose legs at most
    indoors = replace(MIXED, outdoors=0, room_size=(3, 4), floor_size=(10, 12))
    for corridor, least, most in ((0.0, 0.0, 0.0), (0.3, 0.2, 0.4)):
        scenes, _, _ = draw_scenes(200, 2, replace(indoors, corridor=corridor), seeded())
        assert least <= (scenes.half[:, 0, 0] > 4).float().mean() <= most


def test_a_share_of_indoor_places_are_offices(monkeypatch):
    drawn = []
    monkeypatch.setattr("lingbot_map_ros.synthetic.generator.draw_offices",
                        lambda size, *rest: drawn.append(len(size)) or draw_offices(size, *rest))
    draw_scenes(400, 2, replace(MIXED, outdoors=0, corridor=0, office=0.3), seeded())
    assert 0.22 < sum(drawn) / 400 < 0.38


@pytest.mark.parametrize("kind", PLACES)
def test_sequences_of_every_kind_are_images_of_something(kind):
    sequences = SceneGenerator(SIZE, seed=2, textures=16).sequences(3, 2, options=PLACES[kind])
    assert sequences.images.flatten(1).std(1).min() > 0.02
    assert sequences.depth[sequences.depth.isfinite()].min() > 0.05
    assert (sequences.images > 0.98).float().mean() < 0.5


def test_cameras_get_far_in_corridors():
    options = replace(CORRIDORS, step=(0.2, 0.3))
    _, T, _ = draw_scenes(40, 96, options, seeded(3))
    assert (T[:, -1, :3, 3] - T[:, 0, :3, 3]).norm(dim=-1).median() > 3


@pytest.mark.parametrize("field, value", [("outdoors", 1.5), ("fov", (90, 50)), ("fov", (50, 175)), ("step", (0, 1)),
                                          ("room_size", (0.8, 3)), ("room_height", (1.0, 3)), ("place_size", (1, 9)),
                                          ("max_yaw", 0), ("noise", -1), ("hand", 0.9), ("look_down", 2),
                                          ("furnished", -1), ("office", 1.2), ("corridor", -0.1),
                                          ("floor_size", (1, 9))])
def test_options_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        replace(MIXED, **{field: value})


def test_arguments_that_make_no_sense_are_refused(generator):
    with pytest.raises(ValueError, match="textures.*0"):
        SceneGenerator(SIZE, textures=0)
    with pytest.raises(ValueError, match="image_size"):
        SceneGenerator((4, 100), textures=1)
    with pytest.raises(ValueError, match="photos.*float32"):
        SceneGenerator(SIZE, textures=1, photos=[np.zeros((64, 64, 3), np.float32)])
    with pytest.raises(ValueError, match="batch.*0"):
        generator.sequences(0, 1)
    with pytest.raises(ValueError, match="frames.*3"):
        make_place(0, frames=3)


def test_a_bank_keeps_its_size_and_replaces_the_oldest(generator):
    bank = TextureBank(20, seeded())
    assert bank.count == 2 * len(KINDS)  # whole rows of kinds
    before, address = bank.texels.clone(), bank.texels.data_ptr()
    bank.refresh(5)
    changed = (bank.texels != before).any(1)
    assert changed[:5].all() and not changed[5:].any()
    bank.refresh(1000)
    assert (bank.texels != before).any(1).all() and bank.texels.data_ptr() == address
    generator.refresh(4)


def test_photographs_become_textures():
    rng = np.random.default_rng(0)
    photo = np.full((50, 70, 3), (200, 40, 60), np.uint8) + rng.integers(0, 5, (50, 70, 3), dtype=np.uint8)
    bank = TextureBank(16, seeded(), [photo])
    finest = bank.texels[:, :SIDE * SIDE]
    mean = torch.stack([((finest >> shift) & 255).float().mean(1) for shift in (0, 8, 16)], -1)
    is_photo = torch.tensor([kind == PHOTO for kind in KINDS])
    near = (mean - torch.tensor([202.0, 42, 62])).abs().amax(-1) < 3
    assert torch.equal(near, is_photo)
    assert set(draw_numbers(seeded(), (1000,), (PHOTO,)).remainder(len(KINDS)).tolist()) == set(
        is_photo.nonzero()[:, 0].tolist())


def test_texels_come_back_as_they_were_packed():
    colours = torch.rand(1, 3, SIDE, SIDE, generator=seeded())
    texels = pack(colours).view(-1)
    row, column = torch.randint(0, SIDE, (2, 50), generator=seeded())
    nil = torch.zeros(50, dtype=torch.int32)
    found = fetch(texels, nil, (column + 0.5) / SIDE, (row + 0.5) / SIDE, nil)
    torch.testing.assert_close(torch.stack(found), colours[0][:, row, column], atol=0.003, rtol=0)
    coarse = fetch(texels, nil[:1], torch.tensor([0.5]), torch.tensor([0.5]), nil[:1] + 6)
    middle = torch.nn.functional.avg_pool2d(colours, 64)[0][:, 1:3, 1:3].mean((1, 2))
    torch.testing.assert_close(torch.cat(coarse), middle, atol=0.01, rtol=0)
    modulation = fetch_modulation(texels, nil, torch.rand(50), torch.rand(50), nil + 3)
    assert modulation.abs().max() <= 1


def test_noise_tiles():
    noise = fractal_noise(2, 1, seeded(), 1.5)
    seam = (noise[..., 0] - noise[..., -1]).abs().mean()
    assert seam < 1.5 * noise.diff(dim=-1).abs().mean()


def plain_camera(**changes) -> Camera:
    camera = Camera(target=torch.full((1, 4), 0.4), memory=torch.ones(1), adaptation=torch.zeros(1),
                    balance=torch.ones(1, 3), vignetting=torch.zeros(1), noise=torch.zeros(1), gamma=torch.ones(1),
                    sharpness=torch.zeros(1))
    return replace(camera, **changes)


def test_exposure_reaches_its_target_and_follows_the_light():
    light = torch.rand(1, 4, 3, 20, 30, generator=seeded()) * torch.tensor([1.0, 1, 3, 3]).reshape(1, 4, 1, 1, 1)
    fixed = expose(light, plain_camera(target=torch.full((1, 4), 0.2)), seeded())
    assert abs(fixed.mean() - 0.2) < 0.01
    assert fixed[0, 3].mean() > 2.5 * fixed[0, 0].mean()
    adaptive = expose(light, plain_camera(adaptation=torch.ones(1), memory=torch.tensor([1.0])), seeded())
    jump = adaptive.mean((2, 3, 4))[0]
    assert jump[2] > jump[3] > jump[0] - 0.05  # too bright at first, then adapted
    assert abs(even_out(light).mean() - 0.42) < 0.05


def test_noise_shows_in_the_dark_and_is_nil_when_off():
    light = torch.ones(1, 4, 3, 40, 60)
    assert expose(light, plain_camera(), seeded()).std() < 1e-6
    noise = [expose(light, plain_camera(noise=torch.tensor([0.05]), target=torch.full((1, 4), target),
                                        gamma=torch.tensor([0.5])), seeded()) for target in (0.1, 0.6)]
    assert noise[0].std() > noise[1].std() > 0.01  # the tone curve lifts the dark, noise and all


def test_motion_blurs_and_effects_can_be_left_out():
    fast = SceneOptions(outdoors=0, hand=0, drone=0, step=(0.2, 0.25), noise=0, defocus=0, low_light=0, motion_blur=1)

    def detail(options: SceneOptions) -> float:
        images = SceneGenerator(SIZE, seed=3, textures=16).sequences(4, 3, options=options).images
        return images.diff(dim=-1).abs().mean().item()

    assert detail(fast) < 0.97 * detail(replace(fast, motion_blur=0))
    still = SceneGenerator(SIZE, seed=3, textures=16).sequences(2, 1, options=replace(ROOMS, effects=False)).images
    assert (still.mean((1, 2, 3, 4)) - 0.42).abs().max() < 0.05


def test_shadows_darken_only():
    place = make_place(1, frames=20, textures=16)
    K = intrinsics_from_fov(torch.tensor(1.3), SIZE)
    poses = place.T_world_camera[::3]
    lit, dark = ([replace(place, shadows=on) for on in (False, True)])
    with_shadows, _ = render(dark, poses, K, SIZE, supersampling=1)
    without, _ = render(lit, poses, K, SIZE, supersampling=1)
    assert (with_shadows <= without + 1e-6).all()
    assert (with_shadows < without - 0.03).float().mean() > 0.005


@pytest.mark.parametrize(
    "options", [DEMO, replace(DEMO, furnished=1), replace(DEMO, office=1),
                replace(DEMO, corridor=1, floor_size=(8.0, 14.0)), replace(DEMO, outdoors=1, place_size=(15.0, 25.0))])
def test_the_loop_of_a_place_closes(options):
    place = make_place(3, options=options, textures=16)
    T = place.T_world_camera
    steps = (T.roll(-1, 0) - T)[:, :3, 3].norm(dim=-1)
    assert steps.max() < 1.1 * steps.min() + 0.01
    turn = T[:, :3, :3].transpose(-1, -2) @ T.roll(-1, 0)[:, :3, :3]
    angle = torch.arccos(((turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2).clamp(-1, 1)).rad2deg()
    assert angle[-1] < 8 and angle.max() < 8
    K = intrinsics_from_fov(torch.tensor(1.3), SIZE)
    images, depth = render(place, T[:2], K, SIZE)
    assert images.shape == (2, 3, *SIZE) and depth.shape == (2, *SIZE)
    alone, _ = render(place, T[1:2], K, SIZE)
    assert torch.equal(images[1:], alone)  # a frame does not depend on the others
    assert bool(place.scene.open[0]) == bool(options.outdoors)
