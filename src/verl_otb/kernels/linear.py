"""Sums from hidden states and the head: the logits exist a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from .partials import Partials, join
from .streamed import chunks

# A chunk of logits in bytes, and its rows. On a GPU it is tall, so that the head is read once for many tokens,
# and wide enough to fill the matrix units; on a CPU it stays in the cache until its sums are taken.
CHUNK_ON_CPU, CHUNK_ON_DEVICE = 8 << 20, 64 << 20
ROWS_ON_CPU, ROWS_ON_DEVICE = 512, 8192


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor) -> Tensor:
    """Divided in the logits' dtype, as the model's own would be: then these are the numbers that it trains on."""
    logits = linear(hidden, weight, bias)
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[:, None].to(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def joined_partials(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float | Tensor,
    partials: Callable[[Tensor, Tensor | None, int, Tensor | None], Tensor],
) -> Partials:
    """hidden (tokens, d), tokens > 0, weight (V, d), labels (tokens,) → sums over the whole vocabulary."""
    on_cpu = hidden.device.type == "cpu"
    height = ROWS_ON_CPU if on_cpu else ROWS_ON_DEVICE
    elements = (CHUNK_ON_CPU if on_cpu else CHUNK_ON_DEVICE) // hidden.element_size()
    found: list[Partials] = []
    for rows, across in chunks(len(hidden), len(weight), height, elements):
        planes = []
        for columns in across:
            t = temperature[rows] if isinstance(temperature, Tensor) else temperature
            logits = scaled_logits(hidden[rows], weight[columns], None if bias is None else bias[columns], t)
            planes.append(partials(logits, labels[rows], columns.start, None))
            del logits  # before the next chunk is made
        found.append(join(torch.cat(planes, -1)))
    return Partials(*(torch.cat(sums) for sums in zip(*found, strict=True)))
