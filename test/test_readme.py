# SPDX-License-Identifier: Apache-2.0
"""README.md against the code. Run as a program, this writes the README's tables."""
import re
from pathlib import Path

import pytest

from lingbot_map_ros.ros import interfaces, synthetic_camera
from lingbot_map_ros.ros.diagnostics_table import diagnostics_table
from lingbot_map_ros.ros.parameters import Parameters

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
TABLES = {
    "topics": interfaces.topics_table,
    "services": interfaces.services_table,
    "frames": interfaces.frames_table,
    "diagnostics": diagnostics_table,
    "parameters": Parameters.markdown_table,
    "camera topics": lambda: interfaces.topics_table((), synthetic_camera.TOPICS),
    "camera parameters": synthetic_camera.SyntheticCameraParameters.markdown_table,
}


def with_tables(text: str) -> str:
    """Return the README's text with the tables as the code has them."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, name
        text = pattern.sub(lambda match: match[1] + table() + match[2], text)
    return text


def test_tables_are_the_codes():
    text = README.read_text()
    assert text == with_tables(text), "run: python test/test_readme.py"
    assert "| `~/odometry` | nav_msgs/msg/Odometry |" in text and "| `sliding_window` | integer |" in text


def test_launch_arguments_are_all_there():
    source = (REPOSITORY / "launch" / "lingbot_map.launch.py").read_text()
    block = source[source.index("ARGUMENTS = {"):]
    arguments = re.findall(r'^    "(\w+)": \(', block[:block.index("\n}")], re.MULTILINE)
    section = README.read_text().split("| launch argument |")[1].split("\n\n")[0]
    assert arguments == re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(
    r"\b(?:scripts|config|docs|rviz|test)/[\w./]+\w", README.read_text()))))
def test_files_that_are_named_exist(path):
    assert (REPOSITORY / path).exists()


def test_replay_options_exist():
    from lingbot_map_ros.ros.replay import parse_arguments

    for line in re.findall(r"lingbot_map_replay (.*)", README.read_text()):
        words = line.split("#")[0].split("--ros-args")[0].split()
        assert parse_arguments(words).source == "FOLDER"


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
