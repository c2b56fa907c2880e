"""Partial sums on a CPU through torch.compile: one loop over the logits, where a C++ compiler is at hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import streamed
from .partials import join, wide

logger = logging.getLogger(__name__)

BLOCK = 512  # columns with a maximum and sums of their own
# Elements of a call. Nothing of that size is stored; 64 MiB would be, if an inductor should decide otherwise.
CHUNK = 16 << 20
WORTH_COMPILING = 1 << 24  # elements: compiling takes seconds, once a process and shape of the vocabulary

failed = False


def block_sums(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """(rows, blocks, columns) → m, a, b, c of each block. By exp2, because an inductor stores what an exp gave."""
    z = logits.float()
    m = z.amax(-1)
    live = m != -torch.inf
    d = z - m.where(live, 0.0).unsqueeze(-1)
    if temperature is not None:
        d = d / temperature[:, None, None]
    d = d.clamp(min=streamed.LOWEST)
    e = torch.exp2(d * math.log2(math.e))
    return torch.stack((m, e.sum(-1) * live, (e * e).sum(-1) * live, (d * e).sum(-1) * live, torch.zeros_like(m)))


def row_sums(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """(rows, V) → m, a, b, c of each row. Joined in here too: many small operations, each on all threads, are slow
    where threads have to wait for one another."""
    whole = logits.shape[1] // BLOCK * BLOCK
    planes = block_sums(torch.unflatten(logits[:, :whole], -1, (-1, BLOCK)), temperature)
    if whole < logits.shape[1]:
        planes = torch.cat((planes, block_sums(logits[:, None, whole:], temperature)), -1)
    _, *sums = join(planes.to(wide(logits.device)), temperature)
    return torch.stack((planes[0].amax(-1).to(wide(logits.device)), *sums[:3]))


@cache
def compiled_row_sums() -> Callable[[Tensor, Tensor | None], Tensor]:
    # fullgraph: past its limit of recompilations torch then raises, where else it would run the formulas as they
    # stand, slowly.
    return torch.compile(row_sums, dynamic=False, fullgraph=True)


def worth_it(device: torch.device, tokens: int, vocabulary: int) -> bool:
    """TORCH_COMPILE_DISABLE=1, torch's own switch, says no."""
    if device.type != "cpu" or tokens < 2 or vocabulary < BLOCK or tokens * vocabulary < WORTH_COMPILING or failed:
        return False
    import torch._dynamo  # late: takes a second

    return not torch._dynamo.config.disable


def partials(logits: Tensor, labels: Tensor | None, first: int, temperature: Tensor | None) -> Tensor:
    """As `streamed.partials`, with one piece; and by `streamed.partials`, where this cannot be compiled."""
    global failed
    if len(logits) >= 2 and logits.shape[1] >= BLOCK and not failed:
        try:
            return compiled_partials(logits, labels, first, temperature)
        except Exception as error:  # whatever a compiler, its absence or a full disk may raise
            failed = True
            logger.debug("no compiled kernel, streaming instead: %s", error)
    return streamed.partials(logits, labels, first, temperature)


def compiled_partials(logits: Tensor, labels: Tensor | None, first: int, temperature: Tensor | None) -> Tensor:
    tokens, vocabulary = logits.shape
    planes = logits.new_zeros((5, tokens, 1), dtype=wide(logits.device))
    height = max(2, CHUNK // vocabulary)
    for top in range(0, tokens, height):
        rows = slice(min(top, tokens - 2), top + height)  # never one row alone: torch would compile that anew
        chunk, t = logits[rows], None if temperature is None else temperature[rows]
        for tensor in (chunk,) if t is None else (chunk, t):
            torch._dynamo.mark_dynamic(tensor, 0)
        planes[:4, rows, 0] = compiled_row_sums()(chunk, t)
    if labels is not None:
        planes[4, :, 0] = streamed.label_logits(logits, labels, first)
    return planes
