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


def by_turns(
    estimators: Sequence[str], runs: int, steps: int, directory: Path, overrides: Sequence[str] = ()
) -> dict[str, list[list[dict[str, Any]]]]:
    """`runs` runs of each estimator, in turn, the other way round every other time; each one's metrics by step.

    The first two steps of a run, in which all is loaded and compiled, are left out.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {estimator: [] for estimator in estimators}
    for number in range(runs):
        for estimator in estimators if number % 2 == 0 else reversed(estimators):
            metrics = run(directory / f"{number}-{estimator}", estimator, steps, overrides)
            found[estimator].append(metrics[2:])
    return found


def step_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of every training step, in their order. A validation before the first is left out."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [data for line in lines if "critic/score/mean" in (data := json.loads(line)["data"])]
