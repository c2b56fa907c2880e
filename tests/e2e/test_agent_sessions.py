"""An agent loop that returns a session in several outputs, in a whole run: a session is one trajectory."""

from collections import Counter

import pytest
import torch
import verl_run
from joined_sessions import of_the_definition
from otb_runs import (
    DENSE_REWARD,
    assert_sum_pi_squared_is_the_policy_s,
    checkpoints,
    model_before,
    probe,
    probed,
    real_rows,
)

pytestmark = pytest.mark.e2e

PROMPTS, ANSWERS, STEPS = 4, 4, 2
LOOP = """
- name: pieces
  _target_: pieces.Pieces
"""


@pytest.fixture(scope="module")
def run(tiny_task, tmp_path_factory):
    directory = tmp_path_factory.mktemp("agent_sessions")
    (directory / "agent_loops.yaml").write_text(LOOP)
    return verl_run.run_verl(
        "algorithm.adv_estimator=tir_optimal_token_baseline",
        "actor_rollout_ref.rollout.agent.default_agent_loop=pieces",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={directory}/agent_loops.yaml",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={ANSWERS}",
        f"trainer.total_training_steps={STEPS}",
        DENSE_REWARD,
        *checkpoints(directory),
        task=tiny_task,
        directory=directory,
        env=probed(directory),
    )


@pytest.fixture(params=range(1, STEPS + 1))
def fields(request, run):
    """The rows of a step's batch, without those that verl fills it up with."""
    return real_rows(probe(run.directory, request.param))


def outputs(fields):
    """(uid, session, index) of each row."""
    parts = [key.rsplit("_", 2) for key in fields["key"]]
    return [(uid, session, int(index)) for uid, session, index in parts]


def test_sessions_have_one_to_three_outputs(fields):
    of_session = Counter((uid, session) for uid, session, _ in outputs(fields))
    assert len(of_session) == PROMPTS * ANSWERS
    assert len(set(of_session.values())) > 1
    assert max(of_session.values()) <= 3


def test_advantages_trained_on_are_of_joined_sessions(fields):
    wanted = of_the_definition(outputs(fields), fields, align="token")
    for found, advantages in zip(fields["advantages"], wanted, strict=True):
        torch.testing.assert_close(found.double(), torch.tensor(advantages).double(), atol=1e-6, rtol=0)
    assert any(map(any, wanted))
    # The rows each for itself would have been something else.
    alone = [(uid, key, 0) for (uid, *_), key in zip(outputs(fields), fields["key"], strict=True)]
    assert of_the_definition(alone, fields, align="token") != wanted


def test_sum_pi_squared_is_the_policy_s(run, tiny_task):
    for step in range(1, STEPS + 1):
        model = model_before(run.directory, step, tiny_task.model)
        assert_sum_pi_squared_is_the_policy_s(probe(run.directory, step), model)


def test_trains(run):
    assert len(run.metrics) == STEPS
    for line in run.metrics:
        assert line["actor/grad_norm"] > 0
        # Counted by rows it would be up to twelve.
        assert 1 < line["otb/effective_group_size"] <= ANSWERS
