"""The three statistics as the formulas say them: whole tensors, in float64, several times the logits' memory.

The tests' truth. Results are float64 for float64 logits, float32 for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .partials import TokenStatistics, wide


def log_softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    precise = logits.to(wide(logits.device))
    if temperature is not None:
        precise = precise / temperature.unsqueeze(-1)
    # A row with +inf is no distribution; of its finite entries torch would say log π = −inf.
    return precise.log_softmax(-1) + 0 * precise.amax(-1, keepdim=True)


def sum_pi_squared(logits: Tensor, temperature: Tensor | None) -> Tensor:
    return log_softmax(logits, temperature).exp().square().sum(-1).to(result_dtype(logits))


def token_statistics(logits: Tensor, labels: Tensor, temperature: Tensor | None) -> TokenStatistics:
    log_pi = log_softmax(logits, temperature)
    pi = log_pi.exp()
    # A masked vocabulary entry has π = 0 and log π = −inf; its share of the entropy is the limit, 0.
    surprise = torch.where(log_pi == -torch.inf, 0.0, pi * log_pi)
    statistics = (
        log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        -surprise.sum(-1),
        pi.square().sum(-1),
    )
    return TokenStatistics(*(statistic.to(result_dtype(logits)) for statistic in statistics))


def result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
