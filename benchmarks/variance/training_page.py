"""The part of docs/evidence.md that tells of the training runs which are there, between its two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARKS = ("<!-- made by training_report.py --page -->\n", "<!-- until here -->\n")
HEAD = [
    "",
    "N",
    "seeds",
    "final reward (least to most)",
    "tokens, thousands",
    "seeds that reached {reward:g}",
    "steps to it",
    "thousand tokens to it",
    "gradient norm, mean",
]


def block(summary: list[dict[str, Any]], names: dict[str, str], said: list[str], missing: list[str]) -> str:
    """The text between the marks.

    Args:
        summary: a line an arm, of `training_report.summary`.
        names: of the arms.
        said: sentences of `training_report.statements`.
        missing: names of the runs that are not there.
    """
    there = sum(line["seeds"] for line in summary)
    arms = ", ".join(f"{line['arm']}-n{line['n']} {line['seeds']}" for line in summary)
    first = f"**{there} of {there + len(missing)} runs are there** (arm and number of seeds: {arms})."
    if missing:
        first += f" No figure below is more than a first look until all are; missing: {', '.join(missing)}."
    lines = [[name.format(reward=summary[0]["reward_to_reach"]) for name in HEAD], ["---"] * len(HEAD)]
    lines += [
        [
            names[line["arm"]],
            str(line["n"]),
            str(line["seeds"]),
            _spread(line, "final_reward", ".3f"),
            f"{line['tokens'] / 1000:.1f}",
            str(line["reached"]),
            _spread(line, "steps_to", ".0f"),
            _spread(line, "tokens_to", ".1f", 1000),
            _spread(line, "grad_norm", ".3f"),
        ]
        for line in summary
    ]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{first}\n\n{table}\n" + "".join(f"- {sentence}\n" for sentence in said)


def put(text: str, page: Path) -> None:
    """Write it into the page, in the place of what was between the marks."""
    before, start, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise ValueError(f"{page} has no lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    page.write_text(f"{before}{start}{text}{end}{after}")


def _spread(line: dict[str, Any], name: str, digits: str, unit: float = 1) -> str:
    if line[name] == "":
        return "–"
    mean, least, most = (format(line[key] / unit, digits) for key in (name, f"{name}_min", f"{name}_max"))
    return f"{mean} ({least} to {most})"
