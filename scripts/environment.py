# SPDX-License-Identifier: Apache-2.0
"""Make or reuse `.venv` in the checkout, for scripts/demo and scripts/test. Standard library only.

Two kinds of machine are served:
- ROS 2 from apt, sourced: `.venv` sees the system's site-packages and keeps their NumPy (cv_bridge is built for it).
- No ROS 2: it comes as Python wheels, and the one message that they lack (tf2_msgs/TFMessage) is generated.
Torch is taken as it is where the chosen interpreter has one; else it is the CPU build unless an NVIDIA GPU is present.
"""
from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = SCRIPTS / "requirements"
EXECUTABLES = ("lingbot_map_evaluate", "lingbot_map_node", "lingbot_map_replay")
MIN_TORCH = (2, 4)


class SetupError(Exception):
    """What is wrong with this machine, in one line, with what to do about it."""


@dataclass(frozen=True)
class Machine:
    """What the set-up depends on."""

    ros: str  # "wheels", or the distribution that is sourced
    python: str  # version of the interpreter that .venv is made from
    gpu: bool  # an NVIDIA GPU that works
    numpy: str | None = None  # version to keep: the system's, with ROS 2 from apt


def look_at_machine(environ: Mapping[str, str] = os.environ, python: str = sys.executable) -> Machine:
    """Find out what is here. Raises SetupError where neither way to ROS 2 works."""
    version = platform.python_version()
    gpu = _runs(["nvidia-smi", "-L"])
    distro = environ.get("ROS_DISTRO")
    if distro and environ.get("AMENT_PREFIX_PATH"):
        if not _runs([python, "-c", "import rclpy"], dict(environ)):
            raise SetupError(f"ROS 2 {distro} is sourced, but {python} cannot import rclpy: "
                             f"apt install ros-{distro}-rclpy")
        return Machine(distro, version, gpu, _distribution_version("numpy"))
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError("ROS 2 wheels exist for Linux on x86-64 only, not for "
                         f"{sys.platform} on {platform.machine()}: install ROS 2 and source its setup.bash first")
    return Machine("wheels", version, gpu)


def _runs(command: list[str], environ: dict[str, str] | None = None) -> bool:
    try:
        done = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint(machine: Machine) -> str:
    """Return a hash of all that a finished `.venv` depends on: when it is unchanged there is nothing to do."""
    digest = hashlib.sha256(f"{machine} {os.path.realpath(sys.executable)} {ROOT}".encode())
    files = [ROOT / "setup.py", ROOT / "setup.cfg", Path(__file__), *REQUIREMENTS.glob("*.txt"),
             *(path for path in (SCRIPTS / "tf2_msgs").rglob("*") if path.is_file())]
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# -- the environment ----------------------------------------------------------------------------------------------

def reusable(venv: Path, machine: Machine, stamp: dict) -> bool:
    """Tell whether an existing environment can be kept; raise SetupError for one that is neither usable nor ours."""
    if not venv.exists():
        return False
    settings = _read_settings(venv / "pyvenv.cfg")
    minor = ".".join(machine.python.split(".")[:2])
    reason = ""
    if not settings.get("version", settings.get("version_info", "")).startswith(minor + "."):
        reason = f"it was not made with Python {minor}"
    elif machine.ros != "wheels" and settings.get("include-system-site-packages") != "true":
        reason = "it does not see the system's packages"
    elif stamp and stamp.get("ros") != machine.ros:
        reason = f"it was made for ROS 2 {stamp.get('ros')}"
    elif stamp and stamp.get("root") != str(ROOT):
        reason = "the checkout has moved"
    elif not _runs([str(venv / "bin" / "python"), "-m", "pip", "--version"], _clean_environment()):
        reason = "its Python or pip does not run"
    if reason and not stamp:
        raise SetupError(f"{venv} was made by someone else and cannot be used ({reason}): remove or rename it")
    if reason:
        say(f"making .venv anew ({reason})")
    return not reason


