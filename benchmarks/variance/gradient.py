"""The variance of a language model's policy gradient, over all parameters, under each estimator; and the proxy W_t.

    python benchmarks/variance/gradient.py [--rows 256 --prompt-count 4 --sizes 4 8 16]
    python benchmarks/variance/gradient.py --model Qwen/Qwen3-0.6B --prompts train.parquet --reward reward.py \\
        --length 64 --rows 64 --blocks 4 --sizes 4 8 16 --sketch 65536 --at-once 1 --out /tmp/qwen

Without --model: the demo's model after --steps of training with OTB, by a plain loop with the demo's settings
(language_model.py), so that nothing but this script is needed. With it: any causal model of Hugging Face, as it is;
prompts in verl's parquet schema, and a Python file with compute_score as verl calls it. Each of the first distinct
prompts is answered --rows times; group_estimates.py says what is estimated from that. Written: gradient.csv,
gradient_proxy.csv, gradient.png.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from group_estimates import ESTIMATORS, correlations, draw_groups, estimates, largest_shares, moments
from language_model import Prompt, Score, demo_task, demo_training, prompts_of, sample
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from options import STYLES
from table import RESULTS, write_table
from token_gradients import token_gradients

Row = dict[str, Any]
# In the picture; the table has all.
SHOWN = ("rloo", "opo", "otb", "otb_loo", "carry", "token", "token_loo", "otb_true_norms")


def of_hugging_face(name: str, prompts: Path, reward: Path) -> tuple[Any, list[Prompt], Score, Any]:
    """Tokenizer, prompts, reward and model."""
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
    score = runpy.run_path(str(reward))["compute_score"]
    return tokenizer, prompts_of(tokenizer, pandas.read_parquet(prompts)), score, model


def measure(
    point: str, model: Any, tokenizer: Any, prompts: list[Prompt], score: Score, args: argparse.Namespace
) -> tuple[list[Row], list[Row]]:
    """Lines of gradient.csv and gradient_proxy.csv for one state of the model."""
    generator = torch.Generator().manual_seed(args.seed)
    total: dict[int, Any] = {}
    shares: dict[int, list[torch.Tensor]] = {}
    found: dict[tuple[str, int], list[float]] = {}
    rewards, lengths = [], []
    for number, prompt in enumerate(prompts, start=1):
        start = time.monotonic()
        answers = sample(model, tokenizer, [prompt] * args.rows, args.length, score, generator)
        gradients = token_gradients(model, prompt, answers, args.sketch, args.at_once)
        for n in args.sizes:
            groups = draw_groups(args.rows, args.blocks, n, args.times, generator)
            mine = moments(answers, gradients, groups)
            total[n] = total[n] + mine if n in total else mine
            shares.setdefault(n, []).append(largest_shares(answers, groups))
        for key, value in correlations(answers, gradients).items():
            found.setdefault(key, []).append(value)
        rewards.append(answers.rewards)
        lengths.append(answers.mask.double().sum(1))
        print(
            f"{point}: prompt {number} of {len(prompts)}, reward {answers.rewards.mean():.3f}, "
            f"{time.monotonic() - start:.0f} s",
            file=sys.stderr,
        )
    about = {
        "point": point, "prompts": len(prompts), "reward": float(torch.cat(rewards).mean()),
        "reward_sd": float(torch.stack(rewards).std(1).mean()), "length": float(torch.cat(lengths).mean()),
    }  # fmt: skip
    rows = []
    for n in args.sizes:
        figures, share = estimates(total[n]), float(torch.cat(shares[n]).mean())
        for index, estimator in enumerate(ESTIMATORS):
            row = {**about, "n": n, "largest_share": share, "estimator": estimator}
            for name, (value, error) in figures.items():
                row |= {name: float(value[index]), f"{name}_se": float(error[index])}
            rows.append(row)
    proxy = []
    for (what, column), values in sorted(found.items()):
        of = torch.tensor(values)
        proxy.append(
            {
                "point": point, "what": what, "column": column or "all", "prompts": len(values),
                "mean": float(of.mean()), "sd": float(of.std(correction=0)), "min": float(of.min()),
                "max": float(of.max()),
            }
        )  # fmt: skip
    return rows, proxy


def draw(rows: list[Row], proxy: list[Row], path: Path) -> None:
    points = list(dict.fromkeys(row["point"] for row in rows))
    figure = Figure(figsize=(4.4 * len(points), 10.5), layout="constrained")
    axes = figure.subplots(3, len(points), squeeze=False, sharey="row")
    for column, point in enumerate(points):
        top, middle, bottom = axes[:, column]
        mine = [row for row in rows if row["point"] == point]
        sizes = sorted({row["n"] for row in mine})
        for place, estimator in enumerate(SHOWN):
            style = dict(zip(("color", "linestyle", "label"), STYLES[estimator], strict=True))
            line = [row for row in mine if row["estimator"] == estimator]
            x = [size * 1.03 ** (place - 3) for size in sizes]
            for axis, name in ((top, "var_ratio"), (middle, "noise_ratio")):
                values, errors = [row[name] for row in line], [row[f"{name}_se"] for row in line]
                axis.errorbar(x, values, errors, marker="o", markersize=4, capsize=2, **style)
        for axis, name in (
            (top, "Var ÷ Var(group mean)"),
            (middle, "noise: Var/shrink² ÷ that of the group mean"),
        ):
            axis.axhline(1, color="grey", linewidth=0.8, linestyle="--")
            axis.set(xscale="log", xlabel="N, answers a group", title=f"{point}\n{name}" if axis is top else name)
            axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
            axis.set_xticks([], minor=True)
        for what, colour in (("path", "C3"), ("token", "C2")):
            line = [row for row in proxy if (row["point"], row["what"]) == (point, what) and row["column"] != "all"]
            if line:
                x, mean = [row["column"] for row in line], [row["mean"] for row in line]
                spread = [[row["mean"] - row["min"] for row in line], [row["max"] - row["mean"] for row in line]]
                name = "W_t and ‖∇ log π(τ≤t)‖²" if what == "path" else "w_t and ‖∇ log π(a_t)‖²"
                bottom.errorbar(x, mean, spread, color=colour, marker="o", markersize=4, capsize=2, label=name)
        bottom.axhline(0, color="grey", linewidth=0.8)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        bottom.set(xlabel="token t", title="correlation over the answers to a prompt", ylim=(-1.05, 1.05))
    for axis in axes[1]:  # the errors of a ratio of small numbers may reach below 0
        axis.set(yscale="log", ylim=(0.4, 12))
        axis.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    axes[2, 0].legend(fontsize=8)
    figure.suptitle("Bars: standard error (jackknife); at the bottom: least and most over the prompts.")
    figure.savefig(path, dpi=100)


def states(args: argparse.Namespace, model: Any) -> Iterator[tuple[str, Any]]:
    if model is not None:
        yield Path(args.model).name, model
        return
    for step, trained in demo_training(args.steps, args.seed):
        yield f"step {step}", trained


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or a name on the Hugging Face Hub, instead of the demo's model")
    parser.add_argument("--prompts", type=Path, help="with --model: a parquet file in verl's schema")
    parser.add_argument("--reward", type=Path, help="with --model: a Python file with compute_score")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 60, 120], help="of the demo's training")
    parser.add_argument("--prompt-count", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="answers to each prompt")
    parser.add_argument("--blocks", type=int, default=8, help="of answers, for the standard errors")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--times", type=int, default=30, help="how often each block is cut into groups")
    parser.add_argument("--length", type=int, default=8, help="tokens of an answer at most")
    parser.add_argument("--sketch", type=int, default=0, help="numbers kept of a gradient; 0 for all parameters")
    parser.add_argument("--at-once", type=int, default=8, help="backward passes at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.model and not (args.prompts and args.reward):
        parser.error("--model needs --prompts and --reward")
    model = None
    if args.model:
        tokenizer, prompts, score, model = of_hugging_face(args.model, args.prompts, args.reward)
    else:
        tokenizer, prompts, score = demo_task()
    prompts = list({tuple(prompt.tokens): prompt for prompt in prompts}.values())[: args.prompt_count]
    rows: list[Row] = []
    proxy: list[Row] = []
    for point, state in states(args, model):
        for table, lines in zip((rows, proxy), measure(point, state, tokenizer, prompts, score, args), strict=True):
            table += lines
    write_table(rows, args.out / "gradient.csv")
    print()
    write_table(proxy, args.out / "gradient_proxy.csv")
    draw(rows, proxy, args.out / "gradient.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
