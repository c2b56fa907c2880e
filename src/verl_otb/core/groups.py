"""From uids to blocks of whole groups."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def group_ids(index: Any) -> torch.Tensor:
    """Number the prompt groups in the order of their first row.

    Args:
        index: one uid a row: a numpy array, a tensor, or a sequence. Uids may be strings, numbers, a mixture,
            or unhashable (lists, dicts), which are equal where their `repr` is.

    Returns:
        int64 tensor of shape (rows,), on the CPU.
    """
    uids = index.tolist() if hasattr(index, "tolist") else list(index)
    ids: dict[Hashable, int] = {}
    return torch.tensor([ids.setdefault(_hashable(uid), len(ids)) for uid in uids], dtype=torch.int64)


def _hashable(uid: Any) -> Hashable:
    if hasattr(uid, "tolist"):  # arrays have no hash, and tensors hash by identity
        uid = uid.tolist()
    try:
        hash(uid)
    except TypeError:
        return (type(uid), repr(uid))
    return uid  # type: ignore[no-any-return]


def group_blocks(
    ids: torch.Tensor, max_rows: int, device: torch.device | str = "cpu"
) -> list[tuple[int, slice | torch.Tensor]]:
    """Cut a batch into blocks of whole groups, each block's groups of one size.

    So every block is a dense (groups, rows, tokens) tensor, however the groups lie in the batch and however
    unequal they are.

    Args:
        ids: group number of each row, int64, shape (rows,), on the CPU.
        max_rows: rows of a block at most, but for a single group that is larger.
        device: where the row numbers go.

    Returns:
        For each block the rows of a group, and the rows of the batch it takes, group after group: a slice
        where they lie side by side, which saves the copy, else int64 row numbers.
    """
    sizes = torch.bincount(ids)
    order = torch.argsort(sizes[ids] * len(sizes) + ids, stable=True)
    on_device = order.to(device)  # once, not once a block
    rows_of_size = torch.bincount(sizes) * torch.arange(int(sizes.max()) + 1)
    blocks: list[tuple[int, slice | torch.Tensor]] = []
    start = 0
    for size in rows_of_size.nonzero().flatten().tolist():
        stop = start + int(rows_of_size[size])
        step = max(1, max_rows // size) * size
        for first in range(start, stop, step):
            last = min(first + step, stop)
            row = int(order[first])
            side_by_side = bool((order[first:last].diff() == 1).all())
            blocks.append((size, slice(row, row + last - first) if side_by_side else on_device[first:last]))
        start = stop
    return blocks
