"""The Optimal Token Baseline as it is defined: one loop an index, float64, no torch. The tests' truth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Matrix = list[list[float]]


class Definition(NamedTuple):
    """Each as rows of tokens, 0 on masked tokens."""

    advantages: Matrix
    returns: Matrix
    baseline: Matrix
    realized_energy: Matrix
    token_energy: Matrix


def define(
    rewards: Matrix,
    mask: Sequence[Sequence[int]],
    log_probs: Matrix,
    sum_pi_squared: Matrix,
    index: Sequence[Hashable],
    *,
    importance_weights: Matrix | None = None,
    align: str = "position",
    handle_zero_tail: bool = True,
) -> Definition:
    """The symbols are those of the method: r, m, π, S, ρ, G, w, W, B, A."""
    rows, tokens = range(len(rewards)), range(len(rewards[0]))
    G, w, W, B, A = ([[0.0 for _ in tokens] for _ in rows] for _ in range(5))
    live_in_column = defaultdict(list)
    rows_with_tokens = defaultdict(set)
    for i in rows:
        kth = 0
        for t in tokens:
            if not mask[i][t]:
                continue
            G[i][t] = math.fsum(rewards[i][t:])
            pi = math.exp(min(log_probs[i][t], 0.0))
            w[i][t] = (1 - pi) ** 2 + max(sum_pi_squared[i][t] - pi**2, 0.0)
            rho = importance_weights[i] if importance_weights else [1.0] * len(tokens)
            W[i][t] = math.fsum(rho[j] ** 2 * w[i][j] for j in range(t + 1) if mask[i][j])
            live_in_column[index[i], t if align == "position" else kth].append((i, t))
            rows_with_tokens[index[i]].add(i)
            kth += 1
    for (uid, _), cells in live_in_column.items():
        returns = [G[i][t] for i, t in cells]
        weights = [W[i][t] for i, t in cells]
        if len(rows_with_tokens[uid]) == 1 or (len(cells) == 1 and handle_zero_tail):
            b = 0.0
        elif math.fsum(weights) == 0:
            b = math.fsum(returns) / len(returns)
        else:
            b = math.fsum(g * x for g, x in zip(returns, weights, strict=True)) / math.fsum(weights)
        for i, t in cells:
            B[i][t] = b
            A[i][t] = G[i][t] - b
    return Definition(A, G, B, W, w)
