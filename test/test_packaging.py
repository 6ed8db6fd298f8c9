# SPDX-License-Identifier: Apache-2.0
"""What an installation holds, and that the cache is imported as lingbot_map_ros.cache from it."""
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("cache", "lingbot_map_ros", "launch", "config", "rviz", "resource",
         "setup.py", "setup.cfg", "pyproject.toml", "package.xml", "LICENSE")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Return a copy of what a build needs, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    for name in PARTS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, symlinks=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, folder)
    return folder


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def import_from(folder: Path, code: str) -> list[str]:
    """Return the lines that code prints when the package comes from a site folder and all else from this one's.

    Without `site` (-S), since this environment has the checkout itself installed.
    """
    prologue = (f"import site, sys; sys.path[:] = [p for p in sys.path if p != '']; site.addsitedir({str(folder)!r}); "
                f"sys.path += [{sysconfig.get_path('purelib')!r}, {sysconfig.get_path('platlib')!r}]; ")
    return run("-S", "-c", prologue + code, cwd=folder).splitlines()


WHERE = ("import lingbot_map_ros.cache, lingbot_map_ros.cache.kv_cache, importlib.util; "
         "print(lingbot_map_ros.cache.__file__); print(lingbot_map_ros.cache.FlashInferKVCacheManager.__module__); "
         "print(importlib.util.find_spec('cache'))")


def test_wheel_holds_everything(sources, tmp_path):
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, sources,
        cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    installed = {re.sub(r"^lingbot_map_ros-[\d.]+\.data/data/", "", name) for name in names}

    modules = {str(path.relative_to(REPOSITORY))
               for folder in ("gct", "mapping", "mapping/evaluation", "synthetic", "ros", "models")
               for path in (REPOSITORY / "lingbot_map_ros" / folder).glob("*.py")}
    modules |= {f"lingbot_map_ros/cache/{path.name}" for path in (REPOSITORY / "cache").glob("*.py")}
    share = {f"share/lingbot_map_ros/{path.relative_to(REPOSITORY)}" for folder in ("launch", "config", "rviz")
             for path in (REPOSITORY / folder).iterdir() if path.is_file()}
    assert len(share) >= 4
    expected = modules | share | {
        "lingbot_map_ros/models/default.safetensors", "share/lingbot_map_ros/package.xml",
        "share/ament_index/resource_index/packages/lingbot_map_ros"}
    assert not expected - installed
    assert not [name for name in installed if name.startswith(("cache/", "test/"))]
    scripts = next(name for name in names if name.endswith("entry_points.txt"))
    text = (tmp_path / "site" / scripts).read_text()
    assert all(f"lingbot_map_{name} = " in text for name in ("evaluate", "node", "replay"))
    assert "synthetic_camera = " in text

    where, module, bare = import_from(tmp_path / "site", WHERE)
    assert where == str(tmp_path / "site" / "lingbot_map_ros" / "cache" / "__init__.py")
    assert (module, bare) == ("lingbot_map_ros.cache.kv_cache", "None")


def test_editable_installation_reads_the_sources(sources, tmp_path):
    run("-c", f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})", cwd=sources)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    where, module, _ = import_from(tmp_path / "site", WHERE)
    assert Path(where).resolve() == (sources / "cache" / "__init__.py").resolve()
    assert module == "lingbot_map_ros.cache.kv_cache"


def test_manifest_is_valid_and_agrees_with_setup():
    package = pytest.importorskip("catkin_pkg.package")  # comes with ROS 2, and with what builds tf2_msgs
    manifest = package.parse_package(str(REPOSITORY))  # raises on one that is not valid
    assert manifest.package_format == 3
    assert manifest.get_build_type() == "ament_python"
    version = re.search(r'version="([\d.]+)"', (REPOSITORY / "setup.py").read_text())[1]
    assert (manifest.name, manifest.version) == ("lingbot_map_ros", version)


def test_manifest_names_the_packages_that_are_imported():
    manifest = (REPOSITORY / "package.xml").read_text()
    named = set(re.findall(r"<(?:exec_)?depend>(\w[\w-]*)</", manifest))
    imported = set()
    for path in [*(REPOSITORY / "lingbot_map_ros" / "ros").glob("*.py"), *(REPOSITORY / "launch").glob("*.py")]:
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+_(?:msgs|srvs|interfaces|ros)|rclpy|launch)\b",
                                   path.read_text(), re.MULTILINE))
    assert {"rclpy", "sensor_msgs", "launch_ros"} <= imported
    assert not imported - named - {"lingbot_map_ros"}
