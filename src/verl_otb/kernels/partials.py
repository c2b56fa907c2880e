"""Partial sums of a softmax over a piece of the vocabulary, and the statistics that follow from them.

Every implementation (streamed torch, Triton, hidden × head, vocabulary split over ranks) ends here. With z the
logits of one token, divided by the temperature, and m the largest of a piece:

    a = Σ e^{z−m}        b = Σ e^{2(z−m)}        c = Σ (z−m) e^{z−m}

Pieces with different m join by rescaling, and over the whole vocabulary

    log π_v = (z_v − m) − log a        Σ π² = b / a²        entropy = −Σ π log π = log a − c / a

Kernels hand over one wide tensor (5, tokens, pieces), its planes in the order of `Partials`. There m and the label's
logit are as read, undivided by the temperature. A piece of only −inf has m = −inf and sums 0; one with NaN or +inf has
NaN sums.

Terms are float32, and so are sums of a few dozen of them; larger sums are wide or compensated. A long float32 sum that
has the likeliest token's 1 in it loses the small terms: 1e-6 and more of a peaked row's a.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class TokenStatistics(NamedTuple):
    """What one read of the logits gives: three float32 tensors of shape logits.shape[:-1]."""

    log_probs: Tensor  #: log π of the label, in nats
    entropy: Tensor  #: −Σ_v π_v log π_v, in nats
    sum_pi_squared: Tensor  #: Σ_v π_v², in [1/V, 1]


class Partials(NamedTuple):
    """Sums over (a part of) the vocabulary: (tokens,) each, in wide arithmetic."""

    max: Tensor  #: m
    sum_exp: Tensor  #: a
    sum_exp_squared: Tensor  #: b
    sum_centred: Tensor  #: c
    label_logit: Tensor  #: z of the label; 0 where the label lies in another part


def wide(device: torch.device) -> torch.dtype:
    """The dtype for arithmetic on one number a token: log a rounded to float32 may be off by 5e-7 already."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def rescale(partials: Partials, to_max: Tensor) -> Partials:
    """The same sums with `to_max`, at least as large, in place of each part's own maximum."""
    # A part of only −inf has shift −inf: bounded, because −inf · 0 would make NaN of its neighbours' sums.
    shift = (partials.max - to_max).clamp_(min=-80.0)
    weight = shift.exp()
    a = partials.sum_exp * weight
    b = partials.sum_exp_squared * weight.square()
    c = partials.sum_centred * weight + shift * a
    return Partials(to_max, a, b, c, partials.label_logit)


def join(planes: Tensor, temperature: Tensor | None = None) -> Partials:
    """(5, tokens, pieces) as kernels hand them over → the sums over all pieces."""
    largest, a, b, c, label_logit = planes.unbind()
    if temperature is not None:
        largest, label_logit = largest / temperature[:, None], label_logit / temperature[:, None]
    pieces = Partials(largest, a, b, c, label_logit)
    if planes.shape[-1] == 1:
        return Partials(*(plane.squeeze(-1) for plane in pieces))
    to_max = pieces.max.amax(-1, keepdim=True)
    _, *sums = rescale(pieces, to_max)
    return Partials(to_max.squeeze(-1), *(plane.sum(-1) for plane in sums))


def collect(tokens: int, parts: Iterable[tuple[slice, Partials]], device: torch.device) -> Partials:
    """The joined sums of some of the tokens after another, as one. Written into place at once: small results kept
    between large buffers that come and go would leave holes in the heap that nothing fits."""
    whole = torch.empty((len(Partials._fields), tokens), dtype=wide(device), device=device)
    for here, part in parts:
        whole[:, here] = torch.stack(part)
    return Partials(*whole.unbind())


def sum_pi_squared_of(joined: Partials) -> Tensor:
    return (joined.sum_exp_squared / joined.sum_exp.square()).float()


def statistics_of(joined: Partials) -> TokenStatistics:
    """From sums over the whole vocabulary to the three statistics."""
    log_sum = joined.sum_exp.log()
    return TokenStatistics(
        log_probs=((joined.label_logit - joined.max) - log_sum).float(),
        entropy=(log_sum - joined.sum_centred / joined.sum_exp).float(),
        sum_pi_squared=sum_pi_squared_of(joined),
    )
