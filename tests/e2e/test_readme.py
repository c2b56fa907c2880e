"""Every command in README.md, as it is written there: run here, or it says here why not."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from verl_run import REPOSITORY

pytestmark = pytest.mark.e2e

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [re.split(r"\s+#", line)[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
NOT_HERE = {
    "make demo": "six minutes; what it runs is in test_demo.py, and below",
    "make test": "this is it",
    "pip install .": "test_wheel.py does it, in an environment of its own",
    'pip install ".[plot]"': "the same, and matplotlib, which is here",
    "bash examples/make_gpu_env.sh": "fetches 4 GB for GPUs",
    ".venv-gpu/bin/python examples/data/prepare_gsm8k_math.py": "needs that environment and the Hub; tests/examples",
    "bash examples/run_qwen3_8b_fsdp.sh": "needs GPUs; test_qwen3_8b.py runs it with a tiny model",
    "bash examples/run_qwen3_8b_tir.sh": "needs GPUs; tests/examples composes it",
}
HERE = [command for command in COMMANDS if command not in NOT_HERE]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where the commands run: a copy of the tracked files, and this environment first on the PATH."""
    clone = tmp_path_factory.mktemp("readme") / "verl-otb"
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, clone / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clone, {**os.environ, "PATH": path, "PYTHON": sys.executable, "RUN": "run", "OUT_DIR": "run"}


def test_there_is_no_other_command():
    assert set(NOT_HERE) < set(COMMANDS)
    assert len(HERE) == 5


@pytest.mark.parametrize("command", HERE)
def test_command(places, command):
    clone, environment = places
    if command.startswith("verl-otb doctor"):  # verl must find a platform here
        environment = {**environment, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "run_tiny_cpu.sh" in command:
        assert "steps                       20\n" in done.stdout
    if "report" in command:
        assert (clone / "run" / "report.html").exists()
