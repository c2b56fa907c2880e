"""`verl-otb doctor`: healthy here, and what it says of each thing that can be broken.

What an import decides is broken in a process of its own; the rest in this one, where verl and the plugin are loaded.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from free_port import free_port
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from verl_config import MICRO_BATCHES, OTB
from verl_run import REPOSITORY

from verl_otb.cli import main
from verl_otb.doctor.installation import guarded, judged
from verl_otb.doctor.result import MARKS
from verl_otb.integration import patching
from verl_otb.integration.hooks import HOOKS, MEGATRON
from verl_otb.kernels import streamed

VERL_CONFIG = str(Path(find_spec("verl").submodule_search_locations[0], "trainer", "config"))
RUN = (*OTB, *MICRO_BATCHES, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=8")


def python(*command: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=550)


def by_check(stdout: str) -> dict[str, dict]:
    report = json.loads(stdout)
    assert report["ok"] == all(result["status"] != "failed" for result in report["results"])
    for result in report["results"]:
        assert result["status"] != "failed" or result["advice"], f"nothing to do about {result}"
    return {f"{result['where'] and 'ray '}{result['check']}": result for result in report["results"]}


def broken(results: dict[str, dict]) -> set[str]:
    return {check for check, result in results.items() if result["status"] == "failed"}


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Runs the doctor in this process: its exit status, and its results by their check."""
    monkeypatch.setenv("RAY_ADDRESS", "local")

    def run(*arguments: str) -> tuple[int, dict[str, dict]]:
        status = main(["doctor", "--json", *arguments])
        return status, by_check(capsys.readouterr().out)

    return run


def test_the_command_line_imports_neither_verl_nor_ray():
    code = "import sys, verl_otb.cli as c; print([m for m in ('verl', 'ray', 'hydra') if m in sys.modules]); c.main()"
    done = python("-c", code, "--help")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[]"), done.stderr
    assert "doctor" in done.stdout


@pytest.fixture(scope="module")
def healthy() -> subprocess.CompletedProcess[str]:
    return python("-m", "verl_otb.cli", "doctor")


def test_healthy(healthy):
    assert healthy.returncode == 0, healthy.stdout
    facts, lines, _ = healthy.stdout.split("\n\n")
    known = ("verl-otb", "verl", "torch", "vllm", "ray", "triton", "python", "platform", "accelerator", "environment")
    assert tuple(line.split()[0] for line in facts.splitlines()) == known
    assert f"torch        {torch.__version__}" in facts
    assert "VERL_PLATFORM=cpu" in facts
    lines = lines.splitlines()
    assert "✗" not in healthy.stdout.splitlines()
    for hook in HOOKS:
        here = [line for line in lines if f" hook.{hook.id} " in line]
        assert len(here) == 1
        assert here[0].startswith("–" if hook.module == MEGATRON else "✓")
        if hook.module == MEGATRON:
            assert "megatron, which is not installed" in here[0]
    for check in ("versions", "verl", "entry_point", "plugin", "accelerator", "kernel.torch", "config.otb"):
        assert any(line.startswith(f"✓ {check} ") for line in lines), check


def test_json_says_the_same(healthy, doctor):
    status, results = doctor()
    assert status == 0
    lines = [line.split()[:2] for line in healthy.stdout.splitlines() if line[:1] in MARKS.values()]
    assert lines == [[MARKS[result["status"]], check] for check, result in results.items()]


def test_verl_out_of_range(doctor, monkeypatch):
    import verl

    monkeypatch.setattr(verl, "__version__", "0.10.0")
    status, results = doctor()
    assert status == 1
    assert broken(results) == {"verl", "config.otb"}
    assert results["verl"]["detail"] == "0.10.0 is not supported, >=0.9,<0.10 is"
    assert 'Install "verl>=0.9,<0.10"' in results["verl"]["advice"][0]
    assert results["config.otb"]["detail"].startswith("verl 0.10.0 is installed")


def test_another_verl_on_the_path(tmp_path):
    """One that loads the plugin and has nothing that it hooks."""
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text('__version__ = "0.8.2"\nimport verl_otb.plugin\n')
    done = python("-m", "verl_otb.cli", "doctor", "--json", path=tmp_path)
    results = by_check(done.stdout)
    assert done.returncode == 1
    assert json.loads(done.stdout)["facts"]["verl"] == "0.8.2"
    assert {"verl", "config.composes", *(f"hook.{hook.id}" for hook in HOOKS)} <= broken(results)
    assert "No module named 'verl.trainer'" in results["hook.trainer.metrics"]["detail"]


