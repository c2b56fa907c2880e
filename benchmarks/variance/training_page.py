"""The part of docs/evidence.md that tells of the training runs which are there, between its two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARKS = ("<!-- made by training_report.py --page -->\n", "<!-- until here -->\n")
ARMS = [
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
PAIRS = [
    "N = 4",
    "against",
    "final reward",
    "ended at or above it",
    "was there at some time",
    "with this share of its tokens",
    "share of all its tokens",
    "it at equal tokens",
]


def block(summary: list[dict[str, Any]], pairs: list[dict[str, Any]], names: dict[str, str], missing: list[str]) -> str:
    """The text between the marks.

    Args:
        summary: a line an arm, of `training_report.summary`.
        pairs: a line each pair of arms, of `training_report.pairs`.
        names: of the arms.
        missing: names of the runs that are not there.
    """
    there = sum(line["seeds"] for line in summary)
    first = f"**{there} of {there + len(missing)} runs are there.**"
    if missing:
        first += f" No figure below is more than a first look until all are; missing: {', '.join(missing)}."
    arms = [
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
    against = [
        [
            names[pair["small"]],
            "{}, N = {}".format(names[pair["large"].rpartition("-n")[0]], pair["large"].rpartition("-n")[2]),
            f"{pair['small_final']:.3f} against {pair['large_final']:.3f}",
            f"{pair['ended_level']} of {pair['seeds']}",
            f"{pair['reached']} of {pair['seeds']}",
            _spread(pair, "tokens_share", ".2f"),
            f"{pair['all_tokens_share']:.2f}",
            f"{pair['at_equal_tokens']:.3f}",
        ]
        for pair in pairs
    ]
    head = [name.format(reward=summary[0]["reward_to_reach"]) for name in ARMS]
    return "\n".join([f"{first}\n", _table(head, arms), _table(PAIRS, against)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


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
    return mean if least == most else f"{mean} ({least} to {most})"
