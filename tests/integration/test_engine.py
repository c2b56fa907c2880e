"""The engine hook on verl's real FSDP2 engine: Σπ² right, aligned with the log-probs, and only when asked for."""

import pytest
import torch
from real_worker import log_prob_pass, token_fields, training_worker
from transformers import AutoModelForCausalLM

from verl_otb.integration.engine import ASK, FIELD

LENGTHS = [(5, 7), (3, 2), (4, 9), (6, 1)]


@pytest.fixture(scope="module", params=[True, False], ids=["remove_padding", "padded"])
def worker(request, tiny_task):
    return training_worker(tiny_task.model, f"actor_rollout_ref.model.use_remove_padding={request.param}")


def float64_statistics(model_path, fields, temperature):
    """Log-prob of each next token and Σπ² at each position, a list a sample, without verl."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="eager")
    rows = []
    with torch.no_grad():
        for tokens in fields["input_ids"].unbind():
            log_pi = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_arithmetic_on_bfloat16_logits(tiny_task, temperature):
    precision = "{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}"
    worker = training_worker(tiny_task.model, f"actor_rollout_ref.actor.fsdp_config.mixed_precision={precision}")
    logits = []
    worker.engine.module.register_forward_hook(lambda *call: logits.append(call[-1].logits.squeeze(0)))
    out = log_prob_pass(worker, token_fields(LENGTHS), temperature, calculate_entropy=True, **{ASK: True})
    assert {x.dtype for x in logits} == {torch.bfloat16}
    # verl divides in the logits' dtype; from there on nothing may be lost to bfloat16.
    scaled = torch.cat(logits) / torch.tensor(temperature, dtype=torch.bfloat16)
    truth = scaled.double().softmax(-1).square().sum(-1)
    torch.testing.assert_close(out[FIELD].values().double(), truth, atol=0, rtol=1e-6)


def test_not_asked_for_not_there(worker):
    out = log_prob_pass(worker, token_fields(LENGTHS), calculate_entropy=True)
    assert set(out.keys()) == {"log_probs", "entropy", "metrics"}


def test_fused_kernels_are_refused(worker):
    with pytest.raises(Exception, match="use_fused_kernels=False"):
        log_prob_pass(worker, token_fields(LENGTHS), use_fused_kernels=True, **{ASK: True})
