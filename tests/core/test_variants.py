"""What leave_one_out, weight and finished_rows guarantee beside what holds for every method: test_definition.py has the
definition, test_identities.py identities 6 and 7."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import ALIGNMENTS, REWARDS, batches, shared_columns
from variants import METHODS

from verl_otb.core import optimal_baseline, optimal_token_advantages, optimal_token_baseline
from verl_otb.core.masking import live_bits
from verl_otb.errors import InputError

LEAVE_ONE_OUT = [method for method in METHODS if method["leave_one_out"]]
CARRYING = [method for method in METHODS if method["finished_rows"] == "carry"]
BY_ENERGY = [method for method in LEAVE_ONE_OUT if method["weight"] != "uniform"]
aligned = pytest.mark.parametrize("align", ALIGNMENTS)
examples = settings(max_examples=150, deadline=None)


def tolerance(returns):
    """Of float32 results: 1e-6·(1 + max |G|)."""
    return 1e-6 * (1 + returns.abs().max().item())


def without_row(batch, row):
    mask = batch["response_mask"].clone()
    mask[row] = 0
    return batch | {"response_mask": mask}


def rewarded_at_the_end(batch):
    """Its rewards moved to the last unmasked token of each row."""
    mask = batch["response_mask"]
    last = (torch.arange(mask.shape[1]) * mask).amax(-1, keepdim=True)
    scores = batch["token_level_rewards"].sum(-1, keepdim=True)
    rewards = torch.zeros_like(batch["token_level_rewards"]).scatter(1, last, scores)
    return batch | {"token_level_rewards": rewards * mask}


@aligned
@examples
@given(data=st.data())
def test_uniform_weights_of_rows_carried_on_are_the_group_mean(align, data):
    batch = rewarded_at_the_end(data.draw(batches(holes=align == "token")))
    found = optimal_token_baseline(**batch, align=align, weight="uniform", finished_rows="carry")
    live, scores = batch["response_mask"].bool(), batch["token_level_rewards"].double().sum(-1)
    for uid in set(batch["index"]):
        rows = torch.tensor([other == uid for other in batch["index"]]) & live.any(-1)
        expected = scores[rows].mean() if rows.sum() > 1 else torch.zeros((), dtype=torch.float64)
        ours = found.baseline[rows][live[rows]].double()
        torch.testing.assert_close(ours, expected.expand_as(ours), rtol=0, atol=tolerance(found.returns))


@examples
@given(method=st.sampled_from(LEAVE_ONE_OUT), data=st.data())
def test_nothing_a_row_did_is_in_its_own_baseline(method, data):
    """To the bit: what makes leave_one_out unbiased."""
    batch = data.draw(batches())
    other = data.draw(batches())
    row = data.draw(st.integers(0, len(batch["index"]) - 1))
    changed = dict(batch)
    for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared"):
        changed[name] = batch[name].clone()
        changed[name][row] = other[name].flatten()[torch.arange(batch[name].shape[1]) % other[name].numel()]
    before, after = (optimal_token_baseline(**b, **method) for b in (batch, changed))
    assert torch.equal(before.baseline[row], after.baseline[row])


@examples
@given(batch=batches(), align=st.sampled_from(ALIGNMENTS), weight=st.sampled_from(["realized", "token", "uniform"]))
def test_leave_one_out_is_the_estimator_without_the_row(align, weight, batch):
    """Read at the rows that stay, from the column that the row is left out of."""
    left_out = optimal_token_baseline(**batch, align=align, weight=weight, leave_one_out=True)
    for rows, tokens in shared_columns(batch, align):
        row, witness = rows[0], 1
        whole = without_row(batch, row)
        result = optimal_token_baseline(**whole, align=align, weight=weight, handle_zero_tail=False)
        expected = result.baseline[rows[witness], tokens[witness]]
        of_group = torch.tensor([uid == batch["index"][row] for uid in batch["index"]])
        if whole["response_mask"][of_group].any(-1).sum() == 1:
            # The estimator gives a group's only row no baseline; as the only peer of another it is that one's.
            expected = result.returns[rows[witness], tokens[witness]]
        torch.testing.assert_close(
            left_out.baseline[row, tokens[0]], expected, rtol=0, atol=tolerance(left_out.returns)
        )


@examples
@given(method=st.sampled_from(BY_ENERGY), batch=batches(holes=False, min_energy=True))
def test_leave_one_out_is_the_estimator_with_a_row_of_no_weight(method, batch):
    """Finished rows too. Where the other rows have weight, that is where there are any."""
    left_out = optimal_token_baseline(**batch, **method)
    ones = torch.ones_like(batch["old_log_probs"])
    for row in range(len(batch["index"])):
        rho = batch.get("rollout_is_weights", ones).clone()
        rho[row] = 0
        result = optimal_token_baseline(**batch | {"rollout_is_weights": rho}, **method | {"leave_one_out": False})
        length = batch["response_mask"][row].sum()
        of_group = torch.tensor([uid == batch["index"][row] for uid in batch["index"]])
        peers = batch["response_mask"][of_group].sum(0) - batch["response_mask"][row]
        if method["finished_rows"] == "carry":
            peers = peers.cummax(0).values  # rows without holes end once, and begin at the first token
        with_peers = (peers > 0) & (torch.arange(len(peers)) < length)
        ours, expected = (x.baseline[row][with_peers] for x in (left_out, result))
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance(left_out.returns))
        assert (left_out.baseline[row][peers == 0] == 0).all()


@examples
@given(method=st.sampled_from(LEAVE_ONE_OUT), batch=batches(), rho=st.sampled_from([1e-6, 0.5, 3.0, 1e6]))
def test_leave_one_out_does_not_know_the_scale_of_weights(method, batch, rho):
    ones = torch.ones_like(batch["old_log_probs"])
    scaled = batch | {"rollout_is_weights": rho * batch.get("rollout_is_weights", ones)}
    plain, scaled = (optimal_token_baseline(**b, **method) for b in (batch, scaled))
    torch.testing.assert_close(scaled.baseline, plain.baseline, rtol=0, atol=tolerance(plain.returns))


@examples
@given(method=st.sampled_from(LEAVE_ONE_OUT), batch=batches(), constant=REWARDS)
def test_leave_one_out_shifts_with_the_returns(method, batch, constant):
    batch["token_level_rewards"] = batch["token_level_rewards"].double()
    moved = batch | {"token_level_rewards": batch["token_level_rewards"].clone()}
    moved["token_level_rewards"][:, -1] += constant
    before, after = (optimal_token_baseline(**b, **method) for b in (batch, moved))
    atol = tolerance(before.returns) + tolerance(after.returns)
    for cells in shared_columns(batch, method["align"]):
        shift = (after.baseline[cells].double() - before.baseline[cells].double()) - constant
        assert (shift.abs() <= atol).all()


@examples
@given(method=st.sampled_from(CARRYING), batch=batches())
def test_rows_of_one_length_have_none_to_carry_on(method, batch):
    batch["response_mask"] = torch.ones_like(batch["response_mask"])
    carried, dropped = (optimal_token_baseline(**batch, **method | {"finished_rows": how}) for how in ("carry", "drop"))
    for name in ("baseline", "advantages", "returns"):
        assert torch.equal(getattr(carried, name), getattr(dropped, name))


@examples
@given(method=st.sampled_from(METHODS), batch=batches())
def test_what_is_not_the_baseline_is_the_same_for_every_method(method, batch):
    """G, W and w, and 0 on masked tokens."""
    stock, result = optimal_token_baseline(**batch), optimal_token_baseline(**batch, **method)
    for name in ("returns", "realized_energy", "token_energy"):
        assert torch.equal(getattr(stock, name), getattr(result, name))
    for name in ("baseline", "advantages"):
        assert (getattr(result, name)[batch["response_mask"] == 0] == 0).all()


def test_a_row_that_outweighs_the_others_takes_none_of_their_digits():
    """Σ W of all less one's own would leave nothing of weights of 1 beside one of 1e16."""
    rho = torch.ones(3, 2)
    rho[0] = 1e8
    pi = torch.tensor([[0.5, 0.5], [0.2, 0.5], [0.9, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([[0.0, 5.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    inputs = (rewards, torch.ones(3, 2), pi.log(), pi**2 + (1 - pi) ** 2, ["a"] * 3)
    found = optimal_token_baseline(*inputs, rollout_is_weights=rho, leave_one_out=True)
    # w = 2 (1 − π)²: W_1 1.28 and 0.02, W_2 1.78 and 0.52, of the returns 1 and 2.
    expected = torch.tensor([(1.28 + 2 * 0.02) / 1.30, (1.78 + 2 * 0.52) / 2.30])
    torch.testing.assert_close(found.baseline[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.baseline[1:], torch.full((2, 2), 5.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 100])
def test_leave_one_out_lies_within_the_returns_of_the_others(rows):
    """In float64, with returns a few roundings apart under weights of every size."""
    generator = torch.Generator().manual_seed(rows)
    shape = (3, rows, 50)
    live = live_bits(torch.rand(shape, generator=generator) < 0.7)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64).pow(20) * -live
    weights[0] = 0
    returns = 0.1 * (1 + 2.0**-52 * torch.randint(4, shape, generator=generator)) * -live
    baseline = optimal_baseline(returns, weights, live, leave_one_out=True)
    assert baseline.shape == shape
    for row in range(rows):
        others = torch.arange(rows) != row
        seen, there = returns[:, others], live[:, others] != 0
        least = seen.masked_fill(~there, torch.inf).amin(1) if rows > 1 else torch.full(shape[::2], torch.inf)
        most = seen.masked_fill(~there, -torch.inf).amax(1) if rows > 1 else torch.full(shape[::2], -torch.inf)
        peers = there.any(1)
        assert ((least <= baseline[:, row]) & (baseline[:, row] <= most))[peers].all()
        assert (baseline[:, row][~peers] == 0).all()


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("weight", "path", 'weight: expected "realized" or "token" or "uniform", found \'path\''),
        ("finished_rows", True, 'finished_rows: expected "drop" or "carry", found True'),
    ],
)
@pytest.mark.parametrize("entry", [optimal_token_advantages, optimal_token_baseline])
def test_a_keyword_of_another_value(entry, keyword, value, message):
    half = torch.full((2, 3), 0.5)
    with pytest.raises(InputError, match=message) as caught:
        entry(half, torch.ones(2, 3), half.log(), half, ["a", "a"], **{keyword: value})
    assert caught.value.field == keyword
