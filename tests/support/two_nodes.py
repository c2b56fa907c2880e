"""A Ray cluster of two nodes on this machine: two raylets, each with an address, an environment, a GPU of its own."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from free_port import free_port
from verl_run import ENVIRONMENT, REPOSITORY

ADDRESSES = "127.0.0.2", "127.0.0.3"
# For the nodes and the runs that join them: no token to agree on.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
CPUS = 5  # logical: 3 for what a GPU's placement group holds, 2 for TransferQueue


@contextlib.contextmanager
def two_nodes(directory: Path, second: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the cluster's address. `second` is added to the environment of the second node only.

    As somebody's cluster is started, the nodes have no variable of verl's. Their logs are in `directory`.
    """
    port = free_port(ADDRESSES[0])
    address = f"{ADDRESSES[0]}:{port}"
    environment = {**os.environ, **ENVIRONMENT, **NO_TOKEN, "RAY_memory_monitor_refresh_ms": "0"}
    environment = {name: value for name, value in environment.items() if not name.startswith("VERL_")}
    head = ["--head", f"--port={port}", "--include-dashboard=false"]
    with (
        _node(ADDRESSES[0], head, environment, directory / "head.log"),
        _node(ADDRESSES[1], [f"--address={address}"], {**environment, **(second or {})}, directory / "second.log"),
    ):
        yield address


@contextlib.contextmanager
def _node(ip: str, options: list[str], environment: Mapping[str, str], log_path: Path) -> Iterator[None]:
    """`ray start --block` until the end of the context, which ends the node's processes and no other's."""
    # A socket's path may have 107 characters at most.
    ray_dir = tempfile.mkdtemp(prefix="ray-")
    command = [
        *(sys.executable, str(REPOSITORY / "examples" / "supervise.py"), "--"),
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(f"--node-ip-address={ip}", f"--num-cpus={CPUS}", "--num-gpus=1", "--object-store-memory=300000000"),
        # Both nodes' workers on one machine: any port that is free.
        *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={ray_dir}"),
        *options,
    ]
    with log_path.open("w") as log:
        node = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started." not in log_path.read_text():
            if node.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Ray node at {ip} did not start:\n{log_path.read_text()}")
            time.sleep(0.2)
        yield
    finally:
        node.terminate()
        node.wait(timeout=60)
        shutil.rmtree(ray_dir, ignore_errors=True)
