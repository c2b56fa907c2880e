"""The one table of places where verl-otb touches verl: install, uninstall, README and contract tests come from `HOOKS`.

This module imports nothing of verl: `patching` puts a hook in when verl imports its module. A target is a class
attribute, or a global of the module that *uses* it: `from a import f` copies `f`, and a hook on `a.f` could come too
late. `validate_config`, `run_ppo` and `linear_cross_entropy` are copied later than any plugin is loaded.
"""

from __future__ import annotations

from verl_otb.integration.hook import Hook

# The hooks that only refuse a run reach further, so that an unsupported verl is told at second 0, not by a crash.
REFUSING = ">=0.8"

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
RAY_TRAINER = "verl.trainer.ppo.ray_trainer"
SEPARATION = "verl.experimental.separation.ray_trainer"
MEGATRON = "verl.workers.engine.megatron.transformer_impl"
HERE = "verl_otb.integration"


HOOKS: tuple[Hook, ...] = (
    Hook(
        id="estimators.register",
        module="verl.trainer.ppo.core_algos",
        qualname="register_adv_est",
        kind="register",
        verl=REFUSING,
        expects=("name_or_enum",),
        handler=f"{HERE}.estimators:register",
        why="verl's two estimators can leave the range of the returns and lose rewards under masked tokens",
        remove_when="verl's estimators pass tests/core",
    ),
    Hook(
        id="config.driver",
        module="verl.utils.config",
        qualname="validate_config",
        verl=REFUSING,
        expects=("config",),
        handler=f"{HERE}.config:before_validate_config",
        why="a wrong configuration is to fail before Ray starts, not after the first rollout",
        remove_when="never; it is the plugin's own check",
    ),
    Hook(
        id="config.experimental_driver",
        module="verl.trainer.main_ppo",
        qualname="run_ppo",
        verl=REFUSING,
        expects=("config",),
        handler=f"{HERE}.config:before_validate_config",
        why="the drivers of fully_async and one_step_off import it, and do not call validate_config",
        remove_when="never; it is the plugin's own check",
    ),
    Hook(
        id="config.trainer",
        module=TRAINER,
        qualname="PPOTrainer._init_dataloader",
        verl=REFUSING,
        expects=("self",),
        handler=f"{HERE}.config:before_workers",
        why="the same check where only external_lib loads the plugin: in the TaskRunner, before any worker",
        remove_when="never; it is the plugin's own check",
    ),
    Hook(
        id="config.ray_trainer",
        module=RAY_TRAINER,
        qualname="RayPPOTrainer.init_workers",
        verl=REFUSING,
        expects=("self",),
        handler=f"{HERE}.config:before_workers",
        why="the same check with trainer.use_v1=False",
        remove_when="never; it is the plugin's own check",
    ),
    Hook(
        id="config.separation",
        module=SEPARATION,
        qualname="SeparateRayPPOTrainer._init_resource_pools",
        verl=REFUSING,
        expects=("self",),
        handler=f"{HERE}.config:before_workers",
        why="the same check in the trainer's process of fully_async and one_step_off",
        remove_when="never; it is the plugin's own check",
    ),
    Hook(
        id="trainer.old_log_prob",
        module=TRAINER,
        qualname="PPOTrainer._compute_old_log_prob",
        expects=("self", "batch", "metrics"),
        handler=f"{HERE}.trainer:old_log_prob",
        why="the V1 trainer never asks the actor for Σπ², whatever calculate_sum_pi_squared says",
        remove_when="verl's V1 trainer asks for Σπ² itself and slices it to the response",
    ),
    Hook(
        id="trainer.advantage_step",
        module=TRAINER,
        qualname="PPOTrainer._compute_advantage",
        expects=("self", "batch", "metrics"),
        handler=f"{HERE}.trainer:advantage_step",
        why="the estimator's metrics need the trainer's metrics, its Σπ² the batch's TransferQueue partition",
        remove_when="verl's V1 trainer fetches Σπ² for the estimators",
    ),
    Hook(
        id="trainer.advantage_inputs",
        module=TRAINER,
        qualname="compute_advantage_for_multi_trajectories",
        expects=("data", "batch_keys", "adv_estimator"),
        handler=f"{HERE}.trainer:advantage_inputs",
        why="the V1 trainer fetches a fixed list of fields for the advantage, without Σπ²",
        remove_when="verl's V1 trainer fetches Σπ² for the estimators",
    ),
    Hook(
        id="trainer.metrics",
        module=TRAINER,
        qualname="PPOTrainer._compute_metrics",
        expects=("self", "batch", "metrics"),
        handler=f"{HERE}.trainer:step_metrics",
        why="the V1 trainer does not fetch what its own variance_proxy metrics are made of",
        remove_when="verl's V1 trainer shows variance_proxy/*",
    ),
    Hook(
        id="ray_trainer.old_log_prob",
        module=RAY_TRAINER,
        qualname="RayPPOTrainer._compute_old_log_prob",
        expects=("self", "batch"),
        handler=f"{HERE}.ray_trainer:old_log_prob",
        why="asks the workers for our Σπ² instead of verl's; fully_async and one_step_off inherit it",
        remove_when="verl computes Σπ² in float32, in one read",
    ),
    Hook(
        id="ray_trainer.fit",
        module=RAY_TRAINER,
        qualname="RayPPOTrainer.fit",
        expects=("self",),
        handler=f"{HERE}.ray_trainer:step_of",
        why="the functions hooked below are given no trainer",
        remove_when="the next three can go",
    ),
    Hook(
        id="ray_trainer.bypass",
        module="verl.trainer.ppo.rollout_corr_helper",
        qualname="apply_bypass_mode",
        expects=("batch",),
        handler=f"{HERE}.ray_trainer:bypass_mode",
        why="in bypass mode no actor computes π and Σπ², which the energies need from one policy",
        remove_when="verl gives OTB both in bypass mode",
    ),
    Hook(
        id="ray_trainer.advantages",
        module=RAY_TRAINER,
        qualname="compute_advantage",
        expects=("data", "adv_estimator"),
        handler=f"{HERE}.ray_trainer:advantages",
        why="OTB needs the actor's log-probs in bypass mode, and rewards without penalties that rejection masked",
        remove_when="verl masks the penalty, and gives OTB its own log-probs",
    ),
    Hook(
        id="ray_trainer.metrics",
        module=RAY_TRAINER,
        qualname="compute_data_metrics",
        expects=("batch",),
        handler=f"{HERE}.ray_trainer:data_metrics",
        why="the estimator's metrics belong among the step's",
        remove_when="never; verl has no such metrics",
    ),
    Hook(
        id="ray_trainer.variance_proxy",
        module=RAY_TRAINER,
        qualname="compute_variance_proxy_metrics",
        expects=("batch",),
        handler=f"{HERE}.ray_trainer:variance_proxy",
        why="verl's own energies, too, need the actor's log-probs in bypass mode",
        remove_when="ray_trainer.bypass can go",
    ),
    Hook(
        id="separation.log_prob",
        module=SEPARATION,
        qualname="SeparateRayPPOTrainer._fit_compute_log_prob",
        expects=("self", "batch"),
        handler=f"{HERE}.ray_trainer:step_of",
        why="as ray_trainer.fit, for fully_async and one_step_off",
        remove_when="ray_trainer.bypass can go",
    ),
    Hook(
        id="separation.advantage_step",
        module=SEPARATION,
        qualname="SeparateRayPPOTrainer._fit_compute_advantage",
        expects=("self", "batch"),
        handler=f"{HERE}.ray_trainer:step_of",
        why="as ray_trainer.fit",
        remove_when="separation.advantages can go",
    ),
    Hook(
        id="separation.advantages",
        module=SEPARATION,
        qualname="compute_advantage",
        expects=("data", "adv_estimator"),
        handler=f"{HERE}.ray_trainer:advantages",
        why="its own copy of the function that ray_trainer.advantages is on",
        remove_when="ray_trainer.advantages can go",
    ),
    Hook(
        id="separation.metrics",
        module=SEPARATION,
        qualname="compute_data_metrics",
        expects=("batch",),
        handler=f"{HERE}.ray_trainer:data_metrics",
        why="its own copy of the function that ray_trainer.metrics is on",
        remove_when="never; verl has no such metrics",
    ),
    Hook(
        id="separation.variance_proxy",
        module=SEPARATION,
        qualname="compute_variance_proxy_metrics",
        expects=("batch",),
        handler=f"{HERE}.ray_trainer:variance_proxy",
        why="its own copy of the function that ray_trainer.variance_proxy is on",
        remove_when="ray_trainer.bypass can go",
    ),
    Hook(
        id="engine.forward_step",
        module=ENGINE,
        qualname="FSDPEngineWithLMHead.forward_step",
        expects=("self", "micro_batch", "loss_function", "forward_only"),
        handler=f"{HERE}.engine:forward_step",
        why="tells the fused heads, which see no batch, that this forward is asked for Σπ²",
        remove_when="verl's fused heads return Σπ²",
    ),
    Hook(
        id="engine.outputs",
        module=ENGINE,
        qualname="FSDPEngineWithLMHead.prepare_model_outputs",
        expects=("self", "output", "output_args", "micro_batch"),
        handler=f"{HERE}.engine:prepare_model_outputs",
        why="verl reads the logits several times; its Σπ² works in their dtype and copies them (2x and more memory)",
        remove_when="verl computes log-prob, entropy and Σπ² in one read, in float32",
    ),
    Hook(
        id="engine.fused_linear",
        module="verl.utils.experimental.torch_functional",
        qualname="FusedLinearForPPO.forward",
        expects=("self", "hidden_states", "vocab_weights", "input_ids", "temperature"),
        handler=f"{HERE}.engine:fused_linear",
        why="verl refuses Σπ² with fused kernels (torch and liger backends)",
        remove_when="verl's fused heads return Σπ²",
    ),
    Hook(
        id="engine.linear_cross_entropy",
        module="verl.utils.kernel.linear_cross_entropy",
        qualname="linear_cross_entropy",
        expects=("hidden", "weight", "labels", "temperature"),
        handler=f"{HERE}.engine:linear_cross_entropy",
        why="verl refuses Σπ² with fused kernels (triton backend)",
        remove_when="verl's fused heads return Σπ²",
    ),
    Hook(
        id="engine.megatron_logits",
        module=MEGATRON,
        qualname="MegatronEngineWithLMHead._lm_head_logits_processor",
        expects=("self", "logits", "label", "temperature", "calculate_sum_pi_squared"),
        handler=f"{HERE}.megatron:logits_processor",
        why="brings the trainer's request for Σπ² to the place where verl computes it",
        remove_when="verl's V1 trainer asks for Σπ² itself",
    ),
    Hook(
        id="engine.megatron_sum_pi_squared",
        module=MEGATRON,
        qualname="vocab_parallel_sum_pi_squared",
        expects=("vocab_parallel_logits",),
        handler=f"{HERE}.megatron:vocab_parallel_sum_pi_squared",
        why="verl's works in the logits' dtype, with copies of them, and three all-reduces",
        remove_when="verl's sums in float32, in one read",
    ),
)


def as_markdown() -> str:
    """The table as README.md shows it; a test holds the two together."""
    lines = ["| hook | in verl | kind | why | can go when |", "|---|---|---|---|---|"]
    lines += [f"| `{h.id}` | `{h.target}` | {h.kind} | {h.why} | {h.remove_when} |" for h in HOOKS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
