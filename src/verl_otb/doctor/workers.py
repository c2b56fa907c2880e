"""The same checks inside Ray workers: one on each node of the cluster that the run would join, or of a local one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_otb.doctor.facts import facts
from verl_otb.doctor.installation import examine
from verl_otb.doctor.result import Result, failed, ok, reason

TIMEOUT = 300  # seconds; a worker imports torch and verl first
SAME = ("verl-otb", "verl", "torch", "python")


def in_worker(external_lib: bool) -> tuple[dict[str, str], list[Result]]:
    """What runs in each worker."""
    results = list(examine(external_lib))
    return facts(), results


def check(config: DictConfig, external_lib: bool) -> Iterator[Result]:
    """Start or join Ray as verl would for this run, with its runtime environment, and ask a worker on each node."""
    ray, chosen = import_module("ray"), _ray_init(config)
    todo = "Start Ray, or correct RAY_ADDRESS or the run's ray_kwargs.ray_init"
    address = chosen.get("address") or "auto"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    if silent := _silent(address):
        yield failed("ray", f"nothing answers at {address}: {silent}", todo)
        return
    try:
        # Ray's own rule: RAY_ADDRESS, or the cluster that `ray start` left, or one of its own for this process.
        ray.init(**{"log_to_driver": False, **chosen})
    except Exception as error:  # Ray raises ConnectionError, ValueError, RuntimeError and its own
        yield failed("ray", f"no cluster: {reason(error)}", todo)
        return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        yield ok("ray", f"{len(nodes)} node(s) at {ray.get_runtime_context().gcs_address}")
        # A worker sees a GPU only if it asks for one; on a busy cluster it would wait for it.
        gpus = ray.cluster_resources().get("GPU", 0)
        idle = gpus == ray.available_resources().get("GPU", 0)
        asked = [(node["NodeManagerAddress"], _ask(ray, node, idle, external_lib)) for node in nodes]
        for address, answer in asked:
            yield from (result.at(address) for result in _answered(ray, answer))
    finally:
        ray.shutdown()


def _silent(address: str) -> str:
    """Why nothing answers at host:port, or nothing; Ray itself keeps trying for ten minutes and more."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto, local
        return ""
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        return reason(error)
    return ""


def _ray_init(config: DictConfig) -> dict[str, Any]:
    """What verl's run_ppo hands to ray.init."""
    chosen: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init") or OmegaConf.create(), resolve=True)
    environment = import_module("verl.trainer.constants_ppo").get_ppo_ray_runtime_env(config)
    merged = OmegaConf.merge(environment, chosen.get("runtime_env") or {})
    return {**chosen, "runtime_env": OmegaConf.to_container(merged)}


def _ask(ray: Any, node: dict[str, Any], idle: bool, external_lib: bool) -> Any:
    strategies = import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    gpus = 1 if idle and node["Resources"].get("GPU", 0) >= 1 else 0
    task = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=here)(in_worker)
    return task.remote(external_lib)


def _answered(ray: Any, answer: Any) -> Iterator[Result]:
    try:
        there, results = ray.get(answer, timeout=TIMEOUT)
    except ray.exceptions.RayError as error:
        todo = "Install the same verl-otb on this node, in the environment that Ray's workers run in."
        yield failed("ray.worker", f"no answer: {reason(error)[-300:]}", todo)
        return
    here = facts()
    differ = [f"{name} {there[name]} there, {here[name]} here" for name in SAME if there[name] != here[name]]
    if differ:
        yield failed("ray.worker", "; ".join(differ), "Install the same versions on every node.")
    else:
        yield ok("ray.worker", f"{', '.join(f'{name} {there[name]}' for name in SAME)}, as here")
    yield from results
