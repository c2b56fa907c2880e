"""Every shell script, and what those for GPUs check before they start anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from verl_run import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
FSDP, TIR = EXAMPLES / "run_qwen3_8b_fsdp.sh", EXAMPLES / "run_qwen3_8b_tir.sh"
SCRIPTS = [*sorted(EXAMPLES.glob("*.sh")), REPOSITORY / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, "--external-sources", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.fixture
def run(tmp_path):
    """Run a script with four data files, this Python, and `env`; it ends in a check, or composes the job's config.
    `cfg=()` for checks that composing does without."""
    for name in ("gsm8k/train", "gsm8k/test", "math/train", "math/test"):
        path = tmp_path / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def run(
        *arguments: str, script: Path = FSDP, cfg: tuple[str, ...] = ("--cfg", "job"), **env: str | None
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            **os.environ,
            "VERL_PLATFORM": "cpu",
            "CUDA_VISIBLE_DEVICES": None,
            "RAY_ADDRESS": None,
            "VERL_USE_UV": "0",
            "PYTHON": sys.executable,
            "DATA_DIR": str(tmp_path / "data"),
            **env,
        }
        return subprocess.run(
            ["bash", script, *arguments, *cfg],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """What, found, expected, what to do: four lines on stderr, `parts` among them, status 2, nothing on stdout."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4, done.stderr
    assert lines[1].startswith("  found     ")
    assert lines[2].startswith("  expected  ")
    assert lines[3].strip()
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, value, "a positive whole number") for name in ("NNODES", "ROLLOUT_N") for value in ("0", "-1", "1.5")),
        ("NGPUS_PER_NODE", "eight", "a positive whole number"),
        ("TRAIN_BATCH_SIZE", "128 ", "a positive whole number"),
        ("PPO_MINI_BATCH_SIZE", "64x", "a positive whole number"),
        ("MAX_PROMPT_LENGTH", "1e3", "a positive whole number"),
        ("MAX_RESPONSE_LENGTH", "2,048", "a positive whole number"),
        ("PPO_MAX_TOKEN_LEN_PER_GPU", "24k", "a positive whole number"),
        ("ROLLOUT_TP", "01", "a positive whole number"),
        ("TOTAL_EPOCHS", "all", "a positive whole number"),
        ("SAVE_FREQ", "0", "a positive whole number, or -1 for never"),
        ("TEST_FREQ", "-2", "a positive whole number, or -1 for never"),
        ("ACTOR_LR", "1e-", "a number"),
        ("ENTROPY_COEFF", "none", "a number"),
        *(
            ("ROLLOUT_GPU_MEM_UTIL", value, "a share of the memory, above 0 and at most 1")
            for value in ("75%", "0", "0.0", "1.5", "75")
        ),
        ("USE_FUSED_KERNELS", "1", "True or False"),
        ("VERL_USE_UV", "yes", "0 or 1"),
    ],
)
def test_values(run, name, value, expected):
    refused(run(**{name: value}), f"{name} has a value", f"found     {name}={value}\n", f"expected  {expected}\n", name)


@pytest.mark.parametrize(
    ("env", "what", "found"),
    [
        (
            {"PPO_MINI_BATCH_SIZE": "48"},
            "TRAIN_BATCH_SIZE is not divisible by PPO_MINI_BATCH_SIZE",
            "TRAIN_BATCH_SIZE = 128, PPO_MINI_BATCH_SIZE = 48",
        ),
        (
            {"ROLLOUT_N": "3", "PPO_MINI_BATCH_SIZE": "2"},
            "PPO_MINI_BATCH_SIZE × ROLLOUT_N is not divisible by NNODES × NGPUS_PER_NODE",
            "= 6, NNODES × NGPUS_PER_NODE = 8",
        ),
        (
            {"NNODES": "2", "NGPUS_PER_NODE": "2", "ROLLOUT_TP": "8"},
            "NNODES × NGPUS_PER_NODE is not divisible by ROLLOUT_TP",
            "NNODES × NGPUS_PER_NODE = 4, ROLLOUT_TP = 8",
        ),
        (
            {"PPO_MAX_TOKEN_LEN_PER_GPU": "3071"},
            "the longest row does not fit into a micro batch",
            "PPO_MAX_TOKEN_LEN_PER_GPU=3071",
        ),
    ],
    ids=["mini batch", "GPUs", "tensor parallel", "longest row"],
)
def test_sizes(run, env, what, found):
    refused(run(**env), what, found)


