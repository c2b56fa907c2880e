"""What a run must be configured like for OTB, checked before any work is spent.

`check` runs in the driver before Ray starts, and again in the process of the trainer before any worker exists, since
the driver does not load the plugin where only `external_lib` names it. Runs with another estimator pass untouched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from omegaconf import DictConfig, open_dict

from verl_otb.core.method import Align, FinishedRows, Method, Weight
from verl_otb.errors import ConfigError
from verl_otb.integration.dump import check_writable
from verl_otb.integration.heads import check_fused
from verl_otb.integration.patching import require_hooks

logger = logging.getLogger("verl_otb")

ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")
SUM_PI_SQUARED = "actor_rollout_ref.actor.calculate_sum_pi_squared"
ENGINES = ("fsdp", "fsdp2", "fsdp_turbo", "veomni", "megatron")
FUSED_THEIR_OWN_WAY = ("veomni", "megatron")  # not through the heads that our hooks are on
PLUGIN = "verl_otb.plugin"
BLIND_ENGINES = ("torchtitan", "automodel")  # they have no place that could compute Σπ²


@dataclass(frozen=True)
class Options:
    """The keys of `algorithm.otb`.

    Attributes:
        handle_zero_tail: a column of a prompt group with one live row has the baseline 0 (advantage = return). With
            False the row is its own baseline (advantage 0).
        leave_one_out: each row's baseline is made of the group's other rows alone.
        weight: what the rows are weighted by: "realized" energy W_t, that of the "token" alone, or "uniform" weights.
        finished_rows: "drop" those that have ended, or "carry" them on, with their last weight and return.
        bypass: what `rollout_correction.bypass_mode` does to OTB. "forward": one forward pass of the actor a step
            gives π and Σπ² for the energies. "refuse": the run ends at its start.
        dump_dir: a directory for what `verl-otb report` draws, a few prompt groups of each step (`dump.py`). A relative
            one starts from the trainer's working directory. None: nothing is written.
    """

    handle_zero_tail: bool = True
    leave_one_out: bool = False
    weight: Weight = "realized"
    finished_rows: FinishedRows = "drop"
    bypass: Literal["forward", "refuse"] = "forward"
    dump_dir: str | None = None

    def method(self, align: Align) -> Method:
        return Method(align, self.handle_zero_tail, self.leave_one_out, self.weight, self.finished_rows)


def _one_of(*choices: str) -> tuple[str, Callable[[Any], bool]]:
    return f"{', '.join(choices[:-1])} or {choices[-1]}", lambda value: value in choices


_TRUE_OR_FALSE = ("true or false", lambda value: isinstance(value, bool))

# What an option's value is to be, and whether it is.
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "handle_zero_tail": _TRUE_OR_FALSE,
    "leave_one_out": _TRUE_OR_FALSE,
    "weight": _one_of(*get_args(Weight)),
    "finished_rows": _one_of(*get_args(FinishedRows)),
    "bypass": _one_of("forward", "refuse"),
    "dump_dir": (
        "the path of a directory",
        lambda value: value is None or (isinstance(value, str) and bool(value.strip())),
    ),
}


def is_otb(algorithm: Any) -> bool:
    """Whether the `algorithm` section of a run chooses one of our estimators."""
    return name_of(algorithm.get("adv_estimator", None)) in ESTIMATORS


def name_of(estimator: Any) -> Any:
    """An estimator's name: verl hands it on as a string or as a member of its enum."""
    return getattr(estimator, "value", estimator)


def options(algorithm: Mapping[str, Any] | None) -> Options:
    """The options under `algorithm.otb`.

    Raises:
        ConfigError: for a key or a value that is not one of `Options`.
    """
    section = algorithm.get("otb", None) if algorithm else None
    section = {} if section is None else section
    if not isinstance(section, Mapping | DictConfig):
        raise ConfigError(f"algorithm.otb is to be a section of keys, found {section!r}.")
    known = {field.name for field in fields(Options)}
    unknown = sorted(map(str, set(section) - known))
    if unknown:
        raise ConfigError(
            f"algorithm.otb has no key {', '.join(map(repr, unknown))}; it knows {', '.join(sorted(known))}. "
            f"Correct or remove the override +algorithm.otb.{unknown[0]}=…"
        )
    for name, value in section.items():
        what, is_good = _VALUES[name]
        if not is_good(value):
            raise ConfigError(f"algorithm.otb.{name} is to be {what}, found {value!r}.")
    return Options(**section)


def bypass(algorithm: Any) -> bool:
    """Whether verl takes the rollout engine's log-probs for the old ones, without a forward pass of the actor."""
    correction = algorithm.get("rollout_correction", None) or {}
    return bool(correction.get("bypass_mode", False))


