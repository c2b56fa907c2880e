"""Two data-parallel ranks and two vLLM replicas, rows reordered on the way, and batches that verl has to fill up."""

import pytest
import torch
from otb_runs import (
    DENSE_REWARD,
    SAVE_POLICY,
    assert_metrics_describe,
    assert_trained_on_the_estimator_s,
    policy,
    probe,
    probed,
    real_rows,
    sum_pi_squared_gap,
)
from real_trainer import padded

pytestmark = pytest.mark.e2e

PROMPTS, ANSWERS, MINI_BATCH, STEPS = 5, 3, 2, 2
ROWS = PROMPTS * ANSWERS
PADDING = 3  # up to 18, which 2 ranks and mini-batches of 2·3 rows divide


@pytest.fixture(scope="module")
def two_ranks(tiny_task, tmp_path_factory):
    """5 prompts with 3 answers each: 2 ranks do not divide them, nor do mini-batches of 2 prompts.

    V1 always fills up and balances the ranks by length; it does not read trainer.balance_batch.
    """
    import verl_run

    directory = tmp_path_factory.mktemp("two_ranks")
    overrides, environment = SAVE_POLICY
    return verl_run.run_verl(
        *overrides,
        DENSE_REWARD,
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={ANSWERS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
        # Several micro-batches a rank, which verl fills by length and takes apart again. A padding row has 128 tokens.
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=150",
        task=tiny_task,
        directory=directory,
        env={**probed(directory), **environment},
    )


def is_padding(fields):
    return torch.tensor([uid.startswith("pad") for uid in fields["uid"]])


@pytest.fixture(params=range(1, STEPS + 1))
def step(request, two_ranks):
    """(number, fields of its batch, its metrics)"""
    return request.param, probe(two_ranks.directory, request.param), two_ranks.metrics[request.param - 1]


def test_padding_rows_touch_no_group(step):
    _, fields, _ = step
    padding = is_padding(fields)
    assert len(padding) == ROWS + PADDING
    assert padding.sum() == PADDING
    assert padding[: len(padding) // 2].any()  # no longer at the end, where verl put them
    real = real_rows(fields)
    assert all(real["uid"].count(uid) == ANSWERS for uid in real["uid"])
    assert_trained_on_the_estimator_s(real)
    assert_trained_on_the_estimator_s(fields)
    assert not padded(fields["advantages"])[padding].any()
    assert not padded(fields["response_mask"])[padding].any()


def test_every_row_has_its_own_sum_pi_squared(step, two_ranks):
    """Of both ranks, whatever order they computed it in."""
    number, fields, _ = step
    model = policy(two_ranks.directory, number)
    assert (model.parent / "model_world_size_2_rank_1.pt").exists()
    assert sum_pi_squared_gap(model, fields) < 1e-5
    rows = fields["sum_pi_squared"]
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    others = [row for row in range(len(rows)) if len(rows[row]) == len(rows[longest]) and row != longest]
    for other in others:  # rows can be told apart
        swapped = [rows[longest] if row == other else values for row, values in enumerate(rows)]
        assert sum_pi_squared_gap(model, {**fields, "sum_pi_squared": swapped}) > 1e-3


def test_metrics_leave_padding_rows_out(step):
    _, fields, metrics = step
    assert_metrics_describe(real_rows(fields), metrics)
