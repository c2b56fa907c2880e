"""The Qwen3-8B run, as scripts, as files and by groups: what verl's real main_ppo makes of each with `--cfg job`."""

import itertools
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from verl_config import verl_config
from verl_run import REPOSITORY

from verl_otb.errors import ConfigError
from verl_otb.integration.config import check

PACKAGED = "src/verl_otb/configs/otb"
GROUPS = ("default", "tir", "fused")
SEARCHPATH = "hydra.searchpath=[pkg://verl_otb.configs]"
RUNS = {"otb_qwen3_8b": "run_qwen3_8b_fsdp.sh", "otb_qwen3_8b_tir": "run_qwen3_8b_tir.sh"}

# Every variable of run_qwen3_8b_fsdp.sh that is a key of the job: its default, another value, and the keys it sets.
# DATA_DIR and what chooses the Python are not among them.
KNOBS = {
    "MODEL_PATH": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", ["actor_rollout_ref.model.path"]),
    "NNODES": (1, 2, ["trainer.nnodes"]),
    "NGPUS_PER_NODE": (8, 4, ["trainer.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node"]),
    "ADV_ESTIMATOR": ("optimal_token_baseline", "grpo", ["algorithm.adv_estimator"]),
    "TRAIN_BATCH_SIZE": (128, 256, ["data.train_batch_size"]),
    "PPO_MINI_BATCH_SIZE": (128, 64, ["actor_rollout_ref.actor.ppo_mini_batch_size"]),
    "MAX_PROMPT_LENGTH": (1024, 512, ["data.max_prompt_length", "actor_rollout_ref.rollout.prompt_length"]),
    "MAX_RESPONSE_LENGTH": (2048, 4096, ["data.max_response_length", "actor_rollout_ref.rollout.response_length"]),
    "PPO_MAX_TOKEN_LEN_PER_GPU": (
        24576,
        16000,
        [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        ],
    ),
    "ACTOR_LR": (1e-6, 2e-6, ["actor_rollout_ref.actor.optim.lr"]),
    "ENTROPY_COEFF": (0, 0.01, ["actor_rollout_ref.actor.entropy_coeff"]),
    "ROLLOUT_TP": (2, 1, ["actor_rollout_ref.rollout.tensor_model_parallel_size"]),
    "ROLLOUT_GPU_MEM_UTIL": (0.75, 0.5, ["actor_rollout_ref.rollout.gpu_memory_utilization"]),
    "ROLLOUT_N": (8, 4, ["actor_rollout_ref.rollout.n"]),
    "TOTAL_EPOCHS": (15, 3, ["trainer.total_epochs"]),
    "SAVE_FREQ": (20, -1, ["trainer.save_freq"]),
    "TEST_FREQ": (5, 10, ["trainer.test_freq"]),
    "PROJECT_NAME": ("verl_otb_gsm8k_math", "another project", ["trainer.project_name"]),
    "EXPERIMENT_NAME": ("qwen3_8b_vllm_fsdp", "001", ["trainer.experiment_name"]),
    "USE_FUSED_KERNELS": (False, True, ["actor_rollout_ref.model.use_fused_kernels"]),
}
SETTINGS = {
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.calculate_sum_pi_squared": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "trainer.balance_batch": True,
    "trainer.critic_warmup": 0,
    "trainer.logger": ["console", "wandb"],
}


