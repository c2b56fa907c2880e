"""What is refused at second 0, on verl's own composed configuration."""

import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf, open_dict
from verl_config import MICRO_BATCHES, OTB, verl_config

from verl_otb.errors import ConfigError, UnsupportedVerl
from verl_otb.integration.config import (
    PLUGIN,
    before_validate_config,
    before_workers,
    check,
    options,
    without_effect,
)
from verl_otb.integration.heads import check_fused


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
        ("actor_rollout_ref.actor.strategy=mine", "strategy=mine does not work"),
        ("+algorithm.otb.bypass=never", "algorithm.otb.bypass is to be forward or refuse, found 'never'"),
        (
            "+algorithm.otb.handle_zero_tial=True",
            "it knows bypass, dump_dir, finished_rows, handle_zero_tail, leave_one_out, weight.",
        ),
        ("+algorithm.otb.dump_dir=3", "algorithm.otb.dump_dir is to be the path of a directory, found 3"),
        ("+algorithm.otb.dump_dir=''", "algorithm.otb.dump_dir is to be the path of a directory, found ''"),
        ("+algorithm.otb.handle_zero_tail=maybe", "is to be true or false, found 'maybe'"),
        ("+algorithm.otb.leave_one_out=1", "algorithm.otb.leave_one_out is to be true or false, found 1"),
        ("+algorithm.otb.leave_one_out=null", "algorithm.otb.leave_one_out is to be true or false, found None"),
        ("+algorithm.otb.weight=path", "algorithm.otb.weight is to be realized, token or uniform, found 'path'"),
        ("+algorithm.otb.weight=[token]", "algorithm.otb.weight is to be realized, token or uniform, found"),
        ("+algorithm.otb.finished_rows=true", "algorithm.otb.finished_rows is to be drop or carry, found True"),
        ("+algorithm.otb=yes", "algorithm.otb is to be a section"),
        ("+algorithm.otb=false", "algorithm.otb is to be a section of keys, found False"),
        ("+algorithm.otb={1: true}", "no key '1'"),
    ],
)
def test_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        check(verl_config(*OTB, override))


@pytest.mark.parametrize("strategy", ["megatron", "veomni"])
def test_engines_that_fuse_their_own_way_pass_but_for_that(strategy):
    override = f"actor_rollout_ref.actor.strategy={strategy}"
    check(verl_config(*OTB, override))
    with pytest.raises(ConfigError, match=f"use_fused_kernels=True with strategy={strategy} does not work"):
        check(verl_config(*OTB, override, "actor_rollout_ref.model.use_fused_kernels=True"))


def test_bypass_passes_unless_it_is_to_be_refused():
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    check(verl_config(*OTB, bypass))
    check(verl_config(*OTB, "+algorithm.otb.bypass=refuse"))
    with pytest.raises(ConfigError, match=r"costs OTB a forward pass.*Set bypass_mode=False"):
        check(verl_config(*OTB, bypass, "+algorithm.otb.bypass=refuse"))


@pytest.mark.parametrize("override", ["trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async"])
def test_other_trainers_pass(override):
    check(verl_config(*OTB, override))


@pytest.mark.parametrize(
    ("external_lib", "sent"),
    [
        ("null", [PLUGIN]),
        ("json", ["json", PLUGIN]),
        ("[json,csv]", ["json", "csv", PLUGIN]),
        (PLUGIN, PLUGIN),
    ],
)
def test_the_driver_sends_the_plugin_along(external_lib, sent):
    config = verl_config(*OTB, f"actor_rollout_ref.model.external_lib={external_lib}")
    before_validate_config(lambda config: None, config)
    assert config.actor_rollout_ref.model.external_lib == sent


def test_the_plugin_is_sent_along_in_a_configuration_without_the_key():
    config = verl_config(*OTB)
    with open_dict(config.actor_rollout_ref.model):
        del config.actor_rollout_ref.model.external_lib
    OmegaConf.set_struct(config, True)
    before_validate_config(lambda config: None, config)
    assert config.actor_rollout_ref.model.external_lib == [PLUGIN]


def test_other_estimators_get_nothing_along():
    config = verl_config("algorithm.adv_estimator=grpo")
    before_validate_config(lambda config: None, config)
    assert config.actor_rollout_ref.model.external_lib is None


ONE_ROW = "actor_rollout_ref.rollout.n=1"  # verl's default


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (ONE_ROW, "every advantage is the plain return"),
        ("algorithm.gamma=0.5", "algorithm.gamma=0.5 is not used"),
    ],
)
def test_what_has_no_effect_is_said_once(caplog, override, words):
    """A run is checked in the driver, in the trainer's process, and by some trainers once more before the workers."""
    config = verl_config(*OTB, override)
    with caplog.at_level(logging.WARNING, "verl_otb"):
        before_validate_config(lambda config: None, config)
        before_validate_config(lambda config: None, config)
        before_workers(lambda self: None, SimpleNamespace(config=config))
    assert caplog.text.count(words) == 1
    assert without_effect(verl_config(*OTB, "actor_rollout_ref.rollout.n=8")) == []


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("task_rewards", [True, False])
def test_distillation_alone_has_no_effect(enabled, task_rewards):
    config = verl_config(
        *OTB,
        f"distillation.enabled={enabled}",
        f"distillation.distillation_loss.use_task_rewards={task_rewards}",
    )
    check(config)
    found = "has no effect on the training" in " ".join(without_effect(config))
    assert found == (enabled and not task_rewards)


