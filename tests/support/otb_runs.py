"""Whole runs with the probe in them, and what they trained on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from real_trainer import padded
from transformers import AutoModelForCausalLM
from verl_run import REPOSITORY

from verl_otb import optimal_token_advantages, realized_energy, token_energy

SUPPORT = REPOSITORY / "tests" / "support"
DENSE_REWARD = f"reward.custom_reward_function.path={SUPPORT}/dense_reward.py"
# The cpu platform's entry point stays; OTB's is switched off.
NO_ENTRY_POINT = {"VERL_USE_EXTERNAL_PLUGINS": "otb_cpu"}
ACTIVE = "OTB is active: estimator"


def checkpoints(directory: Path) -> list[str]:
    """Overrides for a checkpoint after each step of the run in `directory`, for verl to go on from and to look into."""
    return [
        "trainer.save_freq=1",
        f"trainer.default_local_dir={directory}/checkpoints",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]


def model_before(directory: Path, step: int, initial: Path) -> Path:
    """The model that `step` started from: `initial`, or the one saved after the step before it."""
    return initial if step == 1 else directory / "checkpoints" / f"global_step_{step - 1}" / "actor" / "huggingface"


def probed(directory: Path, *modules: str) -> dict[str, str]:
    """The environment of a run whose batches otb_probe.py writes to `directory`; `modules` are loaded before it."""
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join([*modules, "otb_probe"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])),
        "OTB_PROBE_DIR": str(directory / "probe"),
    }


def probe(directory: Path, step: int, update: int = 0) -> dict[str, Any]:
    """The fields of a step's batch, read back from TransferQueue right before the update; a list of rows each, and
    TransferQueue's own names of the rows under `key`.

    `update` counts the updates within a step, of which separate_async has several.
    """
    return torch.load(directory / "probe" / f"step_{step}_{update}.pt", weights_only=False)


def real_rows(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without the rows that V1 fills a batch up with."""
    real = [row for row, uid in enumerate(fields["uid"]) if not uid.startswith("pad")]
    return {name: [rows[row] for row in real] for name, rows in fields.items()}


# Overrides and environment of a probed run that saves the policy before each update as well.
SAVE_POLICY = ["actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"], {"OTB_PROBE_POLICY": "1"}


def policy(directory: Path, step: int, update: int = 0) -> Path:
    """The weights that the update was about to change, in Hugging Face's format."""
    return directory / "probe" / f"policy_{step}_{update}" / "huggingface"


def sum_pi_squared_gap(model: Path | torch.nn.Module, fields: dict[str, Any]) -> float:
    """How far a probed batch's Σπ² is from that of `model` in float64 on the same tokens: the largest |found/true - 1|.

    Of the batch's own policy 1e-6 and less (float32); another policy's or another row's is off by 1e-3 and more, even
    where all are close to uniform.
    """
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    gap = 0.0
    with torch.no_grad():
        for tokens, response, found in zip(
            fields["input_ids"], fields["responses"], fields["sum_pi_squared"], strict=True
        ):
            truth = model(tokens[None]).logits[0].softmax(-1).square().sum(-1)
            # The distribution of a response token is the one at the token before it.
            truth = truth[len(tokens) - len(response) - 1 : len(tokens) - 1]
            gap = max(gap, (found.double() / truth - 1).abs().max().item())
    return gap


def energy_log_probs(fields: dict[str, Any]) -> torch.Tensor:
    """The actor's own log-probs, (rows, tokens): in bypass mode old_log_probs are the rollout's."""
    return padded(fields["otb_log_probs" if "otb_log_probs" in fields else "old_log_probs"])


def assert_trained_on_the_estimator_s(fields: dict[str, Any], align: str = "position") -> None:
    """The advantages in the batch are those of the estimator on the batch's own tensors."""
    mask, scores = padded(fields["response_mask"]), padded(fields["rm_scores"])
    advantages, returns = optimal_token_advantages(
        # The score of a token that is not trained on rewards the tokens before it, a penalty there nobody.
        torch.where(mask != 0, padded(fields.get("token_level_rewards", fields["rm_scores"])), scores),
        mask,
        energy_log_probs(fields),
        padded(fields["sum_pi_squared"]),
        fields["uid"],
        rollout_is_weights=padded(fields["rollout_is_weights"]) if "rollout_is_weights" in fields else None,
        align=align,
    )
    assert advantages.abs().max() > 0
    # To the bit: the tiny model is close to uniform, so another policy's Σπ² would move advantages by 1e-7 only.
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=0, rtol=0)
    torch.testing.assert_close(padded(fields["returns"]) * mask, returns * mask, atol=0, rtol=0)


def assert_metrics_describe(fields: dict[str, Any], metrics: dict[str, float]) -> None:
    """A step's `otb/` metrics are those of its batch."""
    mask, sum_pi_squared, advantages, returns = (
        padded(fields[name]) for name in ("response_mask", "sum_pi_squared", "advantages", "returns")
    )
    live = mask != 0
    energy = token_energy(energy_log_probs(fields), sum_pi_squared) * live
    if "rollout_is_weights" in fields:
        energy = energy * padded(fields["rollout_is_weights"]).square()
    for name, found in {
        "otb/realized_energy/mean": realized_energy(energy)[live].mean(),
        "otb/realized_energy/max": realized_energy(energy)[live].max(),
        "otb/baseline/mean": (returns - advantages)[live].mean(),
        "otb/advantage/std": advantages[live].std(correction=0),
        "otb/gradient_power": (advantages.square() * energy)[live].mean(),
    }.items():
        assert metrics[name] == pytest.approx(found.item(), rel=1e-4, abs=1e-6), name


def assert_sum_pi_squared_is_the_policy_s(fields: dict[str, Any], model: Path) -> None:
    """Σπ² of every response token, tool output included, is that of `model` in float64 on the same tokens."""
    assert sum_pi_squared_gap(model, fields) < 1e-5
