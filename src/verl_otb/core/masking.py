"""Masks as bits: int64, −1 (all bits set) for a live token and 0 for a masked one.

What a mask is used for here, keeping one number and putting 0 over another, NaN included, is a bitwise and. On a
CPU torch.where branches on every element instead, and takes 3 to 10 times as long.
"""

from __future__ import annotations

import torch


def live_bits(response_mask: torch.Tensor) -> torch.Tensor:
    """The bits of a mask of 0 and 1 of any dtype. Other values are cut to these two."""
    return response_mask.long().clamp(0, 1).neg_()


def zero_unless(live: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write 0 over the `values` (float64, same shape) of masked tokens, whatever stood there. In place."""
    values.view(torch.int64).bitwise_and_(live)
    return values
