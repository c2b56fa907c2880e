"""The engine hook on verl's real FSDP2 engine: Σπ² right, aligned with the log-probs, and only when asked for."""

import pytest
import torch
from real_worker import log_prob_pass, token_fields, training_log_probs, training_worker
from transformers import AutoModelForCausalLM

from verl_otb.errors import ConfigError
from verl_otb.integration import engine
from verl_otb.integration.engine import ASK, FIELD

LENGTHS = [(5, 7), (3, 2), (4, 9), (6, 1)]


@pytest.fixture(scope="module", params=[True, False], ids=["remove_padding", "padded"])
def worker(request, tiny_task):
    return training_worker(tiny_task.model, f"actor_rollout_ref.model.use_remove_padding={request.param}")


def float64_statistics(model_path, fields, temperature, **config):
    """Log-prob of each next token and Σπ² at each position, a list a sample, without verl."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="eager", **config)
    rows = []
    with torch.no_grad():
        for tokens in fields["input_ids"].unbind():
            # Not model(...): verl replaces that for its fused kernels.
            logits = model.lm_head(model.model(tokens[None]).last_hidden_state)[0]
            log_pi = (logits / temperature).log_softmax(-1)
            rows.append((log_pi[:-1].gather(-1, tokens[1:, None]).squeeze(-1), log_pi.exp().square().sum(-1)))
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_is_that_of_the_model_in_float64(worker, tiny_task, temperature):
    fields = token_fields(LENGTHS)
    out = log_prob_pass(worker, fields, temperature, calculate_entropy=True, **{ASK: True})
    assert out[FIELD].dtype == torch.float32
    truth = float64_statistics(tiny_task.model, fields, temperature)
    for log_probs, sum_pi_squared, (true_log_probs, truth_squared) in zip(
        out["log_probs"].unbind(), out[FIELD].unbind(), truth, strict=True
    ):
        torch.testing.assert_close(sum_pi_squared.double(), truth_squared, atol=1e-5, rtol=0)
        # At the same places: the log-prob beside it is that of the same model at the same position.
        torch.testing.assert_close(log_probs[:-1].double(), true_log_probs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def bfloat16_worker(tiny_task):
    return training_worker(
        tiny_task.model,
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "actor_rollout_ref.model.use_remove_padding=True",
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_arithmetic_on_bfloat16_logits(bfloat16_worker, temperature):
    logits = []
    handle = bfloat16_worker.engine.module.register_forward_hook(
        lambda *call: logits.append(call[-1].logits.squeeze(0))
    )
    out = log_prob_pass(bfloat16_worker, token_fields(LENGTHS), temperature, calculate_entropy=True, **{ASK: True})
    handle.remove()
    assert {x.dtype for x in logits} == {torch.bfloat16}
    # verl divides in the logits' dtype; from there on nothing may be lost to bfloat16.
    scaled = torch.cat(logits) / torch.tensor(temperature, dtype=torch.bfloat16)
    truth = scaled.double().softmax(-1).square().sum(-1)
    torch.testing.assert_close(out[FIELD].values().double(), truth, atol=0, rtol=1e-6)


def test_bfloat16_log_probs_stay_verl_s(bfloat16_worker):
    """Without flash-attn verl rounds log-probs of bfloat16 logits; the old ones must be rounded alike."""
    fields = token_fields(LENGTHS)
    stock = log_prob_pass(bfloat16_worker, fields, calculate_entropy=True)
    ours = log_prob_pass(bfloat16_worker, fields, calculate_entropy=True, **{ASK: True})
    for name in ("log_probs", "entropy"):
        assert torch.equal(ours[name].values(), stock[name].values())


def test_not_asked_for_not_there(worker):
    out = log_prob_pass(worker, token_fields(LENGTHS), calculate_entropy=True)
    assert set(out.keys()) == {"log_probs", "entropy", "metrics"}


def test_a_trainer_without_the_plugin_leaves_a_trace(worker, caplog):
    """external_lib does not reach the trainer of fully_async: its worker is then asked by verl's own flag."""
    engine._say_that_verl_asks.cache_clear()
    with caplog.at_level("WARNING", "verl_otb"):
        for _ in range(2):
            out = log_prob_pass(worker, token_fields(LENGTHS), calculate_sum_pi_squared=True)
    assert FIELD in out.keys()  # noqa: SIM118  verl's own, as it asked
    assert caplog.text.count("the trainer's process did not ask through it") == 1


