"""verl with `VERL_PLATFORM=cpu`, and untouched without it. Each case is a process of its own: verl decides once."""

import importlib
import inspect
import os
import subprocess
import sys
from importlib import metadata

import pytest

from verl_otb.cpu.repairs import REPAIRS, Repair

VARIABLES = (
    "VERL_PLATFORM",
    "VERL_ENGINE_DEVICE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "RAY_memory_monitor_refresh_ms",
)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`code` with OTB's own plugin switched off."""
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "VERL_USE_EXTERNAL_PLUGINS": "otb_cpu", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


UNTOUCHED = """
import importlib.metadata, os, sys
version, environment = importlib.metadata.version, dict(os.environ)
import verl
from verl.plugin.platform import PlatformRegistry
import verl.utils.config, verl.utils.distributed, verl.utils.fsdp_utils, verl.utils.model
added = {key for key in os.environ.keys() - environment.keys() if key.startswith(("VERL", "VLLM", "RAY_memory"))}
assert "verl_otb.cpu.plugin" in sys.modules, "the entry point is not installed"
assert "verl_otb.cpu.repairs" not in sys.modules, "repairs imported"
assert PlatformRegistry.get("cpu") is None, "platform registered"
assert importlib.metadata.version is version, "version replaced"
assert not added, added
for function in (
    verl.utils.config.validate_config,
    verl.utils.distributed.initialize_global_process_group_ray,
    verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu,
    verl.utils.model.load_valuehead_model,
):
    assert function.__code__.co_filename.startswith(verl.__path__[0]), function
"""


@pytest.mark.parametrize("env", [{}, {"VERL_PLATFORM": "nvidia"}], ids=["unset", "nvidia"])
def test_inert_unless_asked(env):
    run = run_python(UNTOUCHED, **env)
    assert run.returncode == 0, run.stderr


def test_what_inertness_is_measured_by_sees_the_plugin():
    run = run_python(UNTOUCHED, VERL_PLATFORM="cpu")
    assert "AssertionError: repairs imported" in run.stderr


@pytest.mark.parametrize("value", ["cpu", " CPU "])
def test_one_variable_is_enough(value):
    run = run_python(
        "import verl.utils.device as device, torch\n"
        "assert device.get_device_name() == 'cpu' and device.get_nccl_backend() == 'gloo'\n"
        "assert torch.ones(2).to(device.get_device_id()).device.type == 'cpu'\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)",
        VERL_PLATFORM=value,
    )
    assert run.stdout.strip() == "FSDPEngineWithLMHead", run.stderr


def test_the_user_s_variables_win():
    run = run_python("import verl, os; print(os.environ['VLLM_CPU_OMP_THREADS_BIND'])", VERL_PLATFORM="cpu",
                     VLLM_CPU_OMP_THREADS_BIND="0-1")  # fmt: skip
    assert run.stdout.strip() == "0-1", run.stderr


def test_a_plugin_that_fails_says_why():
    """verl alone would swallow the error and say "Unknown platform 'cpu'"."""
    run = run_python("import sys; sys.modules['wrapt'] = None; import verl", VERL_PLATFORM="cpu")
    assert run.returncode == 1
    assert "VERL_PLATFORM=cpu cannot be set up" in run.stderr
    assert "wrapt" in run.stderr


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: f"{repair.module}:{repair.attribute}")
def test_repair_is_in_place(repair: Repair):
    """Its target exists in the installed verl or vLLM, and is ours after the import."""
    found = importlib.import_module(repair.module)
    for name in repair.attribute.split("."):
        found = getattr(found, name)
    assert inspect.getsourcefile(found.__code__).replace(os.sep, "/").rsplit("/", 2)[1] == "cpu"


def test_vllm_cpu_answers_for_vllm():
    import verl  # noqa: F401

    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("no-such-distribution")


def test_device_module():
    from verl.plugin.platform import get_platform
    from verl.utils.profiler.performance import _get_current_mem_info

    device = get_platform().device_module
    assert 2**26 < device.memory_allocated() <= device.max_memory_allocated()
    free, total = device.mem_get_info()
    assert 0 < free < total
    # As verl calls it.
    allocated, _, used, of = map(float, _get_current_mem_info())
    assert 0 < allocated < of
    assert 0 < used < of
