"""Whole runs with the probe in them, and what they trained on."""

import os
from pathlib import Path
from typing import Any

import torch
from real_trainer import padded
from verl_run import REPOSITORY

from verl_otb import optimal_token_advantages

SUPPORT = REPOSITORY / "tests" / "support"
DENSE_REWARD = f"reward.custom_reward_function.path={SUPPORT}/dense_reward.py"
# The cpu platform's entry point stays; OTB's is switched off.
NO_ENTRY_POINT = {"VERL_USE_EXTERNAL_PLUGINS": "otb_cpu"}
ACTIVE = "OTB is active: estimator"


def probed(directory: Path, *modules: str) -> dict[str, str]:
    """The environment of a run whose batches otb_probe.py writes to `directory`; `modules` are loaded before it."""
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join([*modules, "otb_probe"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])),
        "OTB_PROBE_DIR": str(directory / "probe"),
    }


def probe(directory: Path, step: int) -> dict[str, Any]:
    """The fields of a step's batch, read back from TransferQueue right before the update; a list of rows each."""
    return torch.load(directory / "probe" / f"step_{step}.pt", weights_only=False)["fields"]


def assert_trained_on_the_estimator_s(fields: dict[str, Any], align: str = "position") -> None:
    """The advantages in the batch are those of the estimator on the batch's own tensors."""
    mask = padded(fields["response_mask"])
    advantages, returns = optimal_token_advantages(
        padded(fields["rm_scores"]),
        mask,
        padded(fields["old_log_probs"]),
        padded(fields["sum_pi_squared"]),
        fields["uid"],
        align=align,
    )
    assert advantages.abs().max() > 0
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(padded(fields["returns"]) * mask, returns * mask, atol=1e-6, rtol=0)