def job(command: list[str | Path], data: Path, **env: str) -> dict:
    """The job's configuration, resolved, as the command's main_ppo prints it."""
    for name in ("gsm8k/train", "gsm8k/test", "math/train", "math/test"):
        path = data / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    variables = {"VERL_PLATFORM": "cpu", "VERL_USE_UV": "0", "PYTHON": sys.executable, "DATA_DIR": str(data)}
    done = subprocess.run(
        [*command, "--cfg", "job", "--resolve"],
        cwd=REPOSITORY,
        # A shell's own; subprocess does not set it with cwd.
        env={**os.environ, **variables, "PWD": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def value(config: dict, key: str):
    return OmegaConf.select(OmegaConf.create(config), key, throw_on_missing=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data of the run")  # a space: paths are quoted for Hydra too


@pytest.fixture(scope="module")
def by_script(data):
    return {name: job(["bash", REPOSITORY / "examples" / script], data) for name, script in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_script_and_run_config_are_the_same_job(by_script, data, name):
    main = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", "configs", "--config-name", name]
    assert job(main, data) == by_script[name]


def test_defaults_and_settings(by_script, data):
    config = by_script["otb_qwen3_8b"]
    for name, (default, _, keys) in KNOBS.items():
        for key in keys:
            assert value(config, key) == default, (name, key)
    for key, expected in SETTINGS.items():
        assert value(config, key) == expected, key
    for split, key in {"train": "data.train_files", "test": "data.val_files"}.items():
        assert value(config, key) == [f"{data}/{name}/{split}.parquet" for name in ("gsm8k", "math")]


def test_tir_differs_in_tools_and_estimator_alone(by_script):
    plain, tir = (_flat(by_script[name]) for name in RUNS)
    differing = {key: value for key, value in tir.items() if plain[key] != value}
    tool = str(REPOSITORY / "examples" / "calculator.py")
    assert differing == {
        "algorithm.adv_estimator": "tir_optimal_token_baseline",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 4,
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": tool,
        "data.function_tool_path": tool,
        "trainer.experiment_name": "qwen3_8b_vllm_fsdp_tir",
        "actor_rollout_ref.rollout.trace.experiment_name": "qwen3_8b_vllm_fsdp_tir",
        "trainer.default_local_dir": "checkpoints/verl_otb_gsm8k_math/qwen3_8b_vllm_fsdp_tir",
    }
    assert tir["actor_rollout_ref.rollout.multi_turn.format"] == "hermes"


def test_every_variable_and_a_further_override(data):
    """All changed at once; the estimator is one that does not use Σπ², and the last argument wins over a variable."""
    env = {name: str(other) for name, (_, other, _) in KNOBS.items()}
    override = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=17000"
    config = job(["bash", REPOSITORY / "examples" / "run_qwen3_8b_fsdp.sh", override], data, **env)
    for name, (_, other, keys) in KNOBS.items():
        for key in keys:
            assert value(config, key) == (17000 if name == "PPO_MAX_TOKEN_LEN_PER_GPU" else other), (name, key)
    assert value(config, "actor_rollout_ref.actor.calculate_sum_pi_squared") is False


def test_the_scripts_have_no_other_variables():
    """So that KNOBS above is all of them."""
    text = (REPOSITORY / "examples" / "run_qwen3_8b_fsdp.sh").read_text()
    variables = set(re.findall(r"^([A-Z_]+)=\$\{\1:-", text, re.MULTILINE))
    assert variables == {*KNOBS, "DATA_DIR", "VERL_USE_UV", "GPU_ENV"}


@pytest.mark.parametrize("name", RUNS)
def test_verl_and_the_plugin_accept_it(name, monkeypatch):
    from verl.utils.config import validate_config

    monkeypatch.setenv("PWD", str(REPOSITORY))
    config = verl_config(name=name)
    check(config)
    validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_set_their_keys_and_no_other(group):
    plain, chosen = (
        _flat(OmegaConf.to_container(verl_config("actor_rollout_ref.rollout.name=vllm", *more), resolve=True))
        for more in ((), (SEARCHPATH, f"+otb={group}"))
    )
    fused = [f"actor_rollout_ref.{section}.use_fused_kernels" for section in ("model", "actor")]
    assert {key: value for key, value in chosen.items() if plain[key] != value} == {
        "algorithm.adv_estimator": "tir_optimal_token_baseline" if group == "tir" else "optimal_token_baseline",
        "actor_rollout_ref.actor.calculate_sum_pi_squared": True,
        **(dict.fromkeys(fused, True) if group == "fused" else {}),
    }


def test_group_by_verl_s_main(tmp_path):
    """As a user adds it to the command that is there."""
    main = [sys.executable, "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.name=vllm"]
    config = job([*main, SEARCHPATH, "+otb=fused"], tmp_path)
    assert value(config, "algorithm.adv_estimator") == "optimal_token_baseline"
    assert value(config, "actor_rollout_ref.model.use_fused_kernels") is True


def test_a_group_that_hydra_does_not_find():
    """Hydra takes +otb=default for a new key then, and gae would train."""
    with pytest.raises(ConfigError, match=r"Add the override 'hydra.searchpath=\[pkg://verl_otb.configs\]'"):
        check(verl_config("+otb=default"))


def test_groups_are_in_the_package():
    files = {file.name for file in resources.files("verl_otb.configs").joinpath("otb").iterdir()}
    assert {f"{group}.yaml" for group in GROUPS} == files


@pytest.mark.parametrize("file", [*(f"configs/{name}" for name in RUNS), *(f"{PACKAGED}/{name}" for name in GROUPS)])
def test_each_key_has_a_comment(file):
    for before, line in itertools.pairwise((REPOSITORY / f"{file}.yaml").read_text().splitlines()):
        key, _, rest = line.strip().partition(":")
        sets_a_value = rest.strip() or key in ("train_files", "val_files")
        if key.isidentifier() and sets_a_value:
            assert before.strip().startswith("# "), line


def _flat(config: dict, prefix: str = "") -> dict:
    flat = {}
    for key, entry in config.items():
        flat |= _flat(entry, f"{prefix}{key}.") if isinstance(entry, dict) else {f"{prefix}{key}": entry}
    return flat
