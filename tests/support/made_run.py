"""A run as the report finds it: lines as verl's `file` logger writes them, and a dump by the plugin's own writer."""

import json
from pathlib import Path
from typing import Any

import torch

from verl_otb.core.method import Method
from verl_otb.integration import dump


def put_metrics(run: Path, steps: int = 30, otb: bool = True) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "data": {"val-core/acc": 0.5}}]
    for step in range(1, steps + 1):
        ours = {
            "otb/gradient_power": 0.1 / step,
            "otb/gradient_power_group_mean": 0.2 / step,
            "otb/gradient_power_vs_group_mean": 0.5 if step > 1 else None,  # ∞ as verl writes it
            "otb/held_out_power_vs_group_mean": 0.9 if step > 1 else None,
        }
        lines.append({"step": step, "data": {"critic/score/mean": step / steps, **(ours if otb else {})}})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 99, "da')  # a run that is still going
    return run


def put_dump(
    run: Path, step: int = 3, spread: float = 1.0, responses: torch.Tensor | None = None, **method: Any
) -> tuple[dict[str, Any], list[str]]:
    """Two groups of three rows of at most six tokens, with tool output in two; the scores of `b` differ most."""
    generator = torch.Generator().manual_seed(step)
    mask = torch.ones(6, 6)
    mask[1, 4:] = mask[2, 2:] = mask[3, 1:3] = mask[5, 3:5] = 0
    tensors = {
        "token_level_rewards": torch.zeros(6, 6),
        "response_mask": mask,
        "old_log_probs": -3 * torch.rand(6, 6, generator=generator) - 0.5,
        "sum_pi_squared": 0.5 + 0.4 * torch.rand(6, 6, generator=generator),
        "rollout_is_weights": None,
    }
    tensors["token_level_rewards"][:, 5] = torch.tensor([0.0, 0.1, 0.0, 0.0, spread, 0.5 * spread])
    index = ["a", "a", "a", "b", "b", "b"]
    with dump.telling(step=step, responses=responses):
        dump.record(str(run / "dump"), tensors, index, Method(**method))
    assert dump.flush(str(run / "dump"), 30)
    return tensors, index
