"""Whole runs of stock verl with the plugin: what it trains on is what the estimator says."""

import pytest
from otb_runs import (
    ACTIVE,
    DENSE_REWARD,
    assert_metrics_describe,
    assert_sum_pi_squared_is_the_policy_s,
    assert_trained_on_the_estimator_s,
    checkpoints,
    model_before,
    probe,
    probed,
)
from verl_run import STEPS

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["optimal_token_baseline", "tir_optimal_token_baseline"])
def trained(request, tiny_task, tmp_path_factory):
    """A V1 sync run of 3 steps, loaded by the entry point, with a checkpoint of the model after each."""
    import verl_run

    directory = tmp_path_factory.mktemp(request.param)
    run = verl_run.run_verl(
        f"algorithm.adv_estimator={request.param}",
        DENSE_REWARD,
        *checkpoints(directory),
        task=tiny_task,
        directory=directory,
        env=probed(directory),
    )
    return request.param, run


def test_trains(trained):
    estimator, run = trained
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    for step, line in enumerate(run.metrics, start=1):
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6
        assert line["variance_proxy/proxy2_total_power"] > 0
        assert_metrics_describe(probe(run.directory, step), line)
    assert run.log.count(f"{ACTIVE} {estimator}") == 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_trained_on_are_the_estimator_s(trained, step):
    """Recomputed from the batch's own tensors, read back from TransferQueue right before the update."""
    estimator, run = trained
    align = "token" if estimator.startswith("tir") else "position"
    assert_trained_on_the_estimator_s(probe(run.directory, step), align)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_the_policy_s(trained, tiny_task, step):
    _, run = trained
    assert_sum_pi_squared_is_the_policy_s(
        probe(run.directory, step), model_before(run.directory, step, tiny_task.model)
    )
