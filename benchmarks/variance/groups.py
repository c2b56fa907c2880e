"""Gradients of prompt groups of N answers, with the advantages that the shipped estimator gives them.

ĝ = (1/N) Σ_i Σ_t s_t^i A_t^i. The baseline is made from the group, so E ĝ need not be the true gradient g.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from options import ESTIMATORS
from policies import Array, Policy
from population import Population

from verl_otb.core import optimal_token_advantages


@dataclass(frozen=True)
class Groups:
    """Groups of N answers: numbers of trajectories, (groups, N), and how often each group comes, summing to 1."""

    members: NDArray[np.int64]
    chance: Array


def number_of_groups(policy: Policy, size: int) -> int:
    """That differ in more than the order of their rows."""
    return math.comb(len(policy.probability) + size - 1, size)


def every_group(policy: Policy, size: int) -> Groups:
    """All groups there are. Nothing depends on the order of the rows, so each set of rows is here once."""
    members = np.array(list(itertools.combinations_with_replacement(range(len(policy.probability)), size)))
    factorials = np.array([math.factorial(k) for k in range(size + 1)])
    runs = np.ones(len(members), dtype=np.int64)  # the product of k! over trajectories that come k times
    length = np.ones(len(members), dtype=np.int64)
    for column in range(1, size):
        length = np.where(members[:, column] == members[:, column - 1], length + 1, 1)
        runs *= length
    return Groups(members, factorials[size] / runs * policy.probability[members].prod(1))


def sampled_groups(policy: Policy, size: int, groups: int, rng: np.random.Generator) -> Groups:
    members = rng.choice(len(policy.probability), (groups, size), p=policy.probability / policy.probability.sum())
    return Groups(members, np.full(groups, 1 / groups))


def advantages(population: Population, members: NDArray[np.int64], options: dict[str, Any]) -> Array:
    """A_t, (groups, N, T), as the trainer would get them: float32."""
    policy = population.policy
    rows = torch.from_numpy(members.reshape(-1))
    last = (policy.lengths - 1).astype(int)
    token_rewards = population.rewards[:, None] * np.eye(policy.live.shape[1])[last]
    mask, log_probs, sum_pi_squared, rewards = (
        torch.from_numpy(x)[rows] for x in (policy.live, policy.log_probs, policy.sum_pi_squared, token_rewards)
    )
    uids = np.repeat(np.arange(len(members)), members.shape[1]).tolist()
    found, _ = optimal_token_advantages(rewards, mask, log_probs, sum_pi_squared, uids, **options)
    return found.double().numpy().reshape(*members.shape, -1)


def gradients(policy: Policy, members: NDArray[np.int64], advantage: Array) -> Array:
    """ĝ of each group, (groups, P)."""
    # Many trajectories begin alike. A group's advantages are added up for each score that there is.
    scores, which = policy.distinct_scores
    cells = which[members] + len(scores) * np.arange(len(members))[:, None, None]
    totals = np.bincount(cells.ravel(), advantage.ravel(), len(members) * len(scores))
    return totals.reshape(len(members), -1) @ scores / members.shape[1]


def rloo_noise(population: Population, size: int) -> float:
    """N·Var of RLOO's gradient, over the same with the true mean reward for a baseline. Exact.

    RLOO is the mean of (S_i − S_j)(R_i − R_j)/2 over the pairs of a group, S being the score of a whole answer. The
    variance of such a U-statistic has one part that goes with 1/N, here the true mean's, and one with 1/(N(N − 1)),
    which pairs tell.
    """
    policy, rewards = population.policy, population.rewards
    scores = policy.scores.sum(1)
    products = scores @ scores.T
    distances = np.diag(products)[:, None] + np.diag(products) - 2 * products
    squares = distances * np.square(rewards[:, None] - rewards) / 4
    pair = 2 * (policy.expect(policy.expect(squares)) - np.square(population.gradient).sum())
    known = population.variance(population.baselines()["mean"])
    return float(1 + (pair / known - 1) / (size - 1))


@dataclass(frozen=True)
class Comparison:
    """The gradient ĝ against RLOO's of the same groups.

    RLOO's mean is g, and its variance is known. So sampled groups are asked only how ĝ differs from it.

    Attributes:
        difference: of the expected gradients, (P,).
        variance: Var ĝ.
        rloo_variance: of RLOO's gradient, in these groups.
    """

    difference: Array
    variance: float
    rloo_variance: float


def compare(population: Population, groups: Groups, names: Collection[str] = ESTIMATORS) -> dict[str, Comparison]:
    """Of estimators, all on the same groups."""

    def mean_and_variance(options: dict[str, Any]) -> tuple[Array, float]:
        advantage = advantages(population, groups.members, options)
        values = gradients(population.policy, groups.members, advantage)
        mean = groups.chance @ values
        return mean, float(groups.chance @ np.square(values - mean).sum(1))

    moments = {name: mean_and_variance(ESTIMATORS[name]) for name in {"rloo", *names}}
    rloo_mean, rloo_variance = moments["rloo"]
    return {name: Comparison(moments[name][0] - rloo_mean, moments[name][1], rloo_variance) for name in names}


def pooled(batches: Sequence[Comparison]) -> Comparison:
    """Of several batches of sampled groups, all of one size."""
    return Comparison(
        difference=np.mean([batch.difference for batch in batches], 0),
        variance=float(np.mean([batch.variance for batch in batches])),
        rloo_variance=float(np.mean([batch.rloo_variance for batch in batches])),
    )


@dataclass(frozen=True)
class Quality:
    """Of the gradient of a group of N answers.

    Attributes:
        variance: N·(E‖ĝ‖² − ‖E ĝ‖²), over the same with the true mean reward for a baseline.
        shrink: ⟨E ĝ, g⟩/‖g‖²: how long the expected gradient is along the true one.
        cosine: between these two.
    """

    variance: float
    shrink: float
    cosine: float

    @property
    def noise(self) -> float:
        """The variance once ĝ is scaled up to the true gradient's length."""
        return self.variance / self.shrink**2


def quality(population: Population, size: int, comparison: Comparison) -> Quality:
    g = population.gradient
    expected = g + comparison.difference
    return Quality(
        variance=comparison.variance / comparison.rloo_variance * rloo_noise(population, size),
        shrink=float(expected @ g / np.square(g).sum()),
        cosine=float(expected @ g / np.linalg.norm(g) / np.linalg.norm(expected)),
    )


def rloo_size(population: Population, size: int, noise: float) -> float:
    """How many answers a group needs for RLOO (or the group's mean) to have no more noise in all than this."""
    k, pair = size / noise, rloo_noise(population, 2)
    return (1 + k + math.sqrt((1 + k) ** 2 + 4 * k * (pair - 2))) / 2  # M with rloo_noise(M)/M = 1/k
