"""The Optimal Token Baseline as a whole: from verl's tensors to advantages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from verl_otb.core.baseline import optimal_baseline
from verl_otb.core.checks import Inputs, all_good, check_shapes, first_fault
from verl_otb.core.energy import realized_energy, token_energy
from verl_otb.core.groups import group_blocks, group_ids
from verl_otb.core.returns import reward_to_go
from verl_otb.errors import InputError

Align = Literal["position", "token"]

# Tokens of a block, whose float64 scratch has to stay in a core's cache (16 rows of 8,192), or, on an
# accelerator, to be worth its kernel launches.
_BLOCK_TOKENS = {"cpu": 2**17}
_BLOCK_TOKENS_ELSEWHERE = 2**20


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """What the estimator computed, each float32 of shape (rows, tokens) and 0 on masked tokens.

    Attributes:
        advantages: A_t = G_t − B_t.
        returns: G_t, the reward-to-go.
        baseline: B_t.
        realized_energy: W_t, with ρ² inside.
        token_energy: w_t, without ρ².
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    baseline: torch.Tensor
    realized_energy: torch.Tensor
    token_energy: torch.Tensor


def optimal_token_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    index: Any,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    align: Align = "position",
    handle_zero_tail: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns. Arguments and errors are those of `optimal_token_baseline`, which also gives
    what lies between; this takes less memory: no more than the two results and a block of scratch."""
    inputs = Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    advantages, returns = _estimate(inputs, index, align, handle_zero_tail, results=2)
    return advantages, returns


def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    index: Any,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    align: Align = "position",
    handle_zero_tail: bool = True,
) -> OptimalTokenBaseline:
    """The Optimal Token Baseline (arXiv 2602.07078) of a batch.

    A_t = G_t − B_t with B_t = Σ_i W_t G_t / Σ_i W_t over the rows i of the prompt group that have a token in
    the column, G_t = Σ_{j≥t} r_j, W_t = Σ_{j≤t} ρ_j² w_j and w_t = 1 − 2π_t + Σπ². All is float64 inside,
    which holds every product of float32 inputs without overflow or underflow.

    Args:
        token_level_rewards: r_t, shape (rows, tokens), any dtype. Rewards under masked tokens count for the
            tokens before them.
        response_mask: 1 on tokens that the policy generated and trains on, else 0; same shape; bool, int or
            float. It may have holes and empty rows.
        old_log_probs: log π_t of the sampled tokens, same shape.
        sum_pi_squared: Σπ² over the vocabulary, same shape.
        index: the uid of each row's prompt, one a row, in any order.
        rollout_is_weights: importance weights ρ_t, same shape, or None.
        align: "position" compares tokens at the same place of their rows (verl's `optimal_token_baseline`),
            "token" the k-th unmasked tokens (`tir_optimal_token_baseline`).
        handle_zero_tail: B = 0 in columns with one live row; if False such a row is its own baseline.

    Returns:
        All of it on the inputs' device. Log-probs, Σπ² and ρ under masked tokens never matter, NaN included.

    Raises:
        InputError: for shapes that disagree, and with field, first row and column, and uid for a mask other
            than 0 and 1, a reward that is not finite in a row with unmasked tokens, and on unmasked tokens a
            log-prob, Σπ² or ρ that is not finite or out of its bounds (`checks.BOUNDS`).
    """
    inputs = Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return OptimalTokenBaseline(*_estimate(inputs, index, align, handle_zero_tail, results=5))


@torch.no_grad()
def _estimate(
    inputs: Inputs, index: Any, align: Align, handle_zero_tail: bool, results: int
) -> Sequence[torch.Tensor]:
    if align not in ("position", "token"):
        raise InputError(f'align: expected "position" or "token", found {align!r}.', "align")
    check_shapes(inputs, index)
    rewards = inputs.token_level_rewards
    block_tokens = _BLOCK_TOKENS.get(rewards.device.type, _BLOCK_TOKENS_ELSEWHERE)
    outputs = [torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in range(results)]
    good = []
    for size, rows in group_blocks(group_ids(index), block_tokens // rewards.shape[1], rewards.device):
        block = inputs.take(rows, size)
        block_good, values = _estimate_block(block, align, handle_zero_tail)
        good.append(block_good)
        for output, value in zip(outputs, values, strict=False):
            output[rows] = value.flatten(0, 1).to(output.dtype)
    if not torch.stack(good).all():  # the only wait for the device
        raise first_fault(inputs, index)
    return outputs


def _estimate_block(
    block: Inputs, align: Align, handle_zero_tail: bool
) -> tuple[torch.Tensor, Iterable[torch.Tensor]]:
    """Whether the inputs are good, and the fields of OptimalTokenBaseline, each (groups, rows, tokens)."""
    live = block.response_mask != 0
    returns = reward_to_go(block.token_level_rewards.double())
    # 0 under masked tokens, whatever stood there: log-prob 0 with Σπ² 0 has no energy.
    log_probs = torch.where(live, block.old_log_probs.double(), 0.0)
    sum_pi_squared = torch.where(live, block.sum_pi_squared.double(), 0.0)
    importance_weights = block.rollout_is_weights
    if importance_weights is not None:
        importance_weights = torch.where(live, importance_weights.double(), 0.0)
    good = all_good(block.response_mask, live, returns, log_probs, sum_pi_squared, importance_weights)
    energy = token_energy(log_probs, sum_pi_squared)
    realized = realized_energy(energy, importance_weights)
    returns = torch.where(live, returns, 0.0)
    if align == "position":
        baseline = optimal_baseline(returns, realized, live, handle_zero_tail=handle_zero_tail)
    else:
        columns = _token_columns(live)
        baseline = optimal_baseline(
            _to_columns(returns, columns),
            _to_columns(realized, columns),
            _to_columns(live, columns),
            handle_zero_tail=handle_zero_tail,
        )
        baseline = _from_columns(baseline.expand_as(returns), columns)
    baseline = torch.where(live, baseline, 0.0)
    return good, (returns - baseline, returns, baseline, torch.where(live, realized, 0.0), energy)


def _token_columns(live: torch.Tensor) -> torch.Tensor:
    """k for the k-th unmasked token of each row, for masked tokens one column past the last."""
    return torch.where(live, live.cumsum(-1) - 1, live.shape[-1])


def _to_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    room = values.new_zeros((*values.shape[:-1], values.shape[-1] + 1))
    return room.scatter_(-1, columns, values)[..., :-1]


def _from_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 1)).gather(-1, columns)
