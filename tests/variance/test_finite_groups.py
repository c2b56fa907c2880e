"""Groups of answers with the shipped estimator: what is exact about them, by all groups there are."""

import numpy as np
import pytest
from groups import (
    ESTIMATORS,
    Groups,
    advantages,
    compare,
    every_group,
    gradients,
    number_of_groups,
    pooled,
    quality,
    rloo_noise,
    rloo_size,
    sampled_groups,
)
from policies import make_policy, make_rewards
from population import Population

FLOAT32 = 1e-6  # the advantages' rounding
UNBIASED = ("rloo", "otb_loo", "token_loo", "carry_loo")
KINDS = pytest.mark.parametrize("kind", ["tree", "mlp"])


def population(kind, seed=0, *, ends=True, reward="binary", tokens=3):
    policy = make_policy(kind, seed, tokens=tokens, ends=ends)
    return Population(policy, make_rewards(reward, policy, seed))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_group_is_there_once_with_its_chance(size):
    policy = make_policy("tree", 0, tokens=2)
    groups = every_group(policy, size)
    number = len(policy.probability)
    assert len({tuple(sorted(members)) for members in groups.members.tolist()}) == number_of_groups(policy, size)
    assert groups.chance.sum() == pytest.approx(1, abs=1e-12)
    counts = (groups.members[..., None] == np.arange(number)).sum(1)
    np.testing.assert_allclose(groups.chance @ counts, size * policy.probability, atol=1e-12)
    ordered = np.indices((number,) * size).reshape(size, -1).T
    one = groups.members == groups.members[len(groups.members) // 2]
    chosen = np.sort(ordered, 1) == groups.members[len(groups.members) // 2]
    expected = policy.probability[ordered][chosen.all(1)].prod(1).sum()
    assert groups.chance[one.all(1)].item() == pytest.approx(expected, abs=1e-14)


@KINDS
def test_mean_and_rloo_are_what_their_names_say(kind):
    it = population(kind)
    members = every_group(it.policy, 3).members
    rewards = it.rewards[members]
    others = (rewards.sum(1, keepdims=True) - rewards) / 2
    live = it.policy.live[members]
    for name, baseline in (("mean", rewards.mean(1, keepdims=True)), ("rloo", others)):
        expected = (rewards - baseline)[..., None] * live
        np.testing.assert_allclose(advantages(it, members, ESTIMATORS[name]), expected, atol=FLOAT32)


@KINDS
def test_a_group_of_one_has_the_gradient_of_its_answer(kind):
    it = population(kind)
    members = np.arange(len(it.rewards))[:, None]
    expected = it.policy.scores.sum(1) * it.rewards[:, None]
    found = gradients(it.policy, members, advantages(it, members, ESTIMATORS["otb"]))
    np.testing.assert_allclose(found, expected, atol=FLOAT32)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ends", [False, True], ids=["fixed", "ends"])
@KINDS
def test_without_the_own_row_the_gradient_is_the_true_one(kind, ends, size):
    for seed in range(3):
        it = population(kind, seed, ends=ends, tokens=3 if size == 2 else 2)
        groups = every_group(it.policy, size)
        for name in UNBIASED:
            found = groups.chance @ gradients(
                it.policy, groups.members, advantages(it, groups.members, ESTIMATORS[name])
            )
            np.testing.assert_allclose(found, it.gradient, atol=FLOAT32)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in UNBIASED])
@KINDS
def test_with_the_own_row_the_gradient_shrinks(kind, name):
    for seed in range(3):
        it = population(kind, seed)
        found = quality(it, 2, compare(it, every_group(it.policy, 2), [name])[name])
        assert found.shrink < 0.9
        if name == "mean":
            assert found.shrink == pytest.approx(0.5, abs=FLOAT32)
            assert found.cosine == pytest.approx(1, abs=FLOAT32)


@pytest.mark.parametrize("size", [2, 3, 4])
@KINDS
def test_the_variance_of_rloo_in_groups_of_any_size(kind, size):
    it = population(kind, 1, tokens=2)
    groups = every_group(it.policy, size)
    rloo = compare(it, groups, ["rloo"])["rloo"]
    known = it.variance(it.baselines()["mean"])
    assert size * rloo.variance / known == pytest.approx(rloo_noise(it, size), rel=10 * FLOAT32)
    assert rloo_size(it, size, rloo_noise(it, size)) == pytest.approx(size)


@KINDS
def test_sampled_groups_agree_with_all_groups(kind):
    it, size, rng = population(kind, 2), 3, np.random.default_rng(0)
    exact = compare(it, every_group(it.policy, size))
    batches = [compare(it, sampled_groups(it.policy, size, 2000, rng)) for _ in range(4)]
    for name in ESTIMATORS:
        expected, found = (quality(it, size, x) for x in (exact[name], pooled([batch[name] for batch in batches])))
        assert found.variance == pytest.approx(expected.variance, rel=0.08), name
        assert found.shrink == pytest.approx(expected.shrink, abs=0.04), name


def test_the_order_of_the_rows_does_not_matter():
    it = population("mlp")
    groups = every_group(it.policy, 3)
    mirrored = Groups(groups.members[:, ::-1], groups.chance)
    for one, other in zip(compare(it, groups).values(), compare(it, mirrored).values(), strict=True):
        assert one.variance == pytest.approx(other.variance, rel=FLOAT32)