def test_no_verl():
    done = python(
        "-c", "import sys; sys.modules['verl'] = None; import verl_otb.cli as c; sys.exit(c.main())", "doctor"
    )
    assert done.returncode == 1, done.stderr
    assert "✗ verl  " in done.stdout
    assert 'pip install "verl-otb[verl]"' in done.stdout
    assert done.stdout.count("✗ ") == 1  # the rest depends on it


# Loaded within `import verl`, before the entry points: the V1 trainer's metrics as another verl might have them.
CHANGE = """
    import wrapt

    @wrapt.when_imported("verl.trainer.ppo.v1.trainer_base")
    def change(module):
        module.PPOTrainer._compute_metrics = lambda self, step: None
    """


def test_a_changed_hook_target(tmp_path):
    (tmp_path / "change_verl.py").write_text(textwrap.dedent(CHANGE))
    done = python(*("-m", "verl_otb.cli", "doctor", "--json"), path=tmp_path, VERL_USE_EXTERNAL_MODULES="change_verl")
    results = by_check(done.stdout)
    assert done.returncode == 1, done.stderr
    assert broken(results) == {"hook.trainer.metrics", "config.otb"}
    for check in broken(results):
        assert results[check]["advice"][0].startswith('Install "verl>=0.9,<0.10"')
    expected = "expected (self, batch, metrics), found parameters (self, step)"
    assert results["hook.trainer.metrics"]["detail"].endswith(expected)
    assert results["config.otb"]["detail"] == "hook `trainer.metrics` does not fit verl 0.9.1."


def test_a_module_that_cannot_be_imported(monkeypatch):
    core, optional = HOOKS[0], next(hook for hook in HOOKS if hook.id == "separation.metrics")
    for hook in (core, optional):
        monkeypatch.setitem(patching._status, hook.id, "waiting")
    missing = ModuleNotFoundError("No module named 'x'", name="x.y")
    assert judged(core, missing).status == "failed"
    assert judged(optional, missing).status == "skipped"
    assert "needs x.y, which is not installed" in judged(optional, missing).detail
    assert judged(optional, ModuleNotFoundError("gone", name="verl.gone")).status == "failed"
    assert judged(optional, OSError("libcuda.so")).status == "failed"
    assert "VERL_OTB_STRICT=1 ended the import" in judged(optional, SystemExit()).detail
    assert judged(optional, None).detail.startswith("waiting, although")


def test_switched_off():
    done = python("-m", "verl_otb.cli", "doctor", "--json", VERL_USE_EXTERNAL_PLUGINS="otb_cpu")
    results = by_check(done.stdout)
    assert done.returncode == 1
    ours = {"estimator.optimal_token_baseline", "estimator.tir_optimal_token_baseline"}
    assert broken(results) == {"entry_point", "plugin", *ours}
    assert results["entry_point"]["detail"] == "switched off by VERL_USE_EXTERNAL_PLUGINS=otb_cpu"
    assert "add otb to it" in results["entry_point"]["advice"][0]
    assert results["hooks"]["status"] == "skipped"


def test_switched_off_but_loaded_otherwise(doctor, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "otb_cpu")
    status, results = doctor(*RUN, "actor_rollout_ref.model.external_lib=[json,verl_otb.plugin]")
    assert (status, results["entry_point"]["status"]) == (0, "skipped")
    assert "the run's external_lib loads the plugin" in results["entry_point"]["detail"]


def test_a_platform_nobody_registered(doctor, monkeypatch):
    from verl.plugin.platform import platform_manager

    monkeypatch.setattr(platform_manager, "_current_platform", None)
    monkeypatch.setattr(platform_manager.PlatformRegistry, "_platforms", {})
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "otb")
    status, results = doctor()
    assert (status, broken(results)) == (1, {"accelerator"})
    assert results["accelerator"]["advice"][0].startswith("Name the entry point otb_cpu")


def off(partials):
    return lambda *arguments: partials(*arguments) * (1 + 1e-4)


def nothing(partials):
    return lambda *arguments: torch.full_like(partials(*arguments), torch.nan)


def raises(partials):
    def kernel(*arguments):
        raise RuntimeError("no such instruction")

    return kernel


