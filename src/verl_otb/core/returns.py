"""Reward-to-go."""

from __future__ import annotations

import torch


def reward_to_go(token_level_rewards: torch.Tensor) -> torch.Tensor:
    """G_t = Σ_{j≥t} r_j over the last dimension, without discount.

    Masked tokens are not left out: an outcome reward under a masked token (rejection masks, a row that ends
    on an observation) belongs to every token before it.

    Args:
        token_level_rewards: r_t, shape (..., tokens), any floating dtype.

    Returns:
        G_t, of the same shape and dtype.
    """
    # Summed from the end. total − cumsum would be one pass less, but a reward of −1e8 early in the row would
    # then cost every later return its digits.
    return token_level_rewards.flip(-1).cumsum_(-1).flip(-1)
