"""What the method guarantees, one test or more for each of eight identities.

4, 5, 6 and 8 speak of columns with at least two live rows; elsewhere B = 0 and A = G.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from random_batches import ALIGNMENTS, REWARDS, batches, shared_columns
from variants import METHODS, VARIANTS

from verl_otb.core import optimal_token_advantages, optimal_token_baseline, realized_energy, token_energy

# Logits of up to 12 tokens of vocabulary: no π underflows, and none but a lone token's rounds to 1.
LOGITS = st.integers(1, 12).flatmap(lambda size: arrays("float64", size, elements=st.floats(-8, 8)))
aligned = pytest.mark.parametrize("align", ALIGNMENTS)
examples = settings(max_examples=60, deadline=None)
examples_of_variants = settings(max_examples=200, deadline=None)


def tolerance(returns):
    """Of float32 results: 1e-6·(1 + max |G|)."""
    return 1e-6 * (1 + returns.abs().max().item())


def statistics(logits):
    """log π of every token of the vocabulary, and Σπ² for each of them."""
    log_probs = logits.log_softmax(-1)
    return log_probs, log_probs.exp().square().sum(-1, keepdim=True).expand_as(log_probs)


@examples
@given(LOGITS)
def test_1_energies_and_their_mean(logits):
    """Σ_a π_a w_a = 1 − S; 0 ≤ w < 2."""
    log_probs, sum_pi_squared = statistics(torch.from_numpy(logits))
    energy = token_energy(log_probs, sum_pi_squared)
    mean = (log_probs.exp() * energy).sum()
    torch.testing.assert_close(mean, 1 - sum_pi_squared[0], rtol=0, atol=1e-12)
    assert (energy >= 0).all()
    assert (energy < 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_no_energy_means_a_certain_token(dtype):
    """w = 0 exactly when π_a = 1."""
    one = torch.ones((), dtype=dtype)
    assert token_energy(0 * one, one) == 0
    assert token_energy(1e-3 * one, one) == 0  # a rounding above 0 counts as 0
    almost = torch.nextafter(one, 0 * one)
    assert token_energy(almost.log(), almost.square()) > 0


@examples
@given(LOGITS, st.data())
def test_2_energy_is_the_squared_norm_of_the_score(logits, data):
    """w_a = ‖∂ log π_a / ∂ logits‖²."""
    logits = torch.from_numpy(logits).requires_grad_()
    action = data.draw(st.integers(0, len(logits) - 1))
    (score,) = torch.autograd.grad(logits.log_softmax(-1)[action], logits)
    energy = token_energy(*statistics(logits.detach()))[action]
    torch.testing.assert_close(energy, score.square().sum(), rtol=0, atol=1e-12)


def test_energies_leave_their_arguments_alone_and_carry_no_gradient():
    log_probs, sum_pi_squared = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.5, 0.3])
    energy = token_energy(log_probs, sum_pi_squared)
    realized = realized_energy(energy, torch.tensor([1.0, 2.0]))
    pi = torch.tensor([-1.0, -2.0]).exp()
    expected = 1 - 2 * pi + torch.tensor([0.5, 0.3])
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(realized, torch.stack([expected[0], expected[0] + 4 * expected[1]]))
    assert log_probs.tolist() == [-1.0, -2.0]
    torch.testing.assert_close(sum_pi_squared, torch.tensor([0.5, 0.3]), rtol=0, atol=0)
    assert not energy.requires_grad
    assert not realized.requires_grad


@aligned
@examples
@given(data=st.data())
def test_3_weights_of_the_first_and_the_last_column(align, data):
    """Column 1 is weighted by w_1; the last column, at equal lengths, by the whole row's W(τ), on its last reward."""
    batch = data.draw(batches(min_energy=True, importance_weights=False))
    batch["response_mask"] = torch.ones_like(batch["response_mask"])
    batch["index"] = ["a"] * len(batch["index"])
    result = optimal_token_baseline(**batch, align=align)
    if len(batch["index"]) == 1:
        assert torch.equal(result.advantages, result.returns)
        return
    energy = token_energy(batch["old_log_probs"].double(), batch["sum_pi_squared"].double())
    rewards = batch["token_level_rewards"].double()
    first = (energy[:, 0] * rewards.sum(-1)).sum() / energy[:, 0].sum()
    whole = energy.sum(-1)
    last = (whole * rewards[:, -1]).sum() / whole.sum()
    for column, expected in ((0, first), (-1, last)):
        ours = result.baseline[:, column].double()
        torch.testing.assert_close(ours, expected.expand_as(ours), rtol=0, atol=tolerance(result.returns))


