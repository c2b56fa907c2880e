"""The estimator cases of tests/core/estimator_cases.json: loading, poisoning, checking.

A case holds inputs under the names verl passes (`index` is the uid of each row), `handle_zero_tail`, the right
`advantages_otb`, `advantages_tir` and `returns` (at unmasked tokens), and `why`. The truth was computed by the
definition, one loop an index, in float64. Cases with `"check": "baseline_in_range"` carry no advantages:
rounding decides them, the range does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "core" / "estimator_cases.json").read_text(encoding="utf-8")
)
NAMES = [case["name"] for case in CASES]
# The estimator's name in verl → its alignment, and the key of its truth.
ESTIMATORS = {
    "optimal_token_baseline": ("position", "advantages_otb"),
    "tir_optimal_token_baseline": ("token", "advantages_tir"),
}
UNREAD_WHERE_MASKED = ("old_log_probs", "sum_pi_squared", "rollout_is_weights")


def tensors(case: dict[str, Any], *, poisoned: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The case's inputs as verl passes them: tensors by name, `rollout_is_weights` only where it has some.

    poisoned: NaN under every masked log-prob, Σπ² and ρ.
    """
    mask = torch.tensor(case["response_mask"])
    inputs = {"token_level_rewards": torch.tensor(case["token_level_rewards"], dtype=dtype), "response_mask": mask}
    for name in UNREAD_WHERE_MASKED:
        if name in case:
            values = torch.tensor(case[name], dtype=dtype)
            inputs[name] = values.masked_fill(mask == 0, torch.nan) if poisoned else values
    return inputs


def check(case: dict[str, Any], estimator: str, advantages: torch.Tensor, returns: torch.Tensor) -> None:
    """Assert that an estimator's result is right for the case, to 1e-5 absolute."""
    align, truth = ESTIMATORS[estimator]
    live = torch.tensor(case["response_mask"]).bool()
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.isfinite().all()
    assert returns.isfinite().all()
    assert (advantages[~live] == 0).all()
    assert (returns[~live] == 0).all()
    torch.testing.assert_close(returns[live].double(), torch.tensor(case["returns"]).double()[live], rtol=0, atol=1e-5)
    if case.get("check") == "baseline_in_range":
        assert_baseline_in_range(advantages, returns, live, case["index"], align)
    else:
        expected = torch.tensor(case[truth]).double()[live]
        torch.testing.assert_close(advantages[live].double(), expected, rtol=0, atol=1e-5)


def assert_baseline_in_range(
    advantages: torch.Tensor, returns: torch.Tensor, live: torch.Tensor, index: Any, align: str
) -> None:
    """Assert min G ≤ G − A ≤ max G over the live rows of each group and column that has two of them."""
    rows_of: dict[Any, list[int]] = {}
    for row, uid in enumerate(index):
        rows_of.setdefault(uid, []).append(row)
    column = live.cumsum(-1) - 1 if align == "token" else torch.arange(live.shape[1]).expand(live.shape)
    baseline = returns.double() - advantages.double()
    for rows in rows_of.values():
        for t in range(live.shape[1]):
            here = live[rows] & (column[rows] == t)
            values = returns[rows][here].double()
            if len(values) < 2:
                continue
            slack = 1e-6 * (1 + values.abs().max())  # of float32 advantages and returns
            assert (baseline[rows][here] >= values.min() - slack).all()
            assert (baseline[rows][here] <= values.max() + slack).all()
