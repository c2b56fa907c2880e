"""The demo as a user runs it, short. That its reward climbs: `make demo`."""

import os
import subprocess
import sys

import pytest
from verl_run import REPOSITORY

pytestmark = pytest.mark.e2e


def test_demo(tmp_path):
    """From another directory, with a relative OUT_DIR, another estimator, and an override."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "ADV_ESTIMATOR": "tir_optimal_token_baseline",
        "STEPS": "2",
        "OUT_DIR": "out",
        "TIMEOUT": "300",
    }
    demo = REPOSITORY / "examples" / "run_tiny_cpu.sh"
    run = subprocess.run(
        [demo, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    _, _, table = run.stdout.partition("\n\n")
    rows = dict(row.split("  ", 1) for row in table.splitlines())
    assert rows["steps"].strip() == "2"
    assert float(rows["mean realized energy"]) > 0
    assert float(rows["reward, last 1 steps"]) >= 0
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 2
    # It ends with the pictures of the run, from the groups that it dumped.
    assert rows["pictures of the run"].strip() == str(tmp_path / "out" / "report.html")
    assert {path.name for path in (tmp_path / "out" / "dump").iterdir()} == {"step_1.npz", "step_2.npz"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "One prompt group" in page
    assert "The responses, each token as dark as its energy" in page
    assert "Not in this report" not in page
    assert (tmp_path / "out" / "report.png").stat().st_size > 50_000
