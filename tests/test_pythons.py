"""Every Python that pyproject.toml allows: its syntax, and where torch is there for it the core and kernel tests.

`make env` has one Python. For another, make an environment with torch, numpy, packaging, wrapt, pytest, pytest-timeout
and hypothesis and name its interpreter: VERL_OTB_PYTHONS=…/bin/python:…/bin/python.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.10", "3.11", "3.12"]
WITH_TORCH = [path for path in os.environ.get("VERL_OTB_PYTHONS", "").split(os.pathsep) if path]


def test_these_are_all():
    (line,) = [
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("requires-python")
    ]
    allowed = SpecifierSet(line.partition("=")[2].strip(' "'))
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}.5" in allowed] == PYTHONS


@pytest.mark.parametrize("version", PYTHONS)
def test_every_file_compiles(version, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no python{version} on this machine")
    command = [python, "-m", "compileall", "-q", str(ROOT / "src"), str(ROOT / "tests")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob(f"*cpython-{version.replace('.', '')}.pyc"))


@pytest.mark.parametrize("python", WITH_TORCH or [None])
def test_core_and_kernels(python):
    if python is None:
        pytest.skip("VERL_OTB_PYTHONS names no interpreter; this one runs tests/core and tests/kernels as they are")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout


def interpreter(version: str) -> str | None:
    """An interpreter of this version: this one, or one that the PATH or pyenv has."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")):
        # A shim on the PATH may have no version behind it.
        if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return str(python)
    return None
