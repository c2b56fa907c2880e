"""10,000 batches that hypothesis makes, good and bad, through both estimators under their names in verl's registry.

A batch raises where it is bad, naming the field, and nowhere else. Where two rows or more are compared in a column, the
baseline lies within their returns. Each batch goes through one of them once more, with some options of `algorithm.otb`.
To hypothesis the matrices are a string of bytes; each byte is looked up in a table of values here, so a batch takes
half a millisecond, and a failure shrinks towards the first values of the tables.
"""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from random_batches import ALIGNMENTS, columns
from variants import VARIANTS

from verl_otb.errors import InputError

BATCHES = 10_000
CONFIGS = [OmegaConf.create({"gamma": 1.0, "otb": {"handle_zero_tail": zero_tail}}) for zero_tail in (True, False)]
OPTIONS = [
    OmegaConf.create({"otb": {"handle_zero_tail": zero_tail, **variant}})
    for variant in VARIANTS[1:]
    for zero_tail in (True, False)
]
UIDS = {
    "strings": ["a", "b"],
    "integers": [7, -1],
    "a mixture": ["1", 1],
    "tuples": [("p", 0), ("p", 1)],
    "lists": [["p", 0], ["p", 1]],
    "arrays": [np.array([1, 2]), np.array([1, 3])],
    "dicts": [{"id": 1}, {"id": 2}],
}
# Beyond its bounds, in a cell that counts.
FAULTS = {
    "token_level_rewards": [torch.nan, torch.inf, -torch.inf],
    "response_mask": [2.0, -1.0, 0.5, torch.nan],
    "old_log_probs": [torch.nan, torch.inf, -torch.inf, 0.5],
    "sum_pi_squared": [torch.nan, torch.inf, -0.5, 1.5],
    "rollout_is_weights": [torch.nan, torch.inf, -1.0],
    "index": [torch.nan],
}


def table(first, low, high):
    """256 values: these, then as many as it takes between two bounds."""
    return np.array([*first, *np.linspace(low, high, 256 - len(first))])


REWARDS = table([0, 1, -1, 0.1, 1e-30, 2**40, -(2.0**40), 1e30, -1e30], -5, 5)
# Certain, a rounding above it, nearly certain in steps of powers of two, hardly possible.
LOG_PROBS = table([0, 2**-20, 1e-3, -110, -1e4, *-(2.0 ** -np.arange(1, 60))], -12, -1e-3)
OF_THE_OTHERS = table([0, 1], 0, 1)  # share of (1 − π)² in Σπ² − π²
IMPORTANCE = table([1, 0, 1e-20, 1e20, 3e38, 1e-6, 1e6], 0.125, 4)
MASK = table([1, 0], 0, 1.999).astype(int)


@st.composite
def batches(draw):
    """(what verl's compute_advantage passes, the field that is bad or None)."""
    rows, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 10))

    size = 5 * rows * tokens
    codes = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).reshape(5, rows, tokens)
    tables = (REWARDS, MASK, LOG_PROBS, OF_THE_OTHERS, IMPORTANCE)
    rewards, mask, log_probs, others, importance = (values[code] for values, code in zip(tables, codes, strict=True))
    pi = np.exp(np.minimum(log_probs, 0))
    batch = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "old_log_probs": log_probs,
        "sum_pi_squared": pi**2 + others * (1 - pi) ** 2,
        "rollout_is_weights": importance if draw(st.booleans()) else None,
    }
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    batch = {name: None if x is None else torch.from_numpy(x).to(dtype) for name, x in batch.items()}
    # bfloat16 would round 1e-3 up, past what is accepted
    batch["old_log_probs"].clamp_(max=2.0**-20)
    uids = UIDS[draw(st.sampled_from(list(UIDS)))]
    batch["index"] = np.empty(rows, dtype=object)
    for row, which in enumerate(draw(st.binary(min_size=rows, max_size=rows))):
        batch["index"][row] = uids[which % 2]
    masked = batch["response_mask"] == 0
    if draw(st.booleans()):  # what stands under a masked token never matters
        for field in ("old_log_probs", "sum_pi_squared", "rollout_is_weights"):
            if batch[field] is not None:
                batch[field].masked_fill_(masked, torch.nan)
    return batch, spoil(draw, batch) if draw(st.integers(0, 3)) == 3 else None


def spoil(draw, batch):
    """Put one bad value where it counts, if the batch has such a place. Returns the field, or None."""
    field = draw(st.sampled_from(list(FAULTS)))
    cells = (batch["response_mask"] != 0).nonzero()
    if batch[field] is None or not len(cells):
        return None
    row, column = cells[draw(st.integers(0, len(cells) - 1))].tolist()
    batch[field][(row,) if field == "index" else (row, column)] = draw(st.sampled_from(FAULTS[field]))
    return field


def assert_baselines_within_returns(batch, align, advantages, returns, carry=False):
    """To 1e-6·(1 + max |G|) of the column's rows, live or carried on, wherever there are two or more of them."""
    live = batch["response_mask"] != 0
    kinds = {}
    group = torch.tensor([kinds.setdefault(repr(uid), len(kinds)) for uid in batch["index"]])
    # One number for each column of each group; then everything is flat.
    column = columns(live.long(), align)
    cell = (group[:, None] * live.shape[1] + column)[live]
    G, B = returns.double()[live], (returns.double() - advantages.double())[live]
    everywhere, compared = cell, G
    if carry:
        last = (torch.arange(live.shape[1]) * live).argmax(-1, keepdim=True)
        later = (torch.arange(live.shape[1]) > column.gather(1, last)) & live.any(-1, keepdim=True)
        everywhere = torch.cat([cell, (group[:, None] * live.shape[1] + torch.arange(live.shape[1]))[later]])
        compared = torch.cat([G, returns.double().gather(1, last).expand_as(live)[later]])
    empty = torch.full((len(kinds) * live.shape[1],), torch.nan, dtype=torch.float64)
    lowest, highest = (
        empty.scatter_reduce(0, everywhere, compared, end, include_self=False)[cell] for end in ("amin", "amax")
    )
    slack = 1e-6 * (1 + torch.maximum(lowest.abs(), highest.abs()))
    shared = everywhere.bincount()[cell] >= 2
    inside = (lowest - slack <= B) & (highest + slack >= B)
    assert inside[shared].all()
    return int(shared.sum())


def test_ten_thousand_batches():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimators = {
        "position": get_adv_estimator_fn("optimal_token_baseline"),
        "token": get_adv_estimator_fn("tir_optimal_token_baseline"),
    }
    seen = {"good": 0, **dict.fromkeys(FAULTS, 0)}
    compared = 0

    @settings(
        max_examples=BATCHES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(batches(), st.sampled_from(CONFIGS), st.sampled_from(ALIGNMENTS), st.sampled_from(OPTIONS))
    def run(made, config, one_more, options):
        nonlocal compared
        batch, bad = made
        seen[bad or "good"] += 1
        for align, config in (*((align, config) for align in estimators), (one_more, options)):
            found = None
            try:
                advantages, returns = estimators[align](**batch, config=config)
            except InputError as error:
                found = error.field
            assert found == bad
            if found is None:
                assert advantages.isfinite().all()
                assert returns.isfinite().all()
                carry = config.otb.get("finished_rows") == "carry"
                compared += assert_baselines_within_returns(batch, align, advantages, returns, carry)

    run()
    assert sum(seen.values()) >= BATCHES
    assert min(seen.values()) >= 100
    assert compared >= 10 * BATCHES
