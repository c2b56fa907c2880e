"""The Qwen3-8B example as a user runs it, on the CPU platform: model and sizes replaced, and what only a GPU has."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import small_math
import yaml
from otb_runs import ACTIVE, probed
from verl_run import ENVIRONMENT, REPOSITORY

pytestmark = pytest.mark.e2e

SIZES = {
    "NGPUS_PER_NODE": "1",
    "TRAIN_BATCH_SIZE": "4",
    "PPO_MINI_BATCH_SIZE": "4",
    "MAX_PROMPT_LENGTH": "384",
    "MAX_RESPONSE_LENGTH": "16",
    "PPO_MAX_TOKEN_LEN_PER_GPU": "4096",
    "ENTROPY_COEFF": "0.01",
    "ROLLOUT_TP": "1",
    "ROLLOUT_N": "4",
    "SAVE_FREQ": "-1",
    "TEST_FREQ": "2",
}
# Keys of otb_tiny_cpu.yaml that are the tiny task's, and the script's or this test's here.
OF_THE_TASK = re.compile(
    r"data\.|algorithm\.|reward\.custom|trainer\.(logger|test_freq|save_freq|total|project|experiment|n)|"
    r"actor_rollout_ref\.(model\.path|rollout\.(n|name|tensor|max_model_len)$|actor\.(ppo|optim|entropy|calculate))"
)


def for_the_cpu():
    """The overrides of configs/otb_tiny_cpu.yaml without those of its task: what a machine without a GPU needs."""
    config = yaml.safe_load((REPOSITORY / "configs" / "otb_tiny_cpu.yaml").read_text())
    del config["defaults"]
    flat = _flat(config)
    return [f"++{key}={value}" for key, value in flat.items() if not OF_THE_TASK.match(key) and value != "???"]


def _flat(config, prefix=""):
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@pytest.fixture
def gpu_env(tmp_path):
    """The environment of this test at the place where make_gpu_env.sh would have made it, and newer than the lock."""
    env = tmp_path / "gpu-env"
    env.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (env / name).symlink_to(os.path.join(sys.prefix, name))
    (env / ".ready").touch()
    return env


def test_two_steps(tiny_task, tmp_path, gpu_env):
    """Data by its own command, verl's own scorers, one Python for the driver and every worker of Ray's."""
    data, copies = tmp_path / "data", small_math.as_on_the_hub(tmp_path / "copies")
    prepare = REPOSITORY / "examples" / "data" / "prepare_gsm8k_math.py"
    subprocess.run([sys.executable, prepare, "--data-dir", data, "--local-dir", copies], check=True, timeout=120)
    ray_dir = tempfile.mkdtemp(prefix="ray-")
    log = tmp_path / "run.log"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **SIZES,
        **probed(tmp_path, "python_probe"),
        "MODEL_PATH": str(tiny_task.model),
        "DATA_DIR": str(data),
        "VERL_USE_UV": "1",
        "GPU_ENV": str(gpu_env),
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
    }
    command = [
        *(sys.executable, REPOSITORY / "examples" / "supervise.py", "--timeout=400", "--"),
        *("bash", REPOSITORY / "examples" / "run_qwen3_8b_fsdp.sh", *for_the_cpu()),
        *("trainer.total_training_steps=2", "trainer.logger=[console,file]"),
        f"++ray_kwargs.ray_init._temp_dir={ray_dir}",
    ]
    try:
        with log.open("w") as out:
            run = subprocess.run(
                command, cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=450, check=False
            )
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
    text = log.read_text(errors="replace")
    assert run.returncode == 0, "\n".join(text.splitlines()[-60:])
    assert text.count(ACTIVE) == 1
    assert f"'py_executable': '{gpu_env}/bin/python'" in text  # for workers on other nodes
    lines = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "otb/baseline/mean" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["otb/realized_energy/mean"] > 0
        assert line["actor/grad_norm"] > 0
        assert line["prompt_length/max"] <= 384
        assert line["training/rollout_probs_diff_max"] < 1e-6
    # The validation has scores of each source by itself.
    validated = {key.split("/")[1] for line in lines for key in line if key.startswith("val-core/")}
    assert len(validated) == 2, validated
    pythons = [file.read_text() for file in (tmp_path / "probe").glob("python_of_*")]
    assert set(pythons) == {str(gpu_env / "bin" / "python")}
    assert len(pythons) > 5  # driver, trainer, actor, rollout and the rest
