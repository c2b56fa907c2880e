"""Small policies written out: each trajectory with its probability and the gradient of each of its tokens.

A policy is one map from a state (the tokens so far) to logits. What differs is which parameters a state uses:

    tree    a row of logits for every prefix: no two tokens of a trajectory share a parameter
    time    a row for every position: likewise
    bigram  a row for every previous token: positions share parameters
    mlp     one hidden layer on the prefix: every token shares some

All is float64. The reward comes at the end of a trajectory, so its reward-to-go is the same at all its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Logits = tuple[Array, Callable[[Array], Array]]

KINDS = ("tree", "time", "bigram", "mlp")
REWARDS = ("binary", "gaussian", "likely", "length")
HIDDEN = 8


@dataclass(frozen=True)
class Policy:
    """All n trajectories of up to T tokens that a policy of P parameters can produce.

    Attributes:
        parameters: θ, shape (P,).
        probability: π(τ), shape (n,); sums to 1.
        scores: ∂ log π(a_t)/∂θ, shape (n, T, P), 0 after the end.
        log_probs: log π(a_t), shape (n, T), 0 after the end.
        sum_pi_squared: Σ_v π_v², shape (n, T), 0 after the end.
        live: whether the trajectory has a token there, shape (n, T), 0 or 1.
    """

    parameters: Array
    probability: Array
    scores: Array
    log_probs: Array
    sum_pi_squared: Array
    live: Array

    @property
    def energy(self) -> Array:
        """w_t = 1 − 2π_t + Σπ², shape (n, T), 0 after the end."""
        return (1 - 2 * np.exp(self.log_probs) + self.sum_pi_squared) * self.live

    @cached_property
    def distinct_scores(self) -> tuple[Array, NDArray[np.int64]]:
        """The scores that there are, (k, P), and which of them each token has, (n, T)."""
        flat = self.scores.reshape(-1, self.scores.shape[-1])
        scores, which = np.unique(flat, axis=0, return_inverse=True)
        return scores, which.reshape(self.live.shape)

    @property
    def lengths(self) -> Array:
        return self.live.sum(1)

    def expect(self, values: Array) -> Array:
        """E over trajectories, which are the first dimension of `values`."""
        return np.tensordot(self.probability, values, 1)


def sequences(words: int, tokens: int, *, ends: bool) -> tuple[NDArray[np.int64], Array]:
    """All answers in a language of so many words, (n, T), and where they are live, (n, T).

    With `ends` the last word ends an answer, which then fills up with it; else all have T tokens.
    """
    every = np.array(list(itertools.product(range(words), repeat=tokens)))
    if not ends:
        return every, np.ones(every.shape)
    is_end = every == words - 1
    live = np.cumsum(is_end, 1) - is_end == 0  # no end before this token
    kept = np.all(live | is_end, 1)
    return every[kept], live[kept].astype(float)


def make_policy(
    kind: str, seed: int, *, words: int = 3, tokens: int = 5, ends: bool = True, sharpness: float = 1.0
) -> Policy:
    """A random policy. Its logits have a standard deviation of about `sharpness`."""
    normal = np.random.default_rng([seed, KINDS.index(kind)]).standard_normal
    if kind == "mlp":
        # The hidden layer's outputs have a mean square of about a half.
        last = sharpness * np.sqrt(2 / HIDDEN) * normal((HIDDEN + 1) * words)
        parameters = np.concatenate([normal((words * tokens + 1) * HIDDEN), last])
    else:
        actions, _ = sequences(words, tokens, ends=ends)
        parameters = sharpness * normal((_rows(kind, actions, words).max() + 1) * words)
    return write_out(kind, parameters, words=words, tokens=tokens, ends=ends)


def write_out(kind: str, parameters: Array, *, words: int, tokens: int, ends: bool) -> Policy:
    """The policy with these parameters θ, (P,)."""
    actions, live = sequences(words, tokens, ends=ends)
    if kind == "mlp":
        logits, gradient = _mlp(parameters, actions, words)
    else:
        logits, gradient = _table(parameters, _rows(kind, actions, words), words)
    pi = np.exp(logits - logits.max(-1, keepdims=True))
    pi /= pi.sum(-1, keepdims=True)
    chosen = np.eye(words)[actions]
    log_probs = np.log((pi * chosen).sum(-1)) * live
    return Policy(
        parameters=parameters,
        probability=np.exp(log_probs.sum(1)),
        scores=gradient((chosen - pi) * live[..., None]),
        log_probs=log_probs,
        sum_pi_squared=np.square(pi).sum(-1) * live,
        live=live,
    )


def _rows(kind: str, actions: NDArray[np.int64], words: int) -> NDArray[np.int64]:
    """The row of the table that each token's logits stand in, (n, T)."""
    n, tokens = actions.shape
    if kind == "time":
        return np.tile(np.arange(tokens), (n, 1))
    start = np.full((n, 1), words)
    if kind == "bigram":
        return np.concatenate([start, actions[:, :-1]], 1)
    prefixes = [tuple(action[:t]) for action in actions.tolist() for t in range(tokens)]
    number = {prefix: row for row, prefix in enumerate(dict.fromkeys(prefixes))}
    return np.array([number[prefix] for prefix in prefixes]).reshape(n, tokens)


