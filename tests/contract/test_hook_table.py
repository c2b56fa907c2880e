"""Each hook's target, its existence and its parameters, in the oldest and the latest verl we support.

Read by syntax tree, so that it says what a wheel holds without importing it.
"""

import ast
import inspect
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from wheels import WHEELS, tree

from verl_otb.integration import patching
from verl_otb.integration.hook import SUPPORTED
from verl_otb.integration.hooks import HOOKS, MEGATRON

hooks = pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.id)


def find(root: Path, hook) -> ast.FunctionDef:
    scope = tree(root, hook.module)
    first, *rest = hook.qualname.split(".")
    for node in scope.body:  # a global that the module imports: read it where it is defined
        if isinstance(node, ast.ImportFrom) and first in {alias.name for alias in node.names}:
            scope = tree(root, node.module)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == first:  # f = Function.apply
            first, rest = ast.unparse(node.value).removesuffix(".apply"), ["forward"]
    for part in (first, *rest):
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    return scope


@hooks
@pytest.mark.parametrize("root", WHEELS)
def test_target_is_there_with_its_parameters(root, hook):
    arguments = find(root, hook).args
    parameters = tuple(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs) if argument.arg != "ctx")
    assert parameters[: len(hook.expects)] == hook.expects


@hooks
def test_our_handler_takes_them(hook):
    __import__("verl.trainer.ppo.v1.trainer_base")
    module, _, name = hook.handler.partition(":")
    parameters = inspect.signature(getattr(__import__(module, fromlist=["_"]), name)).parameters
    if hook.kind == "register":
        assert not parameters
        return
    ours = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    assert ours[0] == "original"
    named = [name for name in ours[1:] if parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL]
    assert tuple(named) == hook.expects[: len(named)]
    assert "kwargs" in parameters


@pytest.mark.parametrize("root", WHEELS)
def test_consumers_use_the_globals_we_replace(root):
    """`compute_advantage_for_multi_trajectories` must be called as a global of trainer_base, in _compute_advantage."""
    trainer = next(
        node
        for node in tree(root, "verl.trainer.ppo.v1.trainer_base").body
        if getattr(node, "name", "") == "PPOTrainer"
    )
    method = next(node for node in trainer.body if getattr(node, "name", "") == "_compute_advantage")
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    call = next(node for node in calls if node.func.id == "compute_advantage_for_multi_trajectories")
    assert {"batch_keys", "adv_estimator"} <= {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("root", WHEELS)
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_v1_trainer_goes_through_the_hooked_methods(root, mode):
    """A trainer may override _compute_old_log_prob if it calls the base's, and nothing else that we hook."""
    hooked = {hook.qualname.split(".")[1] for hook in HOOKS if hook.qualname.startswith("PPOTrainer.")}
    for node in ast.walk(tree(root, f"verl.trainer.ppo.v1.trainer_{mode}")):
        if isinstance(node, ast.FunctionDef) and node.name in hooked:
            assert node.name == "_compute_old_log_prob"
            assert "super()._compute_old_log_prob(batch, metrics)" in ast.unparse(node)


@pytest.mark.parametrize("root", WHEELS)
@pytest.mark.parametrize("module", ["dense_common", "qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_fused_forwards_use_the_heads_we_hook(root, module):
    """Looked up when the forward runs, from the module or as a class attribute, so a hook on either is seen."""
    source = (root / f"verl/models/transformers/{module}.py").read_text()
    assert "    from verl.utils.experimental.torch_functional import FusedLinearForPPO" in source
    assert "    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy" in source


@pytest.mark.parametrize("root", WHEELS)
def test_engine_has_what_our_packing_uses(root):
    source = (root / "verl/workers/engine/fsdp/transformer_impl.py").read_text()
    for name in ("def _gather_and_unpad_packed(self, tensor", '"temperature_rmpad"', '"temperature"', '"pad_size"'):
        assert name in source
    assert 'key="use_remove_padding", default=True' in source


def test_supported_range_holds_both_wheels():
    assert all(version in SpecifierSet(SUPPORTED) for version in ("0.9.0", "0.9.1"))
    assert "0.10.0" not in SpecifierSet(SUPPORTED)


def test_all_hooks_go_into_the_installed_verl():
    """But Megatron's, whose module cannot be imported without Megatron; for those see test_megatron."""
    here = {hook.id: hook.module for hook in HOOKS if hook.module != MEGATRON}
    for module in here.values():
        __import__(module)
    patching.install()
    assert {patching.status()[hook] for hook in here} == {"in"}
