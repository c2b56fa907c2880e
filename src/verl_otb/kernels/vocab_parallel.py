"""The vocabulary split evenly over the ranks of a process group: tensor parallelism.

Rank r holds columns [r·n, (r+1)·n) of the logits. Each rank sums its own, the largest logit of all is agreed by one
all-reduce, and the rescaled sums are added by another: five numbers a token, never the logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .partials import Partials, rescale


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def join_over(group: dist.ProcessGroup, mine: Partials) -> Partials:
    """Sums over the whole vocabulary, on every rank."""
    to_max = mine.max.clone()
    dist.all_reduce(to_max, op=dist.ReduceOp.MAX, group=group)
    _, *sums = rescale(mine, to_max)
    planes = torch.stack(sums)
    dist.all_reduce(planes, group=group)
    return Partials(to_max, *planes.unbind())
