"""Partial sums in one Triton kernel that reads each logit once. Import this module only where Triton is wanted.

One program a row (or a piece of a row, where rows are few) goes through it in blocks of DEPTH × LANES logits. The
running maximum is one number a program, so the sums are rescaled only when it rises. Each lane keeps its own sums, with
what their rounding dropped beside them (Σ e^{2(z−m)} needs none of it: what it could drop is too small to show).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton  # noqa: TID251
import triton.language as tl  # noqa: TID251
from torch import Tensor


class Launch(NamedTuple):
    """How a block is cut: num_warps · 32 threads, each of `per_thread` lanes next to one another, DEPTH times."""

    num_warps: int = 8
    per_thread: int = 8  # 16 bytes of bfloat16
    depth: int = 2
    num_stages: int = 1  # of the loop over blocks; above 1, blocks to come are copied to shared memory meanwhile

    @property
    def lanes(self) -> int:
        return self.num_warps * 32 * self.per_thread


DEFAULT = Launch()
PROGRAMS_PER_PROCESSOR = 8


@triton.jit  # type: ignore[untyped-decorator]
def partials_kernel(  # type: ignore[no-untyped-def]
    logits, labels, temperature, planes, row_stride, column_stride, vocabulary, first, width, pieces,
    HAS_LABELS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    LOG2_E_REST: tl.constexpr = 1.925963033500934e-08  # what float32 has no room for
    LOWEST: tl.constexpr = -1e30  # stands in for −inf in products, because −inf · 0 is NaN
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    begin = piece * width
    end = tl.minimum(begin + width, vocabulary)
    base = logits + row * row_stride
    block = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    t = 1.0
    scale = LOG2_E
    rest = 0.0
    if HAS_TEMPERATURE:
        t = tl.load(temperature + row)
        scale = LOG2_E / t
        rest = (tl.fma(-scale, t, LOG2_E) + LOG2_E_REST) / t
    m = tl.full((), float("-inf"), tl.float32)
    a = tl.zeros((LANES,), tl.float32)
    b = tl.zeros((LANES,), tl.float32)
    c = tl.zeros((LANES,), tl.float32)
    a_dropped = tl.zeros((LANES,), tl.float32)
    c_dropped = tl.zeros((LANES,), tl.float32)
    for start in tl.range(begin, end, DEPTH * LANES, num_stages=STAGES):
        column = start + block
        z = tl.load(base + column * column_stride, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        top = tl.max(tl.max(z, axis=0), axis=0)
        if top > m:
            shift = tl.maximum(m - top, LOWEST)
            weight = tl.exp2(shift * scale)
            c_dropped = (c_dropped + shift * a_dropped) * weight
            c = (c + shift * a) * weight
            a_dropped = a_dropped * weight
            a = a * weight
            b = b * (weight * weight)
            m = top
        d = z - tl.where(m == float("-inf"), 0.0, m)
        bounded = tl.maximum(d, LOWEST)
        e = tl.exp2(tl.fma(d, scale, bounded * rest) if HAS_TEMPERATURE else d * scale)
        b += tl.sum(e * e, axis=0)
        a_before, a_more = a, tl.sum(e, axis=0)
        a = a_before + a_more
        a_dropped += a_more - (a - a_before)
        c_before, c_more = c, tl.sum(bounded * e, axis=0)
        c = c_before + c_more
        c_dropped += c_more - (c - c_before)
    here = planes + row * pieces + piece
    plane = tl.num_programs(0).to(tl.int64) * pieces
    tl.store(here, m)
    tl.store(here + plane, tl.sum(a, axis=0).to(tl.float64) + tl.sum(a_dropped, axis=0))
    tl.store(here + 2 * plane, tl.sum(b, axis=0))
    tl.store(here + 3 * plane, (tl.sum(c, axis=0).to(tl.float64) + tl.sum(c_dropped, axis=0)) / t)
    z_label = 0.0
    if HAS_LABELS:
        label = tl.load(labels + row) - first
        inside = (label >= begin) & (label < end)
        z_label = tl.load(base + label * column_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(here + 4 * plane, z_label)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def partials(
    logits: Tensor,
    labels: Tensor | None,
    first: int,
    temperature: Tensor | None,
    launch: Launch = DEFAULT,
    pieces: int | None = None,
) -> Tensor:
    """As `streamed.partials`. `pieces` a row: as many as fill the GPU, if None."""
    tokens, vocabulary = logits.shape
    step = launch.depth * launch.lanes
    blocks = math.ceil(vocabulary / step)
    if pieces is None:
        pieces = math.ceil(PROGRAMS_PER_PROCESSOR * processors(logits.device) / max(1, tokens))
    width = math.ceil(blocks / min(pieces, blocks)) * step
    pieces = math.ceil(vocabulary / width)
    planes = torch.empty((5, tokens, pieces), dtype=torch.float64, device=logits.device)
    if tokens:
        partials_kernel[(tokens, pieces)](
            logits, logits if labels is None else labels, logits if temperature is None else temperature, planes,
            logits.stride(0), logits.stride(1), vocabulary, first, width, pieces,
            HAS_LABELS=labels is not None, HAS_TEMPERATURE=temperature is not None,
            DEPTH=launch.depth, LANES=launch.lanes, STAGES=launch.num_stages, num_warps=launch.num_warps,
        )  # fmt: skip
    return planes
