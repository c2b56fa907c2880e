"""Our two estimators against the two that verl brings: time and extra memory, on the same tensors in one run.

    python benchmarks/estimators.py [--rows 1024 --tokens 8192 --group-size 8 --rounds 9 --threads 1 2]

Both are called by the signature that verl's trainer uses. The inputs are such that verl's estimators accept
them. Runs alternate, so that a busy machine is busy for both; the ratio is the median of each round's ratio.
Memory is the growth of the resident set to its peak during one call, results included, in a process of its own.
Writes benchmarks/results/estimators.csv and prints it.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import itertools
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# verl's estimators have to be verl's own: a plugin would have taken their names.
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
os.environ.pop("VERL_USE_EXTERNAL_MODULES", None)

import numpy as np
import torch

from verl_otb.core import optimal_token_advantages

ALIGN = {"optimal_token_baseline": "position", "tir_optimal_token_baseline": "token"}
KINDS = ("ragged", "shuffled", "holes")
RESULTS = Path(__file__).parent / "results" / "estimators.csv"


def batch(kind: str, rows: int, tokens: int, group_size: int) -> dict[str, Any]:
    """Ragged rows with an outcome reward on the last token; kind "holes": a quarter of the tokens masked, in
    spans; kind "shuffled": the groups interleaved."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(rows, tokens, generator=generator).square()
    pi = log_probs.exp()
    others = torch.rand(rows, tokens, generator=generator) * (1 - pi).square()
    lengths = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=generator)
    positions = torch.arange(tokens)
    mask = (positions < lengths).long()
    if kind == "holes":
        mask *= (positions // 64 + torch.arange(rows)[:, None]) % 4 != 0
        mask.scatter_(1, lengths - 1, 1)
    rewards = torch.zeros(rows, tokens).scatter_(1, lengths - 1, torch.rand(rows, 1, generator=generator).round())
    index = np.array([f"prompt-{row // group_size}" for row in range(rows)], dtype=object)
    if kind == "shuffled":
        index = index[torch.randperm(rows, generator=generator).numpy()]
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "old_log_probs": log_probs,
        "sum_pi_squared": pi.square() + others,
        "index": index,
    }


def implementations(estimator: str) -> dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    stock = get_adv_estimator_fn(estimator)
    assert stock.__module__.startswith("verl."), f"{estimator} is not verl's own: {stock.__module__}"
    return {"verl": stock, "verl_otb": lambda **inputs: optimal_token_advantages(**inputs, align=ALIGN[estimator])}


def times(estimator: str, inputs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    functions = implementations(estimator)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function(**inputs)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}  # less the warm-up


def peak_extra_bytes(estimator: str, name: str, kind: str, size: tuple[int, int, int]) -> int:
    """Meant for a fresh process. Linux."""
    function = implementations(estimator)[name]
    function(**batch("ragged", 16, 64, 8))
    inputs = batch(kind, *size)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before = _peak()
    result = function(**inputs)
    after = _peak()
    del result
    return after - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--csv", type=Path, default=RESULTS)
    args = parser.parse_args()
    size = (args.rows, args.tokens, args.group_size)
    table = []
    for kind in KINDS:
        inputs = batch(kind, *size)
        for estimator, threads in itertools.product(ALIGN, args.threads):
            torch.set_num_threads(threads)
            seconds = times(estimator, inputs, args.rounds)
            ratios = [a / b for a, b in zip(seconds["verl"], seconds["verl_otb"], strict=True)]
            row = {"estimator": estimator, "batch": kind, "threads": threads}
            row |= {f"{name}_ms": round(1e3 * statistics.median(values), 1) for name, values in seconds.items()}
            table.append(row | {"times_faster": round(statistics.median(ratios), 2)})
    del inputs

    copy = 4 * args.rows * args.tokens
    calls = [(estimator, name, kind, size) for estimator in ALIGN for name in ("verl", "verl_otb") for kind in KINDS]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = dict(zip(calls, pool.starmap(peak_extra_bytes, calls, chunksize=1), strict=True))
    for row, name in itertools.product(table, ("verl", "verl_otb")):
        row[f"{name}_copies"] = round(peaks[row["estimator"], name, row["batch"], size] / copy, 2)

    args.csv.parent.mkdir(exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    print(f"verl {version('verl')}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{args.rows} rows × {args.tokens} tokens, groups of {args.group_size}; medians of {args.rounds} rounds;")
    print(f"copies: peak extra memory in float32 copies of the batch, {copy / 2**20:.0f} MiB each\n")
    for values in [list(table[0]), *(row.values() for row in table)]:
        print("{:<28}{:<10}{:>8}{:>9}{:>13}{:>14}{:>13}{:>17}".format(*values))


if __name__ == "__main__":
    main()
