"""What callers may hand in; errors say what was found, what was expected, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def check_logits(logits: Tensor, name: str = "logits") -> None:
    if not logits.is_floating_point():
        raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, found {logits.dtype}")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{name} must end in the vocabulary's dimension, found shape {tuple(logits.shape)}")


def check_labels(labels: Tensor, shape: torch.Size, vocabulary: int) -> Tensor:
    """Labels as int64, flat. On a GPU the gather itself checks the range: looking here would wait for it."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, found {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(f"labels must have the logits' shape without the vocabulary, {tuple(shape)}, "
                         f"found {tuple(labels.shape)}")
    flat = labels.reshape(-1).long()
    if flat.device.type == "cpu":
        outside = (flat < 0) | (flat >= vocabulary)
        if outside.any():
            count, first = int(outside.sum()), int(outside.nonzero()[0])
            found = int(flat[first])
            raise ValueError(f"labels must be in [0, {vocabulary}), found {found} at token {first} "
                             f"and {count} such in all; give masked tokens any label in range")
    return flat


def check_temperature(temperature: float | Tensor, shape: torch.Size, device: torch.device) -> Tensor | None:
    """(tokens,) float32, or None where every temperature is 1. On a GPU a bad one makes its own row NaN."""
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be finite and above 0, found {temperature}")
        if temperature == 1.0:
            return None
        return torch.full((math.prod(shape),), float(temperature), dtype=torch.float32, device=device)
    if temperature.ndim and temperature.shape != shape:
        raise ValueError(f"temperature must be a number or one value per token, {tuple(shape)}, "
                         f"found {tuple(temperature.shape)}")
    flat = temperature.to(device=device, dtype=torch.float32).expand(shape).reshape(-1)
    good = flat.isfinite() & (flat > 0)
    if device.type == "cpu" and not good.all():
        first = int((~good).nonzero()[0])
        value = float(flat[first])
        raise ValueError(f"temperature must be finite and above 0, found {value} at token {first}")
    return flat.masked_fill(~good, torch.nan)


def as_rows(logits: Tensor) -> Iterator[Tensor]:
    """The logits as (tokens, V) views, one where strides allow it: reshape would copy the whole."""
    if logits.ndim == 1:
        yield logits.unsqueeze(0)
    elif logits.ndim == 2:
        yield logits
    else:
        try:
            yield logits.view(-1, logits.shape[-1])
        except RuntimeError:
            for part in logits:
                yield from as_rows(part)