def test_estimators_are_verl_s_without_a_critic(run):
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    names = {estimator.value for estimator in AdvantageEstimator}
    for name in (*names, "optimal_token_base", "OTB"):
        done = run(ADV_ESTIMATOR=name, MODEL_PATH="/nowhere")
        refused(done, "MODEL_PATH is no model" if name in names - {"gae"} else "ADV_ESTIMATOR has a value")


def test_an_estimator_of_one_s_own(run):
    assert "adv_estimator: mine" in run("algorithm.adv_estimator=mine").stdout


def test_model(run, tmp_path):
    refused(run(MODEL_PATH=str(tmp_path)), "MODEL_PATH is no model", f"MODEL_PATH={tmp_path}", "config.json")


@pytest.mark.parametrize("missing", ["gsm8k/train", "gsm8k/test", "math/train", "math/test"])
def test_data(run, tmp_path, missing):
    path = tmp_path / "data" / f"{missing}.parquet"
    path.unlink()
    make = f"{sys.executable} {EXAMPLES}/data/prepare_gsm8k_math.py --data-dir '{tmp_path}/data'"
    refused(run(), "data is missing", f"no file {path}", f"Make all four: {make}\n")


def test_data_with_the_environment_still_to_make(run, tmp_path):
    """Nothing is made before the checks; the command for the data makes the environment first."""
    (tmp_path / "data" / "math" / "test.parquet").unlink()
    env = tmp_path / "env"
    done = run(VERL_USE_UV="1", GPU_ENV=os.path.relpath(env))
    refused(done, f"bash {EXAMPLES}/make_gpu_env.sh {env} && {env}/bin/python {EXAMPLES}/data/prepare_gsm8k_math.py")
    assert not env.exists()


def test_gpus_named(run):
    refused(
        run(cfg=(), VERL_PLATFORM="", CUDA_VISIBLE_DEVICES="0,1,5"),
        "too few GPUs are visible",
        "3 in CUDA_VISIBLE_DEVICES=0,1,5",
        "expected  NGPUS_PER_NODE=8",
        "set NGPUS_PER_NODE=3",
    )
    refused(run(cfg=(), VERL_PLATFORM="", CUDA_VISIBLE_DEVICES=""), "no GPU is visible", "or unset it")


