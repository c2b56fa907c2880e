"""The estimators that verl_otb's options give, by the names that the tables have for them; how pictures show them."""

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

# Colour, line, label. Colours stand for the weight and the finished rows, dashes for a baseline without the own row.
STYLES = {
    "mean": ("C7", "-", "group mean, own row in"),
    "rloo": ("C7", "--", "RLOO"),
    "opo": ("C0", "-", "OPO: mean weighted by length"),
    "otb": ("C3", "-", "OTB (default: zero tail)"),
    "otb_no_zero_tail": ("C3", ":", "OTB, handle_zero_tail=false"),
    "otb_loo": ("C3", "--", "OTB, leave_one_out"),
    "otb_true_norms": ("C4", "-", "OTB by true norms, no proxy"),
    "carry": ("C1", "-", "OTB, finished_rows=carry"),
    "carry_loo": ("C1", "--", "OTB, carry and leave_one_out"),
    "token": ("C2", "-", "weight=token"),
    "token_loo": ("C2", "--", "weight=token, leave_one_out"),
}
