"""What a batch says about its baseline, against loops over the definition in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
import torch
from definition import compare, define
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import batches, poisoned
from variants import METHODS, named

from verl_otb.core import Diagnostics, optimal_token_advantages
from verl_otb.core import advantage as module


def figures_by_definition(batch, method):
    mask, index = batch["response_mask"].tolist(), batch["index"]
    rewards = batch["token_level_rewards"].double().tolist()
    weights = batch["rollout_is_weights"].double().tolist() if "rollout_is_weights" in batch else None
    defined, held_out = (
        define(
            rewards,
            mask,
            batch["old_log_probs"].double().tolist(),
            batch["sum_pi_squared"].double().tolist(),
            index,
            importance_weights=weights,
            **method | {"leave_one_out": leave_one_out},
        )
        for leave_one_out in (method["leave_one_out"], True)
    )
    names = ("align", "finished_rows")
    column, compared = compare(mask, index, **{name: method[name] for name in names})
    cells, by_column, with_tokens = list(column), defaultdict(dict), defaultdict(set)
    for i, t in cells:
        by_column[index[i], column[i, t]] = compared[index[i], column[i, t]]
        with_tokens[index[i]].add(i)
    if not cells:
        return {}
    mean = {uid: fmean(math.fsum(rewards[i]) for i in rows) for uid, rows in with_tokens.items()}
    alone = [(i, t) for i, t in cells if len(by_column[index[i], column[i, t]]) == 1]
    zero_tail = method["handle_zero_tail"] or method["leave_one_out"]
    zeroed = [(i, t) for i, t in alone if zero_tail or len(with_tokens[index[i]]) == 1]

    def values(matrix):
        return [matrix[i][t] for i, t in cells]

    rho = weights or [[1.0] * len(row) for row in mask]

    def weight(i, t):
        of_token = rho[i][t] ** 2 * defined.token_energy[i][t]
        return {"realized": defined.realized_energy[i][t], "token": of_token, "uniform": 1.0}[method["weight"]]

    def effective(rows):
        found = [weight(i, t) for i, t in rows.items()]
        return math.fsum(found) ** 2 / math.fsum(w * w for w in found) if math.fsum(found) else len(found)

    def power(advantage):
        return fmean(rho[i][t] ** 2 * defined.token_energy[i][t] * advantage(i, t) ** 2 for i, t in cells)

    def mean_of_others(i):
        others = [math.fsum(rewards[j]) for j in with_tokens[index[i]] if j != i]
        return fmean(others) if others else 0.0

    def advantage(of, i, t):
        """Without the definition's rounding where all returns of a column are equal."""
        exact = of.advantages[i][t]
        return exact if abs(exact) > 1e-13 * abs(of.returns[i][t]) else 0.0

    def powers(name, of, other_baseline):
        ours = power(lambda i, t: advantage(of, i, t))
        reference = power(lambda i, t: of.returns[i][t] - other_baseline(i))
        ratio = ours / reference if reference else math.inf if ours else 1.0
        return {name: ours, f"{name}_group_mean": reference, f"{name}_vs_group_mean": ratio}

    return {
        "baseline/mean": fmean(values(defined.baseline)),
        "baseline/std": pstdev(values(defined.baseline)),
        "advantage/std": pstdev(values(defined.advantages)),
        "realized_energy/mean": fmean(values(defined.realized_energy)),
        "realized_energy/max": max(values(defined.realized_energy)),
        "token_energy/mean": fmean(values(defined.token_energy)),
        "single_row_fraction": len(alone) / len(cells),
        "zero_tail_fraction": len(zeroed) / len(cells),
        "effective_group_size": fmean(map(effective, by_column.values())),
        **powers("gradient_power", defined, lambda i: mean[index[i]]),
        **powers("held_out_power", held_out, mean_of_others),
    }


@pytest.mark.parametrize("method", METHODS, ids=named)
@settings(deadline=None, max_examples=25)
@given(batch=batches(), poison=st.booleans(), small_blocks=st.booleans())
def test_are_those_of_the_definition(method, batch, poison, small_blocks):
    diagnostics = Diagnostics()
    with pytest.MonkeyPatch.context() as patch:
        if small_blocks:
            patch.setitem(module._BLOCK_TOKENS, "cpu", 1)
        optimal_token_advantages(**(poisoned(batch) if poison else batch), **method, diagnostics=diagnostics)
    found, expected = diagnostics.figures(), figures_by_definition(batch, method)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Near-certain tokens lose digits in 1 − π, in any arithmetic.
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("small_blocks", [True, False])
def test_spread_of_large_rewards(monkeypatch, small_blocks):
    """Returns around 1e8: E[x²] − E[x]² would have no digit left."""
    if small_blocks:
        monkeypatch.setitem(module._BLOCK_TOKENS, "cpu", 1)
    rewards = torch.zeros(4, 3, dtype=torch.float64)
    rewards[:, -1] = 1e8 + torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    diagnostics, half = Diagnostics(), torch.full((4, 3), 0.5, dtype=torch.float64)
    optimal_token_advantages(rewards, torch.ones(4, 3), half.log(), half, ["a", "a", "b", "b"], diagnostics=diagnostics)
    figures = diagnostics.figures()
    assert figures["baseline/std"] == pytest.approx(1.25, rel=1e-6)  # 1e8 + 0.5 and 1e8 + 3
    assert figures["advantage/std"] == pytest.approx(math.sqrt((0.25 + 1) / 2), rel=1e-6)


def test_equal_returns_of_unequal_rows_show_what_the_zero_tail_costs():
    mask = torch.tensor([[1, 0], [1, 1]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    half = torch.full((2, 2), 0.5)
    diagnostics = Diagnostics()
    optimal_token_advantages(rewards, mask, half.log(), half, ["a", "a"], diagnostics=diagnostics)
    assert diagnostics.figures()["gradient_power_vs_group_mean"] == math.inf


def test_held_out_power_is_not_taken_in_by_weights_that_say_nothing():
    """Weights drawn apart from the rewards: no baseline is better than the mean. The power with the own row in the
    baseline says that OTB is, only because fewer rows share its weight; the held-out one says what is: worse."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * 20_000
    rewards = torch.randn(rows, 1, generator=generator)
    pi = torch.where(torch.rand(rows, 1, generator=generator) < 0.5, 0.1, 0.9)
    diagnostics = Diagnostics()
    index = torch.arange(rows) // 4
    optimal_token_advantages(
        rewards, torch.ones(rows, 1), pi.log(), pi.square() + (1 - pi).square(), index, diagnostics=diagnostics
    )
    figures = diagnostics.figures()
    assert figures["gradient_power_vs_group_mean"] < 0.9
    assert 1.02 < figures["held_out_power_vs_group_mean"] < 1.3


def test_nothing_watched_says_nothing():
    assert Diagnostics().figures() == {}


def test_watching_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    rewards, pi = torch.rand(6, 9, generator=generator), torch.rand(6, 9, generator=generator)
    arguments = (rewards, torch.ones(6, 9), pi.log(), pi.square(), list("aabbbb"))
    for ours, watched in zip(
        optimal_token_advantages(*arguments),
        optimal_token_advantages(*arguments, diagnostics=Diagnostics()),
        strict=True,
    ):
        assert torch.equal(ours, watched)
