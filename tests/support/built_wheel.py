"""The wheel of this repository, and an environment that has it alone."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from verl_run import REPOSITORY

# `make env` puts it there where the PATH has none.
UV = path if (path := REPOSITORY / ".uv" / "bin" / "uv").exists() else Path(shutil.which("uv") or "uv")


def build(directory: Path) -> Path:
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", directory, REPOSITORY], check=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    return wheel


def environment_with(wheel: Path, directory: Path) -> Path:
    """The interpreter of a new environment: everything that this one has but this repository, and the wheel."""
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, directory], check=True, timeout=120)
    python = directory / "bin" / "python"
    borrowed = directory / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "verl_otb" not in entry.name:
            (borrowed / entry.name).symlink_to(entry)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
    subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], check=True, timeout=300)
    return python