def _read_settings(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def make_environment(machine: Machine) -> None:
    """Create `.venv` from the running interpreter."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        minor = ".".join(machine.python.split(".")[:2])
        raise SetupError(f"{sys.executable} cannot make virtual environments: apt install python{minor}-venv")
    # Where the interpreter has a torch (as GPU images do), seeing its packages saves gigabytes.
    see_system = machine.ros != "wheels" or torch_fits(sys.executable, machine)
    say(f"making .venv with Python {machine.python}" + (" and the system's packages" if see_system else ""))
    options = ["--system-site-packages"] if see_system else []
    if VENV.is_symlink():
        VENV.unlink()  # what it leads to belongs to another checkout, and would be cleared
    _check([sys.executable, "-m", "venv", "--clear", *options, str(VENV)], "cannot make .venv")


def torch_fits(python: str | Path, machine: Machine) -> bool:
    """Tell whether an interpreter has a torch that serves this machine."""
    code = (f"import torch; v = tuple(int(x) for x in torch.__version__.split('.')[:2]); "
            f"raise SystemExit(not (v >= {MIN_TORCH} and (torch.version.cuda is not None or not {machine.gpu})))")
    return _runs([str(python), "-c", code], _clean_environment())


def install_torch(machine: Machine) -> None:
    """Install torch if need be: without a GPU, nothing of CUDA is downloaded."""
    if torch_fits(PYTHON, machine):
        return
    if machine.gpu:
        say("installing torch (NVIDIA GPU found)")
        return pip("--upgrade", "torch", machine=machine)
    say("installing torch (CPU)")
    arguments = ("-r", str(REQUIREMENTS / "torch_cpu.txt"))
    try:  # the local version can come from a configured index or a folder of wheels ...
        pip(*arguments, machine=machine, quiet=True)
    except SetupError:  # ... and else from PyTorch's own index
        pip(*arguments, "--index-url", "https://download.pytorch.org/whl/cpu", machine=machine)


def install_package(machine: Machine) -> None:
    """Install the checkout in editable form with what the demo and the tests import."""
    say("installing lingbot_map_ros and what it needs")
    if machine.ros == "wheels":
        pip("-r", str(REQUIREMENTS / "ros_wheels.txt"), machine=machine)
    pip("setuptools>=68", "wheel", machine=machine)
    extras = ("demo", "evaluate", "test", *(("cuda",) if machine.gpu else ()))
    pip(*choose_requirements(*_read_requirements(), extras, _imports("cv2")), machine=machine)
    pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT), machine=machine)
    # pip puts executables into bin alone; ros2 launch and ros2 run look in lib/<package>.
    folder = VENV / "lib" / "lingbot_map_ros"
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXECUTABLES:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../../bin") / name)


def _read_requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return what setup.py requires, and its extras."""
    code = ("import json, setuptools; from distutils.core import run_setup; "
            "d = run_setup('setup.py', stop_after='init'); print(json.dumps([d.install_requires, d.extras_require]))")
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, env=_clean_environment(), check=True, capture_output=True)
    return json.loads(done.stdout)


def choose_requirements(
    required: list[str], extras_required: dict[str, list[str]], extras: tuple[str, ...], has_opencv: bool
) -> list[str]:
    """Return what is to be installed for the wanted extras; OpenCV is not wanted where cv2 imports.

    Apt's python3-opencv carries no metadata that pip can see, and a second OpenCV beside it would shadow it.
    """
    chosen = set(required).union(*(extras_required[extra] for extra in extras))
    return sorted(name for name in chosen
                  if not name.startswith("torch")  # that has been dealt with
                  and not (name.startswith("opencv") and has_opencv))


def _imports(module: str) -> bool:
    return _runs([str(PYTHON), "-c", f"import {module}"], _clean_environment())


# -- tf2_msgs -----------------------------------------------------------------------------------------------------

def has_tf2_msgs() -> bool:
    """Tell whether /tf's message imports in `.venv`."""
    return _imports("tf2_msgs.msg")


