"""The public functions: they check, choose an implementation, and finish what it sums."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference, streamed
from .checks import as_rows, check_logits, check_temperature
from .partials import Partials, join, sum_pi_squared_of, wide

IMPLS = ("auto", "reference", "torch")


def chosen(logits: Tensor, impl: str = "auto") -> str:
    """The implementation that `impl` means for these logits: "reference" or "torch"."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, found {impl!r}")
    return "torch" if impl == "auto" else impl


def joined_partials(logits: Tensor, temperature: Tensor | None, impl: str) -> Partials:
    """Sums over the whole vocabulary, (tokens,), in wide arithmetic."""
    found = []
    done = 0
    for rows in as_rows(logits):
        here = None if temperature is None else temperature[done : done + len(rows)]
        pieces = streamed.partials(rows, here)
        if here is not None:
            pieces = pieces._replace(max=pieces.max.to(wide(rows.device)) / here.unsqueeze(-1))
        found.append(join(pieces))
        done += len(rows)
    if not found:
        return Partials(*logits.new_empty((4, 0), dtype=wide(logits.device)).unbind())
    return found[0] if len(found) == 1 else Partials(*(torch.cat(sums) for sums in zip(*found, strict=True)))


@torch.no_grad()
def sum_pi_squared(logits: Tensor, *, temperature: float | Tensor = 1.0, impl: str = "auto") -> Tensor:
    """Σ_v π_v² of each token's distribution π = softmax(logits / temperature): the collision probability.

    Σ π² = Σ e^{2(z−m)} / (Σ e^{z−m})², m = max z; token energy 1 − 2π + Σπ² of arXiv 2602.07078 needs it.

    Args:
        logits: (..., V), bfloat16, float16, float32 or float64, of any strides. Never changed. −inf entries
            have π = 0. A row of only −inf, or with NaN or +inf, gives NaN for that token alone.
        temperature: a number, or one value per token of shape (...); applied in float32.
        impl: "auto", "reference" (plain, whole tensors, float64 if the logits are), or "torch" (streamed in
            chunks: at most 64 MiB of extra memory, float32 arithmetic whatever the dtype).

    Returns:
        float32 (float64 from the reference on float64 logits), shape (...), in [1/V, 1]. Carries no gradient.

    Raises:
        ValueError: not floating point, no vocabulary, an unknown impl, a temperature that is not above 0.
    """
    check_logits(logits)
    shape = logits.shape[:-1]
    flat = check_temperature(temperature, shape, logits.device)
    if chosen(logits, impl) == "reference":
        return reference.sum_pi_squared(logits, logits.new_ones(shape) if flat is None else flat.view(shape))
    return sum_pi_squared_of(joined_partials(logits, flat, impl)).view(shape)
