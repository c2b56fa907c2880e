"""Beside another plugin that wraps the same places of verl, loaded before ours or after."""

import json
import os
import subprocess
import sys
import textwrap

import other_plugin
import pytest
import torch
from real_trainer import padded, put_batch, v1_trainer
from real_worker import tiny_config, training_worker
from verl_run import REPOSITORY

from verl_otb import optimal_token_advantages
from verl_otb.integration import patching
from verl_otb.integration.hooks import HOOKS

ADVANTAGE = tuple(hook for hook in HOOKS if hook.id == "trainer.advantage_inputs")
THEIRS = "compute_advantage_for_multi_trajectories"


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


@pytest.fixture
def advantages_are_right(worker, transfer_queue, tiny_task):
    """One advantage step of the V1 trainer: are its advantages the estimator's?"""

    def step():
        v1, batch = v1_trainer(tiny_config(tiny_task.model), worker), put_batch(transfer_queue)
        v1._compute_advantage(v1._compute_old_log_prob(batch.meta, metrics={}), {})
        fields = batch.fields()
        names = ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")
        expected, _ = optimal_token_advantages(*(padded(fields[name]) for name in names), fields["uid"])
        return torch.allclose(padded(fields["advantages"]), expected, atol=1e-6, rtol=0)

    return step


@pytest.fixture(params=["before ours", "after ours"])
def take_out(request):
    """The other plugin is in, and ours; the function takes it out."""
    from verl.trainer.ppo.v1 import trainer_base

    if request.param == "before ours":
        patching.uninstall(ADVANTAGE)
    take_out = other_plugin.put_in(trainer_base)
    patching.install(ADVANTAGE)
    other_plugin.calls.clear()
    yield take_out
    take_out()
    patching.uninstall(ADVANTAGE)
    take_out()  # if it was beneath ours
    patching.install(ADVANTAGE)


def test_both_run(take_out, advantages_are_right):
    assert advantages_are_right()
    assert other_plugin.calls[THEIRS] == 1


def test_without_theirs_ours_runs(take_out, advantages_are_right):
    take_out()
    assert advantages_are_right()
    assert not other_plugin.calls


def test_without_ours_theirs_runs(take_out, advantages_are_right):
    patching.uninstall(ADVANTAGE)
    with pytest.raises(AssertionError, match="calculate_sum_pi_squared"):  # stock verl, which has no Σπ² here
        advantages_are_right()
    assert other_plugin.calls[THEIRS] == 1
    patching.install(ADVANTAGE)
    assert advantages_are_right()
    assert other_plugin.calls[THEIRS] == 2


USE = """
    import json, os
    import numpy as np, other_plugin, torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_base

    layers, function = [], trainer_base.compute_advantage_for_multi_trajectories
    while function:
        layers.append(os.path.basename(function.__code__.co_filename))
        function = getattr(function, "__wrapped__", None)
    fields = {name: torch.rand(4, 3) for name in ("token_level_rewards", "sum_pi_squared")}
    fields |= {"response_mask": torch.ones(4, 3, dtype=torch.int64), "old_log_probs": -torch.rand(4, 3)}
    data = DataProto(TensorDict(fields, batch_size=4), {"uid": np.array(list("aabb"), dtype=object)})
    advantages = ray_trainer.compute_advantage(data, adv_estimator="optimal_token_baseline").batch["advantages"]
    trainer_base.compute_advantage_for_multi_trajectories(
        data, batch_keys=["a_0_0", "a_1_0", "b_0_0", "b_1_0"], adv_estimator="grpo"
    )
    print(json.dumps({"layers": layers, "advantages": advantages.tolist(), "calls": other_plugin.calls}))
"""


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_loaded_in_either_order(order):
    """By verl: VERL_USE_EXTERNAL_MODULES one after the other, then the entry points. The last is outermost."""
    modules, layers = {
        "theirs first": (["other_plugin_loaded"], ["patching.py", "other_plugin.py", "utils.py"]),
        "ours first": (["verl_otb.plugin", "other_plugin_loaded"], ["other_plugin.py", "patching.py", "utils.py"]),
    }[order]
    path = [str(REPOSITORY / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    loading = {"VERL_USE_EXTERNAL_MODULES": ",".join(modules), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(USE)],
        env={**os.environ, **loading},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == layers
    # `compute_advantage` is called once by the script, once by verl for GRPO, through the copy that utils.py imports
    assert found["calls"] == {"compute_advantage": 2, THEIRS: 1}
    advantages = torch.tensor(found["advantages"])
    assert advantages.isfinite().all()
    assert (advantages != 0).any()
