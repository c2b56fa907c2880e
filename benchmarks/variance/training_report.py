"""What the runs of training.py show: tables, a picture, and whether N = 4 reached the reward of N = 16.

    python benchmarks/variance/training_report.py [--reward 0.3] [--page docs/evidence.md]

Takes the runs that are there and names those that are missing. Reward is the mean score of a step's answers; all
figures but the gradient norm's are of its mean over the last ten steps. Written to results/: training.csv, a line an
arm; training_n4.csv, each arm at N = 4 against each at the largest N, seed by seed; training.png. With --page also
that page's part on it.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import training
import training_page
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray
from table import RESULTS, spread, write_table
from training import ARMS, Run

WINDOW = 10  # steps
SMALL = 4
NAMES = {"otb": "OTB", "grpo": "GRPO, std off", "rloo": "RLOO", "grpo-std": "GRPO, std on"}
COLOURS = {"otb": "black", "grpo": "#0072b2", "rloo": "#d55e00", "grpo-std": "#009e73"}


@dataclass(frozen=True)
class Curve:
    """A run, a value a step: mean reward, tokens generated so far, gradient norm."""

    reward: NDArray[np.float64]
    tokens: NDArray[np.float64]
    grad_norm: NDArray[np.float64]

    @property
    def smooth(self) -> NDArray[np.float64]:
        """The mean reward of the last ten steps; of as many as there were in the first nine."""
        sums = np.concatenate([np.zeros(1), self.reward.cumsum()])
        last = np.arange(1, len(sums))
        first = np.maximum(last - WINDOW, 0)
        return (sums[last] - sums[first]) / (last - first)

    @property
    def final(self) -> float:
        return float(self.smooth[-1])

    def first_at(self, reward: float) -> int | None:
        """The first step, from 1, whose last ten steps have this mean reward."""
        reached = np.flatnonzero(self.smooth[WINDOW - 1 :] >= reward)
        return int(reached[0]) + WINDOW if len(reached) else None

    def tokens_to(self, reward: float) -> float | None:
        step = self.first_at(reward)
        return None if step is None else float(self.tokens[step - 1])


def read(directory: Path) -> dict[Run, Curve]:
    """The complete runs, in the order of their names."""
    curves = {}
    for path in sorted(directory.glob("*.csv")):
        found = re.fullmatch(r"(.+)-n(\d+)-seed(\d+)", path.stem)
        if not found or found[1] not in ARMS:
            raise ValueError(f"{path}: expected a name like {training.plan()[0].name}.csv")
        with open(path) as file:
            lines = list(csv.DictReader(file))
        columns = (np.array([float(line[name]) for line in lines]) for name in ("reward", "tokens", "grad_norm"))
        curves[Run(found[1], int(found[2]), int(found[3]))] = Curve(*columns)
    steps = {len(curve.reward) for curve in curves.values()}
    if len(steps) > 1:
        raise ValueError(f"{directory}: the runs have different numbers of steps, {sorted(steps)}: not comparable")
    if steps and steps.pop() < WINDOW:
        raise ValueError(f"{directory}: a run has fewer than {WINDOW} steps")
    return curves


def by_arm(curves: dict[Run, Curve]) -> dict[tuple[str, int], list[Curve]]:
    arms = defaultdict(list)
    for run, curve in curves.items():
        arms[run.arm, run.n].append(curve)
    return {key: arms[key] for key in sorted(arms, key=lambda key: (list(ARMS).index(key[0]), key[1]))}


def summary(curves: dict[Run, Curve], reward: float) -> list[dict[str, Any]]:
    """A line an arm; the spread is that over its seeds."""
    return [
        {
            "arm": arm,
            "n": n,
            "seeds": len(runs),
            **spread([run.final for run in runs], "final_reward"),
            "tokens": round(fmean(run.tokens[-1] for run in runs)),
            "reward_to_reach": reward,
            "reached": sum(run.first_at(reward) is not None for run in runs),
            **spread([run.first_at(reward) for run in runs], "steps_to"),
            **spread([run.tokens_to(reward) for run in runs], "tokens_to"),
            **spread([float(run.grad_norm.mean()) for run in runs], "grad_norm"),
        }
        for (arm, n), runs in by_arm(curves).items()
    ]


def small_against_large(curves: dict[Run, Curve]) -> list[dict[str, Any]]:
    """Each arm at N = 4 against each at the largest N, of one seed.

    The reward to reach is the large run's own at its end. `tokens_share` is what the small run had generated when it
    first had that reward, over what the large one had when it first did. `at_equal_tokens` is the reward that the
    large run had when it had generated what the small one did in all.
    """
    large_n = max((run.n for run in curves), default=SMALL)
    rows = []
    for small, ours in curves.items():
        for large, theirs in curves.items():
            if small.n == SMALL and large.n == large_n > SMALL and small.seed == large.seed:
                needed, had = ours.tokens_to(theirs.final), theirs.tokens_to(theirs.final)
                spent = int(np.searchsorted(theirs.tokens, ours.tokens[-1], side="right"))
                rows.append(
                    {
                        "seed": small.seed,
                        "small": small.arm,
                        "large": f"{large.arm}-n{large_n}",
                        "small_final": ours.final,
                        "large_final": theirs.final,
                        "at_equal_tokens": float(theirs.smooth[spent - 1]) if spent else "",
                        "reached_step": ours.first_at(theirs.final) or "",
                        "tokens_share": needed / had if needed and had else "",
                        "all_tokens_share": float(ours.tokens[-1] / theirs.tokens[-1]),
                    }
                )
    return sorted(rows, key=lambda row: (list(ARMS).index(row["small"]), row["large"], row["seed"]))


def pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What small_against_large says, a line each pair of arms; means over the seeds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["small"], row["large"]].append(row)
    return [
        {
            "small": small,
            "large": large,
            "seeds": len(runs),
            "reached": sum(bool(run["reached_step"]) for run in runs),
            **spread([run["tokens_share"] or None for run in runs], "tokens_share"),
            "ended_level": sum(run["small_final"] >= run["large_final"] for run in runs),
            **{
                name: fmean(run[name] or 0.0 for run in runs)
                for name in ("small_final", "large_final", "all_tokens_share", "at_equal_tokens")
            },
        }
        for (small, large), runs in found.items()
    ]


def draw(curves: dict[Run, Curve], path: Path) -> None:
    """A column for each N, OTB at N = 4 in all of them: reward over tokens, gradient norm over steps."""
    arms = by_arm(curves)
    sizes = sorted({n for _, n in arms})
    figure = Figure(figsize=(4.2 * len(sizes), 7.2), layout="constrained")
    axes = figure.subplots(2, len(sizes), squeeze=False, sharey="row", sharex="row")
    for column, size in enumerate(sizes):
        top, bottom = axes[:, column]
        for (arm, n), runs in arms.items():
            if n == size or (arm, n) == ("otb", SMALL):
                label = f"{NAMES[arm]}, N = {n} ({len(runs)} seed{'s' * (len(runs) > 1)})"
                tokens = np.mean([run.tokens for run in runs], axis=0)
                steps = np.arange(1, len(tokens) + 1)
                for axis, x, values in (
                    (top, tokens[WINDOW - 1 :], [run.smooth[WINDOW - 1 :] for run in runs]),
                    (bottom, steps, [run.grad_norm for run in runs]),
                ):
                    axis.plot(x, np.mean(values, axis=0), color=COLOURS[arm], label=label, linewidth=1.4)
                    axis.fill_between(
                        x, np.min(values, axis=0), np.max(values, axis=0), color=COLOURS[arm], alpha=0.15, linewidth=0
                    )
        top.set(title=f"N = {size}", xlabel="tokens generated so far, thousands", xscale="log")
        top.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        top.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}")
        top.xaxis.set_minor_formatter(NullFormatter())
        bottom.set(xlabel="step", yscale="log")
        top.legend(fontsize=8, loc="upper left")
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("mean reward of the last ten steps")
    axes[1, 0].set_ylabel("gradient norm")
    figure.suptitle("Line: mean over seeds. Band: least to most over seeds. All runs have the same steps and prompts.")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=training.RESULTS, help="the folder of the runs' CSVs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--reward", type=float, default=0.3, help="the reward whose steps and tokens are counted")
    parser.add_argument("--page", type=Path, help="a page with the marks of training_page.py, to be brought up to date")
    args = parser.parse_args()
    curves = read(args.runs)
    missing = [run.name for run in training.plan() if run not in curves]
    if not curves:
        parser.error(f"no runs in {args.runs}; make them with benchmarks/variance/training.py")
    lines, rows = summary(curves, args.reward), small_against_large(curves)
    write_table(lines, args.out / "training.csv")
    if rows:
        print()
        write_table(rows, args.out / "training_n4.csv")
    draw(curves, args.out / "training.png")
    if args.page:
        training_page.put(training_page.block(lines, pairs(rows), NAMES, missing), args.page)
    print(f"\n{len(curves)} runs; missing: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
