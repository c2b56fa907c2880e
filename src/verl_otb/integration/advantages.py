"""What every trainer does around verl's advantage computation when the estimator is ours."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_otb.core import Diagnostics
from verl_otb.errors import ConfigError, InputError
from verl_otb.integration.config import ESTIMATORS, SUM_PI_SQUARED, bypass, name_of, options
from verl_otb.integration.dump import telling
from verl_otb.integration.estimators import watched_by
from verl_otb.kernels import chosen

logger = logging.getLogger("verl_otb")

# The actor's own log-probs, where old_log_probs are the rollout engine's (bypass mode). Those come from a distribution
# that top-p and top-k have cut and renormalised: with the actor's Σπ² they would give negative energies.
ENERGY_LOG_PROBS = "otb_log_probs"
_MANY_SINGLE_ROWS = 0.1


@contextmanager
def otb_inputs(fields: Any) -> Iterator[Diagnostics]:
    """For the time in which verl computes advantages: verl's fields (TensorDict, each (rows, tokens)) as OTB needs
    them. Yields what the estimator says about the batch."""
    verl_s_own = {name: fields[name] for name in ("token_level_rewards", "old_log_probs") if name in fields}
    rewards = verl_s_own["token_level_rewards"]
    scores = fields.get("token_level_scores", rewards)
    fields["token_level_rewards"] = without_masked_penalty(rewards, scores, fields["response_mask"])
    if ENERGY_LOG_PROBS in fields:
        fields["old_log_probs"] = fields[ENERGY_LOG_PROBS]
    diagnostics = Diagnostics()
    try:
        with watched_by(diagnostics), telling(responses=fields.get("responses", None)):
            yield diagnostics
    finally:
        for name, values in verl_s_own.items():  # verl stores and logs these
            fields[name] = values


@contextmanager
def named_step(trainer: Any) -> Iterator[None]:
    """Errors in a batch's values say in which step of the trainer they came up, and dumps are named by it."""
    try:
        with telling(step=getattr(trainer, "global_steps", None)):
            yield
    except InputError as error:
        where = f"step {getattr(trainer, 'global_steps', '?')}: {error}"
        raise InputError(where, error.field, error.row, error.column, error.uid) from error


def without_masked_penalty(rewards: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards (rows, tokens) less the KL penalty under tokens that rejection masked after it was applied.

    verl applies the penalty before rejection sampling changes the mask. The outcome score of a masked token still
    rewards the tokens before it; a penalty on a token that is not trained on does not.
    """
    return rewards if rewards is scores else torch.where(mask != 0, rewards, scores)


def no_sum_pi_squared() -> ConfigError:
    return ConfigError(
        "the actor workers sent no Σπ² although the trainer asked for it: verl-otb is loaded in the trainer, but "
        "not in the workers, or an engine of your own overrides prepare_model_outputs. Install verl-otb on every "
        "node, and let no VERL_USE_EXTERNAL_PLUGINS leave out `otb` there, or name it in "
        f"actor_rollout_ref.model.external_lib=verl_otb.plugin. ({SUM_PI_SQUARED} is set.)"
    )


def otb_metrics(diagnostics: Diagnostics, estimator: Any) -> dict[str, float]:
    """`Diagnostics.figures` under `otb/`. Warns once where many tokens have no row to be compared with.

    verl's aggregator of the asynchronous trainers goes by names: a key with max, min or sum in it is reduced so, any
    other is averaged. The names here are true to that.
    """
    figures = diagnostics.figures()
    if figures and figures["single_row_fraction"] > _MANY_SINGLE_ROWS and name_of(estimator) == ESTIMATORS[0]:
        _recommend_tir(name_of(estimator))
    return {f"otb/{name}": value for name, value in figures.items()}


def say_active(config: Any) -> None:
    """One line on the first step of a run, from its whole configuration."""
    algorithm, device = config.algorithm, config.trainer.get("device", "cuda")
    changed = options(algorithm).method("position").changed()
    _say_active(name_of(algorithm.adv_estimator), device, bypass(algorithm), ", ".join(changed))


@functools.cache
def _say_active(estimator: str, device: str, bypassed: bool, changed: str) -> None:
    logger.info(
        "OTB is active: estimator %s%s, Σπ² from the actor's old-log-prob pass by the %s kernel; advantages are not "
        "divided by a standard deviation (norm_adv_by_std_in_grpo does not apply)",
        estimator,
        f" with {changed}" if changed else "",
        chosen(device),
    )
    if bypassed:
        logger.warning(
            "rollout_correction.bypass_mode saves the old-log-prob pass, but OTB needs Σπ² and π from the actor: each "
            "step has that forward pass after all. The loss still takes the rollout's log-probs. "
            "+algorithm.otb.bypass=refuse ends such a run at its start instead."
        )


@functools.cache
def _recommend_tir(estimator: str) -> None:
    logger.warning(
        "More than a tenth of the tokens of a step are alone in their column, so their advantage is the plain return. "
        "Where rows have tool output in them, algorithm.adv_estimator=tir_%s compares them at their k-th generated "
        "token instead.",
        estimator,
    )
