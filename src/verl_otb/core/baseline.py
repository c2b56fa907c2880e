"""The baseline of each token column of a prompt group."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Its bits. See masking.py for why not torch.where.
_INFINITY = torch.tensor(torch.inf, dtype=torch.float64).view(torch.int64).item()


def optimal_baseline(
    returns: torch.Tensor,
    weights: torch.Tensor,
    live: torch.Tensor,
    *,
    handle_zero_tail: bool = True,
    leave_one_out: bool = False,
) -> torch.Tensor:
    """B_t = Σ_i W_t G_t / Σ_i W_t over the live rows i of each group (arXiv 2602.07078).

    A column whose live weights are all zero takes the plain mean of its live returns. B_t lies in
    [min G_t, max G_t] of the live rows, whatever the rounding.

    Args:
        returns: G_t, shape (groups, rows, columns), float64, 0 where the row is not live.
        weights: W_t ≥ 0, likewise.
        live: int64, −1 (all bits set) where the row takes part in the column, else 0, same shape.
        handle_zero_tail: B = 0 in a column with one live row, so that its advantage is its return. If False
            such a row is its own baseline and its advantage is 0. A group in which one row alone is live
            anywhere has nothing to compare with: B = 0 either way.
        leave_one_out: each row has a baseline of its own, from the other live rows of the column alone, in the range of
            their returns. Without any, B = 0, whatever `handle_zero_tail` says.

    Returns:
        B_t, shape (groups, 1, columns), with `leave_one_out` (groups, rows, columns), float64, 0 in columns without a
        live row.
    """
    total, least = (total_of_others, _least_of_others) if leave_one_out else (_total, _least)
    live_rows = -total(live)
    total_weight = total(weights)
    scratch = weights * returns
    weighted_mean = total(scratch) / total_weight
    plain_mean = total(returns) / live_rows
    baseline = torch.where(total_weight > 0, weighted_mean, plain_mean)

    # Rounding may carry a mean past the values it is the mean of. Where all returns are equal, it would leave
    # advantages of 1e-17 instead of 0. So: the least of G, and of −G, each with ∞ where the row is not live.
    torch.bitwise_not(live, out=scratch.view(torch.int64)).bitwise_and_(_INFINITY)
    lowest = least(scratch.add_(returns))
    highest = -least(scratch.sub_(returns, alpha=2))
    baseline = baseline.clamp(lowest, highest)

    if leave_one_out:
        return baseline.masked_fill(live_rows == 0, 0.0)
    return baseline.masked_fill(without_peer(live, handle_zero_tail=handle_zero_tail), 0.0)


def without_peer(live: torch.Tensor, *, handle_zero_tail: bool) -> torch.Tensor:
    """The columns whose baseline is 0 for want of another row, (groups, 1, columns). See `optimal_baseline`."""
    live_rows = -live.sum(-2, keepdim=True)
    if handle_zero_tail:
        return live_rows <= 1
    rows_with_tokens = (live.sum(-1, keepdim=True) < 0).sum(-2, keepdim=True)
    return (live_rows == 0) | (rows_with_tokens <= 1)


def _total(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-2, keepdim=True)


def _least(values: torch.Tensor) -> torch.Tensor:
    return values.amin(-2, keepdim=True)


def total_of_others(values: torch.Tensor) -> torch.Tensor:
    """For each row the sum over the other rows."""
    # Not the sum of all less the row's own: a row that outweighs the others would take all their digits along.
    return _of_others(values, lambda part: part.cumsum(-2), torch.add, 0)


def _least_of_others(values: torch.Tensor) -> torch.Tensor:
    return _of_others(values, lambda part: part.cummin(-2).values, torch.minimum, torch.inf)


def _of_others(
    values: torch.Tensor,
    accumulate: Callable[[torch.Tensor], torch.Tensor],
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    of_none: float,
) -> torch.Tensor:
    """For each row what the rows before it and those after it accumulate to, joined."""
    none = values.new_full((*values.shape[:-2], 1, values.shape[-1]), of_none)
    if values.shape[-2] == 1:
        return none
    before = torch.cat([none, accumulate(values[..., :-1, :])], -2)
    after = torch.cat([accumulate(values[..., 1:, :].flip(-2)).flip(-2), none], -2)
    return join(before, after)
