"""What callers may hand in; errors say what was found, what was expected, what to do.

Nothing here waits for a GPU: values that live there are checked there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IMPLS = ("auto", "reference", "torch", "triton")


def check_impl(impl: str, device: torch.device, group: ProcessGroup | None) -> None:
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; found {impl!r}")
    if impl == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'impl="triton" needs tensors on a GPU, found {device}; use impl="auto"')
    if impl == "reference" and group is not None:
        raise ValueError('impl="reference" needs the whole vocabulary on one rank; use impl="torch"')


def check_logits(logits: Tensor) -> None:
    _check_floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must end in the vocabulary's dimension, found shape {tuple(logits.shape)}")


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    head = [("hidden", hidden), ("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for name, tensor in head:
        _check_floating(name, tensor)
        if tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(f"{name} must be of hidden's dtype, {hidden.dtype}, found {tensor.dtype}; "
                             "convert one, or call under autocast")  # fmt: skip
        _check_device(name, tensor, hidden.device)
    if weight.ndim != 2 or 0 in weight.shape or hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError("hidden must be (..., d) and weight (V, d), the head's own layout, d and V at least 1; "
                         f"found {tuple(hidden.shape)} and {tuple(weight.shape)}")  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be (V,) = ({len(weight)},), found {tuple(bias.shape)}")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, found {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"{name} must be dense, found a {'nested' if tensor.is_nested else tensor.layout} tensor")


def _check_floating(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in FLOATING:
        raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, found {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, beside the rest, found on {tensor.device}")


def check_labels(labels: Tensor, shape: torch.Size, vocabulary: int, device: torch.device) -> Tensor:
    """Labels as int64, (tokens,). One out of range: ValueError on a CPU, a device-side assertion elsewhere."""
    _check_tensor("labels", labels)
    _check_device("labels", labels, device)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, found {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(f"labels must have shape {tuple(shape)}, one a token, found {tuple(labels.shape)}")
    flat = labels.reshape(-1).long()
    outside = (flat < 0) | (flat >= vocabulary)
    if flat.device.type != "cpu":
        torch._assert_async(~outside.any(), f"verl_otb: labels must be in [0, {vocabulary})")
    elif outside.any():
        first = int(outside.nonzero()[0])
        raise ValueError(
            f"labels must be in [0, {vocabulary}), found {int(flat[first])} at token {first}, one of "
            f"{int(outside.sum())} such; give tokens that do not count any label in range"
        )
    return flat


def check_temperature(temperature: float | Tensor, shape: torch.Size, device: torch.device) -> Tensor | None:
    """(tokens,) float32, or None where every temperature is 1. On a GPU a bad one makes its own token NaN."""
    if not isinstance(temperature, Tensor):
        if not isinstance(temperature, Real):
            raise ValueError(f"temperature must be a number or a torch tensor, found {type(temperature).__name__}")
        float32 = torch.finfo(torch.float32)
        if not float32.tiny <= temperature <= float32.max:
            raise ValueError(f"temperature must be finite in float32 and above 0, found {temperature}")
        if temperature == 1.0:
            return None
        return torch.full((math.prod(shape),), float(temperature), dtype=torch.float32, device=device)
    if temperature.ndim and temperature.shape != shape:
        raise ValueError(f"temperature must be a number or one value a token, {tuple(shape)}, "
                         f"found {tuple(temperature.shape)}")  # fmt: skip
    flat = temperature.to(device=device, dtype=torch.float32).expand(shape).reshape(-1)
    good = flat.isfinite() & (flat > 0)
    if device.type == "cpu" and not good.all():
        first = int((~good).nonzero()[0])
        value = float(flat[first])
        raise ValueError(f"temperature must be finite and above 0, found {value} at token {first}")
    return flat.masked_fill(~good, torch.nan)


def as_rows(logits: Tensor) -> Iterator[Tensor]:
    """The logits as (tokens, V) views, one where the strides allow it: reshape would copy the whole."""
    try:
        yield logits.view(-1, logits.shape[-1])
    except RuntimeError:
        for part in logits:
            yield from as_rows(part)
