"""What OTB adds to a whole training step: the demo through stock verl, OTB and GRPO in turn.

    python benchmarks/variance/cost.py [--runs 2] [--steps 20]

Both on the settings of configs/otb_tiny_cpu.yaml (8 prompts, N = 8), with a learning rate of 0: the model stays as it
is, so both generate answers of the same lengths and every step is the same work. Medians over the steps of verl's own
timers; the first two steps of a run are left out. OTB's own work is in two of them: Σπ² in old_log_prob, the estimator
with its diagnostics in adv. Writes results/cost.csv.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from table import RESULTS, at_least, require_writable, write_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import demo_run

OTB, GRPO = "optimal_token_baseline", "grpo"
OWN = ("old_log_prob", "adv")
PARTS = ("step", "gen", *OWN, "update_actor", "update_weights")
SUMMED = ("otb_ms", "grpo_ms", "added_ms", "added_share_of_step")
# The dump of every step is for `verl-otb report`, not for training.
OVERRIDES = ["actor_rollout_ref.actor.optim.lr=0", "algorithm.otb.dump_dir=null"]

Runs = list[list[dict[str, Any]]]


def rows(found: dict[str, Runs]) -> list[dict[str, Any]]:
    """A line each timer, and one for OTB's own work: what it adds to the timers that it is in."""

    def milliseconds(estimator: str, part: str) -> list[float]:
        """The median of each run."""
        return [1e3 * median(step[f"timing_s/{part}"] for step in run) for run in found[estimator]]

    def overall(estimator: str, part: str) -> float:
        return 1e3 * median(step[f"timing_s/{part}"] for run in found[estimator] for step in run)

    whole = overall(OTB, "step")
    lines = []
    for part in PARTS:
        ours, theirs = overall(OTB, part), overall(GRPO, part)
        lines.append(
            {
                "what": part, "steps_each": sum(map(len, found[OTB])), "otb_ms": round(ours, 1),
                "grpo_ms": round(theirs, 1), "added_ms": round(ours - theirs, 1),
                "added_share_of_step": round((ours - theirs) / whole, 4),
                "otb_runs_ms": _range(milliseconds(OTB, part)), "grpo_runs_ms": _range(milliseconds(GRPO, part)),
            }
        )  # fmt: skip
    own = {name: round(sum(line[name] for line in lines if line["what"] in OWN), 4) for name in SUMMED}
    lines.append({**dict.fromkeys(lines[0], ""), "what": "OTB's own", "steps_each": lines[0]["steps_each"], **own})
    return lines


def _range(values: list[float]) -> str:
    """Least and most of the runs' medians."""
    return f"{min(values):.1f}–{max(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=at_least(1), default=2, help="of each")
    parser.add_argument("--steps", type=at_least(3), default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_writable(args.out)
    with tempfile.TemporaryDirectory() as directory:
        found = demo_run.by_turns((OTB, GRPO), args.runs, args.steps, Path(directory), OVERRIDES)
    write_table(rows(found), args.out / "cost.csv")


if __name__ == "__main__":
    main()
