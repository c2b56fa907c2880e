"""The one harness of the end-to-end tests: stock `python -m verl.trainer.main_ppo` on the tiny task."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 3


@dataclass(frozen=True)
class TinyTask:
    """What examples/make_tiny_task.py makes, and its reward."""

    model: Path
    train: Path
    val: Path
    reward: Path = REPOSITORY / "examples" / "arithmetic_reward.py"

    @classmethod
    def make(cls, directory: Path, *options: str) -> "TinyTask":
        script = REPOSITORY / "examples" / "make_tiny_task.py"
        subprocess.run([sys.executable, script, directory, *options], check=True, timeout=120)
        return cls(directory / "model", directory / "train.parquet", directory / "val.parquet")

    def overrides(self) -> list[str]:
        return [
            f"actor_rollout_ref.model.path={self.model}",
            f"data.train_files={self.train}",
            f"data.val_files={self.val}",
            f"reward.custom_reward_function.path={self.reward}",
        ]


@dataclass(frozen=True)
class VerlRun:
    """A run that has ended, and all its processes with it.

    `returncode` is 124 if it took longer than its timeout. `metrics` has one dict a training step, as verl logged
    them, with the step under "step". `directory` is where it ran, `seconds` its wall time.
    """

    returncode: int
    log: str
    metrics: list[dict[str, Any]]
    directory: Path
    seconds: float

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.splitlines()[-lines:])


# Small and quick: 3 steps of 4 prompts with 4 answers each.
FAST = [
    f"trainer.total_training_steps={STEPS}",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]

# verl's experimental trainers look for verl's defaults below the working directory.
OTHER_MAIN = "hydra.searchpath=[pkg://verl.trainer.config]"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
    # Every process's own line, not "repeated 3x across cluster".
    "RAY_DEDUP_LOGS": "0",
}


def run_verl(
    *overrides: str,
    task: TinyTask,
    directory: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 450,
    log_path: Path | None = None,
    expect_success: bool = True,
    main: str = "verl.trainer.main_ppo",
    python: str | Path = sys.executable,
    ray_address: str | None = None,
) -> VerlRun:
    """Train on `task` with configs/otb_tiny_cpu.yaml, FAST and `overrides`; returns when every process has ended.

    Args:
        overrides: Hydra overrides; they come last, so they win.
        task: model, data and reward.
        directory: the working directory; it gets the metrics, the log and Hydra's outputs.
        env: variables on top of this process's and of ENVIRONMENT.
        timeout: seconds, after which the whole process tree is killed and `returncode` is 124.
        log_path: where stdout and stderr go; `directory`/run.log by default.
        expect_success: fail with the end of the log unless the run exits 0.
        main: the module to run; another than verl.trainer.main_ppo needs OTHER_MAIN among its overrides.
        python: the interpreter that it, and so every process of the run, has.
        ray_address: a Ray cluster that is there already. Its nodes have not this process's environment: ENVIRONMENT
            and `env` go to them as the job's runtime environment, as a user would send them.

    Runs beside one another do not meet: each has its own Ray, with its own temporary directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log_path = log_path or directory / "run.log"
    metrics_path = directory / "metrics.jsonl"
    # Not in `directory`: Ray's sockets lie there, and a socket's path may have 107 characters at most.
    ray_dir = tempfile.mkdtemp(prefix="ray-")
    variables = {**ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(metrics_path), **(env or {})}
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / "supervise.py"),
        f"--timeout={timeout}",
        "--",
        *(str(python), "-m", main),
        *("--config-dir", str(REPOSITORY / "configs"), "--config-name", "otb_tiny_cpu"),
        *task.overrides(),
        *FAST,
        *([f"+ray_kwargs.ray_init._temp_dir={ray_dir}"] if ray_address is None else _join(ray_address, variables)),
        *overrides,
    ]
    environment = {**os.environ, **variables}
    start = time.monotonic()
    try:
        with log_path.open("w") as log:
            returncode = subprocess.run(
                command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            ).returncode
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
    lines = metrics_path.read_text().splitlines() if metrics_path.exists() else []
    metrics = [{"step": line["step"], **line["data"]} for line in map(json.loads, lines)]
    run = VerlRun(returncode, log_path.read_text(errors="replace"), metrics, directory, time.monotonic() - start)
    if expect_success:
        assert run.returncode == 0, f"verl ended with {run.returncode}; the end of {log_path}:\n{run.tail()}"
    return run


def _join(address: str, variables: Mapping[str, str]) -> list[str]:
    """Overrides with which a run joins a Ray cluster and brings its variables to every node."""
    ray_init = "ray_kwargs.ray_init"
    return [
        f"+{ray_init}.address={address}",
        f"~{ray_init}.object_store_memory",  # the nodes have theirs
        *(f'+{ray_init}.runtime_env.env_vars.{name}="{value}"' for name, value in variables.items()),
    ]
