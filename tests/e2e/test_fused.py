"""Fused kernels, verl's torch backend: a whole run, and the same batches through the unfused actor."""

import pytest
import torch
import verl_run
from otb_runs import DENSE_REWARD, assert_trained_on_the_estimator_s, checkpoints, model_before, probe, probed
from real_trainer import padded
from real_worker import jagged, log_prob_pass, training_worker
from tensordict import TensorDict

from verl_otb import optimal_token_advantages
from verl_otb.integration.engine import ASK, FIELD

pytestmark = pytest.mark.e2e

STEPS = 2


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A V1 run, its models saved after each step. The head is tied: see TIED in tests/integration/test_engine.py."""
    directory = tmp_path_factory.mktemp("fused")
    task = verl_run.TinyTask.make(directory / "task", "--tied-head")
    run = verl_run.run_verl(
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
        DENSE_REWARD,
        f"trainer.total_training_steps={STEPS}",
        *checkpoints(directory),
        task=task,
        directory=directory,
        env=probed(directory),
    )
    return task, run


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_equal_the_unfused_run_s_on_the_same_batch(fused, step):
    task, run = fused
    fields = probe(run.directory, step)
    assert_trained_on_the_estimator_s(fields)

    unfused = training_worker(model_before(run.directory, step, task.model))
    tokens = {name: jagged(fields[name]) for name in ("input_ids", "prompts", "responses", "response_mask")}
    tokens["position_ids"] = jagged([torch.arange(len(row)) for row in fields["input_ids"]])
    tokens["loss_mask"] = tokens["response_mask"]
    out = log_prob_pass(
        unfused, TensorDict(tokens, batch_size=len(fields["uid"])), calculate_entropy=True, **{ASK: True}
    )

    def of_responses(name):
        """The distribution of a response token is the one at the token before it."""
        rows = zip(out[name].unbind(), fields["responses"], strict=True)
        return padded([row[len(row) - len(response) - 1 : -1] for row, response in rows])

    torch.testing.assert_close(of_responses(FIELD), padded(fields[FIELD]), atol=1e-5, rtol=0)
    torch.testing.assert_close(of_responses("log_probs"), padded(fields["old_log_probs"]), atol=1e-5, rtol=0)
    advantages, _ = optimal_token_advantages(
        padded(fields["rm_scores"]),
        padded(fields["response_mask"]),
        of_responses("log_probs"),
        of_responses(FIELD),
        fields["uid"],
    )
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-4, rtol=0)


def test_trains(fused):
    _, run = fused
    for line in run.metrics:
        assert line["actor/grad_norm"] > 0
        assert abs(line["actor/ppo_kl"]) < 1e-5  # one mini-batch a step: the ratio is 1
