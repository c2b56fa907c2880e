"""The gather of the three statistics over a Ulysses group, on two real gloo ranks.

A whole model with Ulysses sequence parallelism needs flash attention, so a GPU; here each rank gets its half of the
logits, as the engine's forward would give it, and the engine's own gather puts them together.
"""

import torch.multiprocessing as mp
from free_port import free_port
from ulysses_rank import one_rank


def test_gather_over_two_ranks():
    mp.spawn(one_rank, args=(free_port(),), nprocs=2)
