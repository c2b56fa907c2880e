"""Partial sums in plain torch: a cache-sized chunk of the logits at a time, in two buffers used again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .partials import Partials

# e^{−43}: terms below it cannot show in a float32 sum that has a 1 in it, even 10⁷ of them. With the bound
# −inf · 0 cannot occur, and neither the terms nor their squares become denormal numbers, which are slow.
LOWEST = -43.0
# Elements of a float32 buffer. On a CPU both stay in the cache; on a GPU a chunk must be worth its launches.
CHUNK = {"cpu": 5 << 18}
CHUNK_ON_A_DEVICE = 6 << 20


def chunks(rows: int, columns: int, elements: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of rows, and the slices of columns within them, so that no chunk has more than `elements`."""
    width = min(columns, elements)
    height = max(1, elements // max(1, width))
    across = [slice(left, min(left + width, columns)) for left in range(0, columns, width)]
    for top in range(0, rows, height):
        yield slice(top, min(top + height, rows)), across


def partials(logits: Tensor, temperature: Tensor | None) -> Partials:
    """logits (tokens, V) of any floating dtype and stride; temperature (tokens,) float32, None for 1.

    Returns float32 sums of (z−m)/temperature, of shape (tokens, pieces), with m as read, undivided. V > 0.
    """
    tokens, vocabulary = logits.shape
    elements = CHUNK.get(logits.device.type, CHUNK_ON_A_DEVICE)
    plan = list(chunks(tokens, vocabulary, elements))
    pieces = len(plan[0][1]) if plan else 1
    out = Partials(*logits.new_empty((4, tokens, pieces), dtype=torch.float32).unbind())
    size = min(elements, logits.numel())
    buffers = logits.new_empty((2, size), dtype=torch.float32)
    for rows, across in plan:
        for piece, columns in enumerate(across):
            chunk = logits[rows, columns]
            z, e = (buffer[: chunk.numel()].view(chunk.shape) for buffer in buffers)
            z.copy_(chunk)
            highest = z.amax(-1, keepdim=True)
            out.max[rows, piece] = highest.squeeze(-1)
            # In a piece of only −inf, z − m would be NaN; its sums, ≈ 0, weigh nothing beside another's.
            z.sub_(highest.masked_fill_(highest == -torch.inf, 0.0))
            if temperature is not None:
                z.div_(temperature[rows, None])
            z.clamp_(min=LOWEST)
            torch.exp(z, out=e)
            out.sum_exp[rows, piece] = e.sum(-1)
            out.sum_centred[rows, piece] = z.mul_(e).sum(-1)
            out.sum_exp_squared[rows, piece] = e.square_().sum(-1)
    return out
