"""Runs of examples/run_tiny_cpu.sh for the benchmarks, and what verl logged in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "examples" / "run_tiny_cpu.sh"


def start(
    directory: Path,
    estimator: str,
    steps: int,
    overrides: Sequence[str] = (),
    task: Path | None = None,
    stdout: Any = None,
) -> subprocess.Popen[bytes]:
    """Start a run in `directory`. SIGTERM ends it with all of its processes.

    Args:
        overrides: of verl's configuration.
        task: what make_tiny_task.py made; one of its own by default.
        stdout: for the script's few lines; verl's own go to `directory`/train.log.
    """
    variables = {"ADV_ESTIMATOR": estimator, "STEPS": str(steps), "OUT_DIR": str(directory), "PYTHON": sys.executable}
    if task:
        variables |= {"MODEL_PATH": f"{task}/model", "TRAIN_FILE": f"{task}/train.parquet"}
        variables |= {"VAL_FILE": f"{task}/val.parquet"}
    return subprocess.Popen(["bash", SCRIPT, *overrides], env={**os.environ, **variables}, stdout=stdout)


def run(directory: Path, estimator: str, steps: int, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run to the end; the metrics of every step."""
    process = start(directory, estimator, steps, overrides)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status:
        raise RuntimeError(f"{SCRIPT.name} ended with status {status}; its output is above")
    return step_metrics(directory)


def step_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of every training step, in their order. A validation before the first is left out."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [data for line in lines if "critic/score/mean" in (data := json.loads(line)["data"])]
