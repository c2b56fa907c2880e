"""The old-log-prob pass of verl with OTB against the same pass with GRPO.

    python benchmarks/old_log_prob.py [--runs 3] [--steps 30] [--rounds 9]

"demo": whole runs of examples/run_tiny_cpu.sh, OTB and GRPO in turn; timing_s/old_log_prob as verl logs it, medians
over all steps but the first two of a run. It holds the TransferQueue traffic, which is most of it with so small a
model. "actor": verl's real FSDP2 actor in this process, a two-layer model with a vocabulary of 151,936, the pass with
and without Σπ² in turn on the same batch. Writes old_log_prob.csv to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import demo_run

RESULTS = demo_run.REPOSITORY / "benchmarks" / "results"
OTB, GRPO = "optimal_token_baseline", "grpo"
VOCABULARY = 151_936
LENGTHS = [(64, 64)] * 8


def actor(rounds: int, directory: Path) -> tuple[list[float], list[float]]:
    """Seconds of the pass with Σπ², and without."""
    os.environ["VERL_PLATFORM"] = "cpu"
    sys.path.insert(0, str(demo_run.REPOSITORY / "tests" / "support"))
    sys.path.insert(0, str(demo_run.REPOSITORY / "examples"))
    import make_tiny_task
    from real_worker import log_prob_pass, token_fields, training_worker
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tiny_task.make_tokenizer()
    tokenizer.save_pretrained(directory)
    config = make_tiny_task.make_model(tokenizer, tied_head=True).config.to_dict()
    Qwen3ForCausalLM(Qwen3Config(**{**config, "vocab_size": VOCABULARY})).save_pretrained(directory)
    worker = training_worker(directory)
    fields = token_fields(LENGTHS, VOCABULARY)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for asked, seconds in zip((True, False), times, strict=True):
            start = time.perf_counter()
            log_prob_pass(worker, fields, calculate_entropy=True, otb_sum_pi_squared=asked)
            seconds.append(time.perf_counter() - start)
    return times[0][1:], times[1][1:]


def row(what: str, otb: list[float], grpo: list[float]) -> dict[str, object]:
    ours, theirs = statistics.median(otb), statistics.median(grpo)
    return {
        "what": what, "passes_each": len(otb), "otb_ms": round(1e3 * ours, 1), "grpo_ms": round(1e3 * theirs, 1),
        "otb_over_grpo": round(ours / theirs, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = demo_run.by_turns((OTB, GRPO), arguments.runs, arguments.steps, Path(directory))
        otb, grpo = ([step["timing_s/old_log_prob"] for run in found[name] for step in run] for name in (OTB, GRPO))
        rows = [row("demo", otb, grpo)]
        rows.append(row("actor", *actor(arguments.rounds, Path(directory) / "model")))
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "old_log_prob.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for line in rows:
        print(line)


if __name__ == "__main__":
    main()
