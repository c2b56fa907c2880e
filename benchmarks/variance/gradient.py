"""The variance of a language model's policy gradient, over all parameters, under each estimator; and the proxy W_t.

    python benchmarks/variance/gradient.py [--seeds 5 --rows 256 --prompt-count 4 --sizes 4 8 16]
    python benchmarks/variance/gradient.py --model Qwen/Qwen3-0.6B --prompts train.parquet --reward reward.py \\
        --length 64 --rows 64 --blocks 4 --sizes 4 8 16 --sketch 65536 --at-once 1 --out /tmp/qwen

Without --model: the demo's model after --steps of training with OTB, by a plain loop with the demo's settings
(language_model.py), so that nothing but this script is needed; once for each seed. With it: any causal model of Hugging
Face, as it is; prompts in verl's parquet schema, and a Python file with compute_score as verl calls it. Each of the
first distinct prompts is answered --rows times; group_estimates.py says what is estimated from that. Written:
gradient_seeds.csv, all of it, _se being the standard error of the sampled answers; gradient.csv, over the seeds;
gradient_proxy.csv; gradient.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import torch
from group_estimates import ESTIMATORS, correlations, draw_groups, estimates, largest_shares, moments
from language_model import Prompt, Score, demo_task, demo_training, prompts_of, sample
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from options import STYLES
from table import RESULTS, at_least, require_writable, spread, write_table
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
    point: str, seed: int, model: Any, tokenizer: Any, prompts: list[Prompt], score: Score, args: argparse.Namespace
) -> tuple[list[Row], list[Row]]:
    """Lines of gradient_seeds.csv for one state of the model, and the correlations of each prompt."""
    generator = torch.Generator().manual_seed(seed)
    total: dict[int, Any] = {}
    shares: dict[int, list[torch.Tensor]] = {}
    found: list[Row] = []
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
        for (what, column), value in correlations(answers, gradients).items():
            found.append({"point": point, "what": what, "column": column or "all", "value": value})
        rewards.append(answers.rewards)
        lengths.append(answers.mask.double().sum(1))
        print(
            f"seed {seed}, {point}: prompt {number} of {len(prompts)}, reward {answers.rewards.mean():.3f}, "
            f"{time.monotonic() - start:.0f} s",
            file=sys.stderr,
        )
    about = {
        "point": point, "seed": seed, "prompts": len(prompts), "reward": float(torch.cat(rewards).mean()),
        "reward_sd": float(torch.stack(rewards).std(1).mean()), "length": float(torch.cat(lengths).mean()),
    }  # fmt: skip
    rows = []
    for n in args.sizes:
        figures, share = estimates(total[n], n), float(torch.cat(shares[n]).mean())
        for index, estimator in enumerate(ESTIMATORS):
            row = {**about, "n": n, "largest_share": share, "estimator": estimator}
            for name, (value, error) in figures.items():
                row |= {name: float(value[index]), f"{name}_se": float(error[index])}
            rows.append(row)
    return rows, found


def of_seed(seed: int, args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Everything that is measured with one seed; it sets the training, where there is one, and the answers."""
    torch.set_num_threads(1)
    if args.model:
        tokenizer, prompts, score, model = of_hugging_face(args.model, args.prompts, args.reward)
        states = iter([(Path(args.model).name, model)])
    else:
        tokenizer, prompts, score = demo_task()
        states = ((f"step {step}", trained) for step, trained in demo_training(args.steps, seed))
    prompts = list({tuple(prompt.tokens): prompt for prompt in prompts}.values())[: args.prompt_count]
    rows: list[Row] = []
    found: list[Row] = []
    for point, state in states:
        for table, lines in zip(
            (rows, found), measure(point, seed, state, tokenizer, prompts, score, args), strict=True
        ):
            table += lines
    return rows, found


