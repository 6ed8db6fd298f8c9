# SPDX-License-Identifier: Apache-2.0
"""The node over real middleware: depth, confidence and the model's image in the camera's geometry, keyframes."""
from __future__ import annotations

import numpy as np
import pytest
from geometry_msgs.msg import PoseArray, PoseStamped
from nav_msgs.msg import OccupancyGrid
from ros_harness import LATCHED, SCALE_FRAMES, Feed, image_message, private, stamp_of, stamps, wait_until
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_srvs.srv import Trigger

from lingbot_map_ros.gct import PRESETS, prepare_image
from lingbot_map_ros.mapping.camera_view import CameraView
from lingbot_map_ros.mapping.image_message import to_rgb
from lingbot_map_ros.ros.messages import POINT_TYPE
from lingbot_map_ros.ros.outputs import Outputs


def pixels(message: Image) -> np.ndarray:
    assert message.encoding == "32FC1" and message.step == 4 * message.width and not message.is_bigendian
    return np.frombuffer(message.data, np.float32).reshape(message.height, message.width)


@pytest.fixture
def frames(monkeypatch) -> list:
    """Return the list that every frame which the nodes publish is appended to."""
    published = []
    publish = Outputs.publish_pose

    def note(self, frame, alignment) -> None:
        published.append(frame)
        publish(self, frame, alignment)

    monkeypatch.setattr(Outputs, "publish_pose", note)
    return published


@pytest.mark.parametrize("size", [(48, 64), (64, 48), (90, 200)])
def test_depth_and_confidence_have_the_cameras_geometry(ros, make_node, frames, size):
    node = make_node()
    depths = ros.listen(Image, private(node, "depth"))
    infos = ros.listen(CameraInfo, private(node, "depth/camera_info"))
    confidences = ros.listen(Image, private(node, "confidence"))
    Feed(ros, node).images(0, 5, size=size)
    wait_until(lambda: len(depths) == len(infos) == len(confidences) == 5, "5 messages on each topic")
    assert stamps(depths) == stamps(infos) == stamps(confidences) == [stamp_of(index) for index in range(5)]
    for frame, depth, info, confidence in zip(frames, depths, infos, confidences):
        assert {message.header.frame_id for message in (depth, info, confidence)} == {"camera"}
        assert {(message.height, message.width) for message in (depth, info, confidence)} == {size}
        seen = np.isfinite(pixels(depth))
        assert seen.any() and (pixels(depth)[seen] > 0).all()
        assert (pixels(confidence)[np.isfinite(pixels(confidence))] >= 1).all()
        # A pixel of the model's image, at the camera's pixel that it came from.
        K = np.reshape(info.k, (3, 3))
        geometry = frame.view.geometry
        np.testing.assert_allclose(geometry.to_image_intrinsics(K), frame.result.intrinsics.numpy(), rtol=1e-5)
        x, y = geometry.image_size[1] // 2, geometry.image_size[0] // 2
        u = round((x + 0.5 + geometry.offset_x) / geometry.scale_x - 0.5)
        v = round((y + 0.5 + geometry.offset_y) / geometry.scale_y - 0.5)
        around = frame.result.depth[y - 1 : y + 2, x - 1 : x + 2]
        assert around.min() <= pixels(depth)[v, u] <= around.max()


