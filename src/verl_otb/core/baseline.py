"""The baseline of each token column of a prompt group."""

from __future__ import annotations

import torch

# Its bits. See masking.py for why not torch.where.
_INFINITY = torch.tensor(torch.inf, dtype=torch.float64).view(torch.int64).item()


def optimal_baseline(
    returns: torch.Tensor, weights: torch.Tensor, live: torch.Tensor, *, handle_zero_tail: bool = True
) -> torch.Tensor:
    """B_t = Σ_i W_t G_t / Σ_i W_t over the live rows i of each group (arXiv 2602.07078).

    A column whose live weights are all zero takes the plain mean of its live returns. B_t lies in
    [min G_t, max G_t] of the live rows, whatever the rounding.

    Args:
        returns: G_t, shape (groups, rows, columns), float64, 0 where the row is not live.
        weights: W_t ≥ 0, likewise.
        live: int64, −1 (all bits set) where the row has a token in the column, else 0, same shape.
        handle_zero_tail: B = 0 in a column with one live row, so that its advantage is its return. If False
            such a row is its own baseline and its advantage is 0. A group in which one row alone is live
            anywhere has nothing to compare with: B = 0 either way.

    Returns:
        B_t, shape (groups, 1, columns), float64, 0 in columns without a live row.
    """
    live_rows = -live.sum(-2, keepdim=True)
    total_weight = weights.sum(-2, keepdim=True)
    scratch = weights * returns
    weighted_mean = scratch.sum(-2, keepdim=True) / total_weight
    plain_mean = returns.sum(-2, keepdim=True) / live_rows
    baseline = torch.where(total_weight > 0, weighted_mean, plain_mean)

    # Rounding may carry a mean past the values it is the mean of. Where all returns are equal, it would leave
    # advantages of 1e-17 instead of 0. So: the least of G, and of −G, each with ∞ where the row is not live.
    torch.bitwise_not(live, out=scratch.view(torch.int64)).bitwise_and_(_INFINITY)
    lowest = scratch.add_(returns).amin(-2, keepdim=True)
    highest = -scratch.sub_(returns, alpha=2).amin(-2, keepdim=True)
    baseline = baseline.clamp(lowest, highest)

    return baseline.masked_fill(without_peer(live, handle_zero_tail=handle_zero_tail), 0.0)


def without_peer(live: torch.Tensor, *, handle_zero_tail: bool) -> torch.Tensor:
    """The columns whose baseline is 0 for want of another row, (groups, 1, columns). See `optimal_baseline`."""
    live_rows = -live.sum(-2, keepdim=True)
    if handle_zero_tail:
        return live_rows <= 1
    rows_with_tokens = (live.sum(-1, keepdim=True) < 0).sum(-2, keepdim=True)
    return (live_rows == 0) | (rows_with_tokens <= 1)
