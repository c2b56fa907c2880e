"""Groups from uids of any kind, and blocks of whole groups."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import METHODS, named

from verl_otb.core.advantage import _estimate_block
from verl_otb.core.checks import Inputs
from verl_otb.core.groups import Block, group_blocks, group_ids
from verl_otb.core.method import Method
from verl_otb.errors import InputError


@pytest.mark.parametrize(
    ("uids", "expected"),
    [
        (["b", "a", "b"], [0, 1, 0]),
        ([7, 3, 7], [0, 1, 0]),
        ([1, "1", 1], [0, 1, 0]),  # not the same prompt
        ([np.int64(1), 1, np.str_("x"), "x"], [0, 0, 1, 1]),
        ([("p", 0), ("p", 1), ("p", 0)], [0, 1, 0]),
        ([["p", 0], ["p", 1], ["p", 0]], [0, 1, 0]),
        ([{"id": 1}, {"id": 2}, {"id": 1}], [0, 1, 0]),
        ([["p"], "['p']"], [0, 1]),
        ([np.array([1, 2]), np.array([1, 3]), np.array([1, 2])], [0, 1, 0]),
        ([np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)], [0, 1]),  # whose short forms are alike
        ([torch.tensor(4), torch.tensor(5), torch.tensor(4)], [0, 1, 0]),
        ([("p", torch.tensor(4)), ("p", torch.tensor(5)), ("p", torch.tensor(4))], [0, 1, 0]),
        ([("p", np.arange(2)), ("p", np.arange(3)), ("p", np.arange(2))], [0, 1, 0]),
        ([[np.arange(5000)], [np.arange(5000) + (np.arange(5000) == 2500)]], [0, 1]),
        ([{"id": 1, "x": torch.tensor([2])}, {"id": 1, "x": 2}, {"x": torch.tensor([2]), "id": 1}], [0, 1, 0]),
        ([("p",), ["p"], "p"], [0, 1, 2]),
        ([{1, 2}, {1, 3}, {1, 2}], [0, 1, 0]),
    ],
)
def test_uids(uids, expected):
    assert group_ids(uids).tolist() == expected


@pytest.mark.parametrize(
    "missing", [None, float("nan"), np.float32("nan"), complex("nan"), Decimal("nan"), np.datetime64("NaT")]
)
def test_a_missing_uid_is_named(missing):
    """As equal values they would make one group of all prompts, as unequal ones a group of each row."""
    for uid in (missing, ("p", missing)):
        with pytest.raises(InputError, match=r"index: expected uids that say which rows share a prompt, .* at row 1"):
            group_ids(["a", uid, "b"])


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=20), max_rows=st.integers(0, 12))
def test_blocks_hold_every_row_once_and_no_group_in_part(ids, max_rows):
    uids = group_ids(ids)
    seen = []
    for block in group_blocks(uids, max_rows):
        rows = block.take(torch.arange(len(ids))[:, None])[..., 0]  # (groups, group_size)
        assert rows.shape[1] == block.group_size
        assert rows.numel() <= max(max_rows, block.group_size)
        for group in rows:
            assert group.tolist() == (uids == uids[group[0]]).nonzero().flatten().tolist()
        seen += rows.flatten().tolist()
    assert sorted(seen) == list(range(len(ids)))


def test_neighbouring_rows_are_not_copied():
    (block,) = group_blocks(group_ids(["a", "a", "b", "b"]), 100)
    assert block.rows == slice(0, 4)
    rows = torch.zeros(4, 3)
    assert block.take(rows).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize("rows", ["slice", "numbers"])
def test_a_block_never_waits_for_its_device(method, rows):
    """Meta tensors have no values: whatever reads one raises."""
    x = torch.empty(4, 6, device="meta")
    block = Block(slice(0, 4) if rows == "slice" else torch.empty(4, dtype=torch.int64, device="meta"), 2)
    results = {name: torch.empty(4, 6, device="meta") for name in ("token_energy", "baseline", "advantages")}
    good = _estimate_block(block, Inputs(x, x.bool(), x, x, x), Method(**method), results)
    assert good.device.type == "meta"
    with pytest.raises(RuntimeError):
        bool(good)
