"""Sums from hidden states and the head: the logits exist a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from .partials import Partials, collect, join
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
    """hidden (tokens, d), weight (V, d), labels (tokens,) → sums over the whole vocabulary."""
    on_cpu = hidden.device.type == "cpu"
    height = ROWS_ON_CPU if on_cpu else ROWS_ON_DEVICE
    elements = (CHUNK_ON_CPU if on_cpu else CHUNK_ON_DEVICE) // hidden.element_size()

    def parts() -> Iterator[tuple[slice, Partials]]:
        for rows, across in chunks(len(hidden), len(weight), height, elements):
            planes = []
            t = temperature[rows] if isinstance(temperature, Tensor) else temperature
            for columns in across:
                logits = scaled_logits(hidden[rows], weight[columns], None if bias is None else bias[columns], t)
                planes.append(partials(logits, labels[rows], columns.start, None))
                del logits  # before the next chunk is made
            yield rows, join(torch.cat(planes, -1))

    return collect(len(hidden), parts(), hidden.device)
