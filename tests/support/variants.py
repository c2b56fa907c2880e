"""Every combination of the estimator's keywords."""

from __future__ import annotations

import itertools
from typing import Any

from random_batches import ALIGNMENTS


def _combined(**choices: Any) -> list[dict[str, Any]]:
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]


# What is not verl's, the defaults first.
VARIANTS = _combined(
    leave_one_out=[False, True], weight=["realized", "token", "uniform"], finished_rows=["drop", "carry"]
)
METHODS = [verls | ours for verls in _combined(align=ALIGNMENTS, handle_zero_tail=[True, False]) for ours in VARIANTS]


def named(method: dict[str, Any]) -> str:
    """For the ids of tests."""
    return "-".join(f"{value}" if isinstance(value, str) else name * value or "not" for name, value in method.items())
