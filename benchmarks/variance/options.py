"""The estimators that verl_otb's options give, by the names that the tables have for them."""

from __future__ import annotations

from typing import Any

# With a reward at the end, rows of one weight that stay in after their end give the
# group's mean reward, and without the own row RLOO's.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "mean": {"weight": "uniform", "finished_rows": "carry"},
    "rloo": {"weight": "uniform", "finished_rows": "carry", "leave_one_out": True},
    "live": {"weight": "uniform"},
    "otb": {},
    "otb_no_zero_tail": {"handle_zero_tail": False},
    "otb_loo": {"leave_one_out": True},
    "token": {"weight": "token"},
    "token_no_zero_tail": {"weight": "token", "handle_zero_tail": False},
    "token_loo": {"weight": "token", "leave_one_out": True},
    "carry": {"finished_rows": "carry"},
    "carry_loo": {"finished_rows": "carry", "leave_one_out": True},
}