@pytest.mark.parametrize(
    ("estimator", "overrides", "said"),
    [
        ("optimal_token_baseline", ["leave_one_out=true"], "not used with leave_one_out=True"),
        ("optimal_token_baseline", ["finished_rows=carry"], None),  # a hole may leave a row alone
        ("tir_optimal_token_baseline", ["finished_rows=carry"], "not used with finished_rows=carry and tir_optimal"),
        ("tir_optimal_token_baseline", ["weight=token"], None),
    ],
)
@pytest.mark.parametrize("zero_tail", [True, False])
def test_a_zero_tail_that_has_no_effect(estimator, overrides, said, zero_tail):
    ours = [f"+algorithm.otb.{override}" for override in (*overrides, f"handle_zero_tail={zero_tail}")]
    config = verl_config(*OTB, f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=8", *ours)
    check(config)
    found = without_effect(config)
    assert len(found) == bool(said and not zero_tail)
    assert all(f"algorithm.otb.handle_zero_tail=False is {said}" in words for words in found)


@pytest.mark.parametrize(("n", "leave_one_out", "said"), [(2, True, 1), (2, False, 0), (3, True, 0)])
def test_two_rows_without_the_own_one_leave_nothing_to_weigh(n, leave_one_out, said):
    ours = (f"actor_rollout_ref.rollout.n={n}", f"+algorithm.otb.leave_one_out={leave_one_out}")
    found = without_effect(verl_config(*OTB, *ours))
    assert ["whatever that row's energy" in words for words in found] == [True] * said


def test_a_verl_out_of_range_is_refused_with_every_hook_waiting_or_in(monkeypatch):
    import verl

    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(UnsupportedVerl, match=r'verl 0.10.0 is installed.*Install "verl>=0.9,<0.10"'):
        check(verl_config(*OTB))
    check(verl_config("algorithm.adv_estimator=grpo"))


@pytest.fixture
def fused(tiny_task):
    def make(*overrides):
        path, fused = (
            f"actor_rollout_ref.model.path={tiny_task.model}",
            "actor_rollout_ref.model.use_fused_kernels=True",
        )
        return verl_config(*OTB, path, fused, *overrides).actor_rollout_ref

    return make


def test_fused_kernels_with_an_untied_head_under_fsdp2(fused):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.strategy=fsdp, or"):
        check_fused(fused("actor_rollout_ref.actor.strategy=fsdp2"))
    check_fused(fused("actor_rollout_ref.actor.strategy=fsdp"))
    tied = "+actor_rollout_ref.model.override_config.tie_word_embeddings=true"
    check_fused(fused("actor_rollout_ref.actor.strategy=fsdp2", tied))


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus"])
def test_other_estimators_are_never_refused(estimator):
    check(verl_config(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.actor.strategy=torchtitan"))


def test_options():
    assert options(None).handle_zero_tail
    assert options({"otb": None}).handle_zero_tail
    assert not options(verl_config("+algorithm.otb.handle_zero_tail=false").algorithm).handle_zero_tail
    chosen = options(verl_config("+algorithm.otb.weight=token", "+algorithm.otb.leave_one_out=true").algorithm)
    assert (chosen.weight, chosen.leave_one_out, chosen.finished_rows) == ("token", True, "drop")
    assert options(verl_config("+algorithm.otb.dump_dir=null").algorithm).dump_dir is None


def test_verl_calls_the_check():
    """verl's validate_config, as main_ppo imports it, is ours around verl's."""
    from verl.utils.config import validate_config

    with pytest.raises(ConfigError, match="calculate_sum_pi_squared=True"):
        validate_config(verl_config(*OTB[:1], *MICRO_BATCHES), use_reference_policy=False, use_critic=False)


def test_a_dump_directory_that_cannot_be_written_to_is_refused_before_any_worker(tmp_path):
    (tmp_path / "file").write_text("")
    overrides = [*OTB, f"+algorithm.otb.dump_dir={tmp_path}/file/dump"]
    config = verl_config(*overrides)
    with pytest.raises(ConfigError, match=r"dump_dir=.*file/dump is to be a directory .* Choose another, or remove"):
        before_workers(lambda self: None, SimpleNamespace(config=config))
    check(config)  # the driver does not look: it may run on another node


def test_the_check_makes_the_dump_directory_and_leaves_it_empty(tmp_path):
    config = verl_config(*OTB, f"+algorithm.otb.dump_dir={tmp_path}/a/b")
    before_workers(lambda self: None, SimpleNamespace(config=config))
    assert list((tmp_path / "a" / "b").iterdir()) == []
