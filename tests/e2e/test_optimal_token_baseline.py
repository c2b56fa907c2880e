"""Whole runs of stock verl with the plugin: what it trains on is what the estimator says."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl_run import REPOSITORY, STEPS

from verl_otb import optimal_token_advantages

pytestmark = pytest.mark.e2e
SUPPORT = str(REPOSITORY / "tests" / "support")
DENSE_REWARD = f"reward.custom_reward_function.path={SUPPORT}/dense_reward.py"
# The cpu platform's entry point stays; OTB's is switched off.
NO_ENTRY_POINT = {"VERL_USE_EXTERNAL_PLUGINS": "otb_cpu"}
ACTIVE = "OTB is active: estimator"


def probed(directory, *modules: str) -> dict[str, str]:
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join([*modules, "otb_probe"]),
        "PYTHONPATH": SUPPORT,
        "OTB_PROBE_DIR": str(directory / "probe"),
    }


def probe(directory, step: int) -> dict:
    return torch.load(directory / "probe" / f"step_{step}.pt", weights_only=False)


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


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
    fields = probe(run.directory, step)["fields"]
    mask = padded(fields["response_mask"])
    advantages, returns = optimal_token_advantages(
        padded(fields["rm_scores"]),
        mask,
        padded(fields["old_log_probs"]),
        padded(fields["sum_pi_squared"]),
        fields["uid"],
        align="token" if estimator.startswith("tir") else "position",
    )
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(padded(fields["returns"]) * mask, returns * mask, atol=1e-6, rtol=0)
    assert advantages.abs().max() > 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_the_policy_s(trained, tiny_task, step):
    """Σπ² of every response token, in float64 from the model saved before this step's update, on the same tokens."""
    _, run = trained
    fields = probe(run.directory, step)["fields"]
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


LOADING = {
    "external_lib": (["actor_rollout_ref.model.external_lib=verl_otb.plugin"], NO_ENTRY_POINT, []),
    "VERL_USE_EXTERNAL_MODULES": ([], NO_ENTRY_POINT, ["verl_otb.plugin"]),
    "twice": (["actor_rollout_ref.model.external_lib=verl_otb.plugin"], {}, ["verl_otb.plugin"]),
}


@pytest.mark.parametrize("way", LOADING)
def test_loading(run_verl, tmp_path, way):
    """The entry point is shown by `trained`; here the other two ways, with it switched off, and all three at once."""
    overrides, env, modules = LOADING[way]
    run = run_verl(
        *overrides, DENSE_REWARD, "trainer.total_training_steps=1", env={**probed(tmp_path, *modules), **env}
    )
    assert run.log.count(ACTIVE) == 1
    fields = probe(tmp_path, 1)["fields"]
    advantages, _ = optimal_token_advantages(
        *(padded(fields[name]) for name in ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")),
        fields["uid"],
    )
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)


def test_colocate_async(run_verl, tmp_path):
    run = run_verl(
        "trainer.v1.trainer_mode=colocate_async", DENSE_REWARD, "trainer.total_training_steps=2", env=probed(tmp_path)
    )
    assert len(run.metrics) == 2
    for step in (1, 2):
        fields = probe(tmp_path, step)["fields"]
        advantages, _ = optimal_token_advantages(
            *(padded(fields[name]) for name in ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")),
            fields["uid"],
        )
        torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)


def test_grpo_beside_the_plugin(run_verl, tmp_path):
    """Installed but not chosen: no metric, no field, no word of OTB."""
    run = run_verl("algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", env=probed(tmp_path))
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert not [key for key in line if key.startswith("otb/")]
        assert line["training/rollout_probs_diff_max"] < 1e-6
    assert "sum_pi_squared" not in probe(tmp_path, 1)["fields"]
    assert "verl_otb" not in run.log.replace(str(REPOSITORY), "")
    assert ACTIVE not in run.log


def test_stock_verl_still_fails(run_verl):
    """The bug this plugin is for. When this test fails, verl has repaired it: read the hooks' `remove_when`."""
    run = run_verl("trainer.total_training_steps=1", env=NO_ENTRY_POINT, expect_success=False)
    assert run.returncode not in (0, 124)
    assert "Please set actor.calculate_sum_pi_squared=True in config" in run.log
    assert not run.metrics


def test_wrong_configuration_fails_before_ray(run_verl):
    run = run_verl("actor_rollout_ref.actor.calculate_sum_pi_squared=False", expect_success=False)
    assert run.returncode not in (0, 124)
    assert "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True" in run.log
    assert "Started a local Ray instance" not in run.log


def test_wrong_configuration_fails_before_workers(run_verl):
    """Where only external_lib loads the plugin, the driver cannot know; the TaskRunner does, before any worker."""
    run = run_verl(
        "actor_rollout_ref.actor.calculate_sum_pi_squared=False",
        "actor_rollout_ref.model.external_lib=verl_otb.plugin",
        env=NO_ENTRY_POINT,
        expect_success=False,
    )
    assert run.returncode not in (0, 124)
    assert "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True" in run.log
    assert "WorkerDict" not in run.log