def test_depth_below_the_confidence_threshold_is_not_shown(ros, make_node):
    node = make_node()
    depths = ros.listen(Image, private(node, "depth"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    wait_until(lambda: len(depths) == 4, "depth")
    assert np.isfinite(pixels(depths[-1])).any()
    assert ros.set_parameter(node.get_fully_qualified_name(), "confidence_threshold", 1e6).successful
    feed.images(4, 5)
    wait_until(lambda: len(depths) == 5, "depth")
    assert np.isnan(pixels(depths[-1])).all()


def test_image_is_what_the_model_saw(ros, make_node):
    node = make_node()
    images = ros.listen(Image, private(node, "image"))
    Feed(ros, node).images(0, SCALE_FRAMES)
    wait_until(lambda: len(images) == SCALE_FRAMES, "images")
    expected, _ = prepare_image(to_rgb(image_message(1)), PRESETS["tiny"])
    np.testing.assert_array_equal(to_rgb(images[1]), (expected * 255).round().byte().permute(1, 2, 0).numpy())


def test_keyframes_are_the_poses_of_keyframes(ros, make_node):
    node = make_node(path_period=0.0, keyframe_interval=3, max_path_length=4)
    keyframes = ros.listen(PoseArray, private(node, "keyframes"))
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 10)
    wait_until(lambda: len(poses) == 10, "poses")
    # The scale frames, and every third from the first one after them; the last four.
    expected = [poses[index].pose for index in (1, 2, 3, 6, 9)][-4:]
    wait_until(lambda: keyframes and keyframes[-1].poses == expected, "the keyframes")
    assert keyframes[-1].header.frame_id == "map" and stamps(keyframes)[-1] == stamp_of(9)
    late = ros.listen(PoseArray, private(node, "keyframes"))
    wait_until(lambda: late and late[-1].poses == expected, "the keyframes once more")


def test_images_are_not_built_for_nobody(ros, make_node, monkeypatch):
    built = []
    for name in ("depth", "confidence"):
        monkeypatch.setattr(CameraView, name, lambda *args, name=name: built.append(name))
    node = make_node()
    Feed(ros, node).images(0, 6)
    assert node.channels[0].monitor.counts.poses == 6 and built == []


def xyz_of(cloud: PointCloud2) -> np.ndarray:
    points = np.frombuffer(cloud.data, POINT_TYPE)
    return np.stack([points["x"], points["y"], points["z"]], axis=1)


def test_updates_add_up_to_the_map(ros, make_node):
    """The newest word on each voxel, from all updates, is the map."""
    node = make_node(map_period=0.05, map_updates_period=0.0)
    maps = ros.listen(PointCloud2, private(node, "map"), LATCHED)
    updates = ros.listen(PointCloud2, private(node, "map_updates"))
    feed = Feed(ros, node)
    voxels: dict[tuple, np.ndarray] = {}
    for index in range(8):
        feed.images(index, index + 1)
        if index >= SCALE_FRAMES:
            wait_until(lambda: updates and stamps(updates)[-1] == stamp_of(index), "an update")
    wait_until(lambda: maps and stamps(maps)[-1] == stamp_of(7), "the map")
    for update in updates:
        for point in xyz_of(update):
            voxels[tuple(np.floor(point.astype(np.float64) / node.channels[0].mapper.map.voxels.voxel_size))] = point
    expected = xyz_of(maps[-1])
    # A voxel's mean may lie on its edge, where rounding decides.
    assert len(voxels) == pytest.approx(len(expected), rel=0.01)
    known = {tuple(point) for point in np.array(list(voxels.values()))}
    assert sum(tuple(point) in known for point in expected) > 0.99 * len(expected)
    assert any(update.width < 0.9 * maps[-1].width for update in updates[2:])


def test_grid_has_what_the_map_has_at_its_heights(ros, make_node):
    node = make_node(map_period=0.05, publish_grid=True, grid_resolution=0.1, scale_source="fixed")
    grids = ros.listen(OccupancyGrid, private(node, "grid"), LATCHED)
    feed = Feed(ros, node)
    feed.images(0, 6)
    wait_until(lambda: grids and stamps(grids)[-1] == stamp_of(5), "the plan")
    grid = grids[-1]
    cells = np.array(grid.data).reshape(grid.info.height, grid.info.width)
    assert set(np.unique(cells)) <= {-1, 0, 100} and (cells == 0).any()
    assert grid.header.frame_id == "map" and grid.info.resolution == pytest.approx(0.1)
    xyz = node.channels[0].mapper.map_points().xyz.numpy()
    xyz = xyz[(xyz[:, 2] >= -0.3) & (xyz[:, 2] <= 0.2)]
    origin = [grid.info.origin.position.x, grid.info.origin.position.y]
    column, row = np.floor((xyz[:, :2] - origin) / 0.1).astype(int).T
    inside = (row >= 0) & (row < cells.shape[0]) & (column >= 0) & (column < cells.shape[1])
    counts = np.zeros(cells.shape, int)
    np.add.at(counts, (row[inside], column[inside]), 1)
    np.testing.assert_array_equal(cells == 100, counts >= 2)
    late = ros.listen(OccupancyGrid, private(node, "grid"), LATCHED)
    wait_until(lambda: late and late[-1].data == grid.data, "the plan for who comes late")
    name = node.get_fully_qualified_name()
    assert ros.set_parameter(name, "grid_max_height", 100.0).successful
    wait_until(lambda: (np.array(grids[-1].data) == 100).sum() > (cells == 100).sum(), "another plan")
    refused = ros.set_parameter(name, "grid_min_height", 200.0)
    assert not refused.successful and "grid_min_height is 200.0" in refused.reason


def test_grid_is_not_made_unless_it_is_asked_for(ros, make_node):
    node = make_node(map_period=0.05)
    grids = ros.listen(OccupancyGrid, private(node, "grid"), LATCHED)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 6)
    wait_until(lambda: len(poses) == 6, "poses")
    assert not grids and len(node.channels[0].loaded.outputs._occupancy) == 0