@aligned
@examples
@given(batch=batches())
def test_4_weighted_advantages_cancel(align, batch):
    """Σ_i W_t (G_t − B_t) = 0 in each column."""
    result = optimal_token_baseline(**batch, align=align)
    for cells in shared_columns(batch, align):
        weights = result.realized_energy[cells].double()
        excess = (weights * result.advantages[cells].double()).sum().abs()
        assert excess <= tolerance(result.returns) * weights.sum()


@aligned
@examples
@given(batch=batches(importance_weights=False))
def test_5_equal_weights_give_the_mean(align, batch):
    # One energy for every token, and rows without holes: W_t is the same for all live rows of a column.
    live = batch["response_mask"].cumprod(-1)
    batch |= {"response_mask": live, "old_log_probs": torch.full(live.shape, -0.5)}
    batch["sum_pi_squared"] = torch.full(live.shape, 0.5)
    result = optimal_token_baseline(**batch, align=align)
    for cells in shared_columns(batch, align):
        mean = result.returns[cells].double().mean()
        baseline = result.baseline[cells].double()
        torch.testing.assert_close(baseline, mean.expand_as(baseline), rtol=0, atol=tolerance(result.returns))


@aligned
@examples
@given(batch=batches(), rho=st.sampled_from([1e-6, 0.5, 3.0, 1e6]))
def test_5_a_common_factor_of_the_energies_changes_nothing(align, batch, rho):
    """w → c·w, brought about by a constant ρ with ρ² = c."""
    plain = optimal_token_baseline(**batch, align=align)
    ones = torch.ones_like(batch["old_log_probs"])
    batch["rollout_is_weights"] = rho * batch.get("rollout_is_weights", ones)
    scaled = optimal_token_baseline(**batch, align=align)
    torch.testing.assert_close(scaled.baseline, plain.baseline, rtol=0, atol=tolerance(plain.returns))


@aligned
@pytest.mark.parametrize("shift", [-30.0, 7.5])
def test_5_a_shift_of_the_logits_changes_nothing(align, shift):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 5, 11, generator=generator, dtype=torch.float64)
    tokens = torch.randint(11, (6, 5, 1), generator=generator)
    baselines = []
    for z in (logits, logits + shift):
        log_probs, sum_pi_squared = statistics(z)
        result = optimal_token_baseline(
            torch.randn(6, 5, generator=torch.Generator().manual_seed(1)),
            torch.ones(6, 5),
            log_probs.gather(-1, tokens).squeeze(-1),
            sum_pi_squared[..., 0],
            [0, 0, 0, 1, 1, 1],
            align=align,
        )
        baselines.append(result.baseline)
    torch.testing.assert_close(*baselines, rtol=0, atol=1e-6)


@examples_of_variants
@given(batch=batches(), reward=REWARDS, method=st.sampled_from(METHODS))
def test_6_equal_returns_leave_no_advantage(batch, reward, method):
    """Not even 1e-17: the reward lies on the last token of every row."""
    batch["token_level_rewards"].zero_()[:, -1] = reward
    advantages, _ = optimal_token_advantages(**batch, **method)
    for cells in shared_columns(batch, method["align"]):
        assert (advantages[cells] == 0).all()


