# SPDX-License-Identifier: Apache-2.0
"""ROS 2's linters over the package, each where it is installed (with ROS 2 from apt; the wheels lack them)."""
import ast
import shutil
import subprocess
import xml.etree.ElementTree
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "cache", "launch", "lingbot_map_ros", "scripts", "test", "training", "setup.py")
LICENCE = "Apache-2.0"
# Beside ament_pep257's own. Summaries begin on the line of the quotes and may go on on the next one, where the quotes
# may end, too; sections are Google's; what a name says is not said again.
PEP257_IGNORED = ("D100", "D101", "D102", "D103", "D104", "D105", "D106", "D107", "D200", "D203", "D205", "D208",
                  "D209", "D212", "D213", "D400", "D401", "D403", "D404", "D406", "D407", "D413", "D415", "D417")


def sources() -> list[Path]:
    """Return the repository's own Python files, shell scripts and launch files."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [REPOSITORY / name for name in listed.stdout.splitlines()]
    return [path for path in files if path.is_file() and not path.is_symlink()
            and (path.suffix in (".py", ".sh", ".yaml", ".rviz", ".toml") or path.parent.name == "scripts")]


def test_files_name_their_licence():
    lines = {path: path.read_text().splitlines()[:2] for path in sources() if path.stat().st_size}
    assert len(lines) > 100
    assert not [path for path, head in lines.items() if f"# SPDX-License-Identifier: {LICENCE}" not in head]


def test_licence_is_what_ament_copyright_takes_it_for():
    # Of headers it knows full texts alone, not the SPDX lines that the files here begin with.
    parser = pytest.importorskip("ament_copyright.parser")
    from ament_copyright import get_licenses

    descriptor = parser.LicenseDescriptor(str(REPOSITORY / "LICENSE"))
    descriptor.parse()
    assert get_licenses()[descriptor.license_identifier].spdx == LICENCE


def test_ament_flake8(capfd):
    lint = pytest.importorskip("ament_flake8.main")
    result = lint.main(["--config", str(REPOSITORY / "setup.cfg"), *(str(REPOSITORY / name) for name in FOLDERS)])
    assert result == 0, capfd.readouterr().out


def test_ament_pep257(capfd):
    lint = pytest.importorskip("ament_pep257.main")
    result = lint.main(["--ignore", *PEP257_IGNORED, "--", *(str(REPOSITORY / name) for name in FOLDERS)])
    assert result == 0, "\n".join(line for line in "".join(capfd.readouterr()).splitlines() if ": D" in line)


def test_ament_xmllint(capfd, tmp_path):
    lint = pytest.importorskip("ament_xmllint.main")
    if not shutil.which("xmllint"):
        pytest.skip("xmllint is not installed")
    # Without the address of its schema, which would be fetched.
    manifest = (REPOSITORY / "package.xml").read_text().splitlines(keepends=True)
    (tmp_path / "package.xml").write_text("".join(line for line in manifest if "<?xml-model" not in line))
    shutil.copy(REPOSITORY / "config" / "fastdds.xml", tmp_path)
    assert lint.main([str(tmp_path)]) == 0, capfd.readouterr().err


def test_manifest_asks_for_the_linters():
    named = {element.text for element in xml.etree.ElementTree.parse(REPOSITORY / "package.xml").iter("test_depend")}
    tree = ast.parse(Path(__file__).read_text())
    used = {call.args[0].value.split(".")[0] for call in ast.walk(tree)
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "importorskip"}
    assert used and used <= named
