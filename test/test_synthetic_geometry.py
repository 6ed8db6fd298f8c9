# SPDX-License-Identifier: Apache-2.0
"""The ray-caster against a slow one in float64, compiled code against the culled, and what the camera may not touch."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lingbot_map_ros.synthetic import (
    CORRIDORS, INTERIORS, MIXED, OFFICES, ROOMS, SceneOptions, SceneGenerator, bounds, corridor, intrinsics_from_fov,
    make_place, office, ray,
)
from lingbot_map_ros.synthetic.generator import OVER_TABLES, draw_blur, draw_scenes
from lingbot_map_ros.synthetic.interior import (
    BOWLS, CABINETS, CHAIRS, COLUMN, COUNTERS, MUG, OBJECTS, PICTURES, ROWS, TABLE_LEGS, TABLES,
)
from lingbot_map_ros.synthetic.path import between, camera_pose
from lingbot_map_ros.synthetic.renderer import Renderer
from lingbot_map_ros.synthetic.scene import FIRST_CYLINDER, FIRST_ELLIPSOID, NOWHERE, PRIMITIVES
from lingbot_map_ros.synthetic.texture import TextureBank

SIZE = (36, 48)
STREETS = SceneOptions(outdoors=1)


def hits(scene, number: int, origin: np.ndarray, direction: np.ndarray) -> list[float]:
    """Return every t at which origin + t direction crosses a primitive's surface, by the textbook, in the world."""
    centre, half, R = (getattr(scene, name)[0, number].double().numpy() for name in ("centre", "half", "rotation"))
    o, d = R.T @ (origin - centre), R.T @ direction
    found = []
    if number < FIRST_CYLINDER:
        for axis in range(3):
            for side in (-half[axis], half[axis]):
                t = (side - o[axis]) / d[axis] if d[axis] else np.inf
                others = [k for k in range(3) if k != axis]
                if np.isfinite(t) and all(abs(o[k] + t * d[k]) <= half[k] * (1 + 1e-9) for k in others):
                    found.append(t)
        return found
    axes = (0, 1) if number < FIRST_ELLIPSOID else (0, 1, 2)
    a = sum((d[k] / half[k]) ** 2 for k in axes)
    b = sum(2 * o[k] * d[k] / half[k] ** 2 for k in axes)
    c = sum((o[k] / half[k]) ** 2 for k in axes) - 1
    if b * b - 4 * a * c > 0:
        roots = [(-b + sign * np.sqrt(b * b - 4 * a * c)) / (2 * a) for sign in (-1, 1)]
        found = [t for t in roots if len(axes) == 3 or abs(o[2] + t * d[2]) <= half[2]]
    if len(axes) == 2:
        for side in (-half[2], half[2]):
            t = (side - o[2]) / d[2]
            if ((o[0] + t * d[0]) / half[0]) ** 2 + ((o[1] + t * d[1]) / half[1]) ** 2 <= 1:
                found.append(t)
    return found


def slow_cast(scene, origin: np.ndarray, direction: np.ndarray) -> tuple[float, bool]:
    """Return the depth along a ray (inf in the sky) and whether the light reaches its end."""
    nearest, which = np.inf, None
    for number in range(PRIMITIVES):
        ahead = [t for t in hits(scene, number, origin, direction) if t > 0]
        if ahead and min(ahead) < nearest:
            nearest, which = min(ahead), number
    point = origin + nearest * direction
    if which == 0 and bool(scene.open[0]) and point[2] > 1e-3:
        return np.inf, True
    to_light = scene.light[0].double().numpy() - point
    lit = not any(0 < t < 1 for number in range(1, PRIMITIVES) if number != which
                  for t in hits(scene, number, point, to_light))
    return nearest, lit


def drawn(options: SceneOptions, seed: int, frames: int = 2):
    scenes, T, fov = draw_scenes(1, frames, options, torch.Generator().manual_seed(seed))
    return scenes, T[0], intrinsics_from_fov(fov, SIZE)


def make_renderer(compile: bool = False) -> Renderer:
    return Renderer(TextureBank(1, torch.Generator().manual_seed(0)), SIZE, 2, compile=compile)