def test_outputs_that_are_switched_off_are_not_there(ros, make_node):
    off = ["map", "path", "odometry", "visual_odometry", "depth", "points"]
    node = make_node(disabled_outputs=off, path_period=0.0, publish_grid=True)
    poses = ros.listen(PoseStamped, private(node, "pose"))
    Feed(ros, node).images(0, 5)
    wait_until(lambda: len(poses) == 5, "poses")
    names = {name for name, _ in node.get_publisher_names_and_types_by_node(node.get_name(), node.get_namespace())}
    assert not names & {private(node, output) for output in off}
    assert {private(node, output) for output in ("pose", "map_updates", "confidence", "events")} <= names
    response = ros.call(Trigger, private(node, "pause"))
    assert response.success
    node.trigger_deactivate()  # latches the last map where there is one
    name = node.get_fully_qualified_name()
    assert not ros.set_parameter(name, "disabled_outputs", ["depth"]).successful
    node.trigger_cleanup()
    assert ros.set_parameter(name, "disabled_outputs", ["depth"]).successful
    refused = ros.set_parameter(name, "disabled_outputs", ["depht"])
    assert not refused.successful and "disabled_outputs is ('depht',): expected some of odometry" in refused.reason


def test_a_pose_does_not_wait_for_the_map(ros, make_node, monkeypatch):
    node = make_node()
    mapper, order = node.channels[0].mapper, []
    add, publish = mapper.map.add, node.channels[0].pipeline._outputs.publish_pose
    monkeypatch.setattr(mapper.map, "add", lambda results: (results and order.append("map"), add(results))[1])
    monkeypatch.setattr(node.channels[0].pipeline._outputs, "publish_pose",
                        lambda frame, alignment: (order.append("pose"), publish(frame, alignment))[1])
    Feed(ros, node).images(0, 4)
    assert order == ["pose", "pose", "pose", "map", "pose", "map"]


def test_a_map_that_fails_takes_no_pose_along(ros, make_node, monkeypatch):
    node = make_node()
    poses = ros.listen(PoseStamped, private(node, "pose"))
    feed = Feed(ros, node)
    feed.images(0, 4)
    mapper = node.channels[0].mapper

    def fails(results):
        raise RuntimeError("no room for the map")

    monkeypatch.setattr(mapper.map, "add", fails)
    feed.images(4, 5)
    wait_until(lambda: len(poses) == 5, "the pose of the frame that the map did not take")
    assert node.channels[0].monitor.counts.failed == 1
