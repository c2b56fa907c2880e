"""A run's Hydra overrides, judged without starting anything: composed as verl's main composes them, then checked."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_otb.doctor.result import Result, failed, ok, reason, refused, skipped
from verl_otb.errors import VerlOtbError
from verl_otb.integration import config as ours
from verl_otb.integration.heads import check_fused

DEFAULT_NAME = "ppo_trainer"
# The two overrides of every run with OTB, what verl has no default for, and a group.
LEAST = (
    "algorithm.adv_estimator=optimal_token_baseline",
    f"{ours.SUM_PI_SQUARED}=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
)


class ConfigDir(SearchPathPlugin):
    """`--config-dir`, where Hydra's main puts it: searched after verl's own directory.

    As a plugin, because an override of hydra.searchpath would replace the one in the run's own configuration.
    """

    directory: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.directory:
            search_path.append("command-line", f"file://{self.directory}")


def composed(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> tuple[DictConfig | None, Result]:
    """What `python -m verl.trainer.main_ppo` would start with (None if it could not), and what to say of it."""
    place = find_spec("verl")
    if place is None or not place.submodule_search_locations:
        return None, skipped("config.composes", "verl is not installed")
    if config_dir and not os.path.isdir(config_dir):
        return None, failed("config.composes", f"--config-dir {config_dir} is no directory", "Correct the path.")
    Plugins.instance().register(ConfigDir)
    ConfigDir.directory = os.path.abspath(config_dir) if config_dir else None
    name = config_name or DEFAULT_NAME
    try:
        directory = os.path.join(place.submodule_search_locations[0], "trainer", "config")
        with initialize_config_dir(os.path.abspath(directory), version_base=None):
            config = compose(name, overrides=list(overrides))
        # Resolves every interpolation on its way, as verl does later: one that leads nowhere shows here.
        missing = sorted(key for key in OmegaConf.missing_keys(config) if not _unused(key, config))
    except OverrideParseException as error:
        return None, failed("config.composes", f"{error.override}: {reason(error)}", "Correct this override.")
    except (HydraException, OmegaConfBaseException) as error:
        return None, refused("config.composes", error, "Correct the overrides.")
    finally:
        ConfigDir.directory = None
    if missing:
        todo = " ".join(f"{key}=…" for key in missing)
        return config, failed("config.composes", f"{name} leaves open: {', '.join(missing)}", f"Add {todo}")
    return config, ok("config.composes", f"{name} with {len(overrides)} overrides")


def _unused(key: str, config: DictConfig) -> bool:
    """verl's defaults leave open the rollout of a reward model, which few runs have."""
    return key.startswith("reward.reward_model.") and not config.reward.reward_model.enable


def names_plugin(config: DictConfig | None) -> bool:
    """Whether the run's `external_lib` loads the plugin."""
    named = None if config is None else OmegaConf.select(config, "actor_rollout_ref.model.external_lib")
    return ours.PLUGIN in ([named] if isinstance(named, str) else named or ())


def judge(config: DictConfig, whole: bool = True) -> Iterator[Result]:
    """What the plugin, and verl, would say of this configuration before any worker starts.

    Args:
        config: is not changed.
        whole: with the model's head and verl's own check, which verl's bare defaults do not pass.
    """
    if not ours.is_otb(config.algorithm):
        estimator = str(ours.name_of(config.algorithm.adv_estimator))
        if meant := get_close_matches(estimator, ours.ESTIMATORS, 1):
            what = f"algorithm.adv_estimator={estimator} is none of OTB's"
            yield failed("config.otb", what, f"Did you mean algorithm.adv_estimator={meant[0]}?")
        else:
            yield skipped("config.otb", f"algorithm.adv_estimator={estimator} is not OTB: the run is not judged")
        return
    try:
        ours.check(config)
    except VerlOtbError as error:
        yield refused("config.otb", error, "Change what it names.")
        return
    warnings = (f"warning: {words}" for words in ours.without_effect(config))
    yield ok("config.otb", "passes the plugin's own check", *warnings)
    if whole:
        yield _fused(config)
        yield _by_verl(copy.deepcopy(config))


def _fused(config: DictConfig) -> Result:
    model = config.actor_rollout_ref.model
    if not model.get("use_fused_kernels", False):
        return skipped("config.fused", "use_fused_kernels=False: the head is not in question")
    if (
        not OmegaConf.is_missing(model, "path")
        and os.path.isdir(model.path)
        and "config.json" not in os.listdir(model.path)
    ):
        return failed("config.fused", f"{model.path} has no config.json", "Correct actor_rollout_ref.model.path")
    if OmegaConf.is_missing(model, "path") or not at_hand(model.path):
        return skipped("config.fused", f"{model._get_node('path')} is not on this machine; the trainer judges its head")
    try:
        check_fused(config.actor_rollout_ref)
    except VerlOtbError as error:
        return refused("config.fused", error, "Change what it names.")
    return ok("config.fused", f"the head of {model.path} can be computed by verl's fused kernels")


def at_hand(path: str) -> bool:
    """Whether the model's configuration is a local directory's, or in the hub's cache."""
    if os.path.isdir(os.path.expanduser(path)):
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError:  # a path, or another scheme's
        return False


def _by_verl(config: DictConfig) -> Result:
    """verl's own check, as its main calls it."""
    utils = import_module("verl.trainer.ppo.utils")
    try:
        import_module("verl.utils.config").validate_config(
            config,
            use_reference_policy=utils.need_reference_policy(config),
            use_critic=utils.need_critic(config),
        )
    except Exception as error:  # verl asserts and raises what it likes; the run would end with the same words
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra wraps what a section of the configuration raises
            cause = cause.__cause__
        todo = "verl would end the run with this at its start. Change what it names."
        return failed("config.verl", reason(cause), todo)
    return ok("config.verl", "passes verl's own check")
