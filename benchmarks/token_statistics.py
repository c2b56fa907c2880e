"""The three statistics against verl's own functions, as its FSDP engine calls them, on the same tensors.

    python benchmarks/token_statistics.py [--tokens 1024] [--rounds 5] [--growth 1024 2048 4096 8192 16384]
    python benchmarks/token_statistics.py --only-plot

Every round times each contender once, one after another, and ratios are taken within a round: so a busy machine
disturbs both sides. Printed are medians over the rounds. Peak memory is the process's own, one call in a process of
its own. Writes token_statistics.csv and token_statistics_growth.csv (.png with matplotlib) to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # verl's functions have to be verl's own

import torch
from torch import Tensor
from torch.nn.functional import linear

from verl_otb.kernels import compiled, linear_token_statistics, token_statistics
from verl_otb.kernels import linear as chunked
from verl_otb.kernels.streamed import chunks

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 151_936
HIDDEN_TOKENS, WIDTH = 2_048, 1_024


def stock(logits: Tensor, labels: Tensor, otb: bool = True, entropy: Callable[[Tensor], Tensor] | None = None) -> None:
    """The calls of verl 0.9.1's FSDPEngineWithLMHead.prepare_model_outputs, in its order."""
    from verl.utils import torch_functional as verl_F

    if otb:
        verl_F.calculate_sum_pi_squared_from_logits(logits)
    (entropy or verl_F.entropy_from_logits)(logits)
    verl_F.logprobs_from_logits(logits=logits, labels=labels, inplace_backward=False)


def compiled_entropy() -> Callable[[Tensor], Tensor]:
    from verl.utils import torch_functional as verl_F

    return torch.compile(verl_F.entropy_from_logits, dynamic=True)


def bare_product(hidden: Tensor, weight: Tensor) -> None:
    """The same chunks of logits as linear_token_statistics makes, and nothing done with them."""
    elements = chunked.CHUNK_ON_CPU // hidden.element_size()
    for rows, across in chunks(len(hidden), len(weight), chunked.ROWS_ON_CPU, elements):
        for columns in across:
            linear(hidden[rows], weight[columns])


def product_in_verl_chunks(hidden: Tensor, weight: Tensor) -> None:
    """As verl's fused torch backend multiplies: 512 tokens by the whole head."""
    for top in range(0, len(hidden), 512):
        hidden[top : top + 512] @ weight.t()


def inputs(contender: str, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (tokens,))
    if contender in FROM_HIDDEN:
        hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16).normal_()
        return hidden, torch.empty(VOCABULARY, WIDTH, dtype=torch.bfloat16).normal_(std=3 / WIDTH**0.5), labels
    return torch.empty(tokens, VOCABULARY, dtype=torch.bfloat16).normal_(std=3), labels


def streamed_eagerly(logits: Tensor, labels: Tensor) -> None:
    """What a machine without a C++ compiler gets."""
    compiled.failed = True
    token_statistics(logits, labels)
    compiled.failed = False


FROM_LOGITS: dict[str, Callable[..., object]] = {
    "token_statistics": lambda logits, labels: token_statistics(logits, labels),
    "token_statistics, no compiler": streamed_eagerly,
    "verl: log-prob, entropy, Σπ²": lambda logits, labels: stock(logits, labels),
    "verl: log-prob, entropy": lambda logits, labels: stock(logits, labels, otb=False),
}
FROM_HIDDEN: dict[str, Callable[..., object]] = {
    "linear_token_statistics": lambda hidden, weight, labels: linear_token_statistics(hidden, weight, labels),
    "bare product, same chunks": lambda hidden, weight, labels: bare_product(hidden, weight),
    "bare product, verl's chunks": lambda hidden, weight, labels: product_in_verl_chunks(hidden, weight),
}


CONTENDERS = {**FROM_LOGITS, **FROM_HIDDEN}


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rounds_of(
    calls: dict[str, Callable[..., object]], tensors: tuple[Tensor, ...], rounds: int
) -> dict[str, list[float]]:
    with torch.no_grad():
        for call in calls.values():
            call(*tensors)  # warm up, compile
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(seconds(lambda call=call: call(*tensors)))
    return times


