"""The baseline of each token column of a prompt group."""

from __future__ import annotations

import torch


def optimal_baseline(
    returns: torch.Tensor, weights: torch.Tensor, live: torch.Tensor, *, handle_zero_tail: bool = True
) -> torch.Tensor:
    """B_t = Σ_i W_t G_t / Σ_i W_t over the live rows i of each group (arXiv 2602.07078).

    A column whose live weights are all zero takes the plain mean of its live returns. B_t lies in
    [min G_t, max G_t] of the live rows, whatever the rounding.

    Args:
        returns: G_t, shape (groups, rows, columns), float64 for the precision that the tests demand.
        weights: W_t ≥ 0, same shape and dtype.
        live: bool, same shape: the rows that have a token in the column. Values elsewhere are not read.
        handle_zero_tail: B = 0 in a column with one live row, so that its advantage is its return. If False
            such a row is its own baseline and its advantage is 0. A group in which one row alone is live
            anywhere has nothing to compare with: B = 0 either way.

    Returns:
        B_t, shape (groups, 1, columns), 0 in columns without a live row.
    """
    live_rows = live.sum(-2, keepdim=True)
    weights = torch.where(live, weights, 0.0)
    total_weight = weights.sum(-2, keepdim=True)
    weighted_sum = (weights * torch.where(live, returns, 0.0)).sum(-2, keepdim=True)
    plain_sum = torch.where(live, returns, 0.0).sum(-2, keepdim=True)
    baseline = torch.where(total_weight > 0, weighted_sum / total_weight, plain_sum / live_rows)

    # Rounding may carry a mean past the values it is the mean of; where all returns are equal it would leave
    # advantages of 1e-17 instead of 0.
    lowest = torch.where(live, returns, torch.inf).amin(-2, keepdim=True)
    highest = torch.where(live, returns, -torch.inf).amax(-2, keepdim=True)
    baseline = baseline.clamp(lowest, highest)

    if handle_zero_tail:
        no_peer = live_rows <= 1
    else:
        no_peer = (live_rows == 0) | (live.any(-1, keepdim=True).sum(-2, keepdim=True) <= 1)
    return baseline.masked_fill(no_peer, 0.0)
