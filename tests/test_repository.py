"""What the repository says of itself: the README's table, the lock, the size of files, paths."""

import os
import subprocess
from pathlib import Path

import pytest
from built_wheel import UV

from verl_otb.integration.hooks import as_markdown

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines()]


def test_readme_has_the_hook_table():
    assert as_markdown() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_source_file_is_long(file):
    assert len(file.read_text().splitlines()) < 300


def test_lock_names_no_host_and_fits_pyproject():
    assert "://" not in (ROOT / "uv.lock").read_text()
    command = str(UV)
    # What is locked is compared with what pyproject.toml asks for; nothing is fetched for what has not changed.
    done = subprocess.run([command, "lock", "--check"], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_no_path_of_a_machine():
    here = str(ROOT)
    for file in tracked():
        if file.is_file() and file.suffix not in (".png", ".lock"):
            assert here not in file.read_text(errors="replace"), file
