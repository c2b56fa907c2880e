"""Whole runs of stock verl with the plugin: what it trains on is what the estimator says."""

import numpy as np
import pytest
import torch
from otb_runs import ACTIVE, DENSE_REWARD, assert_trained_on_the_estimator_s, probe, probed
from transformers import AutoModelForCausalLM
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
        "trainer.save_freq=1",
        f"trainer.default_local_dir={directory}/checkpoints",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        task=tiny_task,
        directory=directory,
        env=probed(directory),
    )
    return request.param, run


def test_trains(trained):
    estimator, run = trained
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    for line in run.metrics:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6
        assert line["otb/realized_energy/mean"] > 0
        assert np.isfinite(line["otb/baseline/mean"])
    assert run.log.count(f"{ACTIVE} {estimator}") == 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_trained_on_are_the_estimator_s(trained, step):
    """Recomputed from the batch's own tensors, read back from TransferQueue right before the update."""
    estimator, run = trained
    align = "token" if estimator.startswith("tir") else "position"
    assert_trained_on_the_estimator_s(probe(run.directory, step), align)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_the_policy_s(trained, tiny_task, step):
    """Σπ² of every response token, in float64 from the model saved before this step's update, on the same tokens."""
    _, run = trained
    fields = probe(run.directory, step)
    saved = run.directory / "checkpoints" / f"global_step_{step - 1}" / "actor" / "huggingface"
    path = tiny_task.model if step == 1 else saved
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        for tokens, response, found in zip(
            fields["input_ids"], fields["responses"], fields["sum_pi_squared"], strict=True
        ):
            truth = model(tokens[None]).logits[0].softmax(-1).square().sum(-1)
            # The distribution of a response token is the one at the token before it.
            truth = truth[len(tokens) - len(response) - 1 : len(tokens) - 1]
            torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=0)


def test_colocate_async(run_verl, tmp_path):
    run = run_verl(
        "trainer.v1.trainer_mode=colocate_async", DENSE_REWARD, "trainer.total_training_steps=2", env=probed(tmp_path)
    )
    assert len(run.metrics) == 2
    for step in (1, 2):
        assert_trained_on_the_estimator_s(probe(tmp_path, step))
