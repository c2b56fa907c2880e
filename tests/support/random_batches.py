"""Random batches for hypothesis: ragged rows, holes, empty rows, groups interleaved, certain tokens, ρ or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

ALIGNMENTS = ("position", "token")
REWARDS = st.floats(-5, 5, width=32)
# Closer to 1 than this, 1 − π is rounding in any arithmetic; so certain, or at least this far from it.
# A rounding above 0 counts as 0.
LOG_PROBS = st.one_of(
    st.floats(-12, -(2**-16), width=32),
    st.floats(-(2**-16), -(2**-26), width=32),
    st.sampled_from([0.0, 2**-20]),
)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    holes: bool = True,
    importance_weights: bool = True,
    min_energy: bool = False,
    rewards: st.SearchStrategy[float] = REWARDS,
) -> dict[str, Any]:
    """The estimators' arguments, float32 and finite everywhere.

    holes: masks may have holes; else each row is live from its first token to its last, which may be none.
    importance_weights: ρ may be given.
    min_energy: no token is certain, so that no column is without energy.
    """
    rows, tokens = draw(st.integers(1, 7)), draw(st.integers(1, 6))

    def matrix(elements: st.SearchStrategy[Any], dtype: Any = np.float32) -> np.ndarray:
        return draw(arrays(dtype, (rows, tokens), elements=elements))

    log_probs = matrix(st.floats(-12, -0.125, width=32) if min_energy else LOG_PROBS)
    pi = np.exp(np.minimum(log_probs, 0).astype(np.float64))
    # Σπ² of the other tokens, whose probabilities add up to 1 − π: between 0 and (1 − π)².
    sum_pi_squared = pi**2 + matrix(st.floats(0, 1, width=32)) * (1 - pi) ** 2
    if holes:
        mask = matrix(st.integers(0, 1), np.int64)
    else:
        lengths = draw(arrays(np.int64, (rows, 1), elements=st.integers(0, tokens)))
        mask = (np.arange(tokens) < lengths).astype(np.int64)
    batch = {
        "token_level_rewards": matrix(rewards),
        "response_mask": mask,
        "old_log_probs": log_probs,
        "sum_pi_squared": sum_pi_squared.astype(np.float32),
    }
    if importance_weights and draw(st.booleans()):
        batch["rollout_is_weights"] = matrix(st.floats(0.125, 4, width=32))
    index = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=rows, max_size=rows))
    return {name: torch.from_numpy(values) for name, values in batch.items()} | {"index": index}


def poisoned(batch: dict[str, Any]) -> dict[str, Any]:
    """NaN under every masked log-prob, Σπ² and ρ, and in every reward of a fully masked row."""
    masked = batch["response_mask"] == 0
    bad = {
        name: batch[name].masked_fill(masked, torch.nan)
        for name in ("old_log_probs", "sum_pi_squared", "rollout_is_weights")
        if name in batch
    }
    empty = masked.all(-1, keepdim=True)
    return batch | bad | {"token_level_rewards": batch["token_level_rewards"].masked_fill(empty, torch.nan)}


def columns(mask: torch.Tensor, align: str) -> torch.Tensor:
    """The column each token is compared in."""
    return mask.cumsum(-1) - 1 if align == "token" else torch.arange(mask.shape[1]).expand(mask.shape)


def shared_columns(batch: dict[str, Any], align: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, tokens) of the live tokens of each group and column that has two live rows or more."""
    live = batch["response_mask"] != 0
    where = columns(batch["response_mask"], align)
    found = []
    for uid in set(batch["index"]):
        of_group = torch.tensor([other == uid for other in batch["index"]])[:, None]
        for column in range(live.shape[1]):
            cells = (live & of_group & (where == column)).nonzero(as_tuple=True)
            if len(cells[0]) >= 2:
                found.append(cells)
    return found
