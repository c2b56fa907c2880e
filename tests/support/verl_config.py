"""verl's real configuration, composed as `main_ppo` composes it."""

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from verl_run import REPOSITORY

OTB = (
    "algorithm.adv_estimator=optimal_token_baseline",
    "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
)
MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)


def verl_config(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """verl's own defaults with `overrides`, or with name="otb_tiny_cpu" those of configs/."""
    import verl

    GlobalHydra.instance().clear()
    directory = REPOSITORY / "configs" if name != "ppo_trainer" else f"{next(iter(verl.__path__))}/trainer/config"
    search = ["hydra.searchpath=[pkg://verl.trainer.config]"] if name != "ppo_trainer" else []
    with initialize_config_dir(str(directory), version_base=None):
        return compose(name, overrides=[*search, *overrides])
