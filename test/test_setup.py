# SPDX-License-Identifier: Apache-2.0
"""The decisions that scripts/setup makes about a machine, on machines that are made up."""
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def environment():
    """Yield scripts/environment.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("environment", REPOSITORY / "scripts" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["environment"]


@pytest.fixture
def apt_environ(tmp_path):
    """Return the environment of a shell with a ROS 2 from apt sourced, whose rclpy is a file that says so."""
    (tmp_path / "rclpy.py").write_text("")
    environ = {key: value for key, value in os.environ.items() if key != "_ROS_WHEELS_BOOTSTRAP_COMPLETE"}
    return environ | {"ROS_DISTRO": "jazzy", "AMENT_PREFIX_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}


def test_machine_without_ros_takes_wheels(environment):
    machine = environment.look_at_machine({"PATH": os.environ["PATH"]})
    assert machine.ros == "wheels"
    assert machine.numpy is None


def test_sourced_ros_keeps_its_numpy(environment, apt_environ):
    machine = environment.look_at_machine(apt_environ)
    assert (machine.ros, machine.numpy) == ("jazzy", importlib.metadata.version("numpy"))


def test_sourced_ros_without_rclpy_is_refused(environment, apt_environ, tmp_path):
    (tmp_path / "rclpy.py").write_text("raise ImportError('made for another Python')")
    with pytest.raises(environment.SetupError, match="apt install ros-jazzy-rclpy"):
        environment.look_at_machine(apt_environ)


def test_architecture_without_wheels_is_refused(environment, monkeypatch):
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    with pytest.raises(environment.SetupError, match="not for linux on aarch64: install ROS 2"):
        environment.look_at_machine({})


def test_architecture_without_wheels_serves_with_sourced_ros(environment, monkeypatch, apt_environ):
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    assert environment.look_at_machine(apt_environ).ros == "jazzy"


def test_pip_is_held_to_the_systems_numpy(environment, monkeypatch):
    seen = []

    def check(command, what, quiet):
        seen.append(Path(command[command.index("--constraint") + 1]).read_text())

    monkeypatch.setattr(environment, "_check", check)
    environment.pip("matplotlib", machine=environment.Machine("jazzy", "3.12.3", False, numpy="1.26.4"))
    environment.pip("matplotlib", machine=environment.Machine("wheels", "3.12.3", False))
    assert seen == ["numpy==1.26.4\n", ""]


def test_an_environment_that_is_linked_to_is_left_alone(environment, monkeypatch, tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    (others / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (tmp_path / ".venv").symlink_to(others)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    environment.make_environment(environment.Machine("wheels", "3.11.0", False))
    assert (others / "pyvenv.cfg").read_text() == "home = /usr/bin\n"
    assert not (tmp_path / ".venv").is_symlink() and (tmp_path / ".venv" / "bin" / "python").exists()


def install_torch(environment, monkeypatch, gpu, fits=False, configured=True):
    """Return the arguments of the calls of pip that installing torch makes."""
    calls = []

    def pip(*arguments, machine, quiet=False):
        calls.append(arguments)
        if not configured and len(calls) == 1:
            raise environment.SetupError("none found")

    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment, "torch_fits", lambda python, machine: fits)
    environment.install_torch(environment.Machine("wheels", "3.12.3", gpu))
    return calls


def test_cpu_torch_comes_from_the_configured_index(environment, monkeypatch):
    (arguments,) = install_torch(environment, monkeypatch, gpu=False)
    assert arguments[0] == "-r"
    pins = [line for line in Path(arguments[1]).read_text().splitlines() if line and not line.startswith("#")]
    assert len(pins) == 1 and pins[0].startswith("torch==") and pins[0].endswith("+cpu")


def test_cpu_torch_comes_from_pytorch_otherwise(environment, monkeypatch):
    calls = install_torch(environment, monkeypatch, gpu=False, configured=False)
    assert calls[1] == (*calls[0], "--index-url", "https://download.pytorch.org/whl/cpu")


def test_gpu_gets_the_default_torch(environment, monkeypatch):
    assert install_torch(environment, monkeypatch, gpu=True) == [("--upgrade", "torch")]


def test_torch_that_serves_is_kept(environment, monkeypatch):
    assert install_torch(environment, monkeypatch, gpu=True, fits=True) == []


def test_this_torch_serves_a_cpu(environment):
    assert environment.torch_fits(sys.executable, environment.Machine("wheels", "3.12.3", gpu=False))


def test_an_interpreter_without_torch_does_not_serve(environment, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert not environment.torch_fits(python, environment.Machine("wheels", "3.12.3", gpu=False))


def test_requirements_leave_out_what_is_there(environment):
    required = ["numpy", "torch>=2.4", "opencv-python-headless"]
    extras = {"test": ["pytest>=7", "numpy"], "cuda": ["flashinfer-python>=0.6"]}
    assert environment.choose_requirements(required, extras, ("test",), has_opencv=True) == ["numpy", "pytest>=7"]
    assert environment.choose_requirements(required, extras, ("cuda",), has_opencv=False) == [
        "flashinfer-python>=0.6", "numpy", "opencv-python-headless"]


def make_venv(folder, version="3.12.3", system="false", runs=True):
    """Return a folder that looks like a virtual environment."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"include-system-site-packages = {system}\nversion = {version}\n")
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexit {0 if runs else 1}\n")
    python.chmod(0o755)
    return folder


