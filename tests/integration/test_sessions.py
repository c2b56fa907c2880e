"""Sessions of several outputs on verl's real V1 methods: one trajectory each, whatever the number of its rows."""

import pytest
import torch
from joined_sessions import OUTPUTS, of_the_definition, put_sessions
from real_trainer import v1_trainer
from real_worker import tiny_config, training_worker

from verl_otb.errors import InputError
from verl_otb.integration.sessions import Sessions


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


@pytest.mark.parametrize("kl", [False, True], ids=["score alone", "KL in the reward"])
@pytest.mark.parametrize(
    ("estimator", "align"), [("optimal_token_baseline", "position"), ("tir_optimal_token_baseline", "token")]
)
def test_a_session_is_one_trajectory(worker, transfer_queue, tiny_task, estimator, align, kl):
    overrides = [f"algorithm.adv_estimator={estimator}"]
    if kl:
        overrides += ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.5"]
    trainer = v1_trainer(tiny_config(tiny_task.model, *overrides), worker)
    batch, metrics = put_sessions(transfer_queue), {}
    meta = trainer._compute_old_log_prob(batch.meta, metrics={})
    penalty = [torch.zeros(len(row)) for row in batch.fields("responses")["responses"]]
    if kl:
        log_probs = batch.fields("old_log_probs")["old_log_probs"]
        reference = [row - 0.3 * torch.rand(len(row)) for row in log_probs]
        batch.put(ref_log_prob=reference)
        penalty = [0.5 * (ours - theirs) for ours, theirs in zip(log_probs, reference, strict=True)]
    trainer._compute_advantage(meta, metrics)
    fields = batch.fields()
    defined = of_the_definition([output for output, *_ in OUTPUTS], fields, align, penalty)
    for found, wanted in zip(fields["advantages"], defined, strict=True):
        assert len(found) == len(wanted)
        torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)
    assert any(row.any() for row in fields["advantages"])
    assert metrics["otb/effective_group_size"] <= 2  # two sessions a prompt, not up to five rows


def test_a_session_of_many_outputs_weighs_as_one():
    """Two sessions, scores 1 and 0, one in three rows: counted by rows the baseline would be 0.75."""
    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0"]
    sessions = Sessions.of(keys, torch.ones(4, dtype=torch.int64), 1)
    scores = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    joined = sessions.join(sessions.of_last_rows(scores))
    assert joined.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert joined.sum(-1).mean() == 0.5
    assert sessions.keys == ["a_0_2", "a_1_0"]


def test_split_undoes_join():
    keys = ["x_1_10", "x_1_9", "y_0_0", "x_1_2"]  # by number, not by letter
    lengths = torch.tensor([2, 3, 4, 1])
    sessions = Sessions.of(keys, lengths, 4)
    rows = torch.arange(1.0, 17).view(4, 4) * (torch.arange(4) < lengths[:, None])
    joined = sessions.join(rows)
    assert joined[0].tolist() == [13, 5, 6, 7, 1, 2]
    assert joined[1].tolist() == [9, 10, 11, 12, 0, 0]
    assert torch.equal(sessions.split(joined), rows)


def test_sessions_of_one_output_are_left_alone():
    assert Sessions.of(["a_0_0", "a_1_0", "pad0f_0_0"], torch.tensor([1, 2, 3]), 3) is None
    # Nor are keys of another form taken for sessions.
    assert Sessions.of(["5", "6", "a_b", "x_1", "y_1"], torch.tensor([1, 2, 3, 1, 1]), 3) is None


def test_a_bad_value_is_named_by_its_output(worker, transfer_queue, tiny_task):
    trainer = v1_trainer(tiny_config(tiny_task.model), worker)
    batch = put_sessions(transfer_queue)
    meta = trainer._compute_old_log_prob(batch.meta, metrics={})
    log_probs = batch.fields("old_log_probs")["old_log_probs"]
    log_probs[7][2] = float("nan")  # third token of the second output of b's second session
    batch.put(old_log_probs=log_probs)
    with pytest.raises(InputError, match=rf"old_log_probs: .* the token is column 2 of {batch.keys[7]}\.$") as caught:
        trainer._compute_advantage(meta, {})
    error = caught.value
    assert (error.field, error.row, error.column, error.uid) == ("old_log_probs", 7, 2, "b")
