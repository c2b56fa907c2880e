"""The engines that inherit the FSDP head, and cannot be imported here: the hooked methods are theirs as well.

Megatron and what inherits it: test_megatron.py.
"""

import ast

import pytest
from wheels import WHEELS, classes, methods

FSDP_HEAD = "FSDPEngineWithLMHead"


@pytest.mark.parametrize("root", WHEELS)
def test_veomni(root):
    """It adds to the head's outputs, and gets them from the head by super() with all four arguments."""
    engine = classes(root, "verl.workers.engine.veomni.transformer_impl")["VeOmniEngineWithLMHead"]
    assert FSDP_HEAD in [ast.unparse(base) for base in engine.bases]
    own = methods(engine)
    assert "forward_step" not in own
    if "prepare_model_outputs" in own:
        call = "super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)"
        assert call in ast.unparse(own["prepare_model_outputs"])


@pytest.mark.parametrize("root", WHEELS[1:])  # 0.9.0 has none
def test_fsdp_turbo(root):
    engine = classes(root, "verl.workers.engine.fsdp.fsdp_turbo_impl")["FSDPTurboEngineWithLMHead"]
    assert [ast.unparse(base) for base in engine.bases] == [FSDP_HEAD]
    assert not {"forward_step", "prepare_model_outputs", "_gather_and_unpad_packed"} & methods(engine).keys()


@pytest.mark.parametrize("root", WHEELS)
def test_fsdp1_is_the_same_class(root):
    engine = classes(root, "verl.workers.engine.fsdp.transformer_impl")[FSDP_HEAD]
    registered = ast.unparse(engine.decorator_list[0])
    assert "'fsdp'" in registered
    assert "'fsdp2'" in registered


@pytest.mark.parametrize("root", WHEELS)
@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_the_refused_ones_have_heads_of_their_own(root, name):
    """If one of them ever inherits the FSDP head, BLIND_ENGINES in integration/config.py is out of date."""
    for engine in classes(root, f"verl.workers.engine.{name}.transformer_impl").values():
        assert FSDP_HEAD not in [ast.unparse(base) for base in engine.bases]


@pytest.mark.parametrize("root", WHEELS)
@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ("verl.experimental.fully_async_policy.fully_async_trainer", "FullyAsyncTrainer"),
        ("verl.experimental.one_step_off_policy.ray_trainer", "OneStepOffRayTrainer"),
    ],
)
def test_the_separation_trainers_go_through_the_hooked_methods(root, module, trainer):
    """They may override _compute_old_log_prob if they call the base's, and no other method that we hook."""
    own = methods(classes(root, module)[trainer])
    assert [ast.unparse(base) for base in classes(root, module)[trainer].bases] == ["SeparateRayPPOTrainer"]
    assert not {"_fit_compute_log_prob", "_fit_compute_advantage", "_init_resource_pools"} & own.keys()
    if "_compute_old_log_prob" in own:
        assert "super()._compute_old_log_prob(batch)" in ast.unparse(own["_compute_old_log_prob"])
    base = methods(classes(root, "verl.experimental.separation.ray_trainer")["SeparateRayPPOTrainer"])
    assert "compute_advantage(batch," in ast.unparse(base["_fit_compute_advantage"])
    assert "compute_data_metrics(batch=batch" in ast.unparse(base["_fit_collect_metrics"])
    assert "apply_bypass_mode(batch=batch" in ast.unparse(base["_fit_compute_log_prob"])
