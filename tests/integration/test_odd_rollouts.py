"""What a rollout may bring: responses of no token or of one, prompts of which every answer failed. On verl's real V1
trainer methods, a real TransferQueue and a real actor."""

import pytest
import torch
from real_trainer import padded, put_batch, v1_trainer
from real_worker import tiny_config, training_worker

from verl_otb import optimal_token_advantages

ESTIMATORS = {"optimal_token_baseline": "position", "tir_optimal_token_baseline": "token"}


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


@pytest.fixture(params=ESTIMATORS)
def steps(request, worker, tiny_task):
    """The old-log-prob and the advantage step on a batch: its fields then, and what the estimator says of them."""
    trainer = v1_trainer(tiny_config(tiny_task.model, f"algorithm.adv_estimator={request.param}"), worker)

    def run(batch):
        metrics = {}
        trainer._compute_advantage(trainer._compute_old_log_prob(batch.meta, metrics={}), metrics)
        fields = batch.fields()
        names = ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")
        expected, _ = optimal_token_advantages(
            *(padded(fields[name]) for name in names), fields["uid"], align=ESTIMATORS[request.param]
        )
        return fields, expected, metrics

    return run


ROWS = {
    "one token each": [("a", 3, 1), ("a", 4, 1), ("b", 2, 1), ("b", 5, 1)],
    "empty ones among others": [("a", 3, 0), ("a", 4, 5), ("b", 2, 1), ("a", 5, 3), ("b", 3, 0), ("b", 6, 0)],
    "a prompt with empty ones only": [("a", 3, 0), ("b", 4, 2), ("a", 2, 0), ("b", 5, 4)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_short_responses(transfer_queue, steps, rows):
    fields, expected, metrics = steps(put_batch(transfer_queue, rows))
    assert [len(row) for row in fields["advantages"]] == [length for _, _, length in rows]
    assert [len(row) for row in fields["sum_pi_squared"]] == [length for _, _, length in rows]
    advantages = padded(fields["advantages"])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
    assert advantages.isfinite().all()
    assert metrics["otb/realized_energy/mean"] > 0


def test_an_empty_response_weighs_nothing(transfer_queue, steps):
    """The other rows get what they would get without it."""
    with_it, without = [("a", 3, 4), ("a", 2, 6), ("b", 4, 1)], [("a", 3, 4), ("a", 2, 6)]
    made = []
    for rows in (with_it, without):
        if rows is with_it:
            rows = [*rows, ("a", 5, 0)]
        fields, _, _ = steps(put_batch(transfer_queue, rows))
        made.append(fields["advantages"][:2])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_prompt_whose_answers_all_fail(transfer_queue, steps):
    """Each of them has advantage 0, exactly; the other prompt learns as if they were not there."""
    rows = [("fails", 5, 7), ("a", 3, 2), ("a", 4, 9), ("fails", 6, 1), ("a", 2, 9), ("fails", 4, 4)]
    batch = put_batch(transfer_queue, rows)
    scores = [
        torch.zeros(length).index_fill(0, torch.tensor(length - 1), float(uid == "a" and row % 4 == 0))
        for row, (uid, _, length) in enumerate(rows)
    ]
    batch.put(rm_scores=scores)
    fields, expected, _ = steps(batch)
    for (uid, _, _), advantages in zip(rows, fields["advantages"], strict=True):
        assert bool(advantages.any()) == (uid == "a")
    torch.testing.assert_close(padded(fields["advantages"]), expected, atol=1e-6, rtol=0)
