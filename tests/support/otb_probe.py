"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: writes what the actor is about to be trained on to OTB_PROBE_DIR.

It reads every field after the advantages and before the update (V1: back from TransferQueue); knows nothing of OTB.
"""

import os
from pathlib import Path

import torch
import wrapt


def _save(step: int, fields: dict, **rest) -> None:
    rows = {name: list(value.unbind()) if torch.is_tensor(value) else value.tolist() for name, value in fields.items()}
    directory = Path(os.environ["OTB_PROBE_DIR"])
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"fields": rows, **rest}, directory / f"step_{step}.pt")


def _watch_v1(trainer_base) -> None:
    import transfer_queue as tq

    update_actor = trainer_base.PPOTrainer._update_actor

    def probe(self, batch, metrics):
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        _save(self.global_steps, fields, keys=batch.keys)
        return update_actor(self, batch, metrics)

    trainer_base.PPOTrainer._update_actor = probe


def _watch_deprecated(ray_trainer) -> None:
    update_actor = ray_trainer.RayPPOTrainer._update_actor

    def probe(self, batch):
        _save(self.global_steps, dict(batch.batch.items()) | batch.non_tensor_batch)
        return update_actor(self, batch)

    ray_trainer.RayPPOTrainer._update_actor = probe


wrapt.register_post_import_hook(_watch_v1, "verl.trainer.ppo.v1.trainer_base")
wrapt.register_post_import_hook(_watch_deprecated, "verl.trainer.ppo.ray_trainer")
