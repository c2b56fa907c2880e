"""The policies that benchmarks/variance writes out are policies, and their scores are derivatives."""

import numpy as np
import pytest
from policies import KINDS, REWARDS, make_policy, make_rewards, sequences, write_out
from population import Population

SIZE = {"words": 3, "tokens": 4}
ENDS = pytest.mark.parametrize("ends", [False, True], ids=["fixed", "ends"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def test_answers_end_at_the_last_word_or_at_the_last_token():
    answers, live = sequences(2, 3, ends=True)
    assert answers.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]]
    assert live.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert sequences(2, 3, ends=False)[0].shape == (8, 3)


@ENDS
@EVERY_KIND
def test_probabilities_are_those_of_the_tokens_and_sum_to_one(kind, ends):
    policy = make_policy(kind, 1, ends=ends, **SIZE)
    assert policy.probability.sum() == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(np.log(policy.probability), policy.log_probs.sum(1), atol=1e-13)


@ENDS
@EVERY_KIND
def test_scores_are_the_derivatives_of_the_log_probs(kind, ends):
    policy = make_policy(kind, 2, ends=ends, **SIZE)
    step = 1e-5
    for parameter in range(0, policy.scores.shape[-1], 3):
        nudge = step * np.eye(policy.scores.shape[-1])[parameter]
        more, less = (write_out(kind, policy.parameters + x, ends=ends, **SIZE).log_probs for x in (nudge, -nudge))
        np.testing.assert_allclose((more - less) / (2 * step), policy.scores[..., parameter], atol=1e-8)


@ENDS
@pytest.mark.parametrize("kind", ["tree", "time"])
def test_the_score_of_a_row_of_logits_has_the_token_energy(kind, ends):
    """And two tokens share no row, in the tree and in time; the bigram's and the MLP's do."""
    policy = make_policy(kind, 3, ends=ends, **SIZE)
    products = Population(policy, np.zeros(len(policy.probability))).products
    energy = policy.energy[..., None] * np.eye(SIZE["tokens"])
    np.testing.assert_allclose(products, energy, atol=1e-14)


@pytest.mark.parametrize("reward", REWARDS)
def test_rewards_differ_and_are_what_they_are_called(reward):
    policy = make_policy("tree", 4, tokens=6)
    drawn = np.array([make_rewards(reward, policy, seed) for seed in range(400)])
    assert (np.ptp(drawn, 1) > 0).all()
    per_token = policy.log_probs.sum(1) / policy.lengths
    goes_with = {"length": policy.lengths, "likely": per_token}.get(reward)
    if goes_with is None:
        assert abs(drawn.mean() - (0.5 if reward == "binary" else 0)) < 0.02
    else:
        assert np.corrcoef(drawn.mean(0), goes_with)[0, 1] > 0.9
