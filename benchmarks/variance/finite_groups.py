"""The gradient of a group of N answers: its variance, its bias, and both together, with the shipped estimator.

    python benchmarks/variance/finite_groups.py [--seeds 8 --tokens 5 --rows 6000]

groups.py says what is measured and how; the policies are the first of exact.py's, and N = inf is its result. `rows`
answers a policy and group size are sampled; groups that are fewer in all are enumerated (those of 2 where answers end:
their _se is 0). Printed and written to
results/finite_groups.csv: means over the policies of a setting (geometric means of noise and rloo_size), the least
shrink, in how many policies the noise is less than with the group's mean, and what chance in the sampled groups makes
of a figure (_se, one standard error). The picture is results/finite_groups.png.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from groups import (
    ESTIMATORS,
    Quality,
    compare,
    every_group,
    number_of_groups,
    pooled,
    quality,
    rloo_size,
    sampled_groups,
)
from options import STYLES
from policies import make_policy, make_rewards
from population import Population
from table import RESULTS, at_least, require_writable, write_table

KINDS = ("tree", "mlp")
SETTINGS = (("fixed", "binary"), ("ends", "binary"), ("ends", "likely"), ("ends", "length"))
SHARPNESS = (1.0, 2.0)
SIZES = (2, 4, 8, 16, 32, 64)
# In the picture; the table has all.
SHOWN = ("mean", "rloo", "otb", "otb_no_zero_tail", "otb_loo", "carry", "carry_loo", "token", "token_loo")
BATCHES = 5  # of sampled groups, to see what chance does

Measured = list[Quality]  # with all groups, then without each batch of them


def measure(population: Population, size: int, rows: int, seed: int) -> dict[str, Measured]:
    if number_of_groups(population.policy, size) <= rows // size:
        exact = compare(population, every_group(population.policy, size))
        return {name: [quality(population, size, found)] for name, found in exact.items()}
    rng = np.random.default_rng([seed, size])
    groups = rows // size // BATCHES
    batches = [compare(population, sampled_groups(population.policy, size, groups, rng)) for _ in range(BATCHES)]
    found = {}
    for name in ESTIMATORS:
        every = [batch[name] for batch in batches]
        subsets = [every, *(every[:k] + every[k + 1 :] for k in range(BATCHES))]
        found[name] = [quality(population, size, pooled(subset)) for subset in subsets]
    return found


def limits(population: Population) -> dict[str, Measured]:
    """What the estimators become with ever larger groups."""
    found = {name: population.variance(baseline) for name, baseline in population.baselines().items()}
    limit = {name: name.split("_")[0].replace("rloo", "mean") for name in ESTIMATORS}
    return {name: [Quality(found[limit[name]] / found["mean"], 1.0, 1.0)] for name in ESTIMATORS}


def mean_and_error(policies: list[list[float]]) -> tuple[float, float]:
    """Jackknife over the batches of each policy. The policies are given, and not a sample of anything."""
    values = [np.array(policy) for policy in policies]
    chance = [(1 - 1 / BATCHES) * np.square(x[1:] - x[1:].mean()).sum() for x in values if len(x) > 1]
    return float(np.mean([x[0] for x in values])), float(np.sqrt(np.sum(chance)) / len(values))


def summary(policies: list[Measured], rivals: list[Measured]) -> dict[str, Any]:
    """One row's figures, of an estimator on the policies of a setting. `rivals`: the group's mean on the same."""
    row: dict[str, Any] = {}
    for name in ("variance", "shrink"):
        row[name], row[f"{name}_se"] = mean_and_error([[getattr(q, name) for q in policy] for policy in policies])
    row["shrink_least"] = min(policy[0].shrink for policy in policies)
    row["cosine"] = float(np.mean([policy[0].cosine for policy in policies]))
    noise, error = mean_and_error([[math.log(q.noise) for q in policy] for policy in policies])
    row |= {"noise": math.exp(noise), "noise_se": math.exp(noise) * error}
    pairs = zip(policies, rivals, strict=True)
    row["noise<mean"] = sum(policy[0].noise < rival[0].noise * (1 - 1e-6) for policy, rival in pairs)
    return row | {"policies": len(policies)}


def of_setting(sharpness: float, length: str, reward: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table for one setting."""
    print(f"{sharpness:g} {length} {reward}", file=sys.stderr)
    populations = []
    for kind, seed in itertools.product(KINDS, range(args.seeds)):
        policy = make_policy(kind, seed, tokens=args.tokens, ends=length == "ends", sharpness=sharpness)
        populations.append(Population(policy, make_rewards(reward, policy, seed)))
    found: dict[float, list[dict[str, Measured]]] = {
        size: [measure(population, size, args.rows, i) for i, population in enumerate(populations)] for size in SIZES
    }
    found[math.inf] = [limits(population) for population in populations]
    rows = []
    for (size, policies), name in itertools.product(found.items(), ESTIMATORS):
        measured = [policy[name] for policy in policies]
        row = {"sharpness": sharpness, "length": length, "reward": reward, "N": size, "estimator": name}
        row |= summary(measured, [policy["mean"] for policy in policies])
        row["rloo_size"] = math.inf
        if size < math.inf:
            as_good = [rloo_size(p, int(size), m[0].noise) for p, m in zip(populations, measured, strict=True)]
            row["rloo_size"] = float(np.exp(np.mean(np.log(as_good))))
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    panels = {
        ("variance", 1.0): "N·Var ÷ Var(true mean)",
        ("shrink", 1.0): "shrink ⟨Eĝ, g⟩/‖g‖²",
        ("noise", 1.0): "noise: N·Var/shrink² ÷ Var(true mean)",
        ("noise", 2.0): "noise, logits' standard deviation 2",
    }
    figure, axes = plt.subplots(
        len(panels), len(SETTINGS), figsize=(17, 16), sharex=True, sharey="row", layout="constrained"
    )
    for column, (length, reward) in enumerate(SETTINGS):
        for axis, (field, sharpness) in zip(axes[:, column], panels, strict=True):
            for name in SHOWN:
                colour, line, label = STYLES[name]
                key = (sharpness, length, reward, name)
                points = [r for r in rows if (r["sharpness"], r["length"], r["reward"], r["estimator"]) == key]
                values, errors = ([p[f"{field}{end}"] for p in points if p["N"] in SIZES] for end in ("", "_se"))
                axis.errorbar(SIZES, values, errors, color=colour, linestyle=line, marker=".", label=label)
            if field == "noise":
                axis.set_yscale("log", base=2)
                axis.set_yticks([0.5, 0.7, 1, 1.4, 2, 4, 8, 16], ["0.5", "0.7", "1", "1.4", "2", "4", "8", "16"])
            axis.set_xscale("log", base=2)
            axis.set_xticks(SIZES, [str(n) for n in SIZES])
            axis.axhline(1, color="black", linewidth=0.8)
            axis.grid(alpha=0.3)
        axes[-1, column].set_xlabel("answers in a group, N")
        ending = "answers end at an end token" if length == "ends" else "answers of one length"
        axes[0, column].set_title(f"{ending}\nreward: {reward}")
    for axis, label in zip(axes[:, 0], panels.values(), strict=True):
        axis.set_ylabel(label)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.suptitle(
        f"Gradients of groups of N answers, means over {rows[0]['policies']} random policies each; low noise is good"
    )
    figure.savefig(path, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least(1), default=8, help=f"for each of {KINDS}")
    parser.add_argument("--tokens", type=at_least(2), default=5, help="of an answer at most")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.rows < (least := 4 * BATCHES * SIZES[-1]):
        parser.error(f"--rows {args.rows}: at least {least}, four groups of {SIZES[-1]} in each batch")
    require_writable(args.results)
    settings = [(sharpness, *of, args) for sharpness, of in itertools.product(SHARPNESS, SETTINGS)]
    # Spawned, not forked: torch has threads. Each setting draws its own numbers, so the order of work is no matter.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        rows = [row for found in processes.map(of_setting, *zip(*settings, strict=True)) for row in found]
    write_table(rows, args.results / "finite_groups.csv")
    draw(rows, args.results / "finite_groups.png")


if __name__ == "__main__":
    main()