@pytest.mark.parametrize("options, seed", [(ROOMS, 0), (ROOMS, 1), (INTERIORS, 5), (OFFICES, 6), (CORRIDORS, 7),
                                           (MIXED, 2), (STREETS, 3), (STREETS, 4)])
def test_depth_and_shadows_are_those_of_a_slow_caster(options, seed):
    scenes, T, K = drawn(options, seed)
    renderer = make_renderer()
    views = renderer._centre_views(scenes, T[:1], K)
    depth, number, point = ray.cast(views, renderer.x, renderer.y)
    lit = ray.light_reaches(views, renderer.x, renderer.y, depth, number)
    depth = torch.where(ray.is_sky(views, number, point), torch.inf, depth)[0].numpy()

    rng = np.random.default_rng(seed)
    pose, K = T[0].double().numpy(), K[0].double().numpy()
    depth_wrong = light_wrong = 0
    for row, column in zip(rng.integers(0, SIZE[0], 150), rng.integers(0, SIZE[1], 150)):
        direction = pose[:3, :3] @ np.linalg.solve(K, [column + 0.5, row + 0.5, 1])
        truth, truly_lit = slow_cast(scenes, pose[:3, 3], direction)
        found = depth[row, column]
        close = found == truth if np.isinf(truth) else abs(found - truth) < 1e-3 * truth
        depth_wrong += not close
        light_wrong += bool(close and np.isfinite(truth) and truly_lit != bool(lit[0, row, column]))
    assert depth_wrong <= 1  # a ray along an edge may round to either side
    assert light_wrong <= 2


@pytest.mark.parametrize("options", [ROOMS, INTERIORS, OFFICES, CORRIDORS, MIXED, STREETS])
def test_windows_leave_nothing_out(options):
    renderer = make_renderer()
    for seed in range(6):
        scenes, T, K = drawn(options, seed)
        views = renderer._centre_views(scenes, T[:1], K)
        whole = ray.cast(views, renderer.x, renderer.y)
        things, shades = renderer._windows(scenes, T[:1], K, True)
        part = ray.cast_within(views, renderer.x, renderer.y, things)
        assert torch.equal(whole[0], part[0]) and torch.equal(whole[1], part[1])
        assert torch.equal(ray.light_reaches(views, renderer.x, renderer.y, *whole[:2]),
                           ray.light_reaches_within(views, renderer.x, renderer.y, *whole[:2], shades))
        assert any(w is not None and w[1] != slice(0, SIZE[1]) for w in things)  # else nothing was spared
        assert len(bounds.list_windows(things, torch.arange(SIZE[0]))) == PRIMITIVES


def test_the_caster_is_one_graph_and_agrees_with_the_culled_one():
    scenes, T, K = drawn(ROOMS, 7)
    culled = make_renderer()
    frames = torch.zeros(2, dtype=torch.int64)
    light, depth = culled.render(scenes, frames, T, K.expand(2, 3, 3))
    dense = make_renderer()
    dense.compiled = True
    dense._render_views = torch.compile(ray.render_views, backend="eager", fullgraph=True, dynamic=False)
    dense._depth_views = torch.compile(ray.depth_views, backend="eager", fullgraph=True, dynamic=False)
    light_dense, depth_dense = dense._render_chunk(scenes[frames], T, K.expand(2, 3, 3), True, None)
    torch.testing.assert_close(depth_dense, depth, rtol=1e-5, atol=0)
    # Away from edges the culled one has one ray a pixel, so textures differ a little.
    assert (light - light_dense).abs().mean() < 0.05 * light_dense.mean()


def test_blurred_frames_are_the_same_culled_or_not():
    scenes, T, K = drawn(MIXED, 8)
    renderer = make_renderer()
    blur = draw_blur(T[None], K, 4, replace(MIXED, motion_blur=1, defocus=3), torch.Generator().manual_seed(1))
    light, depth = renderer.render(scenes, torch.zeros(2, dtype=torch.int64), T, K.expand(2, 3, 3), blur=blur)
    renderer._render_views, renderer._depth_views = ray.render_views, ray.depth_views
    light_dense, depth_dense = renderer._render_chunk(scenes[[0, 0]], T, K.expand(2, 3, 3), True, blur)
    assert torch.equal(depth, depth_dense)
    torch.testing.assert_close(light, light_dense, atol=1e-5, rtol=1e-4)
    sharp, _ = renderer.render(scenes, torch.zeros(2, dtype=torch.int64), T, K.expand(2, 3, 3))
    assert (sharp - light).abs().mean() > 0.001


