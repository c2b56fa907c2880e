#!/usr/bin/env bash
# Train Qwen3-8B on GSM8K and MATH with the Optimal Token Baseline: stock verl on NVIDIA GPUs, vLLM, FSDP.
#
#   bash examples/run_qwen3_8b_fsdp.sh
#   MODEL_PATH=/models/Qwen3-8B NGPUS_PER_NODE=4 bash examples/run_qwen3_8b_fsdp.sh trainer.val_before_train=False
#
# Further arguments are Hydra overrides and win over what is below. configs/otb_qwen3_8b.yaml is the same run as a file.
# Several nodes: `ray start` on each, from the same environment at the same path (examples/make_gpu_env.sh), then this
# script on the head with RAY_ADDRESS and NNODES set. Data and model must be at the same path on every node.
# wandb wants WANDB_API_KEY (or WANDB_MODE=offline); without it: trainer.logger=[console].
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
ADV_ESTIMATOR=${ADV_ESTIMATOR:-optimal_token_baseline}                # or any of verl's that needs no critic
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}                             # prompts a step
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-128}                       # prompts an update
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}                          # tokens, as the three below
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-24576}         # a micro batch's
ACTOR_LR=${ACTOR_LR:-1e-6}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}
ROLLOUT_TP=${ROLLOUT_TP:-2}                                           # GPUs a vLLM engine
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.75}
ROLLOUT_N=${ROLLOUT_N:-8}                                             # answers a prompt: the group of the baseline
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
SAVE_FREQ=${SAVE_FREQ:-20}                                            # steps; -1: never
TEST_FREQ=${TEST_FREQ:-5}
PROJECT_NAME=${PROJECT_NAME:-verl_otb_gsm8k_math}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_8b_vllm_fsdp}
DATA_DIR=${DATA_DIR:-$HOME/data}                                      # gsm8k/ and math/, made by data/prepare_gsm8k_math.py
USE_FUSED_KERNELS=${USE_FUSED_KERNELS:-False}                         # True: the logits are never whole in memory
VERL_USE_UV=${VERL_USE_UV:-1}                                         # 0: the ambient Python, or PYTHON
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
GPU_ENV=${GPU_ENV:-$REPOSITORY/.venv-gpu}                             # where VERL_USE_UV=1 makes its environment, once

# Ray's workers need not have this working directory.
DATA_DIR=$(realpath -ms "$DATA_DIR")
GPU_ENV=$(realpath -ms "$GPU_ENV")
if [[ -d $MODEL_PATH ]]; then MODEL_PATH=$(realpath -ms "$MODEL_PATH"); fi

# shellcheck source=examples/checks.sh
source "$REPOSITORY/examples/checks.sh"
check_values '[1-9][0-9]*' 'a positive whole number' NNODES NGPUS_PER_NODE TRAIN_BATCH_SIZE PPO_MINI_BATCH_SIZE \
    MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH PPO_MAX_TOKEN_LEN_PER_GPU ROLLOUT_TP ROLLOUT_N TOTAL_EPOCHS
check_values '-1|[1-9][0-9]*' 'a positive whole number, or -1 for never' SAVE_FREQ TEST_FREQ
check_values '([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?' 'a number' ACTOR_LR ENTROPY_COEFF
check_values '0?\.[0-9]*[1-9][0-9]*|1|1\.0*' 'a share of the memory, above 0 and at most 1' ROLLOUT_GPU_MEM_UTIL
check_estimator
check_values 'True|False' 'True or False' USE_FUSED_KERNELS
check_values '0|1' '0 or 1' VERL_USE_UV
check_divides TRAIN_BATCH_SIZE "$TRAIN_BATCH_SIZE" PPO_MINI_BATCH_SIZE "$PPO_MINI_BATCH_SIZE"
check_divides 'PPO_MINI_BATCH_SIZE × ROLLOUT_N' $((PPO_MINI_BATCH_SIZE * ROLLOUT_N)) 'NNODES × NGPUS_PER_NODE' $((NNODES * NGPUS_PER_NODE))
check_divides 'NNODES × NGPUS_PER_NODE' $((NNODES * NGPUS_PER_NODE)) ROLLOUT_TP "$ROLLOUT_TP"
check_length
check_model
if [[ $VERL_USE_UV == 1 ]]; then PYTHON=$GPU_ENV/bin/python; else PYTHON=${PYTHON:-python3}; fi
check_data "$DATA_DIR"/{gsm8k,math}/{train,test}.parquet
# Hydra's --cfg prints the run's configuration and starts nothing.
[[ " $* " =~ \ (--cfg|-c)[=\ ] ]] || check_gpus
WORKERS=()
if [[ $VERL_USE_UV == 1 ]]; then
    bash "$REPOSITORY/examples/make_gpu_env.sh" "$GPU_ENV"
    # Not `uv run`, so Ray's hook for it (RAY_ENABLE_UV_RUN_RUNTIME_ENV, which verl switches off) has no part in this:
    # Ray's workers on every node start with the very interpreter that the driver has.
    WORKERS=("++ray_kwargs.ray_init.runtime_env.py_executable='$PYTHON'")
fi
check_python
# Only OTB uses Σπ²; with verl's other estimators it would be computed for nothing.
SUM_PI_SQUARED=False
[[ $ADV_ESTIMATOR == *optimal_token_baseline ]] && SUM_PI_SQUARED=True

DATA=(
    "data.train_files=['$DATA_DIR/gsm8k/train.parquet','$DATA_DIR/math/train.parquet']"
    "data.val_files=['$DATA_DIR/gsm8k/test.parquet','$DATA_DIR/math/test.parquet']"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.truncation=error
)
ALGORITHM=(
    algorithm.adv_estimator="$ADV_ESTIMATOR"
    algorithm.use_kl_in_reward=False
)
MODEL=(
    "actor_rollout_ref.model.path='$MODEL_PATH'"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.model.use_fused_kernels="$USE_FUSED_KERNELS"
)
ACTOR=(
    # Qwen3-8B has a head of its own (untied), which verl's fused kernels read with fsdp alone, not with fsdp2.
    actor_rollout_ref.actor.strategy=fsdp
    actor_rollout_ref.actor.calculate_sum_pi_squared="$SUM_PI_SQUARED"
    actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    actor_rollout_ref.actor.entropy_coeff="$ENTROPY_COEFF"
    actor_rollout_ref.actor.use_kl_loss=False
    # Loaded where a KL term is switched on by an override.
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL"
)
TRAINER=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.balance_batch=True
    trainer.critic_warmup=0
    trainer.total_epochs="$TOTAL_EPOCHS"
    trainer.save_freq="$SAVE_FREQ"
    trainer.test_freq="$TEST_FREQ"
    "trainer.logger=[console,wandb]"
    "trainer.project_name='$PROJECT_NAME'"
    "trainer.experiment_name='$EXPERIMENT_NAME'"
)
exec "$PYTHON" -m verl.trainer.main_ppo \
    "${DATA[@]}" "${ALGORITHM[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${WORKERS[@]}" "$@"