def test_stock_formulas_are_not_run(worker, monkeypatch):
    """On float32 logits all three come from one call of ours."""
    from verl.workers.engine.fsdp import transformer_impl

    def never(*args, **kwargs):
        raise AssertionError("verl's own formula was run")

    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", never)
    monkeypatch.setattr(transformer_impl.verl_F, "entropy_from_logits", never)
    monkeypatch.setattr(worker.engine, "compute_entropy_from_logits", never)
    out = log_prob_pass(worker, token_fields(LENGTHS), calculate_entropy=True, **{ASK: True})
    assert {"log_probs", "entropy", FIELD} < set(out.keys())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_stock_s(worker, temperature):
    """The old log-probs that the ratio starts from: no further from the training forward's than float32 goes."""
    fields = token_fields(LENGTHS)
    stock = log_prob_pass(worker, fields, temperature, calculate_entropy=True)
    ours = log_prob_pass(worker, fields, temperature, calculate_entropy=True, **{ASK: True})
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(ours[name].values(), stock[name].values(), atol=2e-6, rtol=0)


def assert_ratio_starts_as_close_to_1(worker, temperature):
    """π/π_old of the first on-policy mini-batch, old log-probs from us against verl's own."""
    fields = token_fields(LENGTHS)
    training = training_log_probs(worker, fields, temperature)

    def furthest(**flags):
        old = log_prob_pass(worker, fields, temperature, calculate_entropy=True, **flags)["log_probs"].values()
        return ((training - old).exp() - 1).abs().max().item()

    assert furthest(**{ASK: True}) <= furthest() + 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_starts_as_close_to_1_as_stock_s(worker, temperature):
    assert_ratio_starts_as_close_to_1(worker, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_starts_as_close_to_1_as_stock_s_in_bfloat16(bfloat16_worker, temperature):
    assert_ratio_starts_as_close_to_1(bfloat16_worker, temperature)


def test_entropy_off(worker):
    out = log_prob_pass(worker, token_fields(LENGTHS), **{ASK: True})
    assert set(out.keys()) == {"log_probs", FIELD, "metrics"}


# verl's fused heads fail on an untied head under FSDP2, without the plugin too: it is sharded by itself, and they
# read its weight without calling it.
TIED = {"tie_word_embeddings": True}


@pytest.fixture(scope="module", params=[True, False], ids=["remove_padding", "padded"])
def fused_worker(request, tiny_task):
    """verl replaces the forward of the model's class; it is put back afterwards."""
    from transformers import Qwen3ForCausalLM

    forward = Qwen3ForCausalLM.forward
    yield training_worker(
        tiny_task.model,
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
        f"actor_rollout_ref.model.use_remove_padding={request.param}",
        "+actor_rollout_ref.model.override_config.tie_word_embeddings=true",
    )
    Qwen3ForCausalLM.forward = forward


class TestFusedKernels:
    """verl's fused head with the torch backend, which runs on the CPU."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_is_that_of_the_model_in_float64(self, fused_worker, tiny_task, temperature):
        fields = token_fields(LENGTHS)
        out = log_prob_pass(fused_worker, fields, temperature, calculate_entropy=True, **{ASK: True})
        truth = float64_statistics(tiny_task.model, fields, temperature, **TIED)
        for found, (_, expected) in zip(out[FIELD].unbind(), truth, strict=True):
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_and_entropy_are_stock_s(self, fused_worker, temperature):
        fields = token_fields(LENGTHS)
        stock = log_prob_pass(fused_worker, fields, temperature, calculate_entropy=True)
        ours = log_prob_pass(fused_worker, fields, temperature, calculate_entropy=True, **{ASK: True})
        assert FIELD not in stock
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(ours[name].values(), stock[name].values(), atol=2e-6, rtol=0)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_ratio_starts_as_close_to_1_as_stock_s(self, fused_worker, temperature):
        assert_ratio_starts_as_close_to_1(fused_worker, temperature)

    def test_a_head_that_verl_reads_wrongly_is_refused(self, fused_worker, monkeypatch):
        monkeypatch.setattr(fused_worker.engine.module.config, "final_logit_softcapping", 30.0, raising=False)
        with pytest.raises(ConfigError, match=r"final_logit_softcapping=30.0.*use_fused_kernels=False"):
            log_prob_pass(fused_worker, token_fields(LENGTHS), **{ASK: True})

    def test_a_forward_without_a_fused_head_is_refused(self, fused_worker, monkeypatch):
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        monkeypatch.setattr(FusedLinearForPPO, "forward", FusedLinearForPPO.forward.__wrapped__)
        with pytest.raises(ConfigError, match="does not go through verl's fused heads"):
            log_prob_pass(fused_worker, token_fields(LENGTHS), **{ASK: True})