@pytest.mark.parametrize("options", [ROOMS, INTERIORS, OFFICES, CORRIDORS, MIXED, STREETS])
def test_cameras_keep_clear_of_everything(options):
    scenes, T, _ = draw_scenes(24, 60, options, torch.Generator().manual_seed(11))
    position = T[..., :3, 3]
    local = ((position[:, None] - scenes.centre[:, :, None])[..., None, :] @ scenes.rotation[:, :, None])[..., 0, :]
    outside = (local.abs() - scenes.half[:, :, None]).clamp_min(0).norm(dim=-1)[:, 1:]
    assert outside.min() > 0.25
    inside_shell = (scenes.half[:, :1] - local[:, 0].abs()).amin(-1)
    assert inside_shell.min() > 0.2
    used = (scenes.centre[:, 1:, 2] > NOWHERE / 2).sum(1).float()
    assert used.mean() > 12  # there is something to see


def test_things_stand_on_tables_and_worktops():
    scenes, _, _ = draw_scenes(40, 20, INTERIORS, torch.Generator().manual_seed(7))
    there = scenes.centre[..., 2] > NOWHERE / 2
    tops = [COUNTERS + 1, COUNTERS + 3, TABLES, TABLES + 1]
    carried = 0
    for scene in range(len(scenes)):
        for thing in (*range(OBJECTS, OBJECTS + 4), MUG, BOWLS, BOWLS + 1):
            if not there[scene, thing]:
                continue
            foot = scenes.centre[scene, thing].clone()
            foot[2] -= scenes.half[scene, thing, 2]
            local = ((foot - scenes.centre[scene, tops])[:, None] @ scenes.rotation[scene, tops])[:, 0]
            half = scenes.half[scene, tops]
            on = (local[:, :2].abs() < half[:, :2]).all(1) & ((local[:, 2] - half[:, 2]).abs() < 1e-4)
            assert (on & there[scene, tops]).any()
            carried += 1
    assert carried > 80
    inside = (scenes.half[:, :1, :2] - scenes.centre[:, 1:, :2].abs()).amin(-1)
    assert inside[there[:, 1:]].min() > -0.05  # pictures hang half sunk into the walls
    chairs, tables = there[:, CHAIRS:PICTURES:2].sum(1), there[:, TABLES:CHAIRS].sum(1)
    assert (chairs[tables == 0] == 0).all() and chairs.float().mean() > 1.2 and tables.float().mean() > 0.8
    legs = scenes.centre[:, TABLE_LEGS:COLUMN, 2] - scenes.half[:, TABLE_LEGS:COLUMN, 2]
    assert legs[there[:, TABLE_LEGS:COLUMN]].abs().max() < 1e-4  # on the floor
    seats, backs = scenes.centre[:, CHAIRS:PICTURES:2], scenes.centre[:, CHAIRS + 1:PICTURES:2]
    assert (backs[..., 2] > seats[..., 2])[there[:, CHAIRS:PICTURES:2]].all()


def test_worktops_are_where_cameras_look_and_do_not_overlap():
    scenes, T, _ = draw_scenes(120, 20, INTERIORS, torch.Generator().manual_seed(9))
    top = slice(COUNTERS + 1, CABINETS, 2)
    there, centre = scenes.centre[:, top, 2] > NOWHERE / 2, scenes.centre[:, top, :2]
    extent = (scenes.rotation[:, top].abs() @ scenes.half[:, top, :, None])[..., :2, 0]
    both = there.all(1)
    gap = ((centre[:, 0] - centre[:, 1]).abs() - extent.sum(1))[both]
    assert both.float().mean() > 0.4 and (gap.amax(-1) > -0.02).all()
    across = (scenes.rotation[:, COUNTERS + 1, 0, 0] - scenes.rotation[:, COUNTERS + 3, 0, 0]).abs()[both] > 0.5
    corner = across & (gap.abs().amin(-1) < 1e-3)
    assert 0.3 < corner.float().mean() < 0.8
    height = (scenes.centre + scenes.half)[both][:, top, 2]
    assert (height[:, 0] - height[:, 1]).abs()[corner].max() < 1e-5

    way = centre[:, 0, None] - T[..., :2, 3]
    ahead = (way * T[..., :2, 2]).sum(-1) / (way.norm(dim=-1) * T[..., :2, 2].norm(dim=-1))
    assert (ahead.amax(-1) > 0.7)[there[:, 0]].float().mean() > 0.8