def test_environment_is_reused(environment, tmp_path):
    machine = environment.Machine("wheels", "3.12.3", False)
    assert not environment.reusable(tmp_path / "none", machine, {})
    assert environment.reusable(make_venv(tmp_path / "by_hand"), machine, {})
    stamp = {"ros": "wheels", "root": str(REPOSITORY)}
    assert environment.reusable(make_venv(tmp_path / "ours"), machine, stamp)


@pytest.mark.parametrize("venv, ros, stamp", [
    ({"version": "3.11.9"}, "wheels", {}),
    ({"runs": False}, "wheels", {}),
    ({"system": "false"}, "jazzy", {}),
    ({"system": "true"}, "wheels", {"ros": "jazzy"}),
    ({}, "wheels", {"root": "/somewhere/else"}),
])
def test_unfit_environment_is_made_anew_if_it_is_ours(environment, tmp_path, venv, ros, stamp):
    folder = make_venv(tmp_path / "venv", **venv)
    machine = environment.Machine(ros, "3.12.3", False)
    assert not environment.reusable(folder, machine, {"ros": ros, "root": str(REPOSITORY)} | stamp)
    if not stamp:
        with pytest.raises(environment.SetupError, match="remove or rename it"):
            environment.reusable(folder, machine, {})


def test_fingerprint_tells_machines_apart(environment):
    machines = [environment.Machine("wheels", "3.12.3", False), environment.Machine("wheels", "3.12.3", True),
                environment.Machine("wheels", "3.11.2", False), environment.Machine("jazzy", "3.12.3", False, "1.26.4")]
    fingerprints = [environment.fingerprint(machine) for machine in machines]
    assert len(set(fingerprints)) == len(machines)
    assert fingerprints[0] == environment.fingerprint(machines[0])


def test_setup_without_python_says_so_in_one_line():
    environ = {"PATH": os.environ["PATH"], "PYTHON": "/bin/false"}
    done = subprocess.run([REPOSITORY / "scripts" / "setup"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "no Python 3.11 to 3.13 found" in done.stderr


def test_setup_keeps_the_interpreter_that_was_chosen(tmp_path):
    chosen, other = tmp_path / "chosen one", tmp_path / "other"
    for path in (chosen, other):
        path.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo {path.name.split()[0]}\n')
        path.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    setup = shutil.copy(REPOSITORY / "scripts" / "setup", tmp_path / "scripts" / "setup")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"home = {tmp_path}\nexecutable = {chosen}\n")
    environ = {"PATH": os.environ["PATH"]}
    assert subprocess.check_output([setup], env=environ, text=True) == "chosen\n"
    assert subprocess.check_output([setup], env=environ | {"PYTHON": str(other)}, text=True) == "other\n"
    chosen.unlink()
    assert "chosen" not in subprocess.run([setup], env=environ, capture_output=True, text=True).stdout


def test_finished_setup_has_nothing_to_do(environment, monkeypatch, tmp_path):
    monkeypatch.delenv("ROS_DISTRO", raising=False)
    venv = make_venv(tmp_path / "venv")
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "PYTHON", venv / "bin" / "python")
    key = environment.fingerprint(environment.look_at_machine())
    (venv / "lingbot_setup.json").write_text(json.dumps({"key": key, "tf2_msgs": True}))
    monkeypatch.setattr(environment, "_check", lambda *arguments: pytest.fail("something was run"))
    assert environment.main() == 0
