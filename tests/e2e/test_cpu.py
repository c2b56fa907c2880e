"""Whole runs of stock verl on the CPU platform, apart from the Optimal Token Baseline."""

import pytest

pytestmark = pytest.mark.e2e


def test_critic_and_reference_policy_on_two_ranks(run_verl):
    """PPO with a KL loss: two FSDP2 ranks, each with actor, reference and critic, and two vLLM replicas."""
    run = run_verl(
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        timeout=450,
    )
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert line["critic/vf_loss"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6
    # The reference is the model that the first step started from.
    assert run.metrics[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert run.metrics[1]["actor/kl_loss"] > 1e-6


def test_a_failed_weight_sync_ends_the_run_with_its_cause(run_verl):
    """vLLM is given half the width, so that the actor's weights do not fit."""
    run = run_verl(
        "algorithm.adv_estimator=grpo",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.hidden_size=32",
        timeout=400,
        expect_success=False,
    )
    assert run.returncode == 1
    assert not run.metrics
    assert "loading the weights into vLLM failed: RuntimeError('The size of tensor a (32)" in run.tail(5)


def test_too_few_logical_cpus_end_the_run_before_ray_starts(run_verl):
    run = run_verl("ray_kwargs.ray_init.num_cpus=2", timeout=60, expect_success=False)
    assert run.returncode == 1
    assert "ray_kwargs.ray_init.num_cpus=2 is too few: this run takes 5" in run.tail(5)
    assert "Started a local Ray instance" not in run.log
