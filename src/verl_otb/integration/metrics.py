"""What a step says about its baseline, under `otb/`.

verl's aggregator of the asynchronous trainers goes by names: a key with max, min or sum in it is reduced so. These
are means over trained tokens and are named accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl_otb.core import realized_energy, token_energy


def otb_metrics(batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Means over the trained tokens of a batch; masked tokens, and with them verl's padding rows, are left out.

    Args:
        batch: verl's fields, each (rows, response_length): response_mask, old_log_probs, sum_pi_squared, returns,
            advantages, and rollout_is_weights or not.

    Returns:
        `otb/baseline/mean`: B_t, in the reward's unit. `otb/realized_energy/mean`: W_t. Empty without trained tokens.
    """
    live = batch["response_mask"] != 0
    if not live.any():
        return {}
    weights = batch.get("rollout_is_weights", None)
    log_probs, sum_pi_squared, weights = (
        None if value is None else torch.where(live, value.float(), 0.0)
        for value in (batch["old_log_probs"], batch["sum_pi_squared"], weights)
    )
    realized = realized_energy(token_energy(log_probs, sum_pi_squared), weights)
    baseline = batch["returns"] - batch["advantages"]
    return {
        "otb/baseline/mean": baseline[live].mean().item(),
        "otb/realized_energy/mean": realized[live].mean().item(),
    }
