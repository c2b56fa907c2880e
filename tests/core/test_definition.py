"""The estimator against its definition, which tests/support/definition.py writes out as loops in float64."""

import pytest
import torch
from definition import Definition, define
from estimator_cases import CASES, ESTIMATORS, NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import ALIGNMENTS, batches, poisoned
from variants import METHODS, named

from verl_otb.core import advantage, optimal_token_advantages, optimal_token_baseline, reward_to_go

FIELDS = Definition._fields


def defined(batch, **options):
    """The definition on a batch's own values, which float64 holds exactly."""
    names = {"token_level_rewards": "rewards", "response_mask": "mask", "old_log_probs": "log_probs"}
    names |= {"rollout_is_weights": "importance_weights"}
    arguments = {
        names.get(name, name): values.double().tolist() if isinstance(values, torch.Tensor) else values
        for name, values in batch.items()
    }
    return define(**arguments, **options)


def assert_as_defined(batch, **options):
    result, truth = optimal_token_baseline(**batch, **options), defined(batch, **options)
    for name in FIELDS:
        values, expected = getattr(result, name), torch.tensor(getattr(truth, name), dtype=torch.float64)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", [c for c in CASES if "check" not in c], ids=lambda c: c["name"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_definition_gives_the_cases_truth(case, estimator):
    align, truth = ESTIMATORS[estimator]
    keys = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared", "index")
    result = define(
        *(case[key] for key in keys),
        importance_weights=case.get("rollout_is_weights"),
        align=align,
        handle_zero_tail=case["handle_zero_tail"],
    )
    live = torch.tensor(case["response_mask"]).bool()
    for ours, theirs in ((result.advantages, truth), (result.returns, "returns")):
        expected = torch.tensor(case[theirs], dtype=torch.float64)[live]
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64)[live], expected, rtol=0, atol=1e-12)


@settings(max_examples=400, deadline=None)
@given(batch=batches(), align=st.sampled_from(ALIGNMENTS), handle_zero_tail=st.booleans())
def test_random_batches(batch, align, handle_zero_tail):
    assert_as_defined(batch, align=align, handle_zero_tail=handle_zero_tail)


@pytest.mark.parametrize("method", METHODS, ids=named)
@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_every_method(method, batch):
    assert_as_defined(batch, **method)


@settings(max_examples=200, deadline=None)
@given(batch=batches(), method=st.sampled_from(METHODS))
def test_what_stands_under_masked_tokens_never_matters(batch, method):
    clean, bad = (optimal_token_baseline(**b, **method) for b in (batch, poisoned(batch)))
    for name in FIELDS:
        assert torch.equal(getattr(clean, name), getattr(bad, name)), name
        assert (getattr(bad, name)[batch["response_mask"] == 0] == 0).all(), name


