"""Logical CPUs and GPUs: filled in, or refused before Ray starts."""

import pytest
from verl.utils.config import validate_config
from verl_config import verl_config

from verl_otb.cpu.ray_resources import fit, required


@pytest.fixture(autouse=True)
def no_ray_yet(monkeypatch):
    """As in the driver before verl starts Ray, whatever other tests of this process have started."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def tiny(*overrides: str):
    paths = ("model.path=x", "data.train_files=x", "data.val_files=x", "reward.custom_reward_function.path=x")
    return verl_config(f"actor_rollout_ref.{paths[0]}", *paths[1:], *overrides, name="otb_tiny_cpu")


@pytest.mark.parametrize(
    ("overrides", "cpus", "gpus"),
    [
        ([], 5, 1),
        (["trainer.n_gpus_per_node=2"], 8, 2),
        (["transfer_queue.backend.SimpleStorage.num_data_storage_units=8"], 12, 1),
        (["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1"], 7, 2),
    ],
)
def test_filled_in(overrides, cpus, gpus):
    config = tiny(*overrides)
    assert required(config) == (cpus, gpus)
    fit(config)
    assert (config.ray_kwargs.ray_init.num_cpus, config.ray_kwargs.ray_init.num_gpus) == (cpus, gpus)


def test_what_the_user_sets_is_kept():
    config = tiny("ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=2")
    fit(config)
    assert (config.ray_kwargs.ray_init.num_cpus, config.ray_kwargs.ray_init.num_gpus) == (16, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ray_kwargs.ray_init.num_cpus=4", r"num_cpus=4 is too few: this run takes 5"),
        ("+ray_kwargs.ray_init.num_gpus=0", r"num_gpus=0 is too few: this run takes 1"),
    ],
)
def test_too_few_is_an_error(override, message):
    with pytest.raises(ValueError, match=message):
        validate_config(tiny(override), use_reference_policy=False, use_critic=False)


def test_a_cluster_that_is_there_keeps_its_numbers(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    config = tiny("ray_kwargs.ray_init.num_cpus=2")
    fit(config)
    assert config.ray_kwargs.ray_init.num_cpus == 2