@aligned
@settings(max_examples=200, deadline=None)
@given(batch=batches(rewards=st.floats(-(2.0**40), 2.0**40, width=32)))
def test_6_baselines_lie_within_the_returns(align, batch):
    """Certain and nearly certain tokens included, where the energies are small or nothing. No tolerance: what is
    reported is rounded as the returns are."""
    result = optimal_token_baseline(**batch, align=align)
    assert result.advantages.isfinite().all()
    for cells in shared_columns(batch, align):
        returns, baseline = result.returns[cells], result.baseline[cells]
        assert (baseline >= returns.min()).all()
        assert (baseline <= returns.max()).all()


@aligned
@pytest.mark.parametrize("rows", [2, 3, 8, 100])
def test_6_baselines_lie_within_nearly_equal_returns(align, rows):
    """Returns a few roundings apart, under weights of every size: a mean that is not held would leave them."""
    generator = torch.Generator().manual_seed(rows)
    log_probs = -torch.rand(rows, 64, generator=generator, dtype=torch.float64).pow(20)
    rewards = torch.zeros(rows, 64, dtype=torch.float64)
    rewards[:, -1] = 0.1 * (1 + 2.0**-52 * torch.randint(3, (rows,), generator=generator))
    result = optimal_token_baseline(
        rewards, torch.ones(rows, 64), log_probs, (2 * log_probs).exp(), ["a"] * rows, align=align
    )
    assert (result.advantages.amax(0) >= 0).all()
    assert (result.advantages.amin(0) <= 0).all()


@examples_of_variants
@given(batch=batches(holes=False), variant=st.sampled_from(VARIANTS))
def test_7_both_alignments_agree_without_holes(batch, variant):
    by_position, by_token = (optimal_token_advantages(**batch, align=align, **variant) for align in ALIGNMENTS)
    for ours, theirs in zip(by_position, by_token, strict=True):
        assert torch.equal(ours, theirs)


@examples_of_variants
@given(batch=batches(), variant=st.sampled_from(VARIANTS), data=st.data())
def test_7_masked_tokens_anywhere_change_no_advantage_by_token(batch, variant, data):
    """Each row gets its masked tokens at places of its own, with anything under them but a reward."""
    rows, tokens = batch["response_mask"].shape
    wider = tokens + data.draw(st.integers(1, 4))
    places = st.lists(st.integers(0, wider - 1), min_size=tokens, max_size=tokens, unique=True).map(sorted)
    columns = torch.tensor([data.draw(places) for _ in range(rows)])
    filler = dict.fromkeys(batch, torch.nan) | {"token_level_rewards": 0.0, "response_mask": 0}
    stretched = {
        name: torch.full((rows, wider), filler[name], dtype=x.dtype).scatter(1, columns, x)
        for name, x in batch.items()
        if name != "index"
    }
    before, _ = optimal_token_advantages(**batch, align="token", **variant)
    after, _ = optimal_token_advantages(**stretched, index=batch["index"], align="token", **variant)
    torch.testing.assert_close(after.gather(1, columns), before, rtol=0, atol=1e-6)
    assert (after.scatter(1, columns, 0.0) == 0).all()


@aligned
@examples
@given(batch=batches(), constant=REWARDS)
def test_8_a_constant_on_every_return_shifts_the_baseline(align, batch, constant):
    before = optimal_token_baseline(**batch, align=align)
    batch["token_level_rewards"] = batch["token_level_rewards"].double()
    batch["token_level_rewards"][:, -1] += constant
    after = optimal_token_baseline(**batch, align=align)
    for cells in shared_columns(batch, align):
        shift = after.baseline[cells].double() - before.baseline[cells].double()
        torch.testing.assert_close(
            shift, torch.full_like(shift, constant), rtol=0, atol=tolerance(after.returns) + tolerance(before.returns)
        )


@aligned
@examples
@given(batch=batches())
def test_a_column_without_peers_has_no_baseline(align, batch):
    result = optimal_token_baseline(**batch, align=align)
    lonely = batch["response_mask"] != 0
    for cells in shared_columns(batch, align):
        lonely[cells] = False
    assert (result.baseline[lonely] == 0).all()
    assert torch.equal(result.advantages[lonely], result.returns[lonely])
