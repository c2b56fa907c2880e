"""Logical CPUs and GPUs for Ray on a machine without accelerators.

They are numbers in Ray's books, not hardware. Where they are too few, Ray queues an actor for ever, without a word.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import ray
from omegaconf import DictConfig, open_dict

# What verl 0.9 and TransferQueue ask of Ray.
CPUS_PER_TRAINING_GPU = 3  # ResourcePoolManager.max_colocate_count
CPUS_PER_STANDALONE_GPU = 2  # RolloutReplica.init_standalone
CPUS_FOR_TRANSFER_QUEUE = 1  # its controller; each storage unit takes one more


def required(config: DictConfig) -> tuple[int, int]:
    """Logical (CPUs, GPUs) that a run of `verl.trainer.main_ppo` with this `config` takes."""
    pools = [config.trainer]
    if config.reward.reward_model.enable and config.reward.reward_model.enable_resource_pool:
        pools.append(config.reward.reward_model)
    if config.distillation.enabled:
        pools.append(config.distillation)
    training_gpus = sum(pool.nnodes * pool.n_gpus_per_node for pool in pools)
    rollout = config.actor_rollout_ref.rollout
    standalone_gpus = rollout.nnodes * rollout.n_gpus_per_node  # nnodes is 0 unless rollout has GPUs of its own
    cpus = CPUS_PER_TRAINING_GPU * training_gpus + CPUS_PER_STANDALONE_GPU * standalone_gpus
    cpus += CPUS_FOR_TRANSFER_QUEUE + config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return cpus, training_gpus + standalone_gpus


def fit(config: DictConfig) -> None:
    """Fill in `ray_kwargs.ray_init.num_cpus` and `num_gpus` where they are not set; check them where they are.

    Raises:
        ValueError: if either is less than the run takes.
    """
    ray_init = config.ray_kwargs.ray_init
    if ray.is_initialized() or ray_init.get("address") or os.environ.get("RAY_ADDRESS"):
        return  # a cluster that is there already has its own numbers
    for key, need in zip(("num_cpus", "num_gpus"), required(config), strict=True):
        found = ray_init.get(key)
        if found is None:
            with open_dict(ray_init):
                ray_init[key] = need
        elif found < need:
            raise ValueError(
                f"ray_kwargs.ray_init.{key}={found} is too few: this run takes {need}, and Ray would wait for them "
                f"for ever. They are logical, not hardware: leave {key} unset, or set it to {need} or more."
            )


def checked_first(validate_config: Callable[..., None]) -> Callable[..., None]:
    """Wrap `verl.utils.config.validate_config`, which the driver calls before it starts Ray."""

    @functools.wraps(validate_config)
    def validate(config: DictConfig, *args: Any, **kwargs: Any) -> None:
        validate_config(config, *args, **kwargs)
        fit(config)

    return validate
