#!/usr/bin/env bash
# As run_qwen3_8b_fsdp.sh, with a calculator that the model may call (tool-integrated reasoning, several turns), and the
# estimator for rows with tool output in them. Every variable of that script works here too.
#
#   bash examples/run_qwen3_8b_tir.sh
#   MAX_TURNS=8 TOOL_FILE=my_tools.py bash examples/run_qwen3_8b_tir.sh trainer.val_before_train=False
#
# configs/otb_qwen3_8b_tir.yaml is the same run as a file.
set -euo pipefail

export ADV_ESTIMATOR=${ADV_ESTIMATOR:-tir_optimal_token_baseline}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_8b_vllm_fsdp_tir}
MAX_TURNS=${MAX_TURNS:-4}                             # of the model in a row
TOOL_FORMAT=${TOOL_FORMAT:-hermes}                    # how the model writes a call; hermes is Qwen3's
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TOOL_FILE=${TOOL_FILE:-$REPOSITORY/examples/calculator.py}    # verl function tools; at this path on every node

# shellcheck source=examples/checks.sh
source "$REPOSITORY/examples/checks.sh"
check_values '[1-9][0-9]*' 'a positive whole number' MAX_TURNS
[[ -f $TOOL_FILE ]] || refuse 'TOOL_FILE is no file' "TOOL_FILE=$TOOL_FILE" 'a Python file with @function_tool functions' \
    'Correct TOOL_FILE, or unset it for the calculator'

exec bash "$REPOSITORY/examples/run_qwen3_8b_fsdp.sh" \
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.format="$TOOL_FORMAT" \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns="$MAX_TURNS" \
    "actor_rollout_ref.rollout.multi_turn.function_tool_path='$(realpath "$TOOL_FILE")'" \
    "$@"