def test_furniture_is_painted_and_other_rooms_are_not():
    scenes, _, _ = draw_scenes(60, 4, INTERIORS, torch.Generator().manual_seed(10))
    assert (scenes.tint > 0).all() and (scenes.tint <= 1).all()
    front = scenes.tint[:, COUNTERS]
    assert torch.equal(front, scenes.tint[:, COUNTERS + 2])  # the fronts of one kitchen are alike
    assert torch.equal(scenes.tint[:, TABLES], scenes.tint[:, TABLE_LEGS])
    assert 0.1 < (front == 1).all(-1).float().mean() < 0.5 and (front.amax(-1) < 0.3).float().mean() > 0.1
    plain, _, _ = draw_scenes(8, 4, ROOMS, torch.Generator().manual_seed(10))
    assert (plain.tint == 1).all()


def test_a_tint_multiplies_colours():
    scenes, T, K = drawn(INTERIORS, 5)
    renderer = make_renderer()
    scenes.tint[:] = 1
    frames = torch.zeros(1, dtype=torch.int64)
    light, depth = renderer.render(scenes, frames, T[:1], K)
    scenes.tint[:] = torch.tensor([0.5, 1.0, 0.25])
    tinted, same = renderer.render(scenes, frames, T[:1], K)
    assert torch.equal(depth, same)
    torch.testing.assert_close(tinted, light * torch.tensor([0.5, 1.0, 0.25])[:, None, None])


def test_rows_stand_at_the_backs_of_worktops():
    scenes, _, _ = draw_scenes(60, 20, INTERIORS, torch.Generator().manual_seed(7))
    at_back = 0
    for row in range(ROWS):
        top = COUNTERS + 1 + 2 * row
        there = (scenes.centre[:, [OBJECTS + row, top], 2] > NOWHERE / 2).all(1)
        offset = (scenes.centre[:, OBJECTS + row] - scenes.centre[:, top])[:, None] @ scenes.rotation[:, top]
        back = offset[:, 0, 1] - scenes.half[:, OBJECTS + row, 1] + scenes.half[:, top, 1]
        at_back += int((there & (back.abs() < 1e-4)).sum())
    assert at_back > 30


def test_hands_hold_cameras_over_tables():
    options = replace(INTERIORS, hand=1, drone=0)
    _, T, _ = draw_scenes(20, 20, options, torch.Generator().manual_seed(8))
    assert T[..., 2, 3].min() >= OVER_TABLES


def test_furnished_rooms_may_be_small_and_empty():
    small = replace(INTERIORS, room_size=(1.5, 1.6), room_height=(2.0, 2.1))
    scenes, _, _ = draw_scenes(20, 10, small, torch.Generator().manual_seed(2))
    assert scenes.centre.isfinite().all() and (scenes.half > 0).all()
    bare, _, _ = draw_scenes(20, 10, replace(INTERIORS, clutter=0), torch.Generator().manual_seed(2))
    assert (bare.centre[:, 1:, 2] < NOWHERE / 2).all()


def local_to(scenes, number: int, points: torch.Tensor) -> torch.Tensor:
    """Return points [b, 3] in the axes of a primitive of each scene, from its centre, metres."""
    return ((points - scenes.centre[:, number])[:, None] @ scenes.rotation[:, number])[:, 0]


def present(scenes) -> torch.Tensor:
    return scenes.centre[..., 2] > NOWHERE / 2


def sunk(scenes, part: int, box: int) -> torch.Tensor:
    """Tell in which scenes a grid of points in one primitive reaches into a box."""
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 7)] * 3)
    points = (scenes.rotation[:, None, part] @ (grid * scenes.half[:, None, part])[..., None])[..., 0]
    local = (points + scenes.centre[:, None, part] - scenes.centre[:, None, box]) @ scenes.rotation[:, box]
    inside = (local.abs() < scenes.half[:, None, box] - 0.005).all(-1).any(-1)
    return inside & present(scenes)[:, part] & present(scenes)[:, box]


