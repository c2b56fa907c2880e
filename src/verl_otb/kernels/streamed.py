"""Partial sums in plain torch: a cache-sized chunk of the logits at a time, in two buffers used again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .partials import wide

# e^{−43}: terms below it cannot show in a float32 sum that has a 1 in it, even 10⁷ of them. With the bound
# −inf · 0 cannot occur, and neither the terms nor their squares become denormal numbers, which are slow.
LOWEST = -43.0
BLOCK = 1024
# Elements of a float32 buffer. On a CPU both stay in the cache; on a GPU a chunk must be worth its launches.
CHUNK_ON_CPU, CHUNK_ON_DEVICE = 5 << 18, 6 << 20


def chunks(rows: int, columns: int, height: int, elements: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of at most `height` rows, and of columns within them, with at most `elements` in a chunk. One at least,
    if an empty one."""
    height = max(1, min(height, rows))
    width = max(1, min(columns, elements // height))
    across = [slice(left, min(left + width, columns)) for left in range(0, columns, width)]
    for top in range(0, max(rows, 1), height):
        yield slice(top, min(top + height, rows)), across


def label_logits(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """Each label's logit as float32, (tokens,), where the label is one of these columns, which start at `first`;
    0 elsewhere."""
    local = labels - first
    inside = (local >= 0) & (local < logits.shape[-1])
    found = logits.gather(-1, local.where(inside, 0).unsqueeze(-1)).squeeze(-1)
    return found.float().where(inside, 0.0)


def sum_in_blocks(terms: Tensor) -> Tensor:
    """(rows, columns) float32 → (rows,) wide: no float32 sum is longer than a block."""
    rows, columns = terms.shape
    whole = columns // BLOCK * BLOCK
    blocks = terms[:, :whole].view(rows, whole // BLOCK, BLOCK).sum(-1)
    dtype = wide(terms.device)
    return blocks.sum(-1, dtype=dtype) + terms[:, whole:].sum(-1, dtype=dtype)


def partials(logits: Tensor, labels: Tensor | None, first: int, temperature: Tensor | None) -> Tensor:
    """The planes of `Partials`, (5, tokens, pieces).

    Args:
        logits: (tokens, V), V > 0, of any floating dtype and strides: the columns from `first` of a vocabulary.
        labels: (tokens,) int64 in the whole vocabulary, or None.
        temperature: (tokens,) float32, or None for 1.
    """
    tokens, vocabulary = logits.shape
    elements = CHUNK_ON_CPU if logits.device.type == "cpu" else CHUNK_ON_DEVICE
    planes = logits.new_zeros((5, tokens, math.ceil(vocabulary / elements)), dtype=wide(logits.device))
    buffers = logits.new_empty((2, min(elements, logits.numel())), dtype=torch.float32)
    for rows, across in chunks(tokens, vocabulary, elements // vocabulary, elements):
        for piece, columns in enumerate(across):
            chunk = logits[rows, columns]
            z, e = (buffer[: chunk.numel()].view(chunk.shape) for buffer in buffers)
            highest = z.copy_(chunk).amax(-1, keepdim=True)
            live = highest != -torch.inf
            z.sub_(highest.where(live, 0.0))
            if temperature is not None:
                z.div_(temperature[rows, None])
            z.clamp_(min=LOWEST)
            # e^z as 2^{z·log₂e}: torch's exp2 takes half the time of its exp on a CPU.
            torch.exp2(torch.mul(z, math.log2(math.e), out=e), out=e)
            a, c, b = sum_in_blocks(e), sum_in_blocks(z.mul_(e)), sum_in_blocks(e.square_())
            planes[0, rows, piece] = highest.squeeze(-1)
            planes[1:4, rows, piece] = torch.stack((a, b, c)) * live.squeeze(-1)
    if labels is not None:
        planes[4, :, 0] = label_logits(logits, labels, first)
    return planes
