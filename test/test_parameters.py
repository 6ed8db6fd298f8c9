# SPDX-License-Identifier: Apache-2.0
"""The tables of parameters, topics and services, and the file that is made of them."""
from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

from lingbot_map_ros.cache.backends import BACKENDS
from lingbot_map_ros.gct import PRESETS
from lingbot_map_ros.mapping.map_builder import MapBuilder
from lingbot_map_ros.ros import interfaces, parameters
from lingbot_map_ros.ros.node_parameters import NodeParameters, change_of, refuse_late
from lingbot_map_ros.ros.parameter_table import Change, ParameterError
from lingbot_map_ros.ros.parameters import Parameters

CONFIG = Path(__file__).resolve().parent.parent / "config" / "lingbot_map.yaml"


def test_window_parameters_come_first_and_default_to_the_model():
    assert parameters.NAMES[:2] == ("scale_frames", "sliding_window")
    own = Parameters()
    assert {own.scale_frames, own.sliding_window, own.remembered_frames, own.window_size, own.overlap_keyframes,
            own.flow_threshold} == {0}


def test_choices_are_those_of_the_cache_and_defaults_those_of_tracking():
    from lingbot_map_ros.cache import CACHE_DTYPES
    from lingbot_map_ros.cache.backends import BACKENDS
    from lingbot_map_ros.gct import dtype_named
    from lingbot_map_ros.mapping.tracking import Tracker

    choices = {entry.name: entry.metadata["choices"] for entry in dataclasses.fields(Parameters)}
    assert choices["attention_backend"] == BACKENDS
    assert {dtype_named(name) for name in choices["cache_dtype"]} <= {None, *CACHE_DTYPES}
    assert (Parameters().jump_factor, Parameters().lost_after) == (Tracker().jump_factor, Tracker().lost_after)


def test_one_way_to_reserve_memory():
    with pytest.raises(ParameterError, match="max_sliding_window is 8 and cache_memory_mib 100: only one"):
        Parameters(max_sliding_window=8, cache_memory_mib=100)


def test_defaults_are_valid_and_name_a_preset():
    assert Parameters().preset in PRESETS


def test_defaults_are_those_of_the_map():
    defaults = {name: parameter.default for name, parameter in inspect.signature(MapBuilder).parameters.items()}
    own = Parameters()
    assert (own.max_map_points, own.voxel_size, own.voxel_fraction, own.confidence_threshold) == tuple(
        defaults[name] for name in ("max_points", "voxel_size", "voxel_fraction", "confidence_threshold"))


@pytest.mark.parametrize(("name", "value", "reason"), [
    ("scale_frames", -1, "0 to 64"),
    ("scale_frames", 1.0, "integer"),
    ("scale_frames", True, "integer"),
    ("publish_tf", 1, "bool"),
    ("voxel_size", 0.0, "0.001 to 10"),
    ("voxel_fraction", 0.0, "0.0001 to 0.5"),
    ("voxel_size", float("nan"), "finite"),
    ("map_period", float("inf"), "finite"),
    ("map_period", "soon", "double"),
    ("dtype", "float8", "float32, bfloat16, float16"),
    ("device", "tpu", "cuda:N"),
    ("device", "cuda:one", "cuda:N"),
    ("preset", "", "name"),
    ("keyframe_policy", "whim", "motion, interval"),
    ("attention_backend", "cudnn", "auto, sdpa"),
    ("cache_dtype", "fp8", "auto, bfloat16, float8_e4m3fn"),
    ("init_motion", 1.5, "0 to 1"),
    ("lost_after", 0, "1 to 1000"),
    ("map_frame", "", "name"),
    ("map_frame", "/map", "slash"),
    ("camera_frame", "my camera", "white space"),
])
def test_bad_value_is_named_with_the_reason(name, value, reason):
    with pytest.raises(ParameterError, match=name) as caught:
        Parameters(**{name: value})
    assert repr(value) in str(caught.value) and reason in str(caught.value)


def test_camera_and_map_are_two_frames():
    Parameters(map_frame="hall", camera_frame="map")
    with pytest.raises(ParameterError, match="camera_frame is 'map', which is map_frame too"):
        Parameters(camera_frame="map")


