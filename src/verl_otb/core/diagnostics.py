"""What a batch says about its baseline, summed up while the estimator has its blocks at hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from verl_otb.core.baseline import total_of_others, without_peer
from verl_otb.core.columns import Columns


class _Totals(NamedTuple):
    """Over all blocks so far: sums and the largest W, and of B and A the mean and the sum of squared distances from it,
    (2,) each."""

    sums: torch.Tensor
    largest_energy: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor


class Diagnostics:
    """Hand it to `optimal_token_advantages`, then read `figures`. Masked tokens and rows without tokens take no part.

    The sums stay on the device until they are read.
    """

    def __init__(self) -> None:
        self._totals: _Totals | None = None

    def add(
        self,
        *,
        live: torch.Tensor,
        row_sums: torch.Tensor,
        returns: torch.Tensor,
        token_energy: torch.Tensor,
        importance_weights: torch.Tensor | None,
        realized_energy: torch.Tensor,
        baseline: torch.Tensor,
        held_out_baseline: torch.Tensor,
        columns: Columns,
        handle_zero_tail: bool,
    ) -> None:
        """Add a block: (groups, rows, tokens) tensors that are 0 on masked tokens, `live` as bits (`masking`).

        `row_sums` is (groups, rows), the sum of each row's rewards; `held_out_baseline` the baseline with
        `leave_one_out`; `columns` has the tensors as the rows are compared.
        """
        token_power = token_energy if importance_weights is None else token_energy * importance_weights.square()
        has_tokens = live.sum(-1) < 0
        group_mean = (row_sums.sum(-1) / has_tokens.sum(-1).clamp(min=1))[:, None, None]
        others = total_of_others(has_tokens[..., None].long()).clamp(min=1)
        mean_of_others = total_of_others(row_sums[..., None]) / others
        advantages = returns - baseline
        live_rows = -columns.live.sum(-2, keepdim=True)
        compared = live_rows if columns.compared is columns.live else -columns.compared.sum(-2, keepdim=True)
        in_use = live_rows > 0
        total = columns.weights.sum(-2, keepdim=True)
        effective = (total.square() / columns.weights.square().sum(-2, keepdim=True)).where(total > 0, compared)
        single = in_use & (compared == 1)
        alone = without_peer(columns.compared, handle_zero_tail=handle_zero_tail)
        mask = live.bool()
        sums = torch.stack(
            [
                value.sum(dtype=torch.float64)
                for value in (
                    mask,
                    realized_energy,
                    token_energy,
                    single,
                    single & alone,
                    effective.where(in_use, 0.0),
                    in_use,
                    advantages.square() * token_power,
                    (returns - group_mean).square() * token_power,
                    (returns - held_out_baseline).square() * token_power,
                    (returns - mean_of_others).square() * token_power,
                )
            ]
        )
        both, tokens = torch.stack([baseline.expand_as(returns), advantages]), sums[0]
        mean = (both * mask).flatten(1).sum(1) / tokens.clamp(min=1)
        spread = ((both - mean[:, None, None, None]).square() * mask).flatten(1).sum(1)
        largest = realized_energy.amax()
        if self._totals is None:
            self._totals = _Totals(sums, largest, mean, spread)
            return
        # Two moments joined without the cancellation of E[x²] − E[x]² (Chan, Golub and LeVeque 1979).
        so_far, away = self._totals, mean - self._totals.mean
        share = tokens / (so_far.sums[0] + tokens).clamp(min=1)
        self._totals = _Totals(
            so_far.sums + sums,
            so_far.largest_energy.maximum(largest),
            so_far.mean + away * share,
            so_far.spread + spread + away.square() * so_far.sums[0] * share,
        )

    def figures(self) -> dict[str, float]:
        """Means over the trained tokens unless said otherwise; empty where there were none.

        `baseline/mean`, `baseline/std`: B_t, in the reward's unit. `advantage/std`: A_t. `realized_energy/mean`,
        `/max`: W_t. `token_energy/mean`: w_t. `single_row_fraction`: tokens without another row compared in their
        column, live, or finished and carried on; `zero_tail_fraction`: those whose baseline is 0 for it.
        `effective_group_size`: (Σ W)² / Σ W² over the rows compared in a column (with `leave_one_out` too all of them),
        W being their `weight`; mean over the columns with a live row. `gradient_power`: ρ_t² A_t² w_t, the squared norm
        of a token's part of the gradient with respect to its logits; `gradient_power_group_mean`: the same with the
        mean of the group's total rewards for a baseline; `gradient_power_vs_group_mean`: their ratio, infinite where
        the group mean leaves nothing (all returns equal) and OTB's zero tail does. Both baselines hold the row's own
        return, which takes from the power without taking noise from the gradient, and the more, the fewer rows share
        the weight. `held_out_power…`: the same three with each row's own return left out of both, so of the power that
        a row has that the baseline has not seen: below 1 where OTB is the better baseline.
        """
        if self._totals is None or not self._totals.sums[0] > 0:
            return {}
        sums, largest_energy, means, spread = (total.tolist() for total in self._totals)
        tokens, realized, energy, single, zero, effective, columns, power, reference, held_out, held_out_reference = (
            sums
        )
        return {
            "baseline/mean": means[0],
            "baseline/std": (spread[0] / tokens) ** 0.5,
            "advantage/std": (spread[1] / tokens) ** 0.5,
            "realized_energy/mean": realized / tokens,
            "realized_energy/max": largest_energy,
            "token_energy/mean": energy / tokens,
            "single_row_fraction": single / tokens,
            "zero_tail_fraction": zero / tokens,
            "effective_group_size": effective / columns,
            "gradient_power": power / tokens,
            "gradient_power_group_mean": reference / tokens,
            "gradient_power_vs_group_mean": _ratio(power, reference),
            "held_out_power": held_out / tokens,
            "held_out_power_group_mean": held_out_reference / tokens,
            "held_out_power_vs_group_mean": _ratio(held_out, held_out_reference),
        }


def _ratio(power: float, reference: float) -> float:
    """Without a reference every row's return is its group's mean at every token, and all power is the zero tail's."""
    if reference:
        return power / reference
    return math.inf if power else 1.0
