"""The three statistics from logits: accuracy, odd inputs, properties. For every implementation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_otb.kernels import TokenStatistics, chosen, sum_pi_squared, token_statistics

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
QWEN = 151_936
slow_is_fine = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def equal(left: TokenStatistics, right: TokenStatistics, tolerance: float = 2e-6) -> None:
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=3e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["flat", "mid", "peaked"])
def test_error_budget_at_a_full_vocabulary(rows, within_budget, impl, kind, dtype):
    if impl == "reference":
        pytest.skip("is what the budget is measured by")
    count = 4 if impl == "triton" else 12  # its interpreter is slow
    logits = rows(kind, count, QWEN).to(dtype)
    likeliest, any_label = logits.argmax(-1), torch.arange(count) * 12_345
    within_budget(logits, likeliest, lambda: token_statistics(logits, likeliest, impl=impl))
    t = torch.linspace(0.3, 3.0, count)
    within_budget(logits, any_label, lambda: token_statistics(logits, any_label, temperature=t, impl=impl), t)


SHAPES = [(1, 1), (1, 2), (3, 1), (5, 17), (7, 4096), (4, 4097), (52, 507), (2, 3, 123), (9,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes(impl, shape, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(shape) * 4).to(dtype)
    labels = torch.randint(shape[-1], shape[:-1])
    found = token_statistics(logits, labels, impl=impl)
    assert all(statistic.shape == shape[:-1] for statistic in found)
    equal(found, token_statistics(logits.double(), labels, impl="reference"))
    assert torch.equal(sum_pi_squared(logits, impl=impl), found.sum_pi_squared)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_empty(impl, shape):
    found = token_statistics(torch.empty(shape), torch.empty(shape[:-1], dtype=torch.int64), impl=impl)
    assert all(statistic.shape == shape[:-1] and statistic.dtype == torch.float32 for statistic in found)


def test_strides_and_inputs_left_alone(impl):
    base = torch.randn(6, 5, 40)
    views = {
        "transposed": base.transpose(0, 1),
        "without the last position": base[:, :-1],
        "every second column": base[..., ::2],
        "columns first": base.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "one row for all": base[:1, :1].expand(6, 5, 40),
    }
    before = base.clone()
    for name, view in views.items():
        labels = torch.randint(view.shape[-1], view.shape[:-1])
        temperature = torch.rand(view.shape[:-1]) + 0.5
        kept = labels.clone(), temperature.clone()
        found = token_statistics(view, labels, temperature=temperature, impl=impl)
        equal(found, token_statistics(view.double(), labels, temperature=temperature, impl="reference"))
        assert torch.equal(labels, kept[0]), name
        assert torch.equal(temperature, kept[1]), name
    assert torch.equal(base, before)


def test_no_distribution_makes_its_own_row_nan(impl):
    clean = torch.randn(9, 300)
    labels = torch.randint(300, (9,))
    broken = clean.clone()
    broken[1] = -math.inf
    broken[3, 299] = math.nan
    broken[5, 0] = math.inf
    broken[6, :] = math.inf
    broken[7] = math.nan
    found = token_statistics(broken, labels, impl=impl)
    sound = token_statistics(clean, labels, impl=impl)
    for ours, theirs in zip(found, sound, strict=True):
        assert ours.isnan().tolist() == [False, True, False, True, False, True, True, True, False]
        assert torch.equal(ours[~ours.isnan()], theirs[~ours.isnan()])
    assert torch.equal(sum_pi_squared(broken, impl=impl).isnan(), found.sum_pi_squared.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masked_vocabulary(impl, dtype):
    logits = torch.randn(4, 9000).to(dtype)
    logits[0, 10:] = -math.inf  # the first blocks alone are live
    logits[1, :-10] = -math.inf  # the last
    logits[2, 1:] = -math.inf  # one token
    logits[3, ::2] = -math.inf
    labels = torch.tensor([3, 8995, 0, 0])
    for temperature in (1.0, torch.tensor([0.5, 1.5, 0.7, 2.0])):
        found = token_statistics(logits, labels, temperature=temperature, impl=impl)
        equal(found, token_statistics(logits.double(), labels, temperature=temperature, impl="reference"))
        assert found.log_probs[3] == -math.inf
        assert [float(statistic[2]) for statistic in found] == pytest.approx([0.0, 0.0, 1.0], abs=1e-11)


def test_large_logits_and_a_late_peak(impl):
    """The running maximum rises block after block, over a range where e^z alone would overflow."""
    logits = torch.linspace(-3e4, 3e4, 20_000).repeat(3, 1)
    logits[1] = logits[1].flip(0)
    logits[2] = 1e38
    labels = torch.tensor([19_999, 0, 5])
    equal(token_statistics(logits, labels, impl=impl), token_statistics(logits.double(), labels, impl="reference"))


def test_temperature_forms(impl):
    logits = torch.randn(3, 4, 50)
    labels = torch.randint(50, (3, 4))
    one_number = token_statistics(logits, labels, temperature=0.7, impl=impl)
    for form in (torch.tensor(0.7), torch.full((3, 4), 0.7), torch.full((3, 4), 0.7, dtype=torch.float64)):
        equal(token_statistics(logits, labels, temperature=form, impl=impl), one_number, 1e-7)
    equal(one_number, token_statistics(logits.double() / 0.7, labels, impl="reference"))
    torch.testing.assert_close(sum_pi_squared(logits, temperature=0.7, impl=impl), one_number.sum_pi_squared)


@slow_is_fine
@given(
    tokens=st.integers(1, 9), vocabulary=st.integers(2, 700), spread=st.floats(0, 30), shift=st.floats(-50, 50),
    temperature=st.floats(0.2, 5), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_properties(impl, tokens, vocabulary, spread, shift, temperature, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, vocabulary, generator=random) * spread + shift).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=random)
    found = token_statistics(logits, labels, temperature=temperature, impl=impl)
    truth = token_statistics(logits.double(), labels, temperature=temperature, impl="reference")
    equal(found, truth, 5e-6)
    assert (found.log_probs <= 0).all()
    assert ((found.entropy >= 0) & (found.entropy <= math.log(vocabulary) + 2e-6)).all()
    assert ((found.sum_pi_squared >= (1 - 1e-6) / vocabulary) & (found.sum_pi_squared <= 1 + 1e-6)).all()
    order = torch.randperm(vocabulary, generator=random)
    place = order.argsort()[labels]
    equal(token_statistics(logits[:, order], place, temperature=temperature, impl=impl), found, 5e-6)


def test_forward_only(impl):
    logits = torch.randn(3, 8, requires_grad=True)
    assert not any(s.requires_grad for s in token_statistics(logits, torch.tensor([1, 2, 3]), impl=impl))


GOOD = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
BAD = {
    "integer logits": (GOOD[0].long(), GOOD[1], {}, "logits must be bfloat16"),
    "no vocabulary": (torch.zeros(2, 3, 0), GOOD[1], {}, "vocabulary's dimension"),
    "a number": (torch.tensor(1.0), GOOD[1], {}, "vocabulary's dimension"),
    "labels of another shape": (GOOD[0], GOOD[1].T, {}, r"shape \(2, 3\), one a token, found \(3, 2\)"),
    "float labels": (GOOD[0], GOOD[1].float(), {}, "labels must be integers"),
    "label too large": (GOOD[0], GOOD[1].index_fill(1, torch.tensor(2), 8), {}, r"\[0, 8\), found 8 at token 2"),
    "label negative": (GOOD[0], GOOD[1] - 1, {}, r"found -1 at token 0, one of 6"),
    "temperature 0": (GOOD[0], GOOD[1], {"temperature": 0.0}, "above 0, found 0.0"),
    "temperature NaN": (GOOD[0], GOOD[1], {"temperature": math.nan}, "found nan"),
    "a temperature of -1": (GOOD[0], GOOD[1], {"temperature": torch.tensor([[1.0] * 3, [1, -1, 1]])}, "at token 4"),
    "a temperature a row": (GOOD[0], GOOD[1], {"temperature": torch.ones(2)}, r"one value a token, \(2, 3\)"),
    "logits of numpy": (GOOD[0].numpy(), GOOD[1], {}, "logits must be a torch tensor, found ndarray"),
    "a list of labels": (GOOD[0], GOOD[1].tolist(), {}, "labels must be a torch tensor, found list"),
    "nested logits": (torch.nested.nested_tensor(list(GOOD[0])), GOOD[1], {}, "logits must be dense, found a nested"),
    "sparse logits": (GOOD[0].to_sparse(), GOOD[1], {}, "logits must be dense, found a torch.sparse_coo"),
    "float8 logits": (GOOD[0].to(torch.float8_e5m2), GOOD[1], {}, "logits must be bfloat16.* found torch.float8_e5m2"),
    "complex logits": (GOOD[0].cfloat(), GOOD[1], {}, "logits must be bfloat16.* found torch.complex64"),
    "labels elsewhere": (GOOD[0], GOOD[1].to("meta"), {}, "labels must be on cpu, beside the rest, found on meta"),
    "no temperature": (GOOD[0], GOOD[1], {"temperature": None}, "a number or a torch tensor, found NoneType"),
    "temperatures of numpy": (GOOD[0], GOOD[1], {"temperature": GOOD[0][..., 0].numpy()}, "tensor, found ndarray"),
    "unknown impl": (GOOD[0], GOOD[1], {"impl": "cuda"}, "must be one of auto, reference, torch, triton"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    logits, labels, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        token_statistics(logits, labels, **options)


@pytest.mark.parametrize("case", [case for case, (_, labels, *_) in BAD.items() if labels is GOOD[1]])
def test_errors_without_labels(case):
    logits, _, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        sum_pi_squared(logits, **options)


def test_chosen():
    logits = torch.zeros(2, 3)
    assert chosen(logits) == "torch"
    assert chosen(logits, "reference") == "reference"
    gpu = torch.zeros(2, 3, device="meta")
    assert chosen(gpu) == "torch"
