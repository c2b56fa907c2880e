"""Going on from checkpoints, also after a worker was killed: one directory of checkpoints, and three runs in a row."""

import pytest
import verl_run
from otb_runs import (
    ACTIVE,
    DENSE_REWARD,
    NO_ENTRY_POINT,
    assert_sum_pi_squared_is_the_policy_s,
    assert_trained_on_the_estimator_s,
    checkpoints,
    model_before,
    probe,
    probed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(tiny_task, tmp_path_factory):
    """Step 1 by GRPO in stock verl; step 2 by OTB, whose actor is killed in step 3; step 3 by OTB."""
    directory = tmp_path_factory.mktemp("resume")

    def run(name, steps, *overrides, **options):
        return verl_run.run_verl(
            *overrides,
            DENSE_REWARD,
            *checkpoints(directory),
            "trainer.resume_mode=auto",
            f"trainer.total_training_steps={steps}",
            task=tiny_task,
            directory=directory / name,
            **options,
        )

    grpo = run("grpo", 1, "algorithm.adv_estimator=grpo", env=NO_ENTRY_POINT)
    killed = run("killed", 3, env=probed(directory, "actor_faults") | {"OTB_FAULT": "kill@2"}, expect_success=False)
    resumed = run("resumed", 3, env=probed(directory))
    return directory, grpo, killed, resumed


def steps(run):
    return [line["step"] for line in run.metrics]


def test_each_run_goes_on_where_the_last_left_off(runs):
    _, grpo, killed, resumed = runs
    assert (steps(grpo), steps(killed), steps(resumed)) == ([1], [2], [3])
    assert ACTIVE not in grpo.log
    assert killed.log.count(ACTIVE) == resumed.log.count(ACTIVE) == 1


@pytest.mark.parametrize("step", [2, 3])
def test_trained_on_the_estimator_s_with_the_loaded_policy_s_sum_pi_squared(runs, tiny_task, step):
    """Step 2 starts from what GRPO saved, step 3 from what OTB saved."""
    directory, *_ = runs
    fields = probe(directory, step)
    assert_trained_on_the_estimator_s(fields)
    assert_sum_pi_squared_is_the_policy_s(fields, model_before(directory, step, tiny_task.model))


def test_a_killed_actor_ends_the_run_with_its_cause(runs):
    *_, killed, _ = runs
    assert killed.returncode == 1  # not 124: it ended by itself
    assert "in _update_actor" in killed.tail(30)
    assert "ActorDiedError: The actor died unexpectedly" in killed.tail(10)
    assert "WorkerDict" in killed.tail(10)
    assert "the process was killed by the OOM killer" in killed.tail(1)
