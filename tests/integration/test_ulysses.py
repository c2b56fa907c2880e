"""The gather of the three statistics over a Ulysses group, on two real gloo ranks.

A whole model with Ulysses sequence parallelism needs flash attention, so a GPU; here each rank gets its half of the
logits, as the engine's forward would give it, and the engine's own gather puts them together.
"""

import socket

import torch.multiprocessing as mp
from ulysses_rank import one_rank


def test_gather_over_two_ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(one_rank, args=(port,), nprocs=2)
