"""A checkpoint engine over gloo: separate_async refuses verl's "naive", and the others need accelerators.

Registered as "gloo" when verl imports it by `checkpoint_engine.custom_backend_module=gloo_checkpoint`. One weight after
the other is broadcast from actor rank 0 to every rollout worker; the names and shapes go through a store.
"""

import datetime
import pickle
from typing import Any

import ray
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = datetime.timedelta(seconds=120)
END = pickle.dumps(None)


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.store = self.group = None

    def prepare(self) -> tuple[str, int] | None:
        """Where the master's store listens. Made anew for each sync, so that no key of the last one is left."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self.store.port

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[dict, dict]:
        """Actor rank 0 is rank 0; other actors take no part."""
        size = rollouts + 1
        senders = {"rank": [0] + [None] * (actors - 1), "size": [size] * actors, "address": [metadata[0]] * actors}
        receivers = {
            "rank": list(range(1, size)),
            "size": [size] * rollouts,
            "address": [metadata[0]] * rollouts,
        }
        return senders, receivers

    def init_process_group(self, rank: int | None, size: int, address: tuple[str, int]) -> None:
        if rank is None:
            return
        if not self.is_master:
            self.store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        self.group = ProcessGroupGloo(self.store, rank, size, TIMEOUT)

    def finalize(self) -> None:
        self.store = self.group = None

    def _broadcast(self, weight: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([weight], options).wait()

    @torch.no_grad()
    async def send_weights(self, weights, global_steps: int | None = None) -> None:
        count = 0
        for name, weight in weights:  # on every actor: making a weight whole is collective
            if self.group is not None:
                self.store.set(f"weight {count}", pickle.dumps((name, weight.shape, weight.dtype)))
                self._broadcast(weight.detach().contiguous())
                count += 1
        if self.group is not None:
            self.store.set(f"weight {count}", END)
            self._broadcast(torch.zeros(1))  # nobody leaves, and takes the store with it, before all have read

    async def receive_weights(self, global_steps: int | None = None):
        count = 0
        while (described := self.store.get(f"weight {count}")) != END:
            name, shape, dtype = pickle.loads(described)
            weight = torch.empty(shape, dtype=dtype)
            self._broadcast(weight)
            yield name, weight
            count += 1
        self._broadcast(torch.zeros(1))
