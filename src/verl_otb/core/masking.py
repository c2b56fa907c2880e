"""Masking on the bits."""

from __future__ import annotations

import torch


def zero_unless(keep: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write 0 over `values` where `keep` has no bits set, whatever stood there, NaN included.

    The same as torch.where(mask, values, 0), which on a CPU branches on every element and so takes 3 to 10
    times as long.

    Args:
        keep: int64, −1 (all bits set) where the value stays, else 0.
        values: float64, same shape; changed in place.

    Returns:
        `values`.
    """
    values.view(torch.int64).bitwise_and_(keep)
    return values