def test_what_stands_in_an_office_keeps_clear_of_desks():
    scenes, _, _ = draw_scenes(200, 20, OFFICES, torch.Generator().manual_seed(12))
    for thing in (office.PARTITIONS, office.PARTITIONS + 1, office.CABINET):
        for desk in range(office.DESKS):
            for part in (office.TOPS, office.PANELS, office.DRAWERS):
                assert not sunk(scenes, part + desk, thing).any()
        for chair in range(2 * office.DESKS):
            assert not sunk(scenes, office.SEATS + chair, thing).any()
    assert not sunk(scenes, office.CHAIR_FEET + 1, office.CHAIR_FEET + 3).any()
    for desk in range(office.DESKS):
        ball = office.BALLS + desk
        assert not (sunk(scenes, ball, office.SCREENS + desk) | sunk(scenes, ball, office.SHEETS + desk)).any()
        for leg in (office.DESK_LEGS + desk, office.DESK_LEGS + office.DESKS + desk):
            assert not sunk(scenes, leg, office.DRAWERS + desk).any()


def test_what_stands_in_a_corridor_stands_beside_blocks_in_planes_of_their_own():
    scenes, _, _ = draw_scenes(100, 40, CORRIDORS, torch.Generator().manual_seed(13))
    there = present(scenes)
    blocks = range(corridor.BLOCKS, corridor.HANGINGS)
    for number in range(corridor.CLUTTER, PRIMITIVES):
        for block in blocks:
            local = local_to(scenes, block, scenes.centre[:, number])[:, :2].abs()
            assert not ((local < scenes.half[:, block, :2]).all(-1) & there[:, number] & there[:, block]).any()
    extent = (scenes.rotation[:, blocks.start:blocks.stop].abs()
              @ scenes.half[:, blocks.start:blocks.stop, :, None])[..., :2, 0]
    centre = scenes.centre[:, blocks.start:blocks.stop, :2]
    faces = torch.stack([centre - extent, centre + extent], -1)  # [b, 7, 2, 2]
    near = (faces[:, :, None] - faces[:, None]).abs() < 5e-4
    both = there[:, blocks.start:blocks.stop]
    both = both[:, :, None] & both[:, None] & ~torch.eye(7, dtype=torch.bool)
    assert not (near & both[..., None, None]).any()


@pytest.mark.parametrize("options, total", [(ROOMS, 1107.2136), (INTERIORS, 753.8736)])
def test_seeds_keep_their_scenes(options, total):
    """Kinds of places that were added since draw nothing where their share is 0."""
    scenes, T, fov = draw_scenes(8, 4, options, torch.Generator().manual_seed(1))
    seen = scenes.centre[present(scenes)].abs().sum() + T.abs().sum() + fov.sum()
    assert float(seen) == pytest.approx(total, rel=1e-4)


