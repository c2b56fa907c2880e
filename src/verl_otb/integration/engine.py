"""Σπ² in verl's FSDP engine: of each token's distribution, packed as the engine packs log-probs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu

from verl_otb.errors import ConfigError
from verl_otb.kernels import sum_pi_squared

# Our own request, not verl's calculate_sum_pi_squared: verl then leaves its own formula alone, and whoever sets
# verl's flag without OTB gets verl's numbers.
ASK = "otb_sum_pi_squared"
FIELD = "sum_pi_squared"


def prepare_model_outputs(
    original: Any, self: Any, output: Any, output_args: dict[str, Any], micro_batch: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Hook `engine.sum_pi_squared`: verl's outputs, and where the trainer asked for it Σπ² beside them."""
    if not tu.get_non_tensor_data(data=micro_batch, key=ASK, default=False):
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    if tu.get_non_tensor_data(data=micro_batch, key="use_fused_kernels", default=False):
        raise ConfigError(
            "fused kernels make no logits to take Σπ² from. Set actor_rollout_ref.model.use_fused_kernels=False"
        )
    model_output = original(self, output, output_args, micro_batch, *args, **kwargs)
    model_output[FIELD] = _sum_pi_squared(self, output.logits, output_args, micro_batch)
    return model_output


@torch.no_grad()
def _sum_pi_squared(engine: Any, logits: torch.Tensor, output_args: dict[str, Any], micro_batch: Any) -> torch.Tensor:
    """A jagged nested tensor (samples, prompt + response), float32, aligned with the engine's log-probs.

    Taken from the logits that verl takes log-probs from: gathered over tensor parallel ranks and divided by the
    temperature in their own dtype.
    """
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    offsets = micro_batch["input_ids"].offsets()
    if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
        logits = _scaled(logits.squeeze(0), output_args["temperature_rmpad"], output_args)  # (tokens, vocabulary)
        values = engine._gather_and_unpad_packed(sum_pi_squared(logits), output_args["pad_size"])
    else:
        logits = _scaled(logits, output_args["temperature"].unsqueeze(-1), output_args)  # (samples, width, vocabulary)
        columns = torch.arange(logits.shape[1], device=logits.device)
        values = sum_pi_squared(logits)[columns < offsets.diff().unsqueeze(1)]
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, output_args: dict[str, Any]) -> torch.Tensor:
    """As verl divides: by at least 1e-8, in the logits' dtype, and not at all where it knows that all are 1."""
    if output_args.get("temperature_is_one", False):
        return logits
    return logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)
