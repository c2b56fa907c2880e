"""How hooks go in and come out: early, late, twice, and where they do not fit.

Most run in a process of their own, since what is tested is what an import does.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from verl_otb.integration.hooks import HOOKS

# A verl of a few lines, with the places the hooks look at; broken in one of them where a test says so.
STUB = {
    "verl/__init__.py": '__version__ = "0.9.1"\n',
    "verl/utils/__init__.py": "",
    "verl/utils/config.py": "def validate_config(config, use_reference_policy, use_critic): pass\n",
    "verl/trainer/__init__.py": "",
    "verl/trainer/ppo/__init__.py": "",
    "verl/trainer/ppo/core_algos.py": """
        import enum
        class AdvantageEstimator(str, enum.Enum):
            OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
            TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
        ADV_ESTIMATOR_REGISTRY = {"optimal_token_baseline": "stock"}
        def register_adv_est(name_or_enum):
            def decorator(fn):
                name = getattr(name_or_enum, "value", name_or_enum)
                assert name not in ADV_ESTIMATOR_REGISTRY
                ADV_ESTIMATOR_REGISTRY[name] = fn
                return fn
            return decorator
        """,
}


def python(code: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **env}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )


def stub_verl(tmp_path: Path, only: dict[str, str] | None = None, **changes: str) -> Path:
    for name, source in (only or {**STUB, **changes}).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    return tmp_path


def test_importing_the_package_imports_no_host():
    done = python("import sys, verl_otb; print([m for m in ('verl', 'ray', 'triton') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_loading_the_plugin_imports_nothing_of_verl():
    done = python("import sys, verl_otb.plugin; print([m for m in sys.modules if m.split('.')[0] in ('verl', 'ray')])")
    assert done.stdout.strip() == "[]", done.stderr


LATE = """
    import importlib
    import verl.trainer.ppo.v1.trainer_base as base, verl.trainer.ppo.v1.utils as utils
    from verl_otb.integration import hooks, patching
    here = [hook for hook in hooks.HOOKS if hook.module != hooks.MEGATRON]  # which needs Megatron to be imported
    for hook in here:
        importlib.import_module(hook.module)
    {}
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    names = ("_compute_old_log_prob", "_compute_advantage", "_init_dataloader")
    print({{name: vars(base.PPOTrainer)[name].__verl_otb_hook__ for name in names}})
    print(base.compute_advantage_for_multi_trajectories.__verl_otb_hook__)
    print(hasattr(utils.compute_advantage_for_multi_trajectories, "__verl_otb_hook__"))
    print(get_adv_estimator_fn("optimal_token_baseline").__module__)
    print({{patching.status()[hook.id] for hook in here}})
"""


def test_late_is_as_early():
    """The plugin loaded after every module that it hooks puts the same hooks in as the entry point does."""
    early = python(LATE.format(""))
    late = python(
        LATE.format("assert not patching.status(); import verl_otb.plugin"), VERL_USE_EXTERNAL_PLUGINS="otb_cpu"
    )
    assert early.stdout, early.stderr
    assert late.stdout == early.stdout, late.stderr
    assert early.stdout.splitlines()[-1] == "{'in'}"


def test_twice_is_as_once():
    twice = "import verl_otb.plugin, importlib; importlib.reload(verl_otb.plugin); patching.install()"
    done = python(
        LATE.format(
            twice + "\n    depth = base.PPOTrainer._compute_advantage"
            "\n    assert not hasattr(depth.__wrapped__, '__wrapped__')"
        )
    )
    assert done.stdout.splitlines()[-1:] == ["{'in'}"], done.stderr


def test_wrapped_functions_can_be_pickled():
    done = python(
        """
        import cloudpickle, verl.trainer.ppo.v1.trainer_base as base
        for function in (base.compute_advantage_for_multi_trajectories, base.PPOTrainer._compute_old_log_prob):
            again = cloudpickle.loads(cloudpickle.dumps(function))
            assert again.__verl_otb_hook__ == function.__verl_otb_hook__
        print("same")
        """
    )
    assert done.stdout.strip().endswith("same"), done.stderr


def test_a_hook_that_fits(tmp_path):
    done = python(
        """
        import verl, verl_otb.plugin
        from verl.trainer.ppo import core_algos
        print(core_algos.ADV_ESTIMATOR_REGISTRY["optimal_token_baseline"].__module__)
        from verl_otb.integration import patching
        patching.uninstall()
        print(core_algos.ADV_ESTIMATOR_REGISTRY)
        """,
        stub_verl(tmp_path),
    )
    assert done.stdout.splitlines() == ["verl_otb.integration.estimators", "{'optimal_token_baseline': 'stock'}"]


CHANGED = {
    "renamed": ("def check_config(config): pass\n", "no such attribute"),
    "parameters": ("def validate_config(spec, config): pass\n", "parameters (spec, config)"),
}
USE = """
    import verl, verl_otb.plugin, verl.utils.config
    print("verl is up")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    try:
        ADV_ESTIMATOR_REGISTRY["optimal_token_baseline"](*[None] * 5)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_target_warns_once_and_refuses_at_use(tmp_path, change):
    source, found = CHANGED[change]
    done = python(USE, stub_verl(tmp_path, **{"verl/utils/config.py": source}))
    first, error = done.stdout.split("\n", 1)
    assert first == "verl is up"
    assert error.startswith("HookTargetChanged hook `config.driver` does not fit verl 0.9.1.")
    for part in (
        "verl.utils.config:validate_config",
        "expected  parameters (config)",
        found,
        'Install "verl>=0.9,<0.10"',
    ):
        assert part in error
    assert done.stderr.count("verl-otb is off") == 1