def test_desks_carry_screens_and_chairs_stand_before_them():
    scenes, T, _ = draw_scenes(80, 20, OFFICES, torch.Generator().manual_seed(7))
    there = present(scenes)
    foot = scenes.centre.clone()
    foot[..., 2] -= scenes.half[..., 2]
    carried = chairs = seen = 0
    for desk in range(office.DESKS):
        top = office.TOPS + desk
        has = there[:, top]
        for first in (office.SCREENS, office.SHEETS, office.BALLS):
            number = first + desk
            local = local_to(scenes, top, foot[:, number])
            on = (local[:, :2].abs() <= scenes.half[:, top, :2]).all(-1)
            above = local[:, 2] - scenes.half[:, top, 2]
            assert (on & (above > -1e-4) & (above < 0.16))[there[:, number]].all()
            assert not (there[:, number] & ~has).any()
            carried += int(there[:, number].sum())
        panel = there[:, office.PANELS + desk]
        assert (local_to(scenes, top, scenes.centre[:, office.PANELS + desk])[panel, 1] < 0).all()  # opposite the chair
        for number in (office.PANELS + desk, office.DRAWERS + desk, office.DESK_LEGS + desk,
                       office.DESK_LEGS + office.DESKS + desk):
            assert foot[there[:, number], number, 2].abs().max() < 1e-4
        seat, back = office.SEATS + 2 * desk, office.SEATS + 2 * desk + 1
        sits = there[:, seat]
        assert torch.equal(sits, there[:, back]) and not (sits & ~has).any()
        assert (foot[sits, back, 2] > scenes.centre[sits, seat, 2]).all()
        parts = (seat, back, office.CHAIR_FEET + 2 * desk, office.CHAIR_FEET + 2 * desk + 1)
        for other in range(office.DESKS):  # no chair stands in a desk
            for part in parts:
                assert not sunk(scenes, part, office.TOPS + other).any()
            assert sunk(scenes, seat, office.DRAWERS + other).float().mean() < 0.03
        chairs += int(sits.sum())
        way = scenes.centre[:, None, top, :2] - T[..., :2, 3]
        ahead = (way * T[..., :2, 2]).sum(-1) / (way.norm(dim=-1) * T[..., :2, 2].norm(dim=-1))
        seen += int((ahead.amax(-1) > 0.7)[has].sum())
    desks = int(there[:, office.TOPS:office.PANELS].sum())
    assert desks > 90 and seen > 0.8 * desks and carried > 1.5 * desks and chairs > 0.5 * desks
    inside = (scenes.half[:, :1, :2] - scenes.centre[:, 1:, :2].abs()).amin(-1)
    assert inside[there[:, 1:]].min() > -0.05


def test_two_desks_do_not_overlap():
    scenes, _, _ = draw_scenes(200, 20, OFFICES, torch.Generator().manual_seed(8))
    both = present(scenes)[:, office.TOPS:office.PANELS].all(1)
    assert both.float().mean() > 0.3
    first, second = office.TOPS, office.TOPS + 1
    corner = torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9), torch.ones(1))
    points = scenes.half[:, None, second] * corner
    points = scenes.centre[:, None, second] + (scenes.rotation[:, None, second] @ points[..., None])[..., 0]
    local = (points - scenes.centre[:, None, first]) @ scenes.rotation[:, first]
    inside = (local[..., :2].abs() < scenes.half[:, None, first, :2] - 1e-4).all(-1).any(-1)
    assert not (inside & both).any()


