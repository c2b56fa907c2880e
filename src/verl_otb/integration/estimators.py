"""The two estimators under verl's names, in verl's registry.

They unpack what `compute_advantage` passes and hand it to `verl_otb.core`, which knows no verl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from verl_otb.core import Diagnostics, optimal_token_advantages
from verl_otb.core.method import Align
from verl_otb.integration.config import options
from verl_otb.integration.dump import record
from verl_otb.integration.patching import require_hooks

Estimate: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_stock: dict[str, Any] = {}
_watching: ContextVar[Diagnostics | None] = ContextVar("verl_otb_watching", default=None)


@contextmanager
def watched_by(diagnostics: Diagnostics) -> Iterator[None]:
    """Estimates within add themselves to `diagnostics`: verl hands on advantages and returns only."""
    token = _watching.set(diagnostics)
    try:
        yield
    finally:
        _watching.reset(token)


def being_watched() -> bool:
    return _watching.get() is not None


def _estimate(
    align: Align,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    config: Any = None,
    handle_zero_tail: bool | None = None,
    **_: Any,
) -> Estimate:
    """The Optimal Token Baseline (arXiv 2602.07078) from verl's fields.

    Args:
        align: what the rows of a prompt group are compared at.
        token_level_rewards: (bs, response_length), reward of each token.
        response_mask: (bs, response_length), 1 on tokens the policy generated and trains on.
        index: (bs,), uid of each row's prompt.
        old_log_probs: (bs, response_length), log-probability of each token, in nats.
        sum_pi_squared: (bs, response_length), Σ_v π_v² of each token's distribution.
        rollout_is_weights: (bs, response_length), importance weights ρ, or None.
        config: the run's `algorithm` section; `algorithm.otb` holds our options.
        handle_zero_tail: as an argument it wins over the option. verl's trainers do not pass it.
        **_: whatever else a verl passes.

    Returns:
        advantages, returns: (bs, response_length), float32.

    Raises:
        InputError: a ValueError, see `verl_otb.core.optimal_token_advantages`.
        ConfigError: for an unknown key under `algorithm.otb`.
        HookTargetChanged: if the plugin does not fit this verl.
    """
    require_hooks()
    chosen = options(config)
    inputs = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "old_log_probs": old_log_probs,
        "sum_pi_squared": sum_pi_squared,
        "rollout_is_weights": rollout_is_weights,
    }
    method = chosen.method(align)
    if handle_zero_tail is not None:
        method = replace(method, handle_zero_tail=handle_zero_tail)
    estimate = optimal_token_advantages(**inputs, index=index, **asdict(method), diagnostics=_watching.get())
    if chosen.dump_dir is not None:
        record(chosen.dump_dir, inputs, index, method)
    return estimate


def optimal_token_baseline(*args: Any, **kwargs: Any) -> Estimate:
    """`optimal_token_baseline`: the rows of a prompt group are compared at the same position.

    Takes what verl's `compute_advantage` passes; see `_estimate`.
    """
    return _estimate("position", *args, **kwargs)


def tir_optimal_token_baseline(*args: Any, **kwargs: Any) -> Estimate:
    """`tir_optimal_token_baseline` (tool-integrated reasoning): compared at their k-th unmasked token.

    Takes what verl's `compute_advantage` passes; see `_estimate`.
    """
    return _estimate("token", *args, **kwargs)


OURS = {function.__name__: function for function in (optimal_token_baseline, tir_optimal_token_baseline)}


# verl is imported late: this module is imported by the hook on core_algos, and may itself be the first to import verl.
def register() -> None:
    """Hook `estimators.register`: verl refuses a name that is taken, so its own two are freed first."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, function in OURS.items():
        _stock[name] = ADV_ESTIMATOR_REGISTRY.pop(name, None)
        register_adv_est(name)(function)


def unregister() -> None:
    """Put verl's own two back."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    for name, function in _stock.items():
        ADV_ESTIMATOR_REGISTRY.pop(name, None)
        if function is not None:
            ADV_ESTIMATOR_REGISTRY[name] = function
