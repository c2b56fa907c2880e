"""verl's real V1 trainer methods on a real TransferQueue and a real actor, without the processes around them.

The trainer object is not started (no Ray actors, no vLLM): its old-log-prob, reference and advantage steps run here on
batches that the tests make.
"""

import uuid
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from real_worker import jagged, token_fields
from tensordict import TensorDict

# Two prompts with three answers each, of different lengths, in no order; (uid, prompt length, response length).
ROWS = [("b", 5, 7), ("a", 3, 2), ("a", 4, 9), ("b", 6, 1), ("a", 2, 9), ("b", 4, 4)]


def v1_trainer(config: Any, worker: Any) -> Any:
    """A PPOTrainerSync with `config` whose actor is `worker`."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    trainer = object.__new__(PPOTrainerSync)
    trainer.config = config
    trainer.ref_in_actor = True
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=worker.infer_batch)
    if config.algorithm.use_kl_in_reward:
        trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
    return trainer


@dataclass
class Batch:
    """A batch in TransferQueue, and what the test put there."""

    queue: Any
    meta: Any
    keys: list[str]

    def put(self, **fields: list[torch.Tensor]) -> Any:
        """Rows of further fields, or others in the place of those that are there; returns TransferQueue's batch."""
        rows = TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=len(self.keys))
        return self.queue.kv_batch_put(keys=self.keys, partition_id="train", fields=rows)

    def fields(self, *names: str) -> dict[str, list[torch.Tensor]]:
        """Rows as they are in TransferQueue now, in the order of the keys."""
        data = self.queue.kv_batch_get(keys=self.keys, partition_id="train", select_fields=list(names) or None)
        return {
            name: list(value.unbind()) if torch.is_tensor(value) else value.tolist() for name, value in data.items()
        }


def put_batch(queue: Any, rows: list[tuple[str, int, int]] = ROWS, keys: list[str] | None = None) -> Batch:
    """A batch as verl's rollout leaves it: tokens, an outcome score on each last token, the rollout's log-probs."""
    generator = torch.Generator().manual_seed(1)
    fields = token_fields([(prompt, response) for _, prompt, response in rows])
    scores, rollout = [], []
    for row, (_, _, length) in enumerate(rows):
        score = torch.zeros(length)
        score[-1:] = (row % 3) / 2  # an empty response has no place for it
        scores.append(score)
        rollout.append(-5.5 + torch.rand(length, generator=generator))
    fields["rm_scores"] = jagged(scores)
    fields["rollout_log_probs"] = jagged(rollout)
    fields["uid"] = [uid for uid, _, _ in rows]
    unique = uuid.uuid4().hex[:8]  # a partition holds the batches of all tests
    keys = keys or [f"{uid}-{unique}_{row}_0" for row, (uid, _, _) in enumerate(rows)]
    meta = queue.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{} for _ in rows])
    return Batch(queue, meta, keys)


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