@settings(max_examples=100, deadline=None)
@given(batch=batches(), method=st.sampled_from(METHODS), data=st.data())
def test_the_order_of_rows_does_not_matter(batch, method, data):
    order = data.draw(st.permutations(range(len(batch["index"]))))
    moved = {name: x[order] for name, x in batch.items() if name != "index"}
    moved["index"] = [batch["index"][row] for row in order]
    ours, theirs = (optimal_token_advantages(**b, **method) for b in (batch, moved))
    for here, there in zip(ours, theirs, strict=True):
        torch.testing.assert_close(here[order], there, rtol=0, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(batch=batches(), method=st.sampled_from(METHODS), block_tokens=st.integers(1, 30))
def test_the_size_of_blocks_does_not_matter(batch, method, block_tokens):
    whole = optimal_token_baseline(**batch, **method)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(advantage._BLOCK_TOKENS, "cpu", block_tokens)
        in_blocks = optimal_token_baseline(**batch, **method)
    for name in FIELDS:
        assert torch.equal(getattr(whole, name), getattr(in_blocks, name)), name


@settings(max_examples=60, deadline=None)
@given(batch=batches(), method=st.sampled_from(METHODS))
def test_both_entries_agree_and_leave_their_inputs_alone(batch, method):
    batch |= {name: x.double() for name, x in batch.items() if name != "index"}  # no copy is needed to read these
    before = {name: x.clone() for name, x in batch.items() if name != "index"}
    full = optimal_token_baseline(**batch, **method)
    advantages, returns = optimal_token_advantages(**batch, **method)
    assert torch.equal(advantages, full.advantages)
    assert torch.equal(returns, full.returns)
    for name, values in before.items():
        assert torch.equal(batch[name], values), name


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_type(case, align, mask_dtype):
    batch = given_batch(case, torch.float32)
    expected = optimal_token_advantages(**batch, align=align)
    batch["response_mask"] = batch["response_mask"].to(mask_dtype)
    for ours, theirs in zip(optimal_token_advantages(**batch, align=align), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_of_any_type(case, align, dtype):
    assert_as_defined(given_batch(case, dtype), align=align, handle_zero_tail=case["handle_zero_tail"])


def given_batch(case, dtype):
    floats = ("token_level_rewards", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
    batch = {name: torch.tensor(case[name], dtype=dtype) for name in floats if name in case}
    return batch | {"response_mask": torch.tensor(case["response_mask"]), "index": case["index"]}


def test_integer_rewards_and_strided_inputs():
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(3, 5, 8, generator=generator)
    batch = {
        "token_level_rewards": torch.randint(-3, 4, (5, 8), generator=generator).t(),
        "response_mask": torch.ones(1, 5, dtype=torch.bool).expand(8, 5),
        "old_log_probs": -uniform[0].t(),
        "sum_pi_squared": uniform[1].t(),
        "rollout_is_weights": torch.rand(8, 10, generator=generator)[:, ::2],
        "index": [0, 1, 0, 1, 2, 0, 1, 1],
    }
    assert not any(x.is_contiguous() for name, x in batch.items() if name != "index")
    for align in ALIGNMENTS:
        assert_as_defined(batch, align=align)


@pytest.mark.parametrize("align", ALIGNMENTS)
def test_long_rows_and_a_huge_penalty(align):
    """A KL reward of −1e8 at the first token takes no digit from later returns; energies go up to the length."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 4, 3000
    rewards = 0.01 * torch.randn(rows, tokens, generator=generator)
    rewards[:, 0] -= 1e8
    log_probs = -8 * torch.rand(rows, tokens, generator=generator)
    batch = {
        "token_level_rewards": rewards,
        "response_mask": (torch.rand(rows, tokens, generator=generator) < 0.9).long(),
        "old_log_probs": log_probs,
        "sum_pi_squared": log_probs.exp().square() + 0.1 * (1 - log_probs.exp()).square(),
        "index": ["a"] * rows,
    }
    batch["response_mask"][:, 0] = 1
    result, truth = optimal_token_baseline(**batch, align=align), defined(batch, align=align)
    advantages = torch.tensor(truth.advantages, dtype=torch.float64)
    torch.testing.assert_close(result.advantages[:, 1:].double(), advantages[:, 1:], rtol=0, atol=1e-5)
    returns = torch.tensor(truth.returns, dtype=torch.float64)
    torch.testing.assert_close(result.returns[:, 1:].double(), returns[:, 1:], rtol=0, atol=1e-5)
    assert (result.advantages[:, 0].double() - advantages[:, 0]).abs().max() <= 1e-6 * (1 + 1e8)


def test_a_huge_reward_takes_no_digit_from_later_returns_in_float32():
    rewards = torch.tensor([-1e8, 0.25, 0.5])
    assert torch.equal(reward_to_go(rewards)[1:], torch.tensor([0.75, 0.5]))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_importance_weights_of_any_size(scale):
    """ρ² and its sums leave float32 on both sides, and no baseline its range."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(3, 6, 5, generator=generator)
    batch = {
        "token_level_rewards": uniform[0],
        "response_mask": torch.ones(6, 5),
        "old_log_probs": -uniform[1] - 0.1,
        "sum_pi_squared": (-2 * uniform[1] - 0.2).exp(),
        "index": [0, 0, 0, 0, 1, 1],
    }
    expected = optimal_token_advantages(**batch)
    batch["rollout_is_weights"] = torch.full((6, 5), scale)
    for ours, theirs in zip(optimal_token_advantages(**batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