def test_blocks_line_corridors_and_carry_doors_and_notices():
    scenes, T, _ = draw_scenes(60, 96, CORRIDORS, torch.Generator().manual_seed(9))
    there = present(scenes)
    blocks = slice(corridor.BLOCKS, corridor.HANGINGS)
    height = (scenes.centre + scenes.half)[..., 2]
    torch.testing.assert_close(height[:, blocks][there[:, blocks]],
                               (2 * scenes.half[:, :1, 2]).expand(-1, 7)[there[:, blocks]])  # up to the ceiling
    lamps = slice(corridor.LAMPS, corridor.CABINETS)
    torch.testing.assert_close(height[:, lamps][there[:, lamps]],
                               (2 * scenes.half[:, :1, 2]).expand(-1, 2)[there[:, lamps]])
    # Each thing that hangs lies flat in a face of a block or of the shell, as long as it is.
    hung = 0
    for number in range(corridor.HANGINGS, corridor.LAMPS):
        flat = torch.zeros(len(scenes), dtype=torch.bool)
        extent = (scenes.rotation[:, number].abs() @ scenes.half[:, number, :, None])[:, :2, 0]
        for wall in (0, *range(corridor.BLOCKS, corridor.HANGINGS)):
            offset = (scenes.centre[:, number] - scenes.centre[:, wall])[:, :2].abs()
            size = (scenes.rotation[:, wall].abs() @ scenes.half[:, wall, :, None])[:, :2, 0]
            for axis in (0, 1):
                in_face = (offset[:, axis] - size[:, axis]).abs() < 1e-3
                along = offset[:, 1 - axis] + extent[:, 1 - axis] < size[:, 1 - axis] + 1e-3
                flat |= in_face & along & (extent[:, axis] < 0.03) & there[:, wall]
        assert flat[there[:, number]].all()
        hung += int(there[:, number].sum())
    assert hung > 4 * len(scenes)
    # Walls stand close to both sides of most of the way.
    renderer = make_renderer()
    beside = []
    for i in range(0, 60, 6):
        position = T[i, ::24, :3, 3]
        way = T[i, 1:, :2, 3] - T[i, :-1, :2, 3]
        yaw = torch.atan2(way[::24, 1], way[::24, 0])[:, None] + torch.tensor([-torch.pi / 2, torch.pi / 2])
        poses = camera_pose(position[:, None].expand(-1, 2, -1), yaw, torch.zeros_like(yaw), torch.zeros_like(yaw))
        K = intrinsics_from_fov(torch.tensor(1.0), SIZE).expand(8, 3, 3)
        views = renderer._centre_views(scenes[[i] * 8], poses.flatten(0, 1), K)
        beside.append(ray.cast(views, renderer.x, renderer.y)[0][:, SIZE[0] // 2, SIZE[1] // 2])
    assert torch.cat(beside).median() < 2.5


def test_those_in_corridors_go_straight_on_and_turn_at_right_angles():
    options = replace(CORRIDORS, hand=0, drone=0, step=(0.15, 0.2), floor_size=(20, 25))
    _, T, _ = draw_scenes(40, 96, options, torch.Generator().manual_seed(4))
    way = T[..., :2, 3].diff(dim=1)
    moving = way.norm(dim=-1) > 0.05
    angle = torch.atan2(way[..., 1], way[..., 0])
    off = (torch.remainder(angle + torch.pi / 4, torch.pi / 2) - torch.pi / 4).abs()[moving]
    assert (off < 0.15).float().mean() > 0.7
    quarter = (angle / (torch.pi / 2)).round().long().remainder(4)
    turned = [(q[m].diff() != 0).any() for q, m in zip(quarter, moving)]
    assert torch.stack(turned).float().mean() > 0.5
    assert way.norm(dim=-1).sum(1).median() > 10  # and get far


@pytest.mark.parametrize("options", [OFFICES, CORRIDORS])
def test_offices_and_corridors_may_be_small_and_empty(options):
    small = replace(options, room_size=(1.5, 1.6), floor_size=(1.5, 1.6), room_height=(2.0, 2.1))
    scenes, T, _ = draw_scenes(20, 10, small, torch.Generator().manual_seed(2))
    assert scenes.centre.isfinite().all() and (scenes.half > 0).all() and T.isfinite().all()
    bare, _, _ = draw_scenes(20, 10, replace(options, clutter=0), torch.Generator().manual_seed(2))
    assert (bare.centre[:, 1:, 2] < NOWHERE / 2).all()


def test_a_light_within_a_wall_leaves_the_room_dark():
    """The case in which a shadow covers more than what lies behind the primitive."""
    renderer = make_renderer()
    scenes, T, K = drawn(ROOMS, 3)
    inside = (scenes.centre[0, 1:, 2] > NOWHERE / 2).nonzero()[0, 0] + 1
    scenes.light[0] = scenes.centre[0, inside]
    views = renderer._centre_views(scenes, T[:1], K)
    whole = ray.cast(views, renderer.x, renderer.y)
    _, shades = renderer._windows(scenes, T[:1], K, True)
    reaches = ray.light_reaches_within(views, renderer.x, renderer.y, *whole[:2], shades)
    assert torch.equal(reaches, ray.light_reaches(views, renderer.x, renderer.y, *whole[:2]))
    assert not reaches[whole[1] != inside].any()


def test_hands_look_down_where_they_are_to():
    for share, low, high in ((1.0, 5, 46), (0.0, -25, 25)):
        options = replace(INTERIORS, hand=1, drone=0, look_down=share)
        _, T, _ = draw_scenes(40, 30, options, torch.Generator().manual_seed(8))
        down = -torch.asin(T[..., 2, 2]).rad2deg().mean(1)
        assert low - 8 < down.median() < high and (down.median() > 15) == bool(share)


def test_poses_are_rigid_and_turn_no_faster_than_allowed():
    _, T, _ = draw_scenes(24, 60, MIXED, torch.Generator().manual_seed(5))
    R = T[..., :3, :3]
    torch.testing.assert_close(R @ R.transpose(-1, -2), torch.eye(3).expand_as(R), atol=1e-5, rtol=0)
    assert (torch.linalg.det(R) > 0).all()
    yaw = torch.atan2(R[..., 1, 2], R[..., 0, 2])
    turn = torch.remainder(yaw.diff(dim=1) + torch.pi, 2 * torch.pi) - torch.pi
    assert turn.abs().max() < np.radians(MIXED.max_yaw) + 1e-3


def test_an_optical_frame_looks_along_its_yaw():
    T = camera_pose(torch.tensor([1.0, 2, 3]), torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0))
    expected = torch.tensor([[0.0, 0, 1, 1], [-1, 0, 0, 2], [0, -1, 0, 3], [0, 0, 0, 1]])
    torch.testing.assert_close(T, expected)


def test_between_frames_lie_both_ends():
    _, T, _ = draw_scenes(2, 4, MIXED, torch.Generator().manual_seed(6))
    share = torch.tensor([0.0, 1.0]).expand(2, 4, 2)
    found = between(T, share)
    torch.testing.assert_close(found[:, :, 0], T)
    torch.testing.assert_close(found[:, :-1, 1], T[:, 1:], atol=1e-5, rtol=1e-5)


def sample(image: torch.Tensor, pixel: torch.Tensor) -> torch.Tensor:
    """Look [c, h, w] up at pixels [n, 2] (centres at +0.5), bilinearly: [c, n]."""
    h, w = image.shape[-2:]
    grid = (pixel / torch.tensor([w, h]) * 2 - 1)[None, None]
    return torch.nn.functional.grid_sample(image[None], grid, align_corners=False)[0, :, 0]


def test_one_frame_warps_onto_the_next():
    options = replace(ROOMS, effects=False, step=(0.02, 0.05), max_yaw=4, fov=(60, 80))  # much to be seen
    s = SceneGenerator((84, 112), seed=9, textures=16).sequences(4, 2, options=options)
    moved, unmoved = [], []
    for images, depth, T, K in zip(s.images, s.depth, s.T_world_camera, s.intrinsics):
        rows, columns = torch.meshgrid(torch.arange(84), torch.arange(112), indexing="ij")
        pixel = torch.stack([columns + 0.5, rows + 0.5, torch.ones(84, 112)], -1).reshape(-1, 3)
        world = (pixel @ K.inverse().T * depth[0].reshape(-1, 1)) @ T[0, :3, :3].T + T[0, :3, 3]
        camera = (world - T[1, :3, 3]) @ T[1, :3, :3]
        seen = camera @ K.T
        seen = seen[:, :2] / seen[:, 2:]
        inside = (camera[:, 2] > 0) & (seen > 1).all(-1) & (seen < torch.tensor([111.0, 83.0])).all(-1)
        assert inside.float().mean() > 0.5
        # The reciprocal of the depth is linear in the pixels of a plane.
        again = 1 / sample(1 / depth[1][None], seen[inside])[0]
        same = (again / camera[inside, 2] - 1).abs() < 0.002
        assert same.float().mean() > 0.85
        warped = sample(images[1], seen[inside])
        original = images[0].reshape(3, -1)[:, inside]
        still = sample(images[1], pixel[inside, :2])
        moved.append((warped - original)[:, same].abs().mean())
        unmoved.append((still - original)[:, same].abs().mean())
        assert moved[-1] < 0.02
    # The same comparison without the motion is worse: the test can tell.
    assert sum(unmoved) > 1.5 * sum(moved)


def test_surface_points_lie_on_surfaces():
    place = make_place(2, frames=40, textures=1)
    points, colours = place.surface_points(500)
    assert points.shape == (500, 3) and colours.dtype == torch.uint8
    scene = place.scene
    local = ((points - scene.centre[0, :, None])[..., None, :] @ scene.rotation[0, :, None])[..., 0, :] \
        / scene.half[0, :, None]
    half = scene.half[0]
    box = (local.abs().amax(-1) - 1).abs() * half.amax(-1, keepdim=True)
    radius = local[..., :2].norm(dim=-1)
    cylinder = (torch.maximum(radius, local[..., 2].abs()) - 1).abs() * half.amax(-1, keepdim=True)
    ball = (local.norm(dim=-1) - 1).abs() * half.amax(-1, keepdim=True)
    distance = torch.cat([box[:FIRST_CYLINDER], cylinder[FIRST_CYLINDER:FIRST_ELLIPSOID], ball[FIRST_ELLIPSOID:]])
    assert distance.amin(0).max() < 0.01
