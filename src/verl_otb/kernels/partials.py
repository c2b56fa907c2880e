"""Partial sums of a softmax over a piece of the vocabulary, and the statistics that follow from them.

Every implementation (streamed torch, compiled, Triton, vocabulary split over ranks) ends here. With z the
logits of one token, divided by the temperature, and m the largest of a piece:

    a = Σ e^{z−m}        b = Σ e^{2(z−m)}        c = Σ (z−m) e^{z−m}

Pieces with different m join by rescaling, and over the whole vocabulary

    log π_v = (z_v − m) − log a        Σ π² = b / a²        entropy = −Σ π log π = log a − c / a
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenStatistics(NamedTuple):
    """What one read of the logits gives: three float32 tensors of shape logits.shape[:-1]."""

    log_probs: Tensor  #: log π of the label, in nats
    entropy: Tensor  #: −Σ_v π_v log π_v, in nats
    sum_pi_squared: Tensor  #: Σ_v π_v², in [1/V, 1]


class Partials(NamedTuple):
    """Sums over pieces of the vocabulary: float tensors, (tokens, pieces), or (tokens,) once joined."""

    max: Tensor  #: m, the largest scaled logit of the piece
    sum_exp: Tensor  #: a
    sum_exp_squared: Tensor  #: b
    sum_centred: Tensor  #: c


def wide(device: torch.device) -> torch.dtype:
    """The dtype of arithmetic on one number a token: rounding log a alone to float32 costs up to 5e-7."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def rescale(partials: Partials, to_max: Tensor) -> Partials:
    """The same sums, with `to_max` (at least as large) in place of each piece's own maximum.

    Where both are −inf, or either is +inf or NaN, the sums become NaN: there is no such distribution.
    """
    dtype = wide(to_max.device)
    to_max = to_max.to(dtype)
    # A piece of only −inf has shift −inf: bounded, so that 0 · −inf makes no NaN of its neighbours' sums.
    shift = (partials.max.to(dtype) - to_max).clamp_(min=-80.0)
    weight = shift.exp()
    a = partials.sum_exp * weight
    b = partials.sum_exp_squared * weight.square()
    c = partials.sum_centred * weight + shift * a
    return Partials(to_max.expand_as(a), a, b, c)


def join(partials: Partials) -> Partials:
    """(tokens, pieces) → (tokens,)."""
    to_max = partials.max.amax(-1, keepdim=True)
    scaled = rescale(partials, to_max)
    return Partials(to_max.squeeze(-1), *(sums.sum(-1) for sums in scaled[1:]))


def sum_pi_squared_of(joined: Partials) -> Tensor:
    return (joined.sum_exp_squared / joined.sum_exp.square()).float()


def statistics_of(joined: Partials, label_logits: Tensor) -> TokenStatistics:
    """From sums over the whole vocabulary, and each label's scaled logit, to the three statistics."""
    log_sum = joined.sum_exp.log()
    return TokenStatistics(
        log_probs=((label_logits - joined.max) - log_sum).float(),
        entropy=(log_sum - joined.sum_centred / joined.sum_exp).float(),
        sum_pi_squared=sum_pi_squared_of(joined),
    )