def peak_mib(contender: str, tokens: int) -> float:
    """Of one call, in a process of its own, over what the process held before."""
    command = [sys.executable, __file__, "--peak", contender, "--tokens", str(tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(contender: str, tokens: int) -> None:
    tensors = inputs(contender, tokens)
    few = [tensor[:128] for tensor in tensors]
    if contender in FROM_HIDDEN:
        few[1] = tensors[1]
    with torch.no_grad():
        CONTENDERS[contender](*few)  # loads libraries, compiles
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        before = resident("VmRSS:")
        CONTENDERS[contender](*tensors)
    print(resident("VmHWM:") - before)


def resident(line: str) -> float:
    return int(Path("/proc/self/status").read_text().split(line)[1].split()[0]) / 1024


def write(name: str, rows: list[dict[str, object]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    print(f"\n{name}")
    for row in [dict(zip(widths, widths, strict=True)), *rows]:
        print("  ".join(str(row[key]).ljust(width) for key, width in widths.items()))


def table(contenders: dict[str, Callable[..., object]], ours: str, tokens: int, rounds: int) -> list[dict[str, object]]:
    times = rounds_of(contenders, inputs(ours, tokens), rounds)
    rows = []
    for name, values in times.items():
        ratios = [value / own for value, own in zip(values, times[ours], strict=True)]
        peak = peak_mib(name, tokens) if name in CONTENDERS else float("nan")
        rows.append({
            "what": name, "tokens": tokens, "vocabulary": VOCABULARY, "rounds": rounds,
            "threads": torch.get_num_threads(), "ms_least": round(1e3 * min(values), 1),
            "ms_median": round(1e3 * statistics.median(values), 1),
            "times_ours_median": round(statistics.median(ratios), 2),
            "times_ours_least": round(min(ratios), 2), "times_ours_most": round(max(ratios), 2),
            "extra_peak_MiB": round(peak, 1),
        })  # fmt: skip
    return rows


def growth(sizes: list[int], rounds: int) -> list[dict[str, object]]:
    logits, labels = inputs("token_statistics", max(sizes))
    token_statistics(logits[:128], labels[:128])
    times: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    for _ in range(rounds):
        for tokens in sizes:
            few = logits[:tokens], labels[:tokens]
            times[tokens].append(seconds(lambda few=few: token_statistics(*few)))
    del logits, few  # the processes that measure memory make their own
    return [
        {
            "tokens": tokens, "logits_MiB": tokens * VOCABULARY * 2 >> 20, "threads": torch.get_num_threads(),
            "ms_median": round(1e3 * statistics.median(values), 1), "ms_least": round(1e3 * min(values), 1),
            "us_per_token_least": round(1e6 * min(values) / tokens, 1),
            "extra_peak_MiB": round(peak_mib("token_statistics", tokens), 1),
        }
        for tokens, values in times.items()
    ]  # fmt: skip


def plot() -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    with open(RESULTS / "token_statistics_growth.csv") as file:
        rows = list(csv.DictReader(file))
    tokens = [int(row["tokens"]) for row in rows]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axis, key, label in zip(axes, ("ms_least", "extra_peak_MiB"), ("ms", "extra peak MiB"), strict=True):
        axis.plot(tokens, [float(row[key]) for row in rows], marker="o")
        axis.set(xlabel=f"tokens (× {VOCABULARY:,} bfloat16 logits)", ylabel=label)
        axis.set_xticks(tokens, [f"{count >> 10}k" for count in tokens])
    axes[0].plot([0, tokens[-1]], [0, float(rows[-1]["ms_least"])], "k:", label="proportional")
    axes[1].axhline(64, color="k", linestyle=":", label="what is promised")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "token_statistics_growth.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", type=int, nargs="*", default=[1_024, 2_048, 4_096, 8_192, 16_384])
    parser.add_argument("--only-plot", action="store_true", help="draw the growth again from its CSV")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return print_peak(arguments.peak, arguments.tokens)
    if arguments.only_plot:
        return plot()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    entropy = compiled_entropy()
    contenders = {
        **FROM_LOGITS,
        "verl: log-prob, compiled entropy, Σπ²": lambda logits, labels: stock(logits, labels, entropy=entropy),
        "verl: log-prob, compiled entropy": lambda logits, labels: stock(logits, labels, False, entropy),
    }
    rows = table(contenders, "token_statistics", arguments.tokens, arguments.rounds)
    rows += table(FROM_HIDDEN, "linear_token_statistics", HIDDEN_TOKENS, max(1, arguments.rounds // 2))
    write("token_statistics.csv", rows)
    if arguments.growth:
        grown = growth(arguments.growth, 5)
        write("token_statistics_growth.csv", grown)
        plot()


if __name__ == "__main__":
    main()