def test_model_judges_at_least_what_may_change_in_a_running_session():
    from lingbot_map_ros.mapping.session_config import RUNNING

    free = {"init_motion", "max_init_wait"}  # any value in their range will do
    assert set(RUNNING) - free <= set(parameters.JUDGED_BY_MODEL) <= set(parameters.NAMES)


def test_remembered_frames_hold_the_window():
    Parameters(scale_frames=4, sliding_window=8, remembered_frames=12)
    with pytest.raises(ParameterError, match="remembered_frames is 11.*12"):
        Parameters(scale_frames=4, sliding_window=8, remembered_frames=11)


def test_whole_numbers_are_doubles():
    value = Parameters(map_period=2).map_period
    assert value == 2.0 and type(value) is float


def test_change_keeps_the_rest():
    before = NodeParameters(Parameters(sliding_window=16))
    after = before.changed({"map_period": 3.0})
    refuse_late(before.differences(after), configured=True)
    assert before.differences(after) == ["map_period"]
    assert (after.shared.sliding_window, after.shared.map_period, before.shared.map_period) == (16, 3.0, 2.0)


@pytest.mark.parametrize("name", [name for name in parameters.NAMES
                                  if change_of(name) is Change.CONFIGURE])
def test_what_belongs_to_the_model_changes_only_without_one(name):
    values = {name: {"device": "cpu", "dtype": "float32", "preset": "tiny", "checkpoint": "a.pt", "image_width": 140,
                     "max_sliding_window": 20, "cache_memory_mib": 100, "attention_backend": "sdpa",
                     "cache_dtype": "bfloat16",
                     "camera_size": "1280x720", "image_transport": "compressed", "odom_frame": "odom",
                     "base_frame": "base", "frame_prefix": "robot1/", "scale_source": "fixed",
                     "disabled_outputs": ("map",)}[name]}
    before = NodeParameters()
    after = before.changed(values)
    assert getattr(after.shared, name) == values[name]
    refuse_late(before.differences(after), configured=False)
    with pytest.raises(ParameterError, match=f"{name} can be set only while the node is unconfigured"):
        refuse_late(before.differences(after), configured=True)
    assert not before.differences(before.changed({name: getattr(before.shared, name)}))  # the same value is no change


def test_autostart_cannot_change():
    with pytest.raises(ParameterError, match="autostart"):
        refuse_late(NodeParameters().differences(NodeParameters().changed({"autostart": False})), configured=False)


def test_file_is_the_table():
    assert CONFIG.read_text() == Parameters.yaml_file(), (
        "config/lingbot_map.yaml is out of date: write lingbot_map_ros.ros.parameters.Parameters.yaml_file() to it")
    values = yaml.safe_load(CONFIG.read_text())["/**"]["ros__parameters"]
    assert Parameters(**values) == Parameters()


def test_tables_have_a_row_for_everything():
    table = Parameters.markdown_table()
    assert all(f"| `{name}` |" in table for name in parameters.NAMES)
    topics = interfaces.topics_table()
    assert all(f"| `{topic.name}` | {topic.type_name} |" in topics
               for topic in (*interfaces.SUBSCRIBED, *interfaces.PUBLISHED))
    for name in ("~/reset", "~/describe_cache"):
        assert f"| `{name}` | std_srvs/srv/Trigger |" in interfaces.services_table()
    assert "sensor_msgs/msg/Image | best effort, volatile, depth 5" in topics
    assert "| `~/map` | sensor_msgs/msg/PointCloud2 | reliable, transient local, depth 1 |" in topics
    for text in (table, topics, interfaces.services_table(), interfaces.frames_table()):
        columns = {line.count("|") for line in text.strip().splitlines()}
        assert len(columns) == 1, "a row with another number of columns"


def test_every_attention_backend_can_be_asked_for():
    entry = Parameters.__dataclass_fields__["attention_backend"]
    assert entry.metadata["choices"] == BACKENDS  # not imported there: a node without torch must say so itself
