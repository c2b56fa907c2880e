"""The three statistics from hidden states and the head, for every implementation."""

from __future__ import annotations

import pytest
import torch

from verl_otb.kernels import linear, linear_token_statistics, token_statistics


def head(tokens: int, width: int, vocabulary: int, dtype: torch.dtype):
    """Small whole numbers: every product and sum is exact in every dtype, however the chunks are cut."""
    random = torch.Generator().manual_seed(tokens + vocabulary)
    hidden, weight, bias = (
        torch.randint(-1, 2, shape, generator=random).to(dtype)
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    return hidden, weight, bias, torch.randint(vocabulary, (tokens,), generator=random)


CHUNKS = {"one": (512, 8 << 20), "ragged": (100, 1 << 10), "a few rows": (7, 700)}  # rows, bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("biased", [False, True])
def test_as_from_the_logits(monkeypatch, impl, dtype, chunk, biased):
    """Chunks of every shape give what the head's own logits give, scaled in their own dtype."""
    rows, size = CHUNKS[chunk]
    monkeypatch.setattr(linear, "ROWS_ON_CPU", rows)
    monkeypatch.setattr(linear, "CHUNK_ON_CPU", size)
    temperatures = {"one": 1.0, "ragged": 0.7, "a few rows": torch.linspace(0.5, 2, 252)}
    for shape in ((252, 123, 507), (1, 1, 1), (3, 8, 2_001)) if impl != "triton" else ((5, 12, 307),):
        hidden, weight, bias, labels = head(*shape, dtype)
        t = temperatures[chunk]
        t = t[: shape[0]] if isinstance(t, torch.Tensor) else t
        logits = torch.nn.functional.linear(hidden, weight, bias if biased else None)
        logits /= t.to(dtype)[:, None] if isinstance(t, torch.Tensor) else t
        truth = token_statistics(logits.double(), labels, impl="reference")
        found = linear_token_statistics(hidden, weight, labels, bias=bias if biased else None, temperature=t, impl=impl)
        for ours, exact in zip(found, truth, strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=3e-7)


def test_leading_dimensions_and_inputs_left_alone(impl):
    hidden, weight, _, labels = head(12, 16, 33, torch.float32)
    before = hidden.clone(), weight.clone()
    flat = linear_token_statistics(hidden, weight, labels, impl=impl)
    shaped = linear_token_statistics(hidden.view(3, 4, 16), weight, labels.view(3, 4), impl=impl)
    assert all(torch.equal(s, f.view(3, 4)) for s, f in zip(shaped, flat, strict=True))
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])
    assert not any(s.requires_grad for s in linear_token_statistics(hidden, weight.requires_grad_(), labels))


def test_empty(impl):
    found = linear_token_statistics(torch.empty(0, 4), torch.ones(7, 4), torch.empty(0, dtype=torch.long), impl=impl)
    assert [tuple(s.shape) for s in found] == [(0,)] * 3


def test_broken_rows_stay_alone(impl):
    hidden, weight, _, labels = head(6, 8, 5000, torch.float32)
    hidden[2] = torch.nan
    found = linear_token_statistics(hidden, weight, labels, impl=impl)
    for statistic in found:
        assert statistic.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(7, 5)}, r"weight \(V, d\)"),
        ({"weight": torch.ones(0, 4)}, r"weight \(V, d\)"),
        ({"hidden": torch.ones(2, 0), "weight": torch.ones(7, 0)}, r"d and V at least 1; found \(2, 0\) and \(7, 0\)"),
        ({"hidden": torch.ones(2, 4).numpy()}, "hidden must be a torch tensor, found ndarray"),
        ({"weight": torch.nn.Linear(4, 7)}, "weight must be a torch tensor, found Linear"),
        ({"bias": [0.0] * 7}, "bias must be a torch tensor, found list"),
        (
            {"weight": torch.ones(7, 4).bfloat16()},
            "weight must be of hidden's dtype, torch.float32, found torch.bfloat16",
        ),
        ({"weight": torch.ones(7, 4, device="meta")}, "weight must be on cpu, beside the rest, found on meta"),
        ({"labels": [0, 6]}, "labels must be a torch tensor, found list"),
        ({"bias": torch.ones(6)}, r"bias must be \(V,\) = \(7,\)"),
        ({"labels": torch.tensor([0, 7])}, r"\[0, 7\), found 7 at token 1"),
        ({"hidden": torch.ones(2, 4, dtype=torch.int32)}, "hidden must be"),
        ({"temperature": -1.0}, "above 0"),
    ],
)
def test_errors(change, message):
    good = {"hidden": torch.ones(2, 4), "weight": torch.ones(7, 4), "labels": torch.tensor([0, 6])}
    with pytest.raises(ValueError, match=message):
        linear_token_statistics(**{**good, **change})


def test_dtypes_that_differ_under_autocast():
    hidden, weight, _, labels = head(5, 16, 33, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_token_statistics(hidden, weight.bfloat16(), labels)
    same = linear_token_statistics(hidden.bfloat16(), weight.bfloat16(), labels)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, same, strict=True))