def check(config: Any) -> None:
    """Refuse a configuration that OTB cannot run with.

    Args:
        config: the whole run's configuration, as `main_ppo` composes it.

    Raises:
        ConfigError: names what was found and the override to change.
        UnsupportedVerl, HookTargetChanged: this verl is not one that the hooks fit.
    """
    # Where Hydra knows no group `otb`, +otb=default sets a key of that name, and another estimator would train.
    if isinstance(group := config.get("otb", None), str):
        raise ConfigError(
            f"+otb={group} chose no group but set a key: Hydra does not look for groups in verl_otb.configs. Add the "
            "override 'hydra.searchpath=[pkg://verl_otb.configs]'"
        )
    algorithm = config.algorithm
    if not is_otb(algorithm):
        return
    require_hooks()
    chosen = options(algorithm)
    actor = config.actor_rollout_ref.actor
    if not actor.get("calculate_sum_pi_squared", False):
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs Σπ² from the actor, but {SUM_PI_SQUARED} is "
            f"False. Add the override {SUM_PI_SQUARED}=True"
        )
    strategy = actor.strategy
    if strategy in BLIND_ENGINES:
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={strategy} cannot emit Σπ², which {algorithm.adv_estimator} needs. "
            f"Use one of {', '.join(ENGINES)}, or another estimator."
        )
    if strategy not in ENGINES:
        raise _unsupported(f"actor_rollout_ref.actor.strategy={strategy}", f"Use one of {', '.join(ENGINES)}", config)
    if strategy in FUSED_THEIR_OWN_WAY and config.actor_rollout_ref.model.get("use_fused_kernels", False):
        setting = f"actor_rollout_ref.model.use_fused_kernels=True with strategy={strategy}"
        raise _unsupported(setting, "Set it to False", config)
    if bypass(algorithm) and chosen.bypass == "refuse":
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode=True costs OTB a forward pass of the actor a step, and "
            "algorithm.otb.bypass=refuse forbids it. Set bypass_mode=False, or remove algorithm.otb.bypass"
        )


def without_effect(config: Any) -> list[str]:
    """What a run that `check` passes is configured with to no effect, a sentence or two each."""
    algorithm, distillation = config.algorithm, config.get("distillation", None)
    chosen, found = options(algorithm), []
    if algorithm.get("gamma", 1.0) != 1.0:
        found.append(f"algorithm.gamma={algorithm.gamma} is not used: OTB's returns are not discounted.")
    if distillation and distillation.enabled and not distillation.distillation_loss.use_task_rewards:
        found.append(
            "distillation.distillation_loss.use_task_rewards=False: the loss has no task rewards in it, so "
            f"{algorithm.adv_estimator} has no effect on the training. Its old-log-prob pass and its metrics are made "
            "all the same."
        )
    # By the k-th token every row begins in the first column, so one that is carried on is in all of them.
    never_alone = chosen.finished_rows == "carry" and name_of(algorithm.adv_estimator) == ESTIMATORS[1]
    if not chosen.handle_zero_tail and (chosen.leave_one_out or never_alone):
        because = "leave_one_out=True" if chosen.leave_one_out else f"finished_rows=carry and {ESTIMATORS[1]}"
        found.append(
            f"algorithm.otb.handle_zero_tail=False is not used with {because}: a row with no other to be compared with "
            "has the baseline 0, and no other row is without."
        )
    if config.actor_rollout_ref.rollout.n == 2 and chosen.leave_one_out:
        found.append(
            "algorithm.otb.leave_one_out=True with actor_rollout_ref.rollout.n=2: a row's baseline is the return of "
            "the one other row, whatever that row's energy. Set actor_rollout_ref.rollout.n to 4 or more."
        )
    if config.actor_rollout_ref.rollout.n == 1:
        found.append(
            "actor_rollout_ref.rollout.n=1: a prompt group of one row has no baseline, so every advantage is the "
            "plain return. Set actor_rollout_ref.rollout.n to 4 or more."
        )
    return found


def _unsupported(setting: str, instead: str, config: Any) -> ConfigError:
    return ConfigError(
        f"{setting} does not work with {config.algorithm.adv_estimator} in this version of verl-otb. {instead}, or "
        "choose another estimator."
    )


def send_along(config: Any) -> None:
    """Name the plugin in the run's external_lib, which every process imports that builds the model's configuration.

    A node where verl-otb is not installed then ends the run with a ModuleNotFoundError before the first rollout;
    without this, verl's own estimator would run there, and complain after it that Σπ² is missing.
    """
    if not is_otb(config.algorithm):
        return
    model = config.actor_rollout_ref.model
    named = model.get("external_lib", None) or []
    named = [named] if isinstance(named, str) else list(named)
    if PLUGIN not in named:
        with open_dict(model):  # a configuration of one's own may lack the key
            model.external_lib = [*named, PLUGIN]


def before_validate_config(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `config.driver` and `config.experimental_driver`."""
    check(config)
    send_along(config)
    return original(config, *args, **kwargs)


def before_workers(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hooks `config.trainer`, `config.ray_trainer` and `config.separation`."""
    check(self.config)
    if is_otb(self.config.algorithm):
        check_fused(self.config.actor_rollout_ref)
        dump_dir = options(self.config.algorithm).dump_dir
        if dump_dir is not None:  # not in `check`: the driver may run on another node than the trainer
            check_writable(dump_dir)
        for words in without_effect(self.config):  # here alone, so that it is said once
            logger.warning(words)
    return original(self, *args, **kwargs)
