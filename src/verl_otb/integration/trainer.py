"""Σπ² on its way through verl's V1 trainer: asked for, taken home, brought to the estimator.

These hooks sit on what the sync, colocate_async and separate_async trainers share. Each passes straight through to
verl where the run uses another estimator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics
from verl.workers.utils.padding import response_from_nested

from verl_otb.errors import InputError, VerlOtbError
from verl_otb.integration.advantages import (
    ENERGY_LOG_PROBS,
    named_step,
    no_sum_pi_squared,
    otb_inputs,
    otb_metrics,
    say_active,
)
from verl_otb.integration.config import bypass, is_otb, options
from verl_otb.integration.dump import telling
from verl_otb.integration.engine import ASK, FIELD
from verl_otb.integration.sessions import Sessions

# What the estimators read of a row.
TOKEN_FIELDS = ("token_level_rewards", "response_mask", "old_log_probs", FIELD, "rollout_is_weights")


@dataclass
class _Step:
    """What the hook around one advantage computation tells the one inside it, and hears from it."""

    partition_id: str
    bypass: bool
    dump: bool
    metrics: dict[str, float] = field(default_factory=dict)


_step: ContextVar[_Step | None] = ContextVar("verl_otb_step", default=None)


def old_log_prob(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `trainer.old_log_prob`: ask the actor for Σπ² in this pass only, and take it home at once.

    At home it is one row a key in TransferQueue, sliced to the response as verl slices log-probs and entropy. The
    flag goes again: with LoRA the reference pass runs the same actor, and would overwrite Σπ² with the reference's.
    """
    if not is_otb(self.config.algorithm):
        return original(self, batch, *args, **kwargs)
    if bypass(self.config.algorithm):
        result = original(self, batch, *args, **kwargs)
        _forward_for_energies(self, result)
        return result
    batch.extra_info[ASK] = True
    try:
        result = original(self, batch, *args, **kwargs)
    finally:
        batch.extra_info.pop(ASK, None)
    result.extra_info.pop(ASK, None)
    _take_home(result, {FIELD: FIELD})
    return result


def _forward_for_energies(self: Any, batch: Any) -> None:
    """In bypass mode verl runs no actor before the update. π and Σπ² have to come from one forward of one policy."""
    before = dict(batch.extra_info)
    temperature = self.config.actor_rollout_ref.rollout.temperature
    batch.extra_info.update({"calculate_entropy": False, "compute_loss": False, "temperature": temperature, ASK: True})
    try:
        self.actor_rollout_wg.compute_log_prob(batch)
    finally:
        batch.extra_info.clear()
        batch.extra_info.update(before)
    _take_home(batch, {FIELD: FIELD, "log_probs": ENERGY_LOG_PROBS})


def _take_home(batch: Any, names: dict[str, str]) -> None:
    """Slice what the actor wrote to TransferQueue to the responses, under these names."""
    data = _get(batch.keys, batch.partition_id, [*names, "response_mask"])
    for name, ours in names.items():
        data[ours] = response_from_nested(data.pop(name), data["response_mask"])
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select(*names.values()))


def advantage_step(original: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Hook `trainer.advantage_step`: around the whole advantage step, for its partition and its metrics."""
    if not is_otb(self.config.algorithm):
        return original(self, batch, metrics, *args, **kwargs)
    say_active(self.config)
    step = _Step(batch.partition_id, bypass(self.config.algorithm), options(self.config.algorithm).dump_dir is not None)
    token = _step.set(step)
    try:
        with named_step(self):
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
    names = [FIELD, ENERGY_LOG_PROBS] if step.bypass else [FIELD]
    brought = _get(batch_keys, step.partition_id, [*names, "responses"] if step.dump else names)
    shape = data.batch["response_mask"].shape
    lengths = brought[FIELD].offsets().diff()
    if lengths.max() > shape[1]:  # padding would cut it without a word
        raise VerlOtbError(
            f"Σπ² has a row of {lengths.max()} values where the longest response has {shape[1]} tokens: something has "
            "overwritten it after the old-log-prob pass. Choose another estimator until you know what."
        )
    for name in names:
        data.batch[name] = torch.nested.to_padded_tensor(brought[name], 0.0, shape)
    if "responses" in brought:  # for the dump alone, which does without where a batch has none
        data.batch["responses"] = torch.nested.to_padded_tensor(brought["responses"], 0, shape)
    sessions = Sessions.of(batch_keys, lengths, shape[1])
    with otb_inputs(data.batch) as diagnostics:
        if sessions is None:
            data = original(data, batch_keys, adv_estimator, *args, **kwargs)
        else:
            responses = sessions.join(data.batch["responses"]) if "responses" in data.batch else None
            with _rows_of(sessions, batch_keys), telling(responses=responses):
                joined = original(_joined(data, sessions), sessions.keys, adv_estimator, *args, **kwargs)
            for name in ("advantages", "returns"):
                data.batch[name] = sessions.split(joined.batch[name])
    step.metrics.update(otb_metrics(diagnostics, adv_estimator))
    return data


def _joined(data: Any, sessions: Sessions) -> DataProto:
    """One row a session. Its score is its last row's alone, verl's rule for GRPO: the agent loop writes the one score
    of a session to every row. Its KL penalties are every row's."""
    fields = data.batch
    scores, rewards = fields["token_level_scores"], fields["token_level_rewards"]
    per_row = {name: fields[name] for name in TOKEN_FIELDS if name in fields}
    per_row["token_level_rewards"] = sessions.of_last_rows(scores) + (rewards - scores)
    uids = data.non_tensor_batch["uid"][sessions.last.numpy()]
    return DataProto.from_dict({name: sessions.join(rows) for name, rows in per_row.items()}, {"uid": uids})


@contextmanager
def _rows_of(sessions: Sessions, batch_keys: list[str]) -> Iterator[None]:
    """Errors within name the row of the batch that a token of a session came from."""
    try:
        yield
    except InputError as error:
        if error.row is None or error.column is None:
            raise
        row, column = sessions.origin(error.row, error.column)
        where = (
            f"{error} There a row is a session, its outputs joined; the token is column {column} of {batch_keys[row]}."
        )
        raise InputError(where, error.field, row, column, error.uid) from error


def step_metrics(original: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Hook `trainer.metrics`: verl's own variance_proxy/*, for which its V1 trainer does not fetch the fields."""
    result = original(self, batch, metrics, *args, **kwargs)
    if not is_otb(self.config.algorithm):
        return result
    correction = self.config.algorithm.get("rollout_correction", None) or {}
    bypassed = bypass(self.config.algorithm)
    log_probs = ENERGY_LOG_PROBS if bypassed else "old_log_probs"
    names = [FIELD, log_probs, "advantages", "response_mask"]
    if correction.get("rollout_is", None) and not bypassed:
        names.append("rollout_is_weights")
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    data = _get(keys, batch.partition_id, names).to_padded_tensor()
    data["old_log_probs"] = data.pop(log_probs)
    metrics.update(compute_variance_proxy_metrics(DataProto(batch=data), metrics.get("actor/grad_norm")))
    return result


def _get(keys: list[str], partition_id: str, names: list[str]) -> Any:
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
    if FIELD not in data:
        raise no_sum_pi_squared()
    return data
