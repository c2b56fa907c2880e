"""Print the table that run_tiny_cpu.sh ends with.

    python examples/summarize.py OUT_DIR

OUT_DIR has metrics.jsonl (verl's `file` logger) and usage.json (supervise.py).
"""

import json
import sys
from pathlib import Path
from statistics import fmean

REWARD = "critic/score/mean"
WINDOW = 10


def mean_of(steps: list[dict], key: str) -> str:
    """The mean of `key` over the steps that have it: a GRPO run has no baseline."""
    values = [step[key] for step in steps if key in step]
    return f"{fmean(values):.4f}" if values else "-"


def table(out_dir: Path) -> str:
    lines = [json.loads(line)["data"] for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if REWARD in line]  # a validation before the first step is a line of its own
    usage = json.loads((out_dir / "usage.json").read_text())
    window = max(1, min(WINDOW, len(steps) // 2))
    minutes, seconds = divmod(round(usage["wall_seconds"]), 60)
    rows = {
        f"reward, first {window} steps": mean_of(steps[:window], REWARD),
        f"reward, last {window} steps": mean_of(steps[-window:], REWARD),
        "steps": f"{len(steps)}",
        "tokens": f"{sum(step['perf/total_num_tokens'] for step in steps):,}",
        "mean baseline": mean_of(steps, "otb/baseline/mean"),
        "mean realized energy": mean_of(steps, "otb/realized_energy/mean"),
        "wall time": f"{minutes} min {seconds} s",
        "peak memory, all processes": f"{usage['peak_bytes'] / 2**30:.1f} GiB",
        "log of the run": f"{out_dir / 'train.log'}",
        "metrics of each step": f"{out_dir / 'metrics.jsonl'}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/summarize.py OUT_DIR")
    print(table(Path(sys.argv[1])))
