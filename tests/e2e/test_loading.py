"""Ways to load the plugin, what a run without OTB sees of it, and runs that must not start."""

import pytest
from otb_runs import ACTIVE, DENSE_REWARD, NO_ENTRY_POINT, assert_trained_on_the_estimator_s, probe, probed
from verl_run import REPOSITORY

pytestmark = pytest.mark.e2e

LOADING = {
    "external_lib": (["actor_rollout_ref.model.external_lib=verl_otb.plugin"], NO_ENTRY_POINT, []),
    "VERL_USE_EXTERNAL_MODULES": ([], NO_ENTRY_POINT, ["verl_otb.plugin"]),
    "twice": (["actor_rollout_ref.model.external_lib=verl_otb.plugin"], {}, ["verl_otb.plugin"]),
}


@pytest.mark.parametrize("way", LOADING)
def test_loading(run_verl, tmp_path, way):
    """The entry point is shown by `trained`; here the other two ways, with it switched off, and all three at once."""
    overrides, env, modules = LOADING[way]
    run = run_verl(
        *overrides, DENSE_REWARD, "trainer.total_training_steps=1", env={**probed(tmp_path, *modules), **env}
    )
    assert run.log.count(ACTIVE) == 1
    assert_trained_on_the_estimator_s(probe(tmp_path, 1))


def test_grpo_beside_the_plugin(run_verl, tmp_path):
    """Installed but not chosen: no metric, no field, no word of OTB."""
    run = run_verl("algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", env=probed(tmp_path))
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert not [key for key in line if key.startswith("otb/")]
        assert line["training/rollout_probs_diff_max"] < 1e-6
    assert "sum_pi_squared" not in probe(tmp_path, 1)
    assert "verl_otb" not in run.log.replace(str(REPOSITORY), "")
    assert ACTIVE not in run.log


def test_stock_verl_still_fails(run_verl):
    """The bug this plugin is for. When this test fails, verl has repaired it: read the hooks' `remove_when`."""
    run = run_verl("trainer.total_training_steps=1", env=NO_ENTRY_POINT, expect_success=False)
    assert run.returncode not in (0, 124)
    assert "Please set actor.calculate_sum_pi_squared=True in config" in run.log
    assert not run.metrics


def test_wrong_configuration_fails_before_ray(run_verl):
    run = run_verl("actor_rollout_ref.actor.calculate_sum_pi_squared=False", expect_success=False)
    assert run.returncode not in (0, 124)
    assert "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True" in run.log
    assert "Started a local Ray instance" not in run.log


def test_wrong_configuration_fails_before_workers(run_verl):
    """Where only external_lib loads the plugin, the driver cannot know; the TaskRunner does, before any worker."""
    run = run_verl(
        "actor_rollout_ref.actor.calculate_sum_pi_squared=False",
        "actor_rollout_ref.model.external_lib=verl_otb.plugin",
        env=NO_ENTRY_POINT,
        expect_success=False,
    )
    assert run.returncode not in (0, 124)
    assert "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True" in run.log
    assert "WorkerDict" not in run.log
