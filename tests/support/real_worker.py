"""verl's real training worker, with its FSDP2 engine, on one gloo rank in this process; and batches for it."""

import os
from pathlib import Path
from typing import Any

import torch
from free_port import free_port
from tensordict import TensorDict
from verl_config import verl_config


def training_worker(model: Path, *overrides: str) -> Any:
    """The worker that verl's actor role builds from configs/otb_tiny_cpu.yaml with `overrides`, its model loaded."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        os.environ.setdefault(name, value)
    config = actor_config(model, *overrides)
    model_config = omega_conf_to_dataclass(config.model)
    actor = omega_conf_to_dataclass(config.actor)
    actor.engine.use_remove_padding = model_config.use_remove_padding
    actor.engine.use_dynamic_bsz = False
    actor.engine.infer_micro_batch_size_per_gpu = actor.engine.micro_batch_size_per_gpu = 2
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    return worker


def actor_config(model: Path, *overrides: str) -> Any:
    return tiny_config(model, "actor_rollout_ref.actor.optim.total_training_steps=1", *overrides).actor_rollout_ref


def tiny_config(model: Path, *overrides: str) -> Any:
    """configs/otb_tiny_cpu.yaml with `model`, and no data or reward."""
    mandatory = ("data.train_files", "data.val_files", "reward.custom_reward_function.path")
    return verl_config(
        f"actor_rollout_ref.model.path={model}", *(f"{key}=none" for key in mandatory), *overrides, name="otb_tiny_cpu"
    )


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def token_fields(lengths: list[tuple[int, int]], vocabulary: int = 260) -> TensorDict:
    """Random tokens in the fields that verl's rollout writes: one (prompt, response) length a sample."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (prompt + response,), generator=generator) for prompt, response in lengths]
    responses = [row[prompt:] for row, (prompt, _) in zip(rows, lengths, strict=True)]
    return TensorDict(
        {
            "input_ids": jagged(rows),
            "position_ids": jagged([torch.arange(len(row)) for row in rows]),
            "prompts": jagged([row[:prompt] for row, (prompt, _) in zip(rows, lengths, strict=True)]),
            "responses": jagged(responses),
            "response_mask": jagged([torch.ones_like(response) for response in responses]),
            "loss_mask": jagged([torch.ones_like(response) for response in responses]),
        },
        batch_size=len(rows),
    )


def log_prob_pass(worker: Any, fields: TensorDict, temperature: float = 1.0, **flags: Any) -> TensorDict:
    """What verl's old-log-prob pass returns: jagged, (samples, prompt + response)."""
    from verl.utils import tensordict_utils as tu

    batch = fields.clone()
    tu.assign_non_tensor(batch, temperature=temperature, compute_loss=False, **flags)
    return worker.infer_batch(batch)


def training_log_probs(worker: Any, fields: TensorDict, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs that the loss of verl's training forward sees, of all tokens in order; no optimizer step."""
    from verl.utils import tensordict_utils as tu

    seen = []

    def loss(model_output: dict[str, torch.Tensor], **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs = model_output["log_probs"].values()
        seen.append(log_probs.detach())
        return log_probs.sum(), {}

    batch = fields.clone()
    tu.assign_non_tensor(
        batch,
        temperature=temperature,
        use_remove_padding=worker.model_config.get("use_remove_padding", False),
        use_fused_kernels=worker.engine_config.use_fused_kernels,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=worker.engine_config.micro_batch_size_per_gpu,
    )
    with worker.engine.train_mode():
        worker.engine.forward_backward_batch(batch, loss)
        worker.engine.optimizer_zero_grad()
    return torch.cat(seen)
