"""What is refused at second 0, on verl's own composed configuration."""

import logging

import pytest
from verl_config import MICRO_BATCHES, OTB, verl_config

from verl_otb.errors import ConfigError
from verl_otb.integration.config import check, options


def test_a_good_run_passes():
    check(verl_config(*OTB, *MICRO_BATCHES))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_without_sum_pi_squared(name):
    with pytest.raises(ConfigError, match=r"Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True"):
        check(verl_config(f"algorithm.adv_estimator={name}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.strategy=torchtitan", "strategy=torchtitan cannot emit Σπ²"),
        ("actor_rollout_ref.actor.strategy=automodel", "strategy=automodel cannot emit Σπ²"),
        ("actor_rollout_ref.actor.strategy=megatron", "strategy=megatron does not work"),
        ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode=True does not work"),
        ("trainer.use_v1=False", "trainer.use_v1=False does not work"),
        ("+algorithm.otb.handle_zero_tial=True", r"no key 'handle_zero_tial'; it knows handle_zero_tail"),
        ("+algorithm.otb.handle_zero_tail=maybe", "is to be true or false, found 'maybe'"),
        ("+algorithm.otb=yes", "algorithm.otb is to be a section"),
    ],
)
def test_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        check(verl_config(*OTB, override))


def test_separation_trainers_are_refused():
    with pytest.raises(ConfigError, match="fully_async or one_step_off"):
        check(verl_config(*OTB), "separation")


def test_a_group_of_one_warns(caplog):
    with caplog.at_level(logging.WARNING, "verl_otb"):
        check(verl_config(*OTB, "actor_rollout_ref.rollout.n=1"))
    assert "every advantage is the plain return" in caplog.text


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus"])
def test_other_estimators_are_never_refused(estimator):
    check(verl_config(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.actor.strategy=torchtitan"))


def test_options():
    assert options(None).handle_zero_tail
    assert options({"otb": None}).handle_zero_tail
    assert not options(verl_config("+algorithm.otb.handle_zero_tail=false").algorithm).handle_zero_tail


def test_verl_calls_the_check():
    """verl's validate_config, as main_ppo imports it, is ours around verl's."""
    from verl.utils.config import validate_config

    with pytest.raises(ConfigError, match="calculate_sum_pi_squared=True"):
        validate_config(verl_config(*OTB[:1], *MICRO_BATCHES), use_reference_policy=False, use_critic=False)