@pytest.mark.parametrize(
    ("fault", "said"), [(off, "is off by "), (nothing, "is off by inf"), (raises, "no such instruction")]
)
def test_a_wrong_kernel(doctor, monkeypatch, fault, said):
    monkeypatch.setattr(streamed, "partials", fault(streamed.partials))
    status, results = doctor()
    assert (status, broken(results)) == (1, {"kernel.torch"})
    assert said in results["kernel.torch"]["detail"]
    assert "Do not train with OTB" in results["kernel.torch"]["advice"][0]


def test_triton_where_it_runs():
    code = "from verl_otb.doctor.kernels import check\nfor result in check(False): print(result)"
    done = python("-c", code, TRITON_INTERPRET="1")
    assert "✓ kernel.triton" in done.stdout, done.stdout + done.stderr


def test_a_check_that_breaks_says_so():
    def check():
        raise KeyError("here")
        yield

    (result,) = guarded("mine", check())
    assert (result.status, result.detail) == ("failed", "the check itself failed: KeyError: 'here'")


def test_a_good_run(doctor):
    status, results = doctor(*RUN)
    assert status == 0
    assert results["config.otb"]["status"] == results["config.verl"]["status"] == "ok"
    assert not results["config.otb"]["advice"]


def test_a_misspelt_estimator(doctor):
    status, results = doctor("algorithm.adv_estimator=optimal_token_baselin")
    assert status == 1
    assert results["config.otb"]["advice"] == ["Did you mean algorithm.adv_estimator=optimal_token_baseline?"]


def test_a_run_with_warnings(doctor):
    status, results = doctor(*RUN, "algorithm.gamma=0.5")
    assert status == 0
    (warning,) = results["config.otb"]["advice"]
    assert warning.startswith("warning: algorithm.gamma=0.5 is not used")


def test_a_run_without_otb_is_not_judged(doctor):
    status, results = doctor("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
    assert status == 0
    assert results["config.otb"]["status"] == "skipped"
    assert "adv_estimator=grpo is not OTB: the run is not judged" in results["config.otb"]["detail"]
    assert "config.verl" not in results


@pytest.mark.parametrize(
    ("override", "check", "detail", "todo"),
    [
        (
            "actor_rollout_ref.actor.calculate_sum_pi_squared=False",
            "config.otb",
            "calculate_sum_pi_squared is False",
            "Add the override actor_rollout_ref.actor.calculate_sum_pi_squared=True",
        ),
        ("+algorithm.otb.bypas=x", "config.otb", "no key 'bypas'", "Correct or remove the override"),
        ("actor_rollout_ref.actor.strategy=torchtitan", "config.otb", "cannot emit Σπ²", "Use one of fsdp"),
        ("algorithm.foo=1", "config.composes", "Could not override 'algorithm.foo'", "use +algorithm.foo=1"),
        ("oops", "config.composes", "oops: OverrideParseException", "Correct this override"),
        ("trainer.nnodes=${nowhere}", "config.composes", "Interpolation key 'nowhere' not found", "trainer.nnodes"),
        ("data.train_files=???", "config.composes", "leaves open: data.train_files", "Add data.train_files=…"),
        ("trainer.n_gpus_per_node=3", "config.verl", "must be divisible", "verl would end the run"),
        ("--config-name=nowhere", "config.composes", "Cannot find primary config 'nowhere'", "search path"),
        ("--config-dir=nowhere", "config.composes", "--config-dir nowhere is no directory", "Correct the path"),
    ],
)
def test_a_wrong_run(doctor, override, check, detail, todo):
    status, results = doctor(*RUN, override)
    assert (status, broken(results)) == (1, {check})
    assert detail in results[check]["detail"]
    assert todo in results[check]["advice"][0]


def test_a_config_of_ones_own(doctor):
    """--config-dir comes after verl's directory, as in Hydra's main, and what the config names is found in both."""
    status, results = doctor("--config-dir", str(REPOSITORY / "configs"), "--config-name", "otb_tiny_cpu")
    assert status == 0
    assert results["config.composes"]["detail"] == "otb_tiny_cpu with 0 overrides"
    with initialize_config_dir(VERL_CONFIG, version_base=None), pytest.raises(HydraException):
        compose("otb_tiny_cpu")  # the directory is forgotten


def test_a_search_path_of_ones_own(doctor, tmp_path):
    """As `'hydra.searchpath=[pkg://verl_otb.configs]' +otb=default` of the README, and in a configuration file."""
    (tmp_path / "found" / "otb").mkdir(parents=True)
    (tmp_path / "found" / "otb" / "mine.yaml").write_text("# @package _global_\nalgorithm: {gamma: 0.5}\n")
    search = f"hydra: {{searchpath: [file://{tmp_path}/found]}}\n"
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, otb: mine, _self_]\n" + search)
    for arguments in (
        (f"hydra.searchpath=[file://{tmp_path}/found]", "+otb=mine"),
        ("--config-dir", str(tmp_path), "--config-name", "run"),
    ):
        status, results = doctor(*arguments, *RUN)
        assert status == 0
        assert "algorithm.gamma=0.5 is not used" in results["config.otb"]["advice"][0]


