# SPDX-License-Identifier: Apache-2.0
"""The guides in docs/ against the code: what they quote is said, what they name is there."""
import ast
import re
from functools import cache
from pathlib import Path

import pytest

from lingbot_map_ros.ros.parameters import NAMES

REPOSITORY = Path(__file__).resolve().parent.parent
TROUBLESHOOTING, TUNING = (REPOSITORY / "docs" / f"{name}.md" for name in ("troubleshooting", "tuning"))
QUOTES = re.findall(r"^> (.*)$", TROUBLESHOOTING.read_text(), re.MULTILINE)


@cache
def spoken() -> str:
    """Return every string of the package's code, a line each, with … for values that are put in."""
    strings = []
    for path in [*(REPOSITORY / "cache").glob("*.py"), *(REPOSITORY / "lingbot_map_ros").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(re.sub(r"%[-+.\d]*[sdfg]", "…", node.value))
    return "\n".join(strings)


def test_there_are_quotes():
    assert len(QUOTES) > 40 and len(QUOTES) == len(set(QUOTES))
    assert "no such words as these" not in spoken()


@pytest.mark.parametrize("quote", QUOTES)
def test_node_says_what_is_quoted(quote):
    assert len(quote.replace("…", "").split()) >= 2
    assert quote in spoken()


@pytest.mark.parametrize("guide", [TROUBLESHOOTING, TUNING], ids=lambda path: path.stem)
def test_names_are_those_of_the_code(guide):
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", guide.read_text()))
    sources = [*(REPOSITORY / "lingbot_map_ros").rglob("*.py"), *(REPOSITORY / "launch").glob("*.py"),
               *(REPOSITORY / "cache").glob("*.py")]
    words = {word.lstrip("_") for path in sources for word in re.findall(r"\w+", path.read_text())}
    assert len(names & set(NAMES)) >= 10
    assert not names - words


@pytest.mark.parametrize("guide", [TROUBLESHOOTING, TUNING], ids=lambda path: path.stem)
def test_links_lead_somewhere(guide):
    for target in re.findall(r"\]\(([^)]+)\)", guide.read_text()):
        path, _, anchor = target.partition("#")
        text = (guide.parent / path).read_text() if path else guide.read_text()
        headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert not anchor or anchor in headings, target


def test_tuning_tells_of_every_parameter_of_the_window():
    headings = re.findall(r"^\| `(\w+)`", TUNING.read_text(), re.MULTILINE)
    assert {"scale_frames", "sliding_window", "remembered_frames", "window_size", "overlap_keyframes", "flow_threshold",
            "keyframe_interval", "image_width", "camera_iterations", "cache_memory_mib"} <= set(headings) <= set(NAMES)


def test_readme_links_the_guides():
    text = (REPOSITORY / "README.md").read_text()
    assert "(docs/tuning.md)" in text and "(docs/troubleshooting.md)" in text
