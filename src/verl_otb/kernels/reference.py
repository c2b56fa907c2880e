"""The three statistics as the formulas say them: whole tensors, in float32 or the logits' float64.

The tests' truth, on float64 logits. It takes several times the logits' memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .partials import TokenStatistics


def log_softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    if temperature is not None:
        precise = precise / temperature.to(precise.dtype).unsqueeze(-1)
    # A row with +inf is no distribution; of its finite entries torch would say log π = −inf.
    return precise.log_softmax(-1) + 0 * precise.amax(-1, keepdim=True)


def sum_pi_squared(logits: Tensor, temperature: Tensor | None) -> Tensor:
    return (2 * log_softmax(logits, temperature)).exp().sum(-1)


def token_statistics(logits: Tensor, labels: Tensor, temperature: Tensor | None) -> TokenStatistics:
    log_pi = log_softmax(logits, temperature)
    pi = log_pi.exp()
    # A masked vocabulary entry has π = 0 and log π = −inf; its share of the entropy is the limit, 0.
    surprise = torch.where(log_pi == -torch.inf, 0.0, pi * log_pi)
    return TokenStatistics(
        log_probs=log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        entropy=-surprise.sum(-1),
        sum_pi_squared=pi.square().sum(-1),
    )
