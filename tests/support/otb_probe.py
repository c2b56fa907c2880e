"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: writes what the actor is about to be trained on to OTB_PROBE_DIR.

It reads every field back from TransferQueue, after the advantages and before the update; knows nothing of OTB.
"""

import os
from pathlib import Path

import torch
import wrapt


def _watch(trainer_base) -> None:
    import transfer_queue as tq

    trainer = trainer_base.PPOTrainer
    update_actor = trainer._update_actor

    def probe(self, batch, metrics):
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        saved = {
            name: list(value.unbind()) if torch.is_tensor(value) else value.tolist() for name, value in fields.items()
        }
        directory = Path(os.environ["OTB_PROBE_DIR"])
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({"keys": batch.keys, "fields": saved}, directory / f"step_{self.global_steps}.pt")
        return update_actor(self, batch, metrics)

    trainer._update_actor = probe


wrapt.register_post_import_hook(_watch, "verl.trainer.ppo.v1.trainer_base")
