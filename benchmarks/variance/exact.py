"""The exact variance of the policy gradient under each baseline, with true expectations: no sampling anywhere.

    python benchmarks/variance/exact.py [--seeds 200 --words 3 --tokens 5]

Every seed is a random policy with random rewards (policies.py); population.py says what the baselines are. Printed and
written to results/exact.csv: Var/Var(mean), the mean over the seeds (median where it says so), and in how many seeds
one baseline has a larger variance than another. The picture is results/exact.png.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from policies import KINDS, REWARDS, Array, make_policy, make_rewards
from population import BASELINES, Population
from table import RESULTS, at_least, require_writable, write_table

SHARPNESS = (1.0, 2.0)
LENGTHS = {"fixed": False, "ends": True}
SHOWN = ("opo", "path", "scalar", "live", "otb", "carry", "token", "optimum")
DUELS = (
    ("otb", "mean"),
    ("otb", "path"),
    ("otb", "scalar"),
    ("otb", "carry"),
    ("otb", "live"),
    ("carry", "mean"),
    ("carry", "path"),
    ("carry", "scalar"),
    ("token", "mean"),
    ("token", "otb"),
)
ROUNDING = 1e-9  # relative; a tie is nobody's loss

Setting = tuple[str, float, str, str]  # length, sharpness, reward, policy


def variances(seeds: int, words: int, tokens: int) -> dict[Setting, Array]:
    """Of each setting: the variance, (seeds, baselines)."""
    found: dict[Setting, list[list[float]]] = {}
    for length, sharpness, kind in itertools.product(LENGTHS, SHARPNESS, KINDS):
        print(f"{length} {sharpness:g} {kind}", file=sys.stderr)
        for seed in range(seeds):
            policy = make_policy(kind, seed, words=words, tokens=tokens, ends=LENGTHS[length], sharpness=sharpness)
            population = None
            for reward in REWARDS:
                if reward == "length" and length == "fixed":
                    continue
                population = Population(policy, make_rewards(reward, policy, seed))
                values = [population.variance(baseline) for baseline in population.baselines().values()]
                found.setdefault((length, sharpness, reward, kind), []).append(values)
    order = itertools.product(LENGTHS, SHARPNESS, REWARDS, KINDS)
    return {setting: np.array(found[setting]) for setting in order if setting in found}


def summary(variance: Array) -> dict[str, Any]:
    """One setting's part of the table."""
    ratios = dict(zip(BASELINES, (variance / variance[:, [BASELINES.index("mean")]]).T, strict=True))
    row: dict[str, Any] = {"none_median": float(np.median(ratios["none"]))}
    row |= {name: float(ratios[name].mean()) for name in SHOWN}
    row["otb_worst"] = float(ratios["otb"].max())
    for name, other in DUELS:
        row[f"{name}>{other}"] = int((ratios[name] > ratios[other] * (1 + ROUNDING)).sum())
    return row


def draw(found: dict[Setting, Array], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = {
        "opo": "length-weighted number (OPO)",
        "path": "whole-path weight W(τ), one number",
        "scalar": "best one number",
        "live": "mean of the live rows",
        "otb": "OTB",
        "carry": "OTB, finished rows carried on",
        "token": "per-token weight w_t",
        "optimum": "best per position",
    }
    figure, axes = plt.subplots(2, 2, figsize=(15, 9), sharey="row", layout="constrained")
    for (length, sharpness), axis in zip(itertools.product(LENGTHS, SHARPNESS), axes.flat, strict=True):
        settings = [setting for setting in found if setting[:2] == (length, sharpness)]
        places = [1.2 * (i // len(KINDS)) + i for i in range(len(settings))]
        ratios = [found[s] / found[s][:, [BASELINES.index("mean")]] for s in settings]
        otb = [np.quantile(r[:, BASELINES.index("otb")], [0.05, 0.95]) for r in ratios]
        axis.vlines(places, *zip(*otb, strict=True), color="C3", alpha=0.2, linewidth=9, label="OTB, 90 % of seeds")
        for name, marker, colour in zip(
            SHOWN, "sDvx^o*_", ("C7", "C0", "C9", "C4", "C3", "C1", "C2", "k"), strict=True
        ):
            means = [r[:, BASELINES.index(name)].mean() for r in ratios]
            axis.plot(places, means, marker, color=colour, label=names[name], markersize=14 if marker == "_" else 7)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(places, [s[3] for s in settings], rotation=30)
        for i in range(0, len(settings), len(KINDS)):
            middle = places[i] + (len(KINDS) - 1) / 2
            axis.text(middle, 1.3, f"reward: {settings[i][2]}", ha="center", va="top", fontweight="bold")
        ending = "answers end at an end token" if LENGTHS[length] else "answers of one length"
        axis.set_title(f"{ending}; logits' standard deviation {sharpness:g}")
        axis.set_ylim(0.0 if LENGTHS[length] else 0.5, 1.32)
        axis.grid(axis="y", alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("Var of the gradient ÷ Var with the mean reward")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    seeds = len(next(iter(found.values())))
    figure.suptitle(
        f"Exact variance by baseline, means over {seeds} random policies (below 1 is better than the mean)\n"
        "rewards: a fair coin (binary), N(0, 1) (gaussian), sure answers are right (likely), long ones are (length)"
    )
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least(1), default=200)
    parser.add_argument("--words", type=at_least(2), default=3, help="with the one that ends an answer")
    parser.add_argument("--tokens", type=at_least(2), default=5, help="of an answer at most")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_writable(args.results)
    found = variances(args.seeds, args.words, args.tokens)
    keys = ("length", "sharpness", "reward", "policy")
    rows = [dict(zip(keys, setting, strict=True)) | summary(found[setting]) for setting in found]
    write_table(rows, args.results / "exact.csv")
    draw(found, args.results / "exact.png")


if __name__ == "__main__":
    main()
