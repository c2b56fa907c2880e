#!/usr/bin/env bash
# Train a tiny model with the Optimal Token Baseline on a machine without accelerators: stock verl, with real Ray,
# TransferQueue, FSDP2 and vLLM. Minutes, about 5 GiB of memory, no download.
#
#   examples/run_tiny_cpu.sh
#   ADV_ESTIMATOR=grpo STEPS=20 examples/run_tiny_cpu.sh actor_rollout_ref.actor.optim.lr=1e-3
#
# Any Hugging Face causal model (a directory, or a name on the Hub) and any verl parquet take the place of the tiny
# ones through the variables; further arguments are Hydra overrides. A model whose vocabulary is larger than its
# tokenizer's is masked to the tokenizer's by verl in vLLM only: the log-probs of rollout and actor then differ.
set -euo pipefail

ADV_ESTIMATOR=${ADV_ESTIMATOR:-optimal_token_baseline}   # or tir_optimal_token_baseline, grpo, …
STEPS=${STEPS:-120}
MODEL_PATH=${MODEL_PATH:-}                               # the tiny task's own if empty, as the three below
TRAIN_FILE=${TRAIN_FILE:-}
VAL_FILE=${VAL_FILE:-}
REWARD_FILE=${REWARD_FILE:-}                             # a Python file with compute_score, as verl calls it
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-32}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8}
TIMEOUT=${TIMEOUT:-3600}                                 # seconds, for the whole run
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$REPOSITORY/.venv/bin/python}
OUT_DIR=${OUT_DIR:-$REPOSITORY/runs/tiny_cpu/$(date +%Y%m%d-%H%M%S)-$ADV_ESTIMATOR}

# shellcheck source=examples/checks.sh
source "$REPOSITORY/examples/checks.sh"
fail() { echo "run_tiny_cpu.sh: $*" >&2; exit 2; }
check_estimator
check_place
for name in STEPS MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH TIMEOUT; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name} is not a positive whole number"
done
for name in TRAIN_FILE VAL_FILE REWARD_FILE; do
    [[ -z ${!name} || -f ${!name} ]] || fail "$name=${!name} is not a file"
done
if [[ -d $MODEL_PATH ]]; then
    [[ -f $MODEL_PATH/config.json ]] || fail "MODEL_PATH=$MODEL_PATH has no config.json: not a Hugging Face model"
elif [[ -n $MODEL_PATH && ! $MODEL_PATH =~ ^[[:alnum:]][^/]*/[^/]+$ ]]; then
    fail "MODEL_PATH=$MODEL_PATH is neither a directory nor a name on the Hugging Face Hub (owner/model)"
fi
"$PYTHON" -c 'import importlib.util as u; assert u.find_spec("verl") and u.find_spec("vllm")' 2> /dev/null \
    || fail "PYTHON=$PYTHON has no verl or no vllm; run \`make env\`"

[[ ! -s $OUT_DIR/metrics.jsonl && ! -d $OUT_DIR/dump ]] || fail "OUT_DIR=$OUT_DIR has a run in it; choose another directory"

mkdir -p "$OUT_DIR" || fail "OUT_DIR=$OUT_DIR cannot be made"
OUT_DIR=$(cd "$OUT_DIR" && pwd)
if [[ -z $MODEL_PATH || -z $TRAIN_FILE || -z $VAL_FILE ]]; then
    "$PYTHON" "$REPOSITORY/examples/make_tiny_task.py" "$OUT_DIR/task" > /dev/null 2>&1 || fail "the tiny task cannot be made"
fi
MODEL_PATH=${MODEL_PATH:-$OUT_DIR/task/model}
TRAIN_FILE=$(realpath "${TRAIN_FILE:-$OUT_DIR/task/train.parquet}")
VAL_FILE=$(realpath "${VAL_FILE:-$OUT_DIR/task/val.parquet}")
REWARD_FILE=$(realpath "${REWARD_FILE:-$REPOSITORY/examples/arithmetic_reward.py}")
if [[ -d $MODEL_PATH ]]; then
    MODEL_PATH=$(realpath "$MODEL_PATH")
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
fi

export VERL_PLATFORM=cpu
export VERL_FILE_LOGGER_PATH=$OUT_DIR/metrics.jsonl
export TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=1 PYTHONUNBUFFERED=1
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
# A Ray of its own, in a directory with a short name: its sockets lie there, and their paths have a limit.
RAY_DIR=$(mktemp -d "${TMPDIR:-/tmp}/ray-XXXXXX")
cd "$OUT_DIR"
: > metrics.jsonl

echo "==> $ADV_ESTIMATOR, $STEPS steps; verl's own output goes to $OUT_DIR/train.log"
"$PYTHON" "$REPOSITORY/examples/supervise.py" --timeout "$TIMEOUT" --usage usage.json -- \
    "$PYTHON" -m verl.trainer.main_ppo --config-dir "$REPOSITORY/configs" --config-name otb_tiny_cpu \
    algorithm.adv_estimator="$ADV_ESTIMATOR" \
    actor_rollout_ref.actor.calculate_sum_pi_squared=True \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH)) \
    data.train_files="$TRAIN_FILE" \
    data.val_files="$VAL_FILE" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" \
    data.max_response_length="$MAX_RESPONSE_LENGTH" \
    reward.custom_reward_function.path="$REWARD_FILE" \
    trainer.total_training_steps="$STEPS" \
    trainer.default_local_dir="$OUT_DIR/checkpoints" \
    +algorithm.otb.dump_dir="$OUT_DIR/dump" \
    +ray_kwargs.ray_init._temp_dir="$RAY_DIR" \
    "$@" > train.log 2>&1 &
RUN=$!
trap 'kill -TERM $RUN 2> /dev/null || true; wait $RUN || true; rm -rf "$RAY_DIR"' EXIT
trap 'exit 130' INT TERM

shown=0
while kill -0 $RUN 2> /dev/null; do
    sleep 2
    step=$(wc -l < metrics.jsonl)
    if ((step / 10 > shown / 10)); then
        reward=$(tail -n 1 metrics.jsonl | sed -E 's|.*"critic/score/mean":([^,}]*).*|\1|')
        printf '    step %d of %d, reward %.4f\n' "$step" "$STEPS" "$reward"
        shown=$step
    fi
done
status=0
wait $RUN || status=$?
if ((status != 0)); then
    tail -n 20 train.log >&2
    echo "run_tiny_cpu.sh: training failed with status $status; the whole log is $OUT_DIR/train.log" >&2
    exit "$status"
fi
echo
"$PYTHON" "$REPOSITORY/examples/summarize.py" "$OUT_DIR"
# Pictures of the run, if matplotlib is there. The training is done either way.
if "$PYTHON" -m verl_otb.report "$OUT_DIR" --tokenizer "$MODEL_PATH" > report.log 2>&1; then
    pictures=$OUT_DIR/report.html
else
    pictures="none: $(tail -n 1 report.log)"
fi
printf '%-26s  %s\n' 'pictures of the run' "$pictures"
