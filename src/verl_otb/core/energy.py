"""Token energy and its running sum, the weights of the Optimal Token Baseline (arXiv 2602.07078)."""

from __future__ import annotations

import torch


@torch.no_grad()
def token_energy(log_probs: torch.Tensor, sum_pi_squared: torch.Tensor) -> torch.Tensor:
    """w_t = ‖∂ log π(a_t) / ∂ logits‖² = 1 − 2π_t + Σπ², the squared norm of the score of the token.

    Computed as (1 − π)² + max(Σπ² − π², 0): the sampled token's share and that of all others. Only rounding in
    Σπ² can make the second negative, and is cut off; so w_t is never negative.

    Args:
        log_probs: log π_t of the sampled tokens, any shape. A rounding above 0 counts as 0.
        sum_pi_squared: Σπ² over the vocabulary, same shape, in [1/V, 1].

    Returns:
        w_t in [0, 2], same shape and dtype, without a gradient: it weighs, and is not trained on.
    """
    return token_energy_(log_probs.clone(), sum_pi_squared.clone())


def token_energy_(log_probs: torch.Tensor, sum_pi_squared: torch.Tensor) -> torch.Tensor:
    """`token_energy` in the memory of its arguments: w_t takes that of `sum_pi_squared`."""
    pi = log_probs.clamp_(max=0).exp_()
    energy = sum_pi_squared.addcmul_(pi, pi, value=-1).clamp_(min=0)
    pi.sub_(1)
    return energy.addcmul_(pi, pi)


@torch.no_grad()
def realized_energy(token_energy: torch.Tensor, importance_weights: torch.Tensor | None = None) -> torch.Tensor:
    """W_t = Σ_{j≤t} ρ_j² w_j over the last dimension.

    ρ_j² stands inside the sum because each token's term of verl's loss carries its own ρ_j. (The docstring of
    verl's own estimator writes ρ²(t)·W_t; its code does what is done here.)

    Args:
        token_energy: w_t, shape (..., tokens), 0 on masked tokens.
        importance_weights: ρ_t, same shape, finite on masked tokens too; None for 1 everywhere.

    Returns:
        W_t, same shape and dtype.
    """
    return realized_energy_(token_energy.clone(), importance_weights)


def realized_energy_(token_energy: torch.Tensor, importance_weights: torch.Tensor | None = None) -> torch.Tensor:
    """`realized_energy` in the memory of `token_energy`."""
    return weighted_energy_(token_energy, importance_weights).cumsum_(-1)


def weighted_energy_(token_energy: torch.Tensor, importance_weights: torch.Tensor | None = None) -> torch.Tensor:
    """ρ_t² w_t, the terms of `realized_energy`, in the memory of `token_energy`."""
    if importance_weights is not None:
        token_energy.mul_(importance_weights).mul_(importance_weights)
    return token_energy
