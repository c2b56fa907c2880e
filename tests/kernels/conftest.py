"""Every test that takes `impl` runs for each implementation; Triton's run in the child process of test_triton.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verl_otb.kernels import TokenStatistics, token_statistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["torch", "triton"] if INTERPRETED else ["reference", "torch"])
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned():
    """In torch's deterministic mode `torch.empty` is filled with NaN: what a kernel forgets to write, shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_rows(kind: str, rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    """float32 logits. peaked: one token has π from 0.01 to 1 − 1e-7; mid: a few dozen tokens share it."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random)
    if kind == "flat":
        return logits * torch.linspace(0.0, 1.0, rows)[:, None]
    if kind == "mid":
        return logits * torch.linspace(2.0, 8.0, rows)[:, None]
    assert kind == "peaked"
    pi = 1 - torch.logspace(-7, -0.005, rows, dtype=torch.float64)
    rest = logits.double().logsumexp(-1)
    peak = rest + pi.log() - (-pi).log1p()
    column = torch.randint(vocabulary, (rows, 1), generator=random)
    return logits.scatter_(1, column, peak.float()[:, None])


def plain_statistics(logits: Tensor, labels: Tensor, temperature: float | Tensor) -> TokenStatistics:
    """What one writes in float32 without a thought: the peer of the error budget."""
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    logits = logits.float() / scale
    log_pi = logits.log_softmax(-1)
    return TokenStatistics(
        log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1),
        ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp(),
    )


def assert_within_budget(
    logits: Tensor, labels: Tensor, call: Callable[[], TokenStatistics], temperature: float | Tensor = 1.0
) -> None:
    """|ours − truth| ≤ |plain float32 torch − truth| + 1e-6, truth being float64 on the same stored logits."""
    truth = token_statistics(logits.double(), labels, temperature=temperature, impl="reference")
    plain = plain_statistics(logits, labels, temperature)
    found = call()
    for name, ours, exact, rough in zip(TokenStatistics._fields, found, truth, plain, strict=True):
        assert ours.dtype == torch.float32
        excess = (ours - exact).abs() - (rough - exact).abs()
        assert excess.max() <= 1e-6, f"{name}: {excess.max():.2e} over plain torch at {int(excess.argmax())}"
        assert not ours.isnan().any()
    # The energy as the estimators form it from π and Σπ²: both must come from sums that agree.
    log_probs, _, sum_pi_squared = found
    pi, exact_pi = log_probs.exp(), truth.log_probs.exp()
    energy = (1 - pi).square() + (sum_pi_squared - pi.square()).clamp(min=0)
    assert (energy - (1 - 2 * exact_pi + truth.sum_pi_squared)).abs().max() <= 3e-6


@pytest.fixture
def rows() -> Callable[..., Tensor]:
    return make_rows


@pytest.fixture
def within_budget() -> Callable[..., None]:
    return assert_within_budget
