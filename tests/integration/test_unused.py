"""Installed but unused, the plugin changes nothing, bit for bit: verl's functions on the same tensors, in and out."""

import importlib

import pytest
import torch
from real_trainer import put_batch, v1_trainer
from real_worker import log_prob_pass, tiny_config, token_fields, training_worker

from verl_otb.integration import patching
from verl_otb.integration.hooks import HOOKS, MEGATRON

OTHERS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "grpo_passk"]
OFF = "actor_rollout_ref.actor.calculate_sum_pi_squared=False"


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


def with_and_without(call):
    """`call` with the hooks in and with them out."""
    inside = call()
    patching.uninstall()
    try:
        outside = call()
    finally:
        patching.install()
    return inside, outside


def assert_same(inside, outside):
    assert inside.keys() == outside.keys()
    for name, value in inside.items():
        if torch.is_tensor(value):
            assert torch.equal(value, outside[name]), name
        elif isinstance(value, list) and value and torch.is_tensor(value[0]):
            assert all(torch.equal(a, b) for a, b in zip(value, outside[name], strict=True)), name
        else:
            assert value == outside[name], name


@pytest.mark.parametrize("sum_pi_squared", [False, True], ids=["", "with verl's own Σπ²"])
def test_engine_outputs(worker, sum_pi_squared):
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": sum_pi_squared}

    def call():
        out = log_prob_pass(worker, token_fields([(5, 7), (3, 2), (4, 9), (6, 1)]), 0.7, **flags)
        return {name: out[name].values() for name in out.keys() if name != "metrics"}  # noqa: SIM118

    inside, outside = with_and_without(call)
    assert ("sum_pi_squared" in inside) == sum_pi_squared
    assert_same(inside, outside)


@pytest.mark.parametrize("estimator", OTHERS)
def test_old_log_prob_and_advantage_steps(worker, transfer_queue, tiny_task, estimator):
    """Fields in TransferQueue and metrics after both steps of the V1 trainer."""
    config = tiny_config(tiny_task.model, f"algorithm.adv_estimator={estimator}", OFF)

    def call():
        trainer, batch, metrics = v1_trainer(config, worker), put_batch(transfer_queue), {}
        trainer._compute_advantage(trainer._compute_old_log_prob(batch.meta, metrics), metrics)
        return {**batch.fields(), **metrics}

    inside, outside = with_and_without(call)
    assert "advantages" in inside
    assert not [name for name in inside if "otb" in name or name == "sum_pi_squared"]
    assert_same(inside, outside)


def test_uninstall_leaves_verl_as_it_was():
    """Every attribute that a hook replaces is verl's own function again."""
    from verl.trainer.ppo import core_algos

    here = [hook for hook in HOOKS if hook.module != MEGATRON]  # which needs Megatron to be imported
    modules = {hook.module: importlib.import_module(hook.module) for hook in here}
    ours = core_algos.get_adv_estimator_fn("optimal_token_baseline")
    wrappers = set(patching._wrappers.values())
    assert len(wrappers) == len(here) - 1  # the estimators are registered, not wrapped
    patching.uninstall()
    try:
        stock = core_algos.get_adv_estimator_fn("optimal_token_baseline")
        assert stock is core_algos.compute_optimal_token_baseline_advantage
        for hook in here:
            owner, name = patching._owner(hook, modules[hook.module])
            assert vars(owner)[name] not in wrappers
    finally:
        patching.install()
    assert core_algos.get_adv_estimator_fn("optimal_token_baseline") is ours
