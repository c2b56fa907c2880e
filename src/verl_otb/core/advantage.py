"""The Optimal Token Baseline as a whole: from verl's tensors to advantages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from verl_otb.core.baseline import optimal_baseline
from verl_otb.core.checks import Inputs, all_good, check_shapes, first_fault
from verl_otb.core.columns import Columns, by_token, carry_finished_rows, token_columns
from verl_otb.core.diagnostics import Diagnostics
from verl_otb.core.energy import realized_energy_, token_energy_, weighted_energy_
from verl_otb.core.groups import Block, group_blocks, group_ids
from verl_otb.core.masking import live_bits, zero_unless
from verl_otb.core.method import Align, FinishedRows, Method, Weight
from verl_otb.core.returns import reward_to_go

# Tokens of a block, whose float64 scratch has to stay in a core's cache (16 rows of 8,192), or, on an
# accelerator, to be worth its kernel launches.
_BLOCK_TOKENS = {"cpu": 2**17}
_BLOCK_TOKENS_ELSEWHERE = 2**20
_SCRATCH_BYTES = 24 * 2**20


@dataclasses.dataclass(frozen=True)
class OptimalTokenBaseline:
    """What the estimator computed, each float32 of shape (rows, tokens) and 0 on masked tokens.

    Attributes:
        advantages: A_t = G_t − B_t.
        returns: G_t, the reward-to-go.
        baseline: B_t, the same for all rows of a column but with `leave_one_out`.
        realized_energy: W_t, with ρ² inside, whatever the `weight`.
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
    leave_one_out: bool = False,
    weight: Weight = "realized",
    finished_rows: FinishedRows = "drop",
    diagnostics: Diagnostics | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns. Arguments and errors are those of `optimal_token_baseline`, which also gives
    what lies between; this takes less memory: no more than the two results and a block of scratch.
    `diagnostics` sums up what lies between, block by block."""
    inputs = Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    method = Method(align, handle_zero_tail, leave_one_out, weight, finished_rows)
    results = _estimate(inputs, index, method, fields=("advantages", "returns"), diagnostics=diagnostics)
    return results["advantages"], results["returns"]


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
    leave_one_out: bool = False,
    weight: Weight = "realized",
    finished_rows: FinishedRows = "drop",
) -> OptimalTokenBaseline:
    """The Optimal Token Baseline (arXiv 2602.07078) of a batch.

    A_t = G_t − B_t with B_t = Σ_i W_t G_t / Σ_i W_t over the rows i of the prompt group that have a token in
    the column, G_t = Σ_{j≥t} r_j, W_t = Σ_{j≤t} ρ_j² w_j and w_t = 1 − 2π_t + Σπ². All is float64 inside,
    which holds every product of float32 inputs without overflow or underflow.

    Args:
        token_level_rewards: r_t, shape (rows, tokens), any real dtype. Rewards under masked tokens count for the
            tokens before them.
        response_mask: 1 on tokens that the policy generated and trains on, else 0; same shape; bool, int or
            float. It may have holes and empty rows.
        old_log_probs: log π_t of the sampled tokens, same shape, floating point.
        sum_pi_squared: Σπ² over the vocabulary, same shape, floating point.
        index: the uid of each row's prompt, one a row, in any order; compared by value (`groups.group_ids`).
        rollout_is_weights: importance weights ρ_t, same shape, floating point, or None.
        align: "position" compares tokens at the same place of their rows (verl's `optimal_token_baseline`),
            "token" the k-th unmasked tokens (`tir_optimal_token_baseline`).
        handle_zero_tail: B = 0 in columns with one compared row; if False such a row is its own baseline.
        leave_one_out: B^i = Σ_{j≠i} W_t G_t / Σ_{j≠i} W_t over the other compared rows; their plain mean where none of
            them has energy; B = 0 where there is none of them.
        weight: what stands for W_t in B_t: "realized" itself, "token" ρ_t² w_t of the token alone, "uniform" 1.
        finished_rows: "drop" compares the rows that have a token in the column. "carry" also those that had their last
            one in an earlier column, with its G and its weight. Either way a row is not compared in the holes before
            its last token, nor without a token at all.

    Returns:
        All of it on the inputs' device. Log-probs, Σπ² and ρ under masked tokens never matter, NaN included.

    Raises:
        InputError: for a keyword of another value, types, shapes or devices that do not fit, a uid that is NaN, and
            with field, first row and column, and uid for a mask other than 0 and 1, a reward that is not finite in a
            row with unmasked tokens, and on unmasked tokens a log-prob, Σπ² or ρ that is not finite or out of its
            bounds (`checks.BOUNDS`).
    """
    inputs = Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    fields = tuple(field.name for field in dataclasses.fields(OptimalTokenBaseline))
    method = Method(align, handle_zero_tail, leave_one_out, weight, finished_rows)
    return OptimalTokenBaseline(**_estimate(inputs, index, method, fields=fields))


@torch.no_grad()
def _estimate(
    inputs: Inputs,
    index: Any,
    method: Method,
    *,
    fields: tuple[str, ...],
    diagnostics: Diagnostics | None = None,
) -> dict[str, torch.Tensor]:
    """These fields of OptimalTokenBaseline."""
    uids = check_shapes(inputs, index)
    rewards = inputs.token_level_rewards
    results = {name: torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for name in fields}
    max_tokens = _BLOCK_TOKENS.get(rewards.device.type, _BLOCK_TOKENS_ELSEWHERE)
    # glibc keeps freed memory below a threshold that follows the largest chunk it has seen freed. Without this each
    # block would fault its scratch in anew, which takes longer than the arithmetic. The pages are never touched.
    torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
    good = torch.ones((), dtype=torch.bool, device=rewards.device)
    for block in group_blocks(group_ids(uids), max_tokens // rewards.shape[1], rewards.device):
        # One flag for all: a small tensor kept from each block would split its memory for the next.
        good &= _estimate_block(block, inputs, method, results, diagnostics)
    if not good:  # the only wait for the device
        raise first_fault(inputs, uids)
    return results


def _estimate_block(
    block: Block,
    inputs: Inputs,
    method: Method,
    results: dict[str, torch.Tensor],
    diagnostics: Diagnostics | None = None,
) -> torch.Tensor:
    """Fill in the block's rows of the results. Returns one bool: whether its inputs are fit for use."""

    def report(**fields: torch.Tensor) -> None:
        for name, values in fields.items():
            if name in results:
                block.put(values, results[name])

    live = live_bits(block.take(inputs.response_mask))
    returns, row_sums, energy, importance, good = _read_block(block, inputs, live)
    report(token_energy=energy)
    token_energy = energy if diagnostics is None else energy.clone()
    weights = _other_weights(method.weight, live, energy, importance)
    realized = zero_unless(live, realized_energy_(energy, importance))
    columns, places = Columns(returns, realized if weights is None else weights, live, live), None
    if method.align == "token":
        places = token_columns(live)
        columns = by_token(columns, places)
    if method.finished_rows == "carry":
        columns = carry_finished_rows(columns)
    baseline = _baseline_of_tokens(
        columns, places, handle_zero_tail=method.handle_zero_tail, leave_one_out=method.leave_one_out
    )
    if diagnostics is not None:
        held_out = baseline if method.leave_one_out else _baseline_of_tokens(columns, places, leave_one_out=True)
        diagnostics.add(
            live=live,
            row_sums=row_sums,
            returns=returns,
            token_energy=token_energy,
            importance_weights=importance,
            realized_energy=realized,
            baseline=baseline,
            held_out_baseline=held_out,
            columns=columns,
            handle_zero_tail=method.handle_zero_tail or method.leave_one_out,
        )
    del columns, weights
    report(returns=returns, advantages=zero_unless(live, returns - baseline), realized_energy=realized)
    if "baseline" in results:
        report(baseline=zero_unless(live, baseline.expand_as(live).clone()))
    return good


def _read_block(
    block: Block, inputs: Inputs, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns, each row's sum of rewards, token energy and ρ, 0 on masked tokens, and whether the inputs are fit."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        return zero_unless(live, block.take(x).to(torch.float64, copy=True))

    returns = reward_to_go(block.take(inputs.token_level_rewards).double())
    # A row's first return is the sum of its rewards. Rows without tokens take no part.
    row_sums = returns[..., 0].where(live.sum(-1) < 0, 0.0)
    zero_unless(live, returns)
    log_probs, sum_pi_squared = masked(inputs.old_log_probs), masked(inputs.sum_pi_squared)
    weights = None if inputs.rollout_is_weights is None else masked(inputs.rollout_is_weights)
    mask = block.take(inputs.response_mask)
    good = all_good(mask, row_sums, returns, log_probs, sum_pi_squared, weights)
    # A masked token has log-prob 0 and Σπ² 0 now, and so no energy.
    return returns, row_sums, token_energy_(log_probs, sum_pi_squared), weights, good


def _baseline_of_tokens(columns: Columns, places: torch.Tensor | None, **how: bool) -> torch.Tensor:
    """Each token's, from that of its column; `places` are the `token_columns`, None: a token's column is its own."""
    baseline = optimal_baseline(columns.returns, columns.weights, columns.compared, **how)
    return baseline if places is None else baseline.expand(*places.shape[:-1], -1).gather(-1, places)


def _other_weights(
    weight: Weight, live: torch.Tensor, energy: torch.Tensor, importance: torch.Tensor | None
) -> torch.Tensor | None:
    """What the rows are weighed by instead of their realized energy; None: by that."""
    if weight == "uniform":
        return -live.double()
    return weighted_energy_(energy.clone(), importance) if weight == "token" else None