def test_gpus_counted(run, tmp_path):
    """By an nvidia-smi that lists two, as the real one lists them."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\nprintf "GPU 0: NVIDIA H200 (UUID: GPU-a)\\nGPU 1: NVIDIA H200 (UUID: GPU-b)\\n"\n')
    smi.chmod(0o755)
    env = {"VERL_PLATFORM": "", "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    refused(run(cfg=(), **env), "too few GPUs are visible", "2 in nvidia-smi --list-gpus", "expected  NGPUS_PER_NODE=8")
    # Two are enough for two: the next check has its turn.
    two = {"NGPUS_PER_NODE": "2", "PYTHON": "no-such-python"}
    refused(run(cfg=(), **env, **two), "PYTHON is no program", "PYTHON=no-such-python")


def test_gpus_of_a_cluster_are_its_own_matter(run):
    done = run(cfg=(), VERL_PLATFORM="", CUDA_VISIBLE_DEVICES="", RAY_ADDRESS="auto", PYTHON="no-such-python")
    refused(done, "PYTHON is no program")


def test_composing_needs_no_gpu(run):
    done = run(VERL_PLATFORM="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "adv_estimator: optimal_token_baseline" in done.stdout


@pytest.fixture
def distribution(tmp_path):
    """Metadata of a package, found before the installed one's."""

    def distribution(name: str, version: str) -> str:
        path = tmp_path / "path" / f"{name.replace('-', '_')}-{version}.dist-info"
        path.mkdir(parents=True)
        (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return os.pathsep.join(filter(None, [str(path.parent), os.environ.get("PYTHONPATH")]))

    return distribution


def test_verl_out_of_range(run, distribution):
    done = run(PYTHONPATH=distribution("verl", "0.10.0"))
    refused(done, "verl is not one that the plugin fits", "found     verl 0.10.0", "verl >=0.9,<0.10", sys.executable)


def test_another_plugin(run, distribution):
    done = run(PYTHONPATH=distribution("verl-otb", "9.0"))
    refused(done, "the plugin is not this clone's", "found     verl-otb 9.0", "Install it: ", f" {REPOSITORY}\n")


def test_plugin_that_verl_does_not_see(run, distribution):
    from verl_otb import __version__

    done = run(PYTHONPATH=distribution("verl-otb", __version__))
    refused(done, "verl does not see the plugin", "entry points of verl.plugins: ", "Install it: ", f" {REPOSITORY}\n")


def test_bare_python(run, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    refused(run(PYTHON=str(python)), "the plugin is not this clone's", "found     no verl-otb")


def test_tir_has_the_same_checks_and_its_own(run, tmp_path):
    refused(run(script=TIR, MAX_TURNS="0"), "MAX_TURNS has a value", "a positive whole number")
    refused(run(script=TIR, TOOL_FILE=str(tmp_path / "tools.py")), "TOOL_FILE is no file", "@function_tool")
    refused(run(script=TIR, NNODES="0"), "NNODES has a value")


# The GPU environment is too large to make here; what is asked of uv is recorded instead, and its real export is read.


@pytest.fixture
def make_gpu_env(tmp_path):
    """make_gpu_env.sh in a clone with this lock, and a uv that exports, makes, and records what it is to install."""
    clone, uv, record = tmp_path / "clone", tmp_path / "bin" / "uv", tmp_path / "installed"
    (clone / "examples").mkdir(parents=True)
    shutil.copy(EXAMPLES / "make_gpu_env.sh", clone / "examples")
    for name in ("uv.lock", "pyproject.toml", "README.md", "LICENSE", "src"):
        (clone / name).symlink_to(REPOSITORY / name)
    real = next(filter(None, [shutil.which("uv"), str(REPOSITORY / ".uv" / "bin" / "uv")]))
    uv.parent.mkdir()
    uv.write_text(
        f'#!/usr/bin/env bash\nif [[ $1 != pip ]]; then exec {real} "$@"; fi\necho "$*" >> {record}\n'
        'case "$*" in *$FAIL_ON*) exit 1 ;; esac\n'
    )
    uv.chmod(0o755)

    def make(path: str = f"{uv.parent}:{os.environ['PATH']}", fail_on: str = "nothing"):
        record.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", clone / "examples" / "make_gpu_env.sh"],
            env={**os.environ, "PATH": path, "FAIL_ON": fail_on},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done, record.read_text().splitlines() if record.exists() else []

    make.env = clone / ".venv-gpu"
    return make


def test_gpu_environment_is_the_lock_s(make_gpu_env):
    done, installed = make_gpu_env()
    assert done.returncode == 0, done.stderr
    env = make_gpu_env.env
    assert all(line.startswith(f"pip install --python {env}/bin/python --no-deps ") for line in installed)
    locked, plugin, wheel, flash_attn = (line.split("--no-deps ")[1] for line in installed)
    assert locked == f"--compile-bytecode --require-hashes -r {env}/without-flash-attn.txt"
    assert plugin == f"--editable {env.parent}"
    assert wheel == "wheel"
    assert flash_attn == f"--require-hashes --no-build-isolation -r {env}/requirements.txt"

    def packages(name):
        return {line.split()[0] for line in (env / name).read_text().splitlines() if "==" in line and line[0] != " "}

    everything, before = packages("requirements.txt"), packages("without-flash-attn.txt")
    assert {"verl==0.9.1", "vllm==0.24.0", "torch==2.11.0"} <= before
    assert everything - before == {"flash-attn==2.8.3"}
    hashes = (env / "without-flash-attn.txt").read_text().count("--hash=sha256:")
    assert hashes >= len(before)

    assert make_gpu_env()[1] == [], "made again, though it is up to date"
    os.utime(env / ".ready", (0, 0))
    assert len(make_gpu_env()[1]) == 4, "not made again, though the lock is newer"


def test_gpu_environment_without_a_compiler(make_gpu_env):
    done, _ = make_gpu_env(fail_on="no-build-isolation")
    assert done.returncode == 2
    assert "flash-attn cannot be built" in done.stderr
    assert "VERL_USE_UV=0" in done.stderr
    assert not (make_gpu_env.env / ".ready").exists()


def test_gpu_environment_without_uv(make_gpu_env, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    done, _ = make_gpu_env(path=str(tools))
    assert done.returncode == 2
    assert "uv is neither on the PATH nor in .uv/ of this clone" in done.stderr
