"""Baselines from true expectations, and the exact variance of the gradient that each of them gives.

The gradient of one trajectory is ĝ = Σ_t s_t (R − b_t), with s_t = ∂ log π(a_t)/∂θ and a baseline b_t of the
position alone. E[ĝ] = ∂ E[R]/∂θ whatever b is. Its variance is E‖ĝ‖² − ‖E ĝ‖², all parameters together.

The score of a token has mean zero given what came before. So E[s_t · s_u] = 0 for t ≠ u, for every policy, and
    Var(b) = Var(b*) + Σ_t E‖s_t‖² (b_t − b*_t)²      with b*_t = E[s_t · (Σ_u s_u) R] / E‖s_t‖².
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from policies import Array, Policy

BASELINES = ("none", "mean", "opo", "path", "scalar", "live", "otb", "carry", "token", "optimum")


@dataclass(frozen=True)
class Population:
    """A policy with a reward for each of its trajectories, shape (n,)."""

    policy: Policy
    rewards: Array

    @cached_property
    def products(self) -> Array:
        """s_t · s_u within each trajectory, (n, T, T)."""
        scores = self.policy.scores
        return scores @ scores.swapaxes(1, 2)

    @cached_property
    def gradient(self) -> Array:
        """∂ E[R]/∂θ, (P,)."""
        return self.policy.expect(self.policy.scores.sum(1) * self.rewards[:, None])

    def baselines(self) -> dict[str, Array]:
        """b_t, (T,), of each of BASELINES.

        none: 0. mean: E[R]. opo: one number, weights are lengths. path: one number, weights W_T. scalar: the best
        one number. live: E[R | live]. otb: E[W_t R | live] / E[W_t | live]. carry: the same over all rows, where one
        that has ended keeps its last W. token: as otb with w_t in place of W_t. optimum: the best numbers.
        """
        policy, one = self.policy, np.ones(self.policy.live.shape)
        realized = policy.energy.cumsum(1)  # stays what it was after the end
        quadratic, linear = self._quadratic_form()
        return {
            "none": 0 * one[0],
            "mean": self._weighted(one),
            "opo": self._weighted(policy.lengths[:, None] * one),
            "path": self._weighted(realized[:, -1:] * one),
            "scalar": linear.sum() / quadratic.sum() * one[0],
            "live": self._weighted(policy.live),
            "otb": self._weighted(realized * policy.live),
            "carry": self._weighted(realized),
            "token": self._weighted(policy.energy),
            "optimum": np.linalg.lstsq(quadratic, linear)[0],
        }

    def expected_gradient(self, baseline: Array) -> Array:
        """E ĝ, (P,)."""
        policy = self.policy
        return policy.expect(np.einsum("ntp,nt->np", policy.scores, self.rewards[:, None] - baseline))

    def variance(self, baseline: Array) -> float:
        """E‖ĝ‖² − ‖E ĝ‖²."""
        advantages = self.rewards[:, None] - baseline
        second_moment = self.policy.expect(np.einsum("nt,ntu,nu->n", advantages, self.products, advantages))
        return float(second_moment - np.square(self.gradient).sum())

    def _weighted(self, weights: Array) -> Array:
        return self.policy.expect(weights * self.rewards[:, None]) / self.policy.expect(weights)

    def _quadratic_form(self) -> tuple[Array, Array]:
        """M and c: the variance is b·M b − 2 c·b + what does not depend on b."""
        expect, products = self.policy.expect, self.products
        return expect(products), expect(products.sum(2) * self.rewards[:, None])
