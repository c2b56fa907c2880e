"""LoRA: the reference is the actor without its adapter, so its pass runs the same engine after Σπ² was taken."""

import pytest
import torch
from otb_runs import DENSE_REWARD, assert_trained_on_the_estimator_s, probe, probed, sum_pi_squared_gap
from peft import LoraConfig, get_peft_model
from real_trainer import padded
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.e2e

STEPS, RANK = 2, 8


@pytest.fixture(scope="module")
def lora(tiny_task, tmp_path_factory):
    import verl_run

    directory = tmp_path_factory.mktemp("lora")
    return verl_run.run_verl(
        DENSE_REWARD,
        f"actor_rollout_ref.model.lora_rank={RANK}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        f"trainer.total_training_steps={STEPS}",
        task=tiny_task,
        directory=directory,
        env={**probed(directory), "OTB_PROBE_POLICY": "1"},
    )


def base(tiny_task):
    return AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float64, attn_implementation="eager")


def adapted(run, tiny_task, step):
    """The base model in float64 with the adapter that step's update was about to change."""
    model = get_peft_model(base(tiny_task), LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"))
    saved = run.directory / "probe" / f"policy_{step}_0" / "model_world_size_1_rank_0.pt"
    weights = {name: shard.to_local() for name, shard in torch.load(saved, weights_only=False).items()}
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_the_adapted_policy_s(lora, tiny_task, step):
    fields = probe(lora.directory, step)
    assert_trained_on_the_estimator_s(fields)
    assert sum_pi_squared_gap(adapted(lora, tiny_task, step), fields) < 1e-5
    if step > 1:  # the adapter starts as nothing
        assert sum_pi_squared_gap(base(tiny_task), fields) > 1e-3


def test_the_reference_pass_ran_without_the_adapter(lora, tiny_task):
    fields = probe(lora.directory, STEPS)
    policy, reference = padded(fields["old_log_probs"]), padded(fields["ref_log_prob"])
    assert (policy - reference).abs().max() > 1e-3
    assert lora.metrics[-1]["actor/kl_loss"] > 1e-6
    assert lora.metrics[-1]["training/rollout_probs_diff_max"] < 1e-5  # vLLM answered with the adapter, too
