"""From uids to blocks of whole groups."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from verl_otb.errors import InputError


def group_ids(uids: list[Any]) -> torch.Tensor:
    """Number the prompt groups in the order of their first row.

    Args:
        uids: one a row: strings, numbers, arrays, tensors, tuples, lists or dicts of such, or a mixture. All are
            compared by value; what else is unhashable is equal where its `repr` is.

    Returns:
        int64 tensor of shape (rows,), on the CPU.

    Raises:
        InputError: for a NaN, which is equal to nothing and would cut a prompt into groups of one row.
    """
    ids: dict[Hashable, int] = {}
    return torch.tensor(
        [ids.setdefault(_by_value(uid, row), len(ids)) for row, uid in enumerate(uids)], dtype=torch.int64
    )


def _by_value(uid: Any, row: int) -> Hashable:
    """The uid as something that is equal, and hashes alike, wherever its value is the same."""
    if isinstance(uid, (str, int)):
        return uid
    if hasattr(uid, "tolist"):  # arrays have no hash, and tensors hash by identity
        uid = uid.tolist()
    if isinstance(uid, (list, tuple)):
        return (type(uid), *(_by_value(item, row) for item in uid))
    if isinstance(uid, dict):
        return (dict, frozenset((_by_value(key, row), _by_value(value, row)) for key, value in uid.items()))
    if _is_missing(uid):
        what = f"uids that say which rows share a prompt, found {uid!r} at row {row}. It names no prompt"
        raise InputError(f"index: expected {what}; give every row the uid of its prompt.", "index", row, uid=uid)
    try:
        hash(uid)
    except TypeError:
        return (type(uid), repr(uid))
    return uid  # type: ignore[no-any-return]


def _is_missing(uid: Any) -> bool:
    """None, or one of the values that stand for no value: NaN of any type, NaT, pandas' NA."""
    if uid is None:
        return True
    try:
        return bool(uid != uid)
    except (TypeError, ValueError):  # pandas' NA has no truth value
        return True


@dataclass(frozen=True)
class Block:
    """Some whole groups of a batch, all of `group_size` rows.

    `rows` are their rows in the batch, group after group: a slice where they lie side by side, which saves a
    copy, else int64 row numbers.
    """

    rows: slice | torch.Tensor
    group_size: int

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of a (rows, tokens) tensor, as (groups, group_size, tokens)."""
        rows = self.rows
        part = tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
        return part.reshape(-1, self.group_size, tensor.shape[-1])

    def put(self, values: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write what belongs to the block back into a (rows, tokens) tensor."""
        part = values.flatten(0, 1)
        if isinstance(self.rows, slice):
            tensor[self.rows] = part
        else:
            tensor.index_copy_(0, self.rows, part.to(tensor.dtype))


def group_blocks(ids: torch.Tensor, max_rows: int, device: torch.device | str = "cpu") -> list[Block]:
    """Cut a batch into blocks.

    Groups of one size make dense tensors, however they lie in the batch and however unequal the sizes are.

    Args:
        ids: group number of each row, int64, shape (rows,), on the CPU.
        max_rows: rows of a block at most, but for a single group that is larger.
        device: where the row numbers go.
    """
    sizes = torch.bincount(ids)
    order = torch.argsort(sizes[ids] * len(sizes) + ids, stable=True)
    on_device = order.to(device)  # once, not once a block
    blocks, start = [], 0
    for size, groups in enumerate(torch.bincount(sizes).tolist()):
        if groups:
            part = slice(start, start + groups * size)
            cuts = list(range(0, groups * size, max(1, max_rows // size) * size))[1:]
            for rows, same in zip(*(x[part].tensor_split(cuts) for x in (order, on_device)), strict=True):
                first, side_by_side = int(rows[0]), bool((rows.diff() == 1).all())
                blocks.append(Block(slice(first, first + len(rows)) if side_by_side else same, size))
            start = part.stop
    return blocks