def test_a_directory_that_is_no_model(doctor, tmp_path):
    status, results = doctor(
        *RUN, "actor_rollout_ref.model.use_fused_kernels=True", f"actor_rollout_ref.model.path={tmp_path}"
    )
    assert (status, broken(results)) == (1, {"config.fused"})
    assert results["config.fused"]["detail"] == f"{tmp_path} has no config.json"


def test_the_models_head(doctor, tiny_task):
    fused = "actor_rollout_ref.model.use_fused_kernels=True"
    run = (*RUN, fused, f"actor_rollout_ref.model.path={tiny_task.model}")
    status, results = doctor(*run, "actor_rollout_ref.actor.strategy=fsdp2")
    assert (status, broken(results)) == (1, {"config.fused"})
    assert results["config.fused"]["advice"][0].startswith("Set actor_rollout_ref.actor.strategy=fsdp")
    status, results = doctor(*run, "actor_rollout_ref.actor.strategy=fsdp")
    assert (status, results["config.fused"]["status"]) == (0, "ok")
    status, results = doctor(*RUN, fused, "actor_rollout_ref.model.path=/nowhere/model")
    assert (status, results["config.fused"]["status"]) == (0, "skipped")
    assert "/nowhere/model is not on this machine" in results["config.fused"]["detail"]


# As on a cluster whose nodes have other variables than the driver.
RAY = """
    import sys
    from verl_otb.cli import main
    without, *run = sys.argv[1:]
    variable = "+ray_kwargs.ray_init.runtime_env.env_vars."
    for worker in ([], [variable + "VERL_USE_EXTERNAL_PLUGINS=otb_cpu"], [variable + "PYTHONPATH=" + without]):
        print(main(["doctor", "--json", "--ray", *run, *worker]), end="\\0")
    """


def test_ray(tmp_path):
    (tmp_path / "verl_otb").mkdir()
    (tmp_path / "verl_otb" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'verl_otb'\")\n")
    directory = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie there
    run = [*RUN, f"+ray_kwargs.ray_init._temp_dir={directory}", "ray_kwargs.ray_init.num_cpus=2"]
    try:
        done = python("-c", textwrap.dedent(RAY), str(tmp_path), *run, RAY_ADDRESS="local")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    answers = [part.rpartition("}") for part in done.stdout.split("\0")[:-1]]
    assert [status.strip() for _, _, status in answers] == ["0", "1", "1"], done.stderr
    healthy, switched_off, missing = (by_check(body + brace) for body, brace, _ in answers)
    assert healthy["ray plugin"]["status"] == healthy["ray ray.worker"]["status"] == "ok"
    assert {check for check in healthy if check.startswith("ray hook.")} == {f"ray hook.{hook.id}" for hook in HOOKS}
    ours = {"estimator.optimal_token_baseline", "estimator.tir_optimal_token_baseline"}
    assert broken(switched_off) == {f"ray {check}" for check in ("entry_point", "plugin", *ours)}
    assert broken(missing) == {"ray ray.worker"}
    assert "No module named 'verl_otb'" in missing["ray ray.worker"]["detail"]
    assert missing["ray ray.worker"]["advice"][0].startswith("Install the same verl-otb on this node")


def test_a_cluster_that_is_not_there(doctor, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    status, results = doctor("--ray")
    assert (status, broken(results)) == (1, {"ray"})
    assert results["ray"]["detail"].startswith(f"nothing answers at {address}: ConnectionRefusedError")
    assert "correct RAY_ADDRESS" in results["ray"]["advice"][0]


def test_the_doctor_changes_nothing(doctor):
    before = patching.status()
    doctor(*RUN)
    assert patching.status() == before