def grouped(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def summary(rows: list[Row]) -> list[Row]:
    """A line a point, N and estimator: means over the seeds, geometric ones of ratios, with the least and the most."""
    return [
        {
            "point": point, "n": n, "estimator": estimator, "seeds": len(of),
            **{name: fmean(row[name] for row in of) for name in ("reward", "length", "largest_share")},
            **spread((row["var_ratio"] for row in of), "var_ratio", geometric_mean),
            **spread((row["shrink"] for row in of), "shrink"),
            **spread((row["noise_ratio"] for row in of), "noise_ratio", geometric_mean),
        }
        for (point, n, estimator), of in grouped(rows, "point", "n", "estimator").items()
    ]  # fmt: skip


def proxy_summary(found: list[Row]) -> list[Row]:
    """A line a point and token: over prompts and seeds."""
    of_all = sorted(grouped(found, "point", "what", "column").items(), key=lambda item: tuple(map(str, item[0])))
    return [
        {
            "point": point, "what": what, "column": column, "values": len(of),
            **spread((row["value"] for row in of), "mean"),
        }
        for (point, what, column), of in of_all
    ]  # fmt: skip


def bars(line: list[Row], name: str) -> tuple[list[float], list[list[float]]]:
    """Values, and how far below and above them the bars reach."""
    values = [row[name] for row in line]
    ends = ([row[f"{name}_{end}"] for row in line] for end in ("min", "max"))
    return values, [[abs(end - value) for end, value in zip(of, values, strict=True)] for of in ends]


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
                axis.errorbar(x, *bars(line, name), marker="o", markersize=4, capsize=2, **style)
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
                x = [row["column"] for row in line]
                name = "W_t and ‖∇ log π(τ≤t)‖²" if what == "path" else "w_t and ‖∇ log π(a_t)‖²"
                bottom.errorbar(x, *bars(line, "mean"), color=colour, marker="o", markersize=4, capsize=2, label=name)
        bottom.axhline(0, color="grey", linewidth=0.8)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        bottom.set(xlabel="token t", title="correlation over the answers to a prompt", ylim=(-1.05, 1.05))
    for axis in axes[:2].flat:
        axis.set(yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    axes[2, 0].legend(fontsize=8)
    figure.suptitle(f"Means over {rows[0]['seeds']} seeds; bars: least to most, at the bottom over the prompts too.")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or a name on the Hugging Face Hub, instead of the demo's model")
    parser.add_argument("--prompts", type=Path, help="with --model: a parquet file in verl's schema")
    parser.add_argument("--reward", type=Path, help="with --model: a Python file with compute_score")
    parser.add_argument("--steps", type=at_least(0), nargs="+", default=[0, 60, 120], help="of the demo's training")
    parser.add_argument("--prompt-count", type=at_least(1), default=4)
    parser.add_argument("--rows", type=at_least(4), default=256, help="answers to each prompt")
    parser.add_argument("--blocks", type=at_least(2), default=8, help="of answers, for the standard errors")
    parser.add_argument("--sizes", type=at_least(2), nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--times", type=at_least(1), default=30, help="how often each block is cut into groups")
    parser.add_argument("--length", type=at_least(1), default=8, help="tokens of an answer at most")
    parser.add_argument(
        "--sketch", type=at_least(0), default=0, help="numbers kept of a gradient; 0 for all parameters"
    )
    parser.add_argument("--at-once", type=at_least(1), default=8, help="backward passes at a time")
    parser.add_argument("--seeds", type=at_least(1), help="trainings of the demo's model, 5 by default; 1 with --model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.model and not (args.prompts and args.reward):
        parser.error("--model needs --prompts and --reward")
    if args.rows % args.blocks or any(args.rows // args.blocks % n for n in args.sizes):
        parser.error(f"--rows {args.rows} are not {args.blocks} blocks of whole groups of {args.sizes}")
    seeds = args.seeds or (1 if args.model else 5)
    require_writable(args.out)
    if seeds == 1:
        parts = [of_seed(0, args)]
    else:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
            parts = list(processes.map(of_seed, range(seeds), [args] * seeds))
    order = grouped([row for rows, _ in parts for row in rows], "point", "n", "estimator")
    rows = [row for of in order.values() for row in of]
    proxy = proxy_summary([row for _, found in parts for row in found])
    write_table(rows, args.out / "gradient_seeds.csv", show=False)
    write_table(proxy, args.out / "gradient_proxy.csv")
    print()
    lines = summary(rows)
    write_table(lines, args.out / "gradient.csv")
    draw(lines, proxy, args.out / "gradient.png")


if __name__ == "__main__":
    main()
