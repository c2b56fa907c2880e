"""verl's own sender and receiver over real sockets and shared memory: every way to fail ends with its cause."""

import asyncio
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

from verl_otb.cpu import weight_sync

WEIGHTS = {f"layer.{i}": torch.full((1000, 100), float(i)) for i in range(8)}  # 3.2 MB, in buckets of 1 MiB


@pytest.fixture
def sync(tmp_path, monkeypatch):
    """Send WEIGHTS while a call (a function of the address) receives; returns what the sender returned or raised."""
    address = f"ipc://{tmp_path}/zmq-test.sock"
    assert len(address) < 100
    with ThreadPoolExecutor(1) as vllm:

        def send(receive):
            call: Future[None] = vllm.submit(receive, address)
            monkeypatch.setitem(weight_sync._receivers, weight_sync.address_of_this_run(address), call)
            asyncio.run(
                BucketedWeightSender(address, bucket_size_mb=1, use_shm=True).async_send_weights(WEIGHTS.items())
            )
            call.result(timeout=10)

        yield send


def receiver(load):
    return lambda address: BucketedWeightReceiver(address, torch.device("cpu"), use_shm=True).receive_weights(load)


def test_all_weights_arrive(sync):
    received = {}
    sync(receiver(lambda weights, is_last: received.update((name, tensor.clone()) for name, tensor in weights)))
    torch.testing.assert_close(received, WEIGHTS, rtol=0, atol=0)


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_failed_load_raises_its_cause_in_the_sender(sync, bucket):
    buckets = iter(range(100))

    def load(weights, is_last):
        held = weights[0]  # held by the traceback, as vLLM's loaders hold theirs
        if next(buckets) == bucket:
            raise KeyError(f"no such parameter: {held[0]}")

    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"loading the weights into vLLM failed: KeyError\('no such parameter: layer.\d'\)"
    ):
        sync(receiver(load))
    assert time.monotonic() - start < 10


# verl's sender leaves its shared memory to the end of the process if it fails this early.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_receiver_that_never_connects(sync):
    def fail(address):
        raise OSError("out of memory before the first bucket")

    with pytest.raises(OSError, match="before the first bucket"):
        sync(fail)


def test_a_receiver_that_ends_too_soon(sync):
    with pytest.raises(RuntimeError, match="before it had taken all weights"):
        sync(lambda address: None)


def test_two_runs_have_two_addresses(monkeypatch):
    """As verl names them, two runs on one machine share an address: each has Ray job 1, replica 0, rank 0."""
    address = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    addresses = set()
    for raylet in (str(os.getpid()), "1"):
        monkeypatch.setenv("RAY_RAYLET_PID", raylet)
        sender, receiver = BucketedWeightSender(address), BucketedWeightReceiver(address, torch.device("cpu"))
        assert sender.zmq_handle == receiver.zmq_handle
        addresses.add(sender.zmq_handle)
    assert len(addresses) == 2