def changed_verl(parameters: str | None) -> dict[str, str]:
    """The source of a verl that has the module of every hook and none of their targets, or all with `parameters`."""
    files = {"verl/__init__.py": STUB["verl/__init__.py"]}
    for hook in HOOKS:
        file = Path(*hook.module.split(".")).with_suffix(".py")
        for package in file.parents[:-2]:
            files.setdefault(f"{package}/__init__.py", "")
        owner = hook.qualname.rpartition(".")[0]
        source = f"{owner} = globals().get('{owner}') or type('{owner}', (), {{}})\n" if owner else ""
        source += f"{hook.qualname} = lambda {parameters}: None\n"
        files[str(file)] = files.get(str(file), "") + ("" if parameters is None else source)
    return files


@pytest.mark.parametrize(
    ("parameters", "found"), [(None, "no such attribute"), ("spec, /, config", "parameters (spec, config)")]
)
def test_every_changed_target_is_named(tmp_path, parameters, found):
    done = python(
        """
        import importlib, json, verl, verl_otb.plugin
        from verl_otb.integration import hooks, patching
        for hook in hooks.HOOKS:
            importlib.import_module(hook.module)
        print(json.dumps({hook: str(reason) for hook, reason in patching.status().items()}))
        """,
        stub_verl(tmp_path, only=changed_verl(parameters)),
    )
    reasons = json.loads(done.stdout)
    assert reasons.keys() == {hook.id for hook in HOOKS}
    for hook in HOOKS:
        assert reasons[hook.id].startswith(f"hook `{hook.id}` does not fit verl 0.9.1.")
        assert f"target    {hook.target}\n" in reasons[hook.id]
        assert f"expected  parameters ({', '.join(hook.expects)}) in verl" in reasons[hook.id]
        assert f"found     {found}\n" in reasons[hook.id]
    assert done.stderr.count("verl-otb is off") == 1


def test_a_verl_out_of_range_is_refused_at_use(tmp_path):
    trainer = """
        class PPOTrainer:
            def _init_dataloader(self): pass
            def _compute_old_log_prob(self, batch, metrics): pass
        """
    files = {
        "verl/__init__.py": '__version__ = "0.10.0"\n',
        "verl/trainer/ppo/v1/__init__.py": "",
        "verl/trainer/ppo/v1/trainer_base.py": trainer,
    }
    done = python(USE.replace("verl.utils.config", "verl.trainer.ppo.v1.trainer_base"), stub_verl(tmp_path, **files))
    assert "UnsupportedVerl verl 0.10.0 is installed" in done.stdout, done.stderr
    assert "hook `trainer.old_log_prob` does not fit verl 0.10.0" in done.stderr


def test_strict_ends_the_process(tmp_path):
    verl = stub_verl(tmp_path, **{"verl/utils/config.py": CHANGED["renamed"][0]})
    done = python(USE, verl, VERL_OTB_STRICT="1")
    assert done.returncode == 1
    assert "verl is up" not in done.stdout
    assert "HookTargetChanged" in done.stderr or "does not fit" in done.stderr


@pytest.mark.parametrize("wrap", ["lambda f: lambda *a: f(*a)", "lambda f: functools.wraps(f)(lambda *a: f(*a))"])
def test_a_later_wrapper_of_somebody_else_stays(tmp_path, wrap):
    """As verl_otb.cpu's around validate_config: uninstall leaves it in place, and ours beneath it does nothing."""
    done = python(
        f"""
        import functools
        import verl, verl.utils.config as config, verl_otb.plugin
        from verl_otb.integration import config as ours, patching
        ours.check, ours.send_along = lambda config: print("checked"), lambda config: None
        theirs = config.validate_config = ({wrap})(config.validate_config)
        for step in (patching.uninstall, patching.install, patching.install):
            step()
            assert config.validate_config is theirs
            print(step.__name__)
            config.validate_config(None, None, None)
        """,
        stub_verl(tmp_path),
    )
    assert done.stdout.split() == ["uninstall", "install", "checked", "install", "checked"], done.stderr
