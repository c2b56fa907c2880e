"""docs/doctor.md shows what its commands print: each is run again, as written, in the clone's root."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl_otb.doctor.result import MARKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
SHOWN = re.findall(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", PAGE, flags=re.MULTILINE)
FILES = re.findall(r"^```python\n# (\w+\.py)\n((?:.*\n)*?)```$", PAGE, flags=re.MULTILINE)


def printed(command: str, directory: Path) -> str:
    """What the page's reader sees, in an environment that switches nothing off and names no platform."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "TRITON_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    modules = os.pathsep.join(filter(None, [str(directory), kept.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="ray-") as ray:  # short: Ray's sockets lie there
        environment = {**kept, "PATH": path, "PYTHONPATH": modules, "RAY_TMPDIR": ray}
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    return done.stdout


def checks(output: str) -> list[str]:
    return [line.split()[1] for line in output.splitlines() if line[:1] in MARKS.values()]


def test_the_page_has_a_healthy_one_and_five_things_broken():
    healthy, judged, *broken = (output for _, output in SHOWN)
    assert "✗ " not in "\n".join(healthy.splitlines()[:-1]) + judged
    assert healthy.splitlines()[-1].endswith(" 4 –")
    assert len(broken) >= 5
    assert all(output.startswith("✗ ") for output in broken)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[str(number) for number in range(len(SHOWN))])
def test_as_printed(command, output, tmp_path):
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    found = printed(command, tmp_path)
    if "|" in command:
        assert found == output
    else:  # the facts, the versions and the accelerator are the machine's
        assert checks(found) == checks(output)
        assert found.splitlines()[-1].split()[2] == "0"
