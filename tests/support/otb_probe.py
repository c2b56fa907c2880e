"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: writes what the actor is about to be trained on to OTB_PROBE_DIR.

It reads every field after the advantages and before the update (V1: back from TransferQueue); knows nothing of OTB.
With OTB_PROBE_POLICY=1 it saves the weights that are about to be updated as well, by verl's own checkpoint.
"""

import os
from pathlib import Path

import torch
import wrapt


def _save(update: str, fields: dict, **more: list) -> Path:
    rows = {name: list(value.unbind()) if torch.is_tensor(value) else value.tolist() for name, value in fields.items()}
    directory = Path(os.environ["OTB_PROBE_DIR"])
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(rows | more, directory / f"step_{update}.pt")
    return directory


def _save_policy(trainer, directory: Path) -> None:
    if os.environ.get("OTB_PROBE_POLICY") == "1":
        trainer.actor_rollout_wg.save_checkpoint(str(directory), None, trainer.global_steps)


def _watch_v1(trainer_base) -> None:
    import transfer_queue as tq

    update_actor = trainer_base.PPOTrainer._update_actor

    def probe(self, batch, metrics):
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        update = f"{self.global_steps}_{self.local_trigger_step}"  # separate_async updates several times a step
        directory = _save(update, fields, key=batch.keys)
        _save_policy(self, directory / f"policy_{update}")
        return update_actor(self, batch, metrics)

    trainer_base.PPOTrainer._update_actor = probe


def _watch_deprecated(ray_trainer) -> None:
    update_actor = ray_trainer.RayPPOTrainer._update_actor

    def probe(self, batch):
        update = f"{self.global_steps}_0"
        directory = _save(update, dict(batch.batch.items()) | batch.non_tensor_batch)
        _save_policy(self, directory / f"policy_{update}")
        return update_actor(self, batch)

    ray_trainer.RayPPOTrainer._update_actor = probe


wrapt.register_post_import_hook(_watch_v1, "verl.trainer.ppo.v1.trainer_base")
wrapt.register_post_import_hook(_watch_deprecated, "verl.trainer.ppo.ray_trainer")
