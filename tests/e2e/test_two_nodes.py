"""A Ray cluster of two nodes that knows nothing of verl: what a run has to send, and what it says if it did not."""

import pytest
from otb_runs import (
    DENSE_REWARD,
    NO_ENTRY_POINT,
    SAVE_POLICY,
    assert_trained_on_the_estimator_s,
    policy,
    probe,
    probed,
    sum_pi_squared_gap,
)
from two_nodes import ADDRESSES, NO_TOKEN, two_nodes
from verl_run import run_verl

pytestmark = pytest.mark.e2e

ONE_GPU_A_NODE = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", DENSE_REWARD]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The second node is one where the entry point is switched off, and for `without_otb` one without the plugin."""
    with two_nodes(tmp_path_factory.mktemp("nodes"), second={**NO_ENTRY_POINT, "WITHOUT_OTB": "1"}) as address:
        yield address


def test_the_job_s_variables_reach_both_nodes(cluster, tiny_task, tmp_path):
    """`runtime_env.env_vars` brings VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES, and with it OTB, to both nodes."""
    overrides, environment = SAVE_POLICY
    run = run_verl(
        *ONE_GPU_A_NODE,
        *overrides,
        "trainer.total_training_steps=2",
        task=tiny_task,
        directory=tmp_path,
        env={**probed(tmp_path, "verl_otb.plugin"), **environment, **NO_TOKEN},
        ray_address=cluster,
        timeout=400,
    )
    assert len(run.metrics) == 2
    for role in ("WorkerDict", "vLLMHttpServer"):
        lines = [line for line in run.log.splitlines() if f"({role} pid=" in line]
        assert 0 < sum(f"ip={ADDRESSES[1]}" in line for line in lines) < len(lines)
    for step in (1, 2):
        fields = probe(tmp_path, step)
        assert_trained_on_the_estimator_s(fields)
        assert sum_pi_squared_gap(policy(tmp_path, step), fields) < 1e-5


def test_a_node_without_the_plugin_ends_the_run_before_the_first_rollout(cluster, tiny_task, tmp_path):
    run = run_verl(
        *ONE_GPU_A_NODE,
        task=tiny_task,
        directory=tmp_path,
        env={**probed(tmp_path, "without_otb"), **NO_TOKEN},
        ray_address=cluster,
        timeout=300,
        expect_success=False,
    )
    assert run.returncode not in (0, 124)
    assert "ModuleNotFoundError('import of verl_otb.plugin" in run.tail(5)
    assert any("RayTaskError" in line and f"ip={ADDRESSES[1]}" in line for line in run.log.splitlines())
    assert "Training Progress" not in run.log
