"""trainer_mode=separate_async: rollout and training on GPUs of their own, two updates between two weight syncs."""

import pytest
from otb_runs import (
    DENSE_REWARD,
    SAVE_POLICY,
    assert_trained_on_the_estimator_s,
    policy,
    probe,
    probed,
    sum_pi_squared_gap,
)
from real_trainer import padded

pytestmark = pytest.mark.e2e

STEPS, UPDATES = 2, 2


@pytest.fixture(scope="module")
def separate(tiny_task, tmp_path_factory):
    """verl refuses its "naive" checkpoint engine here; weights go to the rollout by gloo_checkpoint.py."""
    import verl_run

    directory = tmp_path_factory.mktemp("separate")
    overrides, environment = SAVE_POLICY
    checkpoint_engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return verl_run.run_verl(
        *overrides,
        DENSE_REWARD,
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.separate_async.parameter_sync_step={UPDATES}",
        # Each step's answers are of the last sync's policy, so that they show what the sync brought.
        "trainer.v1.separate_async.num_warmup_batches=0",
        f"trainer.total_training_steps={STEPS}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"{checkpoint_engine}.backend=gloo",
        f"{checkpoint_engine}.custom_backend_module=gloo_checkpoint",
        task=tiny_task,
        directory=directory,
        env={**probed(directory), **environment},
        timeout=450,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("update", range(UPDATES))
def test_advantages_trained_on_are_the_estimator_s(separate, step, update):
    assert_trained_on_the_estimator_s(probe(separate.directory, step, update))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_that_of_the_last_sync(separate, step):
    """π_old is the policy of the last sync, also for the second update, for which verl puts its weights back."""
    synced, live = policy(separate.directory, step, 0), policy(separate.directory, step, 1)
    for update in range(UPDATES):
        fields = probe(separate.directory, step, update)
        assert sum_pi_squared_gap(synced, fields) < 1e-5
    # The weights that the second update changed were others: those of the first, back in their place.
    assert sum_pi_squared_gap(live, fields) > 1e-3


def test_metrics_are_the_mean_of_the_updates(separate):
    assert len(separate.metrics) == STEPS
    for line in separate.metrics:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6
        baselines = []
        for update in range(UPDATES):
            fields = probe(separate.directory, line["step"], update)
            baseline = padded(fields["returns"]) - padded(fields["advantages"])
            baselines.append(baseline[padded(fields["response_mask"]) != 0].mean().item())
        assert line["otb/baseline/mean"] == pytest.approx(sum(baselines) / UPDATES, abs=1e-6)
