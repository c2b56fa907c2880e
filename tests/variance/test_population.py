"""What theory guarantees of the baselines, with true expectations. No sampling, so no tolerance but rounding."""

import itertools

import numpy as np
import pytest
from exact import LENGTHS, variances
from policies import KINDS, REWARDS, make_policy, make_rewards
from population import BASELINES, Population

SEEDS = range(6)
CASES = [
    pytest.param(kind, ends, reward, id=f"{kind}-{length}-{reward}")
    for kind, (length, ends), reward in itertools.product(KINDS, LENGTHS.items(), REWARDS)
]
NO_SHARED_PARAMETERS = ("tree", "time")


def populations(kind, ends, reward):
    for seed, sharpness in itertools.product(SEEDS, (1.0, 2.0)):
        policy = make_policy(kind, seed, tokens=4, ends=ends, sharpness=sharpness)
        yield Population(policy, make_rewards("binary" if reward == "length" and not ends else reward, policy, seed))


def ratios(population):
    """Var/Var(mean) of every baseline."""
    found = {name: population.variance(baseline) for name, baseline in population.baselines().items()}
    return {name: value / found["mean"] for name, value in found.items()}


def assert_chain(found, *names):
    for less, more in itertools.pairwise(names):
        assert found[less] <= found[more] + 1e-12, (less, more)


def test_the_names_are_those_of_the_table():
    population = next(populations("tree", True, "binary"))
    assert tuple(population.baselines()) == BASELINES


@pytest.mark.parametrize(("kind", "ends", "reward"), CASES)
def test_every_baseline_is_unbiased(kind, ends, reward):
    for population in populations(kind, ends, reward):
        scale = 1 + np.abs(population.gradient).max()
        for baseline in population.baselines().values():
            np.testing.assert_allclose(population.expected_gradient(baseline), population.gradient, atol=1e-12 * scale)


@pytest.mark.parametrize(("kind", "ends", "reward"), CASES)
def test_the_optimum_is_below_every_baseline_by_the_squared_distance(kind, ends, reward):
    """Var(b) = Var(b*) + Σ_t E‖s_t‖² (b_t − b*_t)², for every policy: tokens' scores are uncorrelated."""
    for population in populations(kind, ends, reward):
        baselines, products = population.baselines(), population.policy.expect(population.products)
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-13)
        least, mean = population.variance(baselines["optimum"]), population.variance(baselines["mean"])
        for name, baseline in baselines.items():
            excess = np.diag(products) @ np.square(baseline - baselines["optimum"])
            assert population.variance(baseline) == pytest.approx(least + excess, abs=1e-11 * (1 + mean)), name
        assert_chain(ratios(population), "optimum", "scalar", "mean")


@pytest.mark.parametrize(("kind", "ends", "reward"), [c for c in CASES if c.values[0] in NO_SHARED_PARAMETERS])
def test_without_shared_parameters_the_token_weight_is_the_optimum(kind, ends, reward):
    """Whether or not answers end early. And the weight W(τ) gives the best one number."""
    for population in populations(kind, ends, reward):
        found = ratios(population)
        assert found["token"] == pytest.approx(found["optimum"], abs=1e-12)
        assert found["path"] == pytest.approx(found["scalar"], abs=1e-12)
        for other in ("none", "mean", "opo"):
            assert_chain(found, "token", "carry", "path", other)


@pytest.mark.parametrize(
    ("kind", "ends", "reward"), [c for c in CASES if c.values[0] in NO_SHARED_PARAMETERS and not c.values[1]]
)
def test_the_chain_at_a_fixed_length(kind, ends, reward):
    for population in populations(kind, ends, reward):
        for last in ("mean", "none"):
            assert_chain(ratios(population), "token", "otb", "path", last)


def test_where_the_chain_is_not_promised_it_breaks():
    """Otherwise the tests above would assert what cannot fail: answers that end, and shared parameters."""
    found = variances(seeds=40, words=3, tokens=4)
    otb, path, mean = (BASELINES.index(name) for name in ("otb", "path", "mean"))
    losses = {setting: (v[:, otb] > v[:, path] * (1 + 1e-9)).sum() for setting, v in found.items()}
    for (length, _, _, kind), lost in losses.items():
        assert lost == 0 or length == "ends" or kind not in NO_SHARED_PARAMETERS
    assert losses["ends", 1.0, "binary", "tree"] > 0
    shared = found["fixed", 1.0, "binary", "mlp"]
    assert (shared[:, otb] > shared[:, mean] * (1 + 1e-9)).any()