def build_tf2_msgs(machine: Machine) -> bool:
    """Generate the tf2_msgs stand-in into `.venv`. Return whether it imports then; say why when it does not."""
    if not shutil.which("g++"):
        say("no g++: the tf2_msgs stand-in cannot be built, so /tf stays off (apt install g++ and run again)")
        return False
    say("building the tf2_msgs stand-in")
    pip("-r", str(REQUIREMENTS / "tf2_msgs.txt"), machine=machine)
    _point_cmake_files_here()
    environ = _clean_environment() | {
        "AMENT_PREFIX_PATH": str(VENV), "CMAKE_PREFIX_PATH": str(VENV), "LD_LIBRARY_PATH": str(VENV / "lib"),
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory(prefix="tf2_msgs-") as build:
        configure = ["cmake", "-G", "Ninja", "-S", str(SCRIPTS / "tf2_msgs"), "-B", build, "-DCMAKE_BUILD_TYPE=Release",
                     f"-DPython3_EXECUTABLE={VENV / 'bin' / 'python3'}", "-DPython3_FIND_VIRTUALENV=ONLY",
                     f"-DCMAKE_INSTALL_PREFIX={VENV}", "-DBUILD_TESTING=OFF"]
        for command in (configure, ["cmake", "--build", build, "--target", "install"]):
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                print(done.stdout[-4000:], file=sys.stderr)
                say("the tf2_msgs stand-in did not build, so /tf stays off (are Python's headers installed? "
                    "apt install python3-dev)")
                return False
    return has_tf2_msgs()


def _point_cmake_files_here() -> None:
    """Replace the include folders of the machine that built the wheels, written into their CMake files, by ours."""
    code = "import numpy, sysconfig; print(sysconfig.get_path('include')); print(numpy.get_include())"
    found = subprocess.run([PYTHON, "-c", code], env=_clean_environment(), check=True, capture_output=True, text=True)
    python_include, numpy_include = found.stdout.splitlines()
    for path in VENV.glob("share/*/cmake/*.cmake"):
        text = path.read_text()
        here = re.sub(r"/opt/python/[^\";]*/numpy/[^\";]*include", numpy_include, text)
        here = re.sub(r"/opt/python/[^\";]*/include/python3\.\d+", python_include, here)
        if here != text:
            path.write_text(here)


# -- running things -----------------------------------------------------------------------------------------------

def pip(*arguments: str, machine: Machine, quiet: bool = False) -> None:
    """Run `pip install` in `.venv`, never touching the system's NumPy. Raises SetupError."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(f"numpy=={machine.numpy}\n" if machine.numpy else "")
        constraint.flush()
        _check([str(PYTHON), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check",
                "--constraint", constraint.name, *arguments], f"pip could not install {' '.join(arguments)}", quiet)


def _check(command: list[str], what: str, quiet: bool = False) -> None:
    sink = subprocess.DEVNULL if quiet else None
    if subprocess.run(command, env=_clean_environment(), stderr=sink).returncode:
        raise SetupError(what)


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without what would lead another Python astray."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "__PYVENV_LAUNCHER__")}


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Bring `.venv` up to date."""
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # a demo and a test run may start together
    stamp_file = VENV / "lingbot_setup.json"
    try:
        machine = look_at_machine()
        key = fingerprint(machine)
        try:
            stamp = json.loads(stamp_file.read_text())
        except (OSError, ValueError):
            stamp = {}
        retry_tf = not stamp.get("tf2_msgs", False) and shutil.which("g++") is not None
        if stamp.get("key") == key and PYTHON.exists() and not retry_tf:
            return 0
        if not reusable(VENV, machine, stamp):
            make_environment(machine)
        stamp = {"ros": machine.ros, "root": str(ROOT)}
        stamp_file.write_text(json.dumps(stamp))  # ours from here on, if not yet complete
        install_torch(machine)
        install_package(machine)
        tf2_msgs = has_tf2_msgs() or (machine.ros == "wheels" and build_tf2_msgs(machine))
        stamp_file.write_text(json.dumps(stamp | {"key": key, "tf2_msgs": tf2_msgs}))
        say("ready")
        return 0
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
