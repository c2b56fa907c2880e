"""log-prob, entropy and Σπ² in verl's FSDP engine, in the old-log-prob pass of a run with OTB.

The hooks act only where the trainer asks for Σπ²; the training forward stays verl's. There verl reads the logits
several times; here one call gives all three, in float32. With fused kernels no logits exist: Σπ² comes from the
hidden states and the head, chunk by chunk.
"""

from __future__ import annotations

import functools
import logging
import os
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F

from verl_otb.errors import ConfigError
from verl_otb.integration.heads import INSTEAD, refuse_head, refuse_left_out, refuse_sharded
from verl_otb.kernels import linear_token_statistics, sum_pi_squared, token_statistics

logger = logging.getLogger("verl_otb")

# Our own request, not verl's calculate_sum_pi_squared: verl then leaves its own formula alone, and whoever sets
# verl's flag without OTB gets verl's numbers.
ASK = "otb_sum_pi_squared"
FIELD = "sum_pi_squared"

# Within a forward step that is asked for Σπ²: what the fused head found. Elsewhere None.
_from_head: ContextVar[list[torch.Tensor] | None] = ContextVar("verl_otb_from_head", default=None)


def forward_step(original: Any, self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `engine.forward_step`: the time in which a fused head is to leave its Σπ²."""
    if not flag(micro_batch, ASK):
        return original(self, micro_batch, *args, **kwargs)
    if flag(micro_batch, "use_fused_kernels"):
        refuse_left_out(self.module.config)
        refuse_head(self.module)
    token = _from_head.set([])
    try:
        return original(self, micro_batch, *args, **kwargs)
    finally:
        _from_head.reset(token)


def fused_linear(
    original: Any,
    self: Any,
    hidden_states: Any,
    vocab_weights: Any,
    input_ids: Any,
    temperature: Any = 1.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook `engine.fused_linear`: verl's fused head (torch and liger), asked for Σπ²: all three from one product.

    A chunk of logits is rounded to the hidden states' dtype and divided by the temperature there, as verl's own
    head does in the training forward, so that the log-probs agree.
    """
    found = _from_head.get()
    if found is None:
        return original(self, hidden_states, vocab_weights, input_ids, temperature, *args, **kwargs)
    refuse_sharded(isinstance(vocab_weights, DTensor))
    statistics = linear_token_statistics(hidden_states, vocab_weights, input_ids, temperature=temperature)
    found.append(statistics.sum_pi_squared)
    return statistics.log_probs, statistics.entropy


def linear_cross_entropy(
    original: Any, hidden: Any, weight: Any, labels: Any, temperature: Any = 1.0, *args: Any, **kwargs: Any
) -> Any:
    """Hook `engine.linear_cross_entropy`: verl's Triton head. It never rounds its logits, so its own log-probs and
    entropy stay, as in the training forward, and only Σπ² is ours."""
    found = _from_head.get()
    if found is not None:
        found.append(linear_token_statistics(hidden, weight, labels, temperature=temperature).sum_pi_squared)
    return original(hidden, weight, labels, temperature, *args, **kwargs)


def prepare_model_outputs(
    original: Any, self: Any, output: Any, output_args: dict[str, Any], micro_batch: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Hook `engine.outputs`: verl's outputs, and where the trainer asked for it Σπ² beside them.

    All are jagged nested tensors (samples, prompt + response), aligned with each other.
    """
    if not flag(micro_batch, ASK):
        if flag(micro_batch, "calculate_sum_pi_squared"):
            _say_that_verl_asks()
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    if flag(micro_batch, "use_fused_kernels"):
        model_output = original(self, output, output_args, micro_batch, *args, **kwargs)
        model_output[FIELD] = _packed(self, _found_in_head(), output_args, micro_batch)
        return model_output
    logits = _scaled_logits(output.logits, output_args, micro_batch)
    if _as_verl_would(logits, micro_batch):
        statistics = token_statistics(logits, _labels(logits, output_args, micro_batch))._asdict()
        if not flag(micro_batch, "calculate_entropy"):
            del statistics["entropy"]
        return {name: _packed(self, values, output_args, micro_batch) for name, values in statistics.items()}
    found = sum_pi_squared(logits)
    del logits
    model_output = original(self, output, output_args, micro_batch, *args, **kwargs)
    model_output[FIELD] = _packed(self, found, output_args, micro_batch)
    return model_output


@functools.cache
def _say_that_verl_asks() -> None:
    """The one trace that a trainer without the plugin leaves in a worker with it."""
    logger.warning(
        "this worker computes Σπ² by verl's own formula: verl-otb is loaded here, but the trainer's process did not "
        "ask through it. If algorithm.adv_estimator is one of OTB's, load the plugin there too (fully_async and "
        "one_step_off do not read external_lib in their trainer): by its entry point, or VERL_USE_EXTERNAL_MODULES."
    )


def flag(micro_batch: Any, name: str, default: bool = False) -> bool:
    """A setting that travels with the batch."""
    return bool(tu.get_non_tensor_data(data=micro_batch, key=name, default=default))


def _remove_padding(micro_batch: Any) -> bool:
    return flag(micro_batch, "use_remove_padding", default=True)


def _as_verl_would(logits: torch.Tensor, micro_batch: Any) -> bool:
    """Whether verl's log-prob of the training forward is float32 arithmetic on these logits, as ours is.

    Where it is not (bfloat16 logits without flash-attn's cross entropy: verl rounds the log-prob to bfloat16) its own
    formula must give the old log-prob too, or the ratio of the two policies would start off 1.
    """
    if flag(micro_batch, "distillation_use_topk") or flag(micro_batch, "distillation_only"):
        return False  # further outputs, which only verl makes
    flash = verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE and os.getenv("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"
    return logits.dtype == torch.float32 or (flash and logits.dtype in (torch.bfloat16, torch.float16))


def _scaled_logits(logits: torch.Tensor, output_args: dict[str, Any], micro_batch: Any) -> torch.Tensor:
    """The logits that verl takes log-probs from: gathered over tensor parallel ranks, and divided by a temperature
    of at least 1e-8 in their own dtype, or not at all where verl knows that all are 1.

    (tokens, vocabulary), or with padding (samples, width, vocabulary).
    """
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if _remove_padding(micro_batch):
        logits, temperature = logits.squeeze(0), output_args["temperature_rmpad"]
    else:
        temperature = output_args["temperature"].unsqueeze(-1)
    if output_args.get("temperature_is_one", False):
        return logits
    return logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)


def _labels(logits: torch.Tensor, output_args: dict[str, Any], micro_batch: Any) -> torch.Tensor:
    """The next token at each place of the logits; verl has them without padding."""
    labels = output_args["input_ids_rmpad_rolled"]
    if _remove_padding(micro_batch):
        return labels
    padded = labels.new_zeros(logits.shape[:-1])
    padded[_real(padded, micro_batch)] = labels
    return padded


def _packed(engine: Any, values: torch.Tensor, output_args: dict[str, Any], micro_batch: Any) -> torch.Tensor:
    """One value a token, as verl packs them: gathered over the Ulysses group, without padding."""
    if _remove_padding(micro_batch):
        values = engine._gather_and_unpad_packed(values.flatten(), output_args["pad_size"])
    else:
        values = values[_real(values, micro_batch)]
    return torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())


def _real(padded: torch.Tensor, micro_batch: Any) -> torch.Tensor:
    """Where (samples, width) holds a token."""
    lengths = micro_batch["input_ids"].offsets().diff()
    return torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


def _found_in_head() -> torch.Tensor:
    found = _from_head.get()
    if not found:
        raise ConfigError(
            "this model's forward does not go through verl's fused heads (FusedLinearForPPO, linear_cross_entropy), "
            f"so there is no Σπ² to take. {INSTEAD}"
        )
    return found.pop()