def _table(parameters: Array, rows: NDArray[np.int64], words: int) -> Logits:
    """Logits, (n, T, V), and what takes ∂/∂logits, (n, T, V), to ∂/∂θ, (n, T, P)."""
    table = parameters.reshape(-1, words)

    def gradient(of_logits: Array) -> Array:
        in_row = np.eye(len(table))[rows]
        return (in_row[..., None] * of_logits[..., None, :]).reshape(*rows.shape, -1)

    return table[rows], gradient


def _mlp(parameters: Array, actions: NDArray[np.int64], words: int) -> Logits:
    """As `_table`. The input holds the one-hot words of the prefix, zeros for those to come, and a 1 for the bias."""
    n, tokens = actions.shape
    prefix = np.eye(words)[actions][:, None] * np.tri(tokens, k=-1)[..., None]
    inputs = np.concatenate([prefix.reshape(n, tokens, -1), np.ones((n, tokens, 1))], -1)
    first, second = np.split(parameters, [inputs.shape[-1] * HIDDEN])
    second = second.reshape(HIDDEN + 1, words)
    hidden = np.concatenate([np.tanh(inputs @ first.reshape(-1, HIDDEN)), np.ones((n, tokens, 1))], -1)

    def gradient(of_logits: Array) -> Array:
        of_hidden = (of_logits @ second.T * (1 - np.square(hidden)))[..., :-1]
        outer = [inputs[..., None] * of_hidden[..., None, :], hidden[..., None] * of_logits[..., None, :]]
        return np.concatenate([x.reshape(n, tokens, -1) for x in outer], -1)

    return hidden @ second, gradient


def make_rewards(kind: str, policy: Policy, seed: int) -> Array:
    """The reward of each trajectory, shape (n,).

    gaussian: N(0, 1). The others are 1 or 0. binary: a fair coin. likely: 1 with a chance that rises evenly from 0
    to 1 with the answer's mean log-prob per token: sure answers are right. length: 1 with chance L/T: long answers
    are right. Rewards that are all the same leave nothing to learn, and are drawn again.
    """
    rng = np.random.default_rng([seed, 17, REWARDS.index(kind)])
    n, tokens = policy.live.shape
    if kind == "gaussian":
        return rng.standard_normal(n)
    chance: Array | float = 0.5
    if kind == "likely":
        chance = (policy.log_probs.sum(1) / policy.lengths).argsort().argsort() / (n - 1)
    if kind == "length":
        chance = policy.lengths / tokens
    while True:
        rewards = (rng.random(n) < chance).astype(float)
        if np.ptp(rewards) > 0:
            return rewards
