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


def compare(
    mask: Sequence[Sequence[int]], index: Sequence[Hashable], *, align: str = "position", finished_rows: str = "drop"
) -> tuple[dict[tuple[int, int], int], dict[tuple[Hashable, int], dict[int, int]]]:
    """The column of each token (row, position), and of each prompt and column the rows that are compared in it, each
    with the token that it stands there with."""
    column: dict[tuple[int, int], int] = {}
    compared = defaultdict(dict)
    tokens = range(len(mask[0]))
    for i, row in enumerate(mask):
        kth = 0
        for t in tokens:
            if row[t]:
                column[i, t] = t if align == "position" else kth
                compared[index[i], column[i, t]][i] = t
                kth += 1
        if finished_rows == "carry" and kth:
            last = max(t for t in tokens if row[t])
            for later in range(column[i, last] + 1, len(tokens)):
                compared[index[i], later][i] = last
    return column, compared


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
    leave_one_out: bool = False,
    weight: str = "realized",
    finished_rows: str = "drop",
) -> Definition:
    """The symbols are those of the method: r, m, π, S, ρ, G, w, W, B, A; V is what stands for W in B."""
    rows, tokens = range(len(rewards)), range(len(rewards[0]))
    G, w, W, V, B, A = ([[0.0 for _ in tokens] for _ in rows] for _ in range(6))
    column, compared = compare(mask, index, align=align, finished_rows=finished_rows)
    rows_with_tokens = defaultdict(set)
    for i, _ in column:
        rows_with_tokens[index[i]].add(i)
    for i in rows:
        for t in tokens:
            if not mask[i][t]:
                continue
            G[i][t] = math.fsum(rewards[i][t:])
            pi = math.exp(min(log_probs[i][t], 0.0))
            w[i][t] = (1 - pi) ** 2 + max(sum_pi_squared[i][t] - pi**2, 0.0)
            rho = importance_weights[i] if importance_weights else [1.0] * len(tokens)
            W[i][t] = math.fsum(rho[j] ** 2 * w[i][j] for j in range(t + 1) if mask[i][j])
            V[i][t] = {"realized": W[i][t], "token": rho[t] ** 2 * w[i][t], "uniform": 1.0}[weight]
    for i, t in column:
        cells = [(j, u) for j, u in compared[index[i], column[i, t]].items() if not (leave_one_out and j == i)]
        returns = [G[j][u] for j, u in cells]
        weights = [V[j][u] for j, u in cells]
        if leave_one_out:
            alone = not cells
        else:
            alone = len(rows_with_tokens[index[i]]) == 1 or (len(cells) == 1 and handle_zero_tail)
        if alone:
            b = 0.0
        elif math.fsum(weights) == 0:
            b = math.fsum(returns) / len(returns)
        else:
            b = math.fsum(g * x for g, x in zip(returns, weights, strict=True)) / math.fsum(weights)
        B[i][t] = b
        A[i][t] = G[i][t] - b
    return Definition(A, G, B, W, w)
