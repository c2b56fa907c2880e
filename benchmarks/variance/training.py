"""The demo's task through stock verl: OTB at N = 4 against GRPO and RLOO at N = 4, 8, 16, three seeds each.

    python benchmarks/variance/training.py [--only 'otb-*' grpo-n16-seed0] [--limit-minutes 60] [--list]
    python benchmarks/variance/training_report.py

A run is examples/run_tiny_cpu.sh with the settings of configs/otb_tiny_cpu.yaml (minutes on two cores). It leaves
results/training/ARM-nN-seedS.csv, when it is complete and not before; a run whose CSV is there is skipped, so the
command can be stopped at any time (Ctrl-C, SIGTERM) and given again. N is the number of answers to a prompt
(rollout.n). The steps, the eight prompts of each step and the learning rate are the same for every arm and every N,
so a run with N = 4 generates about a quarter of the tokens of one with N = 16. A seed sets the model's first weights,
the order of the prompts and vLLM's sampler: all arms of one seed start from the same model and see the same prompts.
vLLM batches requests as they arrive, so a run given again comes out near the first, not equal to it.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import at_least, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import demo_run

RESULTS = Path(__file__).resolve().parent / "results" / "training"
LOGS = demo_run.REPOSITORY / "runs" / "variance-training"
PROMPTS = 8  # a step
ARMS = {
    "otb": ("optimal_token_baseline", []),
    "grpo": ("grpo", ["algorithm.norm_adv_by_std_in_grpo=False"]),
    "rloo": ("rloo", []),
    "grpo-std": ("grpo", ["algorithm.norm_adv_by_std_in_grpo=True"]),
}
# The most telling first: whoever stops half-way then has a whole comparison of fewer seeds.
ORDER = [
    ("otb", 4), ("grpo", 4), ("rloo", 4), ("grpo", 8), ("grpo", 16),
    ("rloo", 16), ("grpo-std", 16), ("grpo-std", 4), ("rloo", 8), ("grpo-std", 8),
    ("grpo", 32), ("rloo", 32), ("grpo-std", 32),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    arm: str
    n: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-n{self.n}-seed{self.seed}"

    def csv(self, results: Path) -> Path:
        return results / f"{self.name}.csv"


def plan(seeds: int = 3, largest: int = 16) -> list[Run]:
    """All runs, seed by seed."""
    return [Run(arm, n, seed) for seed in range(seeds) for arm, n in ORDER if n <= largest]


def overrides(run: Run) -> list[str]:
    return [
        *ARMS[run.arm][1],
        f"actor_rollout_ref.rollout.n={run.n}",
        f"actor_rollout_ref.rollout.seed={run.seed}",
        f"data.train_batch_size={PROMPTS}",
        f"data.seed={run.seed}",
        "trainer.test_freq=20",
    ]


def row(step: int, metrics: dict[str, Any], rows: int, tokens: int) -> dict[str, Any]:
    """A line of the CSV. `tokens` are those generated before this step, `rows` the answers of a step."""
    validation = [value for key, value in metrics.items() if key.startswith("val-") and key.endswith("/reward/mean@1")]
    return {
        "step": step,
        "reward": f"{metrics['critic/score/mean']:.6g}",
        "validation": f"{validation[0]:.6g}" if validation else "",
        "tokens": tokens + round(metrics["response_length/mean"] * rows),
        "grad_norm": f"{metrics['actor/grad_norm']:.6g}",
        "gradient_power": f"{metrics['otb/gradient_power']:.6g}" if "otb/gradient_power" in metrics else "",
    }


def write(path: Path, metrics: Sequence[dict[str, Any]], rows: int) -> None:
    """The run's CSV, whole or not at all."""
    lines: list[dict[str, Any]] = []
    for step, found in enumerate(metrics, start=1):
        lines.append(row(step, found, rows, lines[-1]["tokens"] if lines else 0))
    write_csv(lines, path, lineterminator="\n")


class Job:
    """A run under way, in a directory of its own that goes when it ends."""

    def __init__(self, run: Run, steps: int) -> None:
        self.run, self.steps, self.start = run, steps, time.monotonic()
        self.directory = Path(tempfile.mkdtemp(prefix=f"{run.name}-"))
        task = self.directory / "task"
        maker = demo_run.REPOSITORY / "examples" / "make_tiny_task.py"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([sys.executable, maker, task, "--seed", str(run.seed)], check=True, **quiet)
        estimator = ARMS[run.arm][0]
        self.process = demo_run.start(self.directory, estimator, steps, overrides(run), task, sys.stderr)
        say(f"{run.name}: started, pid {self.process.pid}")

    def finish(self, results: Path) -> None:
        """Keep the CSV of a run that ended well, else its log."""
        minutes = (time.monotonic() - self.start) / 60
        metrics = demo_run.step_metrics(self.directory) if self.process.returncode == 0 else []
        if len(metrics) == self.steps:
            write(self.run.csv(results), metrics, PROMPTS * self.run.n)
            say(f"{self.run.name}: complete after {minutes:.1f} minutes")
        else:
            LOGS.mkdir(parents=True, exist_ok=True)
            log = LOGS / f"{self.run.name}.log"
            shutil.copy(self.directory / "train.log", log)
            say(f"{self.run.name}: FAILED after {minutes:.1f} minutes, status {self.process.returncode}; see {log}")
        self.remove()

    def remove(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # the script ends its whole tree, then itself
            self.process.wait()
            say(f"{self.run.name}: stopped, to be run again from its first step")
        shutil.rmtree(self.directory, ignore_errors=True)


def train(queue: list[Run], results: Path, steps: int, jobs: int, limit_minutes: float) -> None:
    end = time.monotonic() + 60 * limit_minutes
    running: list[Job] = []
    try:
        while queue or running:
            if time.monotonic() > end:
                say(f"{limit_minutes:g} minutes are over; {len(queue) + len(running)} runs are left")
                return
            while queue and len(running) < jobs:
                running.append(Job(queue.pop(0), steps))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                job.finish(results)
            time.sleep(1)
    finally:
        for job in running:
            job.remove()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of runs, with wildcards")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--largest", type=int, default=16, choices=(4, 8, 16, 32), metavar="N")
    parser.add_argument("--steps", type=at_least(1), default=120)
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at a time; each takes 5 GiB and two cores")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="say what is missing, run nothing")
    args = parser.parse_args()
    chosen = [run for run in plan(args.seeds, args.largest) if any(fnmatch.fnmatch(run.name, p) for p in args.only)]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)} matches no run; names are like {plan()[0].name}")
    there = [run for run in chosen if run.csv(args.results).exists()]
    for path in (run.csv(args.results) for run in there):
        if (steps := len(path.read_text().splitlines()) - 1) != args.steps:
            parser.error(f"{path} is of {steps} steps, not of {args.steps}: give another --results")
    queue = [run for run in chosen if run not in there]
    say(f"{len(chosen) - len(queue)} of {len(chosen)} runs are there, {len(queue)} to go")
    if args.list:
        print("\n".join(run.name for run in queue))
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # passes through `finally`
    train(queue, args.results, args.steps, args.jobs, args.limit_minutes)


if __name__ == "__main__":
    main()
