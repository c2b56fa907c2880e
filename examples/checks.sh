# shellcheck shell=bash
# Sourced by run_qwen3_8b_fsdp.sh: what can be found wrong in seconds, before Ray starts and GPUs are taken.
# Each failure says what was found, what was expected and what to do, and ends the script with status 2.

refuse() { # WHAT FOUND EXPECTED DO
    printf '%s: %s\n  found     %s\n  expected  %s\n  %s\n' "$(basename "$0")" "$1" "$2" "$3" "$4" >&2
    exit 2
}

check_values() { # PATTERN EXPECTED NAME...
    local pattern=$1 expected=$2 name
    shift 2
    for name in "$@"; do
        [[ ${!name} =~ ^($pattern)$ ]] \
            || refuse "$name has a value that it cannot have" "$name=${!name}" "$expected" "Correct $name, or unset it"
    done
}

check_divides() { # DIVIDEND'S NAME, ITS VALUE, DIVISOR'S NAME, ITS VALUE
    (($2 % $4 == 0)) || refuse "$1 is not divisible by $3" "$1 = $2, $3 = $4" "a multiple of $4" "Change $1 or $3"
}

check_length() {
    local longest=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    ((PPO_MAX_TOKEN_LEN_PER_GPU >= longest)) \
        || refuse "the longest row does not fit into a micro batch" "PPO_MAX_TOKEN_LEN_PER_GPU=$PPO_MAX_TOKEN_LEN_PER_GPU" \
            "MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH = $longest or more" "Raise PPO_MAX_TOKEN_LEN_PER_GPU, or shorten the rows"
}

check_model() {
    [[ $MODEL_PATH =~ ^[[:alnum:]][^/]*/[^/]+$ || -f $MODEL_PATH/config.json ]] \
        || refuse "MODEL_PATH is no model" "MODEL_PATH=$MODEL_PATH" \
            "a name on the Hugging Face Hub (owner/model), or a directory with config.json" "Correct MODEL_PATH"
}

check_data() { # FILE...
    local file command="$PYTHON $REPOSITORY/examples/data/prepare_gsm8k_math.py --data-dir '$DATA_DIR'"
    [[ $VERL_USE_UV == 0 || -x $PYTHON ]] || command="bash $REPOSITORY/examples/make_gpu_env.sh $GPU_ENV && $command"
    for file in "$@"; do
        [[ -f $file ]] || refuse "data is missing" "no file $file" \
            "train.parquet and test.parquet in gsm8k/ and math/ of DATA_DIR=$DATA_DIR" "Make all four: $command"
    done
}

# A name that verl does not know would end the run only after its first rollout.
check_estimator() {
    check_values '(tir_)?optimal_token_baseline|grpo(_vectorized|_passk)?|rloo(_vectorized)?|opo|gpg|gdpo|remax|reinforce_plus_plus(_baseline)?' \
        "optimal_token_baseline, tir_optimal_token_baseline, grpo, rloo, or another of verl's without a critic; one of your own as the argument algorithm.adv_estimator=…" ADV_ESTIMATOR
}

# Ray starts its workers by a shell, and does not quote their interpreter.
check_place() {
    [[ ! $PYTHON =~ [[:space:]\'\"] ]] || refuse "Ray cannot start workers with this interpreter" "PYTHON=$PYTHON" \
        "a path without spaces and quotes" "Make the environment at such a path, and name it by PYTHON (or GPU_ENV)"
}

# Those of this node. With RAY_ADDRESS the run joins a cluster, whose GPUs Ray counts; the CPU platform has none.
check_gpus() {
    local visible
    if [[ -n ${RAY_ADDRESS:-} || ${VERL_PLATFORM:-} == cpu ]]; then
        return
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        visible=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
        ((visible > 0)) || refuse "no GPU is visible" "CUDA_VISIBLE_DEVICES is set, and empty" \
            "NGPUS_PER_NODE=$NGPUS_PER_NODE" "Name GPUs in CUDA_VISIBLE_DEVICES, or unset it"
        ((visible >= NGPUS_PER_NODE)) || refuse "too few GPUs are visible" "$visible in CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES" \
            "NGPUS_PER_NODE=$NGPUS_PER_NODE" "Name more in CUDA_VISIBLE_DEVICES, or set NGPUS_PER_NODE=$visible"
    else
        visible=$({ nvidia-smi --list-gpus 2> /dev/null || true; } | grep -c '^GPU' || true)
        ((visible >= NGPUS_PER_NODE)) || refuse "too few GPUs are visible" "$visible in nvidia-smi --list-gpus" \
            "NGPUS_PER_NODE=$NGPUS_PER_NODE" "Set NGPUS_PER_NODE, or look at what nvidia-smi says"
    fi
}

check_python() {
    check_place
    command -v "$PYTHON" > /dev/null || refuse "PYTHON is no program" "PYTHON=$PYTHON" "a Python with verl, vLLM and verl-otb" \
        "Set PYTHON, or take the locked environment: VERL_USE_UV=1"
    "$PYTHON" "$REPOSITORY/examples/check_python.py" || exit 2
}
