"""Σπ² on its way through verl's V1 trainer: asked for, taken home, brought to the estimator.

These hooks sit on what the sync, colocate_async and separate_async trainers share. Each passes straight through to
verl where the run uses another estimator.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from verl.workers.utils.padding import response_from_nested

from verl_otb.errors import ConfigError, VerlOtbError
from verl_otb.integration.config import SUM_PI_SQUARED, is_otb
from verl_otb.integration.engine import ASK, FIELD
from verl_otb.integration.metrics import otb_metrics
from verl_otb.kernels import chosen

logger = logging.getLogger("verl_otb")


@dataclass
class _Step:
    """What the hook around one advantage computation tells the one inside it, and hears from it."""

    partition_id: str
    metrics: dict[str, float] = field(default_factory=dict)


_step: ContextVar[_Step | None] = ContextVar("verl_otb_step", default=None)


def old_log_prob(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `trainer.old_log_prob`: ask the actor for Σπ² in this pass only, and take it home at once.

    At home it is one row a key in TransferQueue, sliced to the response as verl slices log-probs and entropy. The
    flag goes again: with LoRA the reference pass runs the same actor, and would overwrite Σπ² with the reference's.
    """
    if not is_otb(self.config.algorithm):
        return original(self, batch, *args, **kwargs)
    batch.extra_info[ASK] = True
    try:
        result = original(self, batch, *args, **kwargs)
    finally:
        batch.extra_info.pop(ASK, None)
    result.extra_info.pop(ASK, None)
    data = _get(result.keys, result.partition_id, [FIELD, "response_mask"])
    data[FIELD] = response_from_nested(data.pop(FIELD), data["response_mask"])
    tq.kv_batch_put(keys=result.keys, partition_id=result.partition_id, fields=data.select(FIELD))
    return result


def advantage_step(original: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Hook `trainer.advantage_step`: around the whole advantage step, for its partition and its metrics."""
    if not is_otb(self.config.algorithm):
        return original(self, batch, metrics, *args, **kwargs)
    if not getattr(self, "_verl_otb_said", False):
        self._verl_otb_said = True
        logger.info(
            "OTB is active: estimator %s, Σπ² from the actor's old-log-prob pass by the %s kernel",
            self.config.algorithm.adv_estimator,
            chosen(self.config.trainer.device),
        )
    step = _Step(batch.partition_id)
    token = _step.set(step)
    try:
        result = original(self, batch, metrics, *args, **kwargs)
    finally:
        _step.reset(token)
    metrics.update(step.metrics)
    return result


def advantage_inputs(
    original: Any, data: Any, batch_keys: list[str], adv_estimator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook `trainer.advantage_inputs`: bring Σπ² to the estimator, row for row by TransferQueue key."""
    if not is_otb({"adv_estimator": adv_estimator}):
        return original(data, batch_keys, adv_estimator, *args, **kwargs)
    step = _step.get()
    if step is None:
        raise VerlOtbError(
            "verl computes advantages outside of PPOTrainer._compute_advantage, where verl-otb does not know the "
            "batch's TransferQueue partition. This verl is not one that verl-otb knows; choose another estimator."
        )
    _refuse_sessions_of_several_outputs(batch_keys)
    fields = data.batch
    rows, width = fields["response_mask"].shape
    sum_pi_squared = _get(batch_keys, step.partition_id, [FIELD])[FIELD]
    fields[FIELD] = torch.nested.to_padded_tensor(sum_pi_squared, 0.0, (rows, width))
    rewards = fields["token_level_rewards"]
    fields["token_level_rewards"] = without_masked_penalty(
        rewards, fields["token_level_scores"], fields["response_mask"]
    )
    data = original(data, batch_keys, adv_estimator, *args, **kwargs)
    step.metrics.update(otb_metrics(data.batch))
    data.batch["token_level_rewards"] = rewards  # verl stores and logs these
    return data


def without_masked_penalty(rewards: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards (rows, tokens) less the KL penalty under tokens that rejection masked after it was applied.

    verl applies the penalty before rejection sampling changes the mask. The outcome score of a masked token still
    rewards the tokens before it; a penalty on a token that is not trained on does not.
    """
    return rewards if rewards is scores else torch.where(mask != 0, rewards, scores)


def _get(keys: list[str], partition_id: str, names: list[str]) -> Any:
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
    if FIELD not in data:
        raise ConfigError(
            "the actor workers sent no Σπ² although the trainer asked for it: verl-otb is loaded in the trainer, but "
            "not in the workers, or an engine of your own overrides prepare_model_outputs. Install verl-otb on every "
            "node, and let no VERL_USE_EXTERNAL_PLUGINS leave out `otb` there, or name it in "
            f"actor_rollout_ref.model.external_lib=verl_otb.plugin. ({SUM_PI_SQUARED} is set.)"
        )
    return data


def _refuse_sessions_of_several_outputs(batch_keys: list[str]) -> None:
    """A session's outputs are one trajectory; taken for several they would count several times in the baseline."""
    sessions = {key.rpartition("_")[0] for key in batch_keys}
    if len(sessions) < len(batch_keys):
        raise ConfigError(
            f"the agent loop gave {len(batch_keys)} outputs for {len(sessions)} sessions. Sessions of several outputs "
            "do not work with OTB in this version of verl-otb. Use an agent loop with one output a session, or "
            "choose another estimator."
        )
