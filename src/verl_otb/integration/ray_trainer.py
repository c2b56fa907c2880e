"""Σπ² on its way through verl's RayPPOTrainer (`trainer.use_v1=False`) and the trainers that inherit it, fully_async
and one_step_off.

Here a batch is one DataProto that the trainer holds, so Σπ² rides along with the old log-probs.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl import DataProto
from verl.utils import tensordict_utils as tu

from verl_otb.integration.advantages import (
    ENERGY_LOG_PROBS,
    named_step,
    no_sum_pi_squared,
    otb_inputs,
    otb_metrics,
    say_active,
)
from verl_otb.integration.config import is_otb
from verl_otb.integration.engine import ASK, FIELD
from verl_otb.integration.estimators import being_watched

# The trainer whose step this is: verl's bypass is a function that knows no trainer.
_trainer: ContextVar[Any] = ContextVar("verl_otb_trainer", default=None)
# From the advantage computation to the step's metrics, which are put together elsewhere in the same step.
_metrics: ContextVar[dict[str, float] | None] = ContextVar("verl_otb_metrics", default=None)


class _Asked:
    """The actor's workers, asked for our Σπ² instead of verl's."""

    def __init__(self, workers: Any):
        self._workers = workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def compute_log_prob(self, batch: Any) -> Any:
        tu.assign_non_tensor(batch, **{ASK: True, "calculate_sum_pi_squared": False})
        try:
            output = self._workers.compute_log_prob(batch)
        except AssertionError as error:
            if "same set of nested tensors" not in str(error):  # of one worker with Σπ² and one without
                raise
            raise no_sum_pi_squared() from error
        if FIELD not in output.keys():  # noqa: SIM118  (a TensorDict iterates over rows)
            raise no_sum_pi_squared()
        return output


def old_log_prob(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `ray_trainer.old_log_prob`: verl takes whatever Σπ² comes back, and ours does."""
    if not is_otb(self.config.algorithm):
        return original(self, batch, *args, **kwargs)
    workers = self.actor_rollout_wg
    self.actor_rollout_wg = _Asked(workers)
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        self.actor_rollout_wg = workers


def step_of(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `ray_trainer.fit`, `separation.log_prob` and `separation.advantage_step`: what is called within is this
    trainer's."""
    token = _trainer.set(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        _trainer.reset(token)


def bypass_mode(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `ray_trainer.bypass`: old_log_probs become the rollout's; for the energies the actor gives π and Σπ²."""
    result = original(batch, *args, **kwargs)
    trainer = _trainer.get()
    if trainer is not None and is_otb(trainer.config.algorithm):
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # which may be importing this very module

        # Not fully_async's own, which would bring the weights of the last sync back and forth for it.
        actor, _ = RayPPOTrainer._compute_old_log_prob(trainer, batch)
        batch.batch[FIELD] = actor.batch[FIELD]
        batch.batch[ENERGY_LOG_PROBS] = actor.batch["old_log_probs"]
    return result


def advantages(original: Any, data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `ray_trainer.advantages` and `separation.advantages`."""
    if not is_otb({"adv_estimator": adv_estimator}) or being_watched():  # V1 has prepared its batch already
        return original(data, adv_estimator, *args, **kwargs)
    trainer = _trainer.get()
    with named_step(trainer), otb_inputs(data.batch) as diagnostics:
        data = original(data, adv_estimator, *args, **kwargs)
    _metrics.set(otb_metrics(diagnostics, adv_estimator))
    if trainer is not None:
        say_active(trainer.config)
    return data


def data_metrics(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `ray_trainer.metrics` and `separation.metrics`: ours beside verl's metrics of the same batch."""
    metrics = original(batch, *args, **kwargs)
    metrics.update(_metrics.get() or {})
    _metrics.set(None)
    return metrics


def variance_proxy(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `ray_trainer.variance_proxy` and `separation.variance_proxy`: energies need π and Σπ² of one policy."""
    if ENERGY_LOG_PROBS in batch.batch:
        fields = batch.batch.clone(recurse=False)
        fields["old_log_probs"] = fields[ENERGY_LOG_PROBS]
        batch = DataProto(batch=fields)
    return original(batch, *args, **kwargs)
