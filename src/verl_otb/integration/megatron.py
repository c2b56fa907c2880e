"""Σπ² in verl's Megatron engine, where each tensor parallel rank holds a part of the vocabulary.

One method of verl serves its training forward and its log-prob passes, and works on the logits in place. Log-prob and
entropy therefore stay verl's, so that the ratio of the two policies starts at 1; Σπ² is the kernels', in float32 and
without verl's two copies of the logits.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl_otb.integration.engine import ASK, flag
from verl_otb.kernels import sum_pi_squared

# Within a forward that the trainer asked for Σπ².
_asked: ContextVar[bool] = ContextVar("verl_otb_megatron_asked", default=False)


def logits_processor(original: Any, self: Any, logits: Any, label: Any, temperature: Any, **kwargs: Any) -> Any:
    """Hook `engine.megatron_logits`: turns our request into verl's own, which decides when Σπ² is computed."""
    if not flag(kwargs["batch"], ASK):
        return original(self, logits, label, temperature, **kwargs)
    token = _asked.set(True)
    try:
        return original(self, logits, label, temperature, **{**kwargs, "calculate_sum_pi_squared": True})
    finally:
        _asked.reset(token)


def vocab_parallel_sum_pi_squared(original: Any, vocab_parallel_logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook `engine.megatron_sum_pi_squared`: two all-reduces, of the maxima and of the sums."""
    if not _asked.get():
        return original(vocab_parallel_logits, *args, **kwargs)
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return sum_pi_squared(vocab_parallel_logits, process_group=group)
