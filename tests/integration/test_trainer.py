"""The trainer hooks on verl's real V1 methods, a real TransferQueue and a real actor."""

import copy

import pytest
import torch
from real_trainer import padded, put_batch, v1_trainer
from real_worker import tiny_config, training_worker
from transformers import AutoModelForCausalLM

from verl_otb import optimal_token_advantages
from verl_otb.errors import ConfigError, InputError
from verl_otb.integration import advantages, patching
from verl_otb.integration.advantages import ENERGY_LOG_PROBS, without_masked_penalty
from verl_otb.integration.engine import ASK
from verl_otb.integration.hooks import HOOKS
from verl_otb.integration.trainer import step_metrics


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


@pytest.fixture
def trainer(worker, tiny_task):
    def make(*overrides, worker=worker):
        return v1_trainer(tiny_config(tiny_task.model, *overrides), worker)

    return make


def expected(fields, rewards, align="position"):
    return optimal_token_advantages(
        rewards,
        *(padded(fields[name]) for name in ("response_mask", "old_log_probs", "sum_pi_squared")),
        fields["uid"],
        rollout_is_weights=padded(fields["rollout_is_weights"]) if "rollout_is_weights" in fields else None,
        align=align,
    )[0]


def test_sum_pi_squared_is_taken_home(trainer, transfer_queue, tiny_task):
    batch = put_batch(transfer_queue)
    result = trainer()._compute_old_log_prob(batch.meta, metrics={})
    assert ASK not in batch.meta.extra_info
    assert ASK not in (result.extra_info or {})
    fields = batch.fields("sum_pi_squared", "input_ids", "responses", "old_log_probs")
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float64, attn_implementation="eager")
    for tokens, response, found, log_probs in zip(
        *(fields[name] for name in ("input_ids", "responses", "sum_pi_squared", "old_log_probs")), strict=True
    ):
        log_pi = model(tokens[None]).logits[0, -len(response) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(found.double(), log_pi.exp().square().sum(-1), atol=1e-5, rtol=0)
        true = log_pi.gather(-1, response[:, None]).squeeze(-1)
        torch.testing.assert_close(log_probs.double(), true, atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_advantages(trainer, transfer_queue, estimator):
    v1 = trainer(f"algorithm.adv_estimator={estimator}")
    batch, metrics = put_batch(transfer_queue), {}
    v1._compute_advantage(v1._compute_old_log_prob(batch.meta, metrics={}), metrics)
    fields = batch.fields()
    advantages = expected(fields, padded(fields["rm_scores"]), "token" if "tir" in estimator else "position")
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)
    live = padded(fields["response_mask"]) != 0
    baseline = (padded(fields["returns"]) - advantages)[live].mean().item()
    assert metrics["otb/baseline/mean"] == pytest.approx(baseline, abs=1e-6)
    assert metrics["otb/realized_energy/mean"] > 0


def test_the_first_step_says_so_once(trainer, transfer_queue, caplog):
    v1 = trainer()
    advantages._say_active.cache_clear()
    with caplog.at_level("INFO", "verl_otb"):
        for _ in range(2):
            v1._compute_advantage(v1._compute_old_log_prob(put_batch(transfer_queue).meta, metrics={}), {})
    assert caplog.text.count("OTB is active: estimator optimal_token_baseline") == 1
    assert caplog.text.count("norm_adv_by_std_in_grpo does not apply") == 1


def test_the_first_step_names_the_options(trainer, transfer_queue, caplog):
    v1 = trainer("+algorithm.otb.leave_one_out=true", "+algorithm.otb.weight=token")
    advantages._say_active.cache_clear()
    with caplog.at_level("INFO", "verl_otb"):
        v1._compute_advantage(v1._compute_old_log_prob(put_batch(transfer_queue).meta, metrics={}), {})
    assert "estimator optimal_token_baseline with leave_one_out=True, weight=token, Σπ² from" in caplog.text


def test_lora_reference_pass_leaves_sum_pi_squared_alone(trainer, transfer_queue, tiny_task):
    """With LoRA verl's reference pass runs the same actor without its adapter."""
    worker = training_worker(tiny_task.model, "actor_rollout_ref.model.lora_rank=4")
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            if "lora_B" in name:  # starts at 0, where the adapter changes nothing
                torch.nn.init.normal_(parameter.to_local(), std=0.5, generator=torch.Generator().manual_seed(0))
    v1, batch = trainer(worker=worker), put_batch(transfer_queue)
    meta = v1._compute_old_log_prob(batch.meta, metrics={})
    before = padded(batch.fields("sum_pi_squared")["sum_pi_squared"])
    v1._compute_ref_log_prob(meta, metrics={})
    fields = batch.fields()
    assert (padded(fields["ref_log_prob"]) - padded(fields["old_log_probs"])).abs().max() > 1e-3
    assert torch.equal(padded(fields["sum_pi_squared"]), before)
    base = put_batch(transfer_queue)
    trainer()._compute_old_log_prob(base.meta, metrics={})
    assert (padded(base.fields("sum_pi_squared")["sum_pi_squared"]) - before).abs().max() > 1e-5


def filled_up(batch):
    """The batch with two padding rows more."""
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    for tag in batch.meta.tags:
        tag.update(prompt_len=1, response_len=1, seq_len=2)
    meta = upsample_batch_to_divisible_size(batch.meta, 4, eos_token_id=1)
    assert len(meta) == 8
    return meta


def test_padding_rows_take_no_part(trainer, transfer_queue):
    v1, batch = trainer(), put_batch(transfer_queue)
    meta = filled_up(batch)
    v1._compute_advantage(v1._compute_old_log_prob(meta, metrics={}), {})
    alone = put_batch(transfer_queue)
    v1._compute_advantage(v1._compute_old_log_prob(alone.meta, metrics={}), {})
    for found, wanted in zip(
        batch.fields("advantages")["advantages"], alone.fields("advantages")["advantages"], strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    batch.keys = [key for key in meta.keys if key not in batch.keys]
    assert len(batch.keys) == 2
    assert not any(row.any() for row in batch.fields("advantages")["advantages"])


def test_a_reward_on_every_token(trainer, transfer_queue):
    v1, batch = trainer(), put_batch(transfer_queue)
    meta = v1._compute_old_log_prob(batch.meta, metrics={})
    rewards = [torch.linspace(-1, 1, len(row)) for row in batch.fields("responses")["responses"]]
    batch.put(rm_scores=rewards)
    v1._compute_advantage(meta, {})
    advantages = expected(batch.fields(), padded(rewards))
    assert advantages.abs().max() > 0.5
    torch.testing.assert_close(padded(batch.fields("advantages")["advantages"]), advantages, atol=1e-6, rtol=0)


def test_kl_in_the_reward_and_rejection(trainer, transfer_queue):
    """The score of a token that rejection masked counts for the tokens before it, its KL penalty does not."""
    v1 = trainer(
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6",
    )
    batch = put_batch(transfer_queue)
    meta = v1._compute_old_log_prob(batch.meta, metrics={})
    mask_before = padded(batch.fields("response_mask")["response_mask"])
    reference = [row - 0.3 * torch.rand(len(row)) for row in batch.fields("old_log_probs")["old_log_probs"]]
    meta = batch.put(ref_log_prob=reference)
    v1._compute_advantage(meta, {})
    fields = batch.fields()
    mask, scores = padded(fields["response_mask"]), padded(fields["rm_scores"])
    penalty = 0.5 * (padded(fields["old_log_probs"]) - padded(fields["ref_log_prob"])) * mask_before
    rejected = (mask == 0) & (mask_before != 0)
    assert (rejected & (penalty != 0)).any()
    # verl stores and logs the rewards as it made them, penalty and all
    torch.testing.assert_close(padded(fields["token_level_rewards"]), scores - penalty)
    advantages = expected(fields, scores - penalty * mask)
    torch.testing.assert_close(padded(fields["advantages"]), advantages, atol=1e-6, rtol=0)
    assert (expected(fields, scores - penalty) - advantages).abs().max() > 1e-4


def test_without_masked_penalty():
    scores, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 0]])
    rewards = scores - 0.25
    assert without_masked_penalty(scores, scores, mask) is scores
    assert without_masked_penalty(rewards, scores, mask).tolist() == [[-0.25, 0.0, 1.0]]


def test_workers_without_the_plugin(trainer, transfer_queue):
    engine = tuple(hook for hook in HOOKS if hook.id == "engine.outputs")
    patching.uninstall(engine)
    try:
        with pytest.raises(ConfigError, match=r"sent no Σπ².*not in the workers"):
            trainer()._compute_old_log_prob(put_batch(transfer_queue).meta, metrics={})
    finally:
        patching.install(engine)


def test_one_worker_of_two_without_the_plugin(trainer, transfer_queue):
    """Some rows come back without Σπ²; what TransferQueue then gives has it for none."""
    v1, batch = trainer(), put_batch(transfer_queue)
    infer = v1.actor_rollout_wg.compute_log_prob

    def two_workers(meta):
        first, second = (copy.deepcopy(meta.select_keys(keys)) for keys in (meta.keys[:4], meta.keys[4:]))
        second.extra_info.pop(ASK)
        infer(first)
        infer(second)
        return meta

    v1.actor_rollout_wg.compute_log_prob = two_workers
    with pytest.raises(ConfigError, match="sent no Σπ²"):
        v1._compute_old_log_prob(batch.meta, metrics={})


def test_bypass_takes_both_from_one_forward_of_the_actor(trainer, transfer_queue, caplog):
    """The loss keeps the rollout's log-probs; the energies have the actor's, with its Σπ²."""
    plain, batch = put_batch(transfer_queue), put_batch(transfer_queue)
    trainer()._compute_old_log_prob(plain.meta, metrics={})
    v1 = trainer("algorithm.rollout_correction.bypass_mode=True")
    batch.meta.extra_info["mine"] = 1
    advantages._say_active.cache_clear()
    for _ in range(2):
        meta = v1._compute_old_log_prob(batch.meta, metrics={})
        assert meta.extra_info == {"mine": 1}
        v1._compute_advantage(meta, {})
    assert caplog.text.count("each step has that forward pass after all") == 1
    fields, actor = batch.fields(), plain.fields("old_log_probs", "sum_pi_squared")
    for name in ("old_log_probs", "rollout_log_probs"):
        assert torch.equal(padded(fields[name]), padded(fields["rollout_log_probs"]))
    torch.testing.assert_close(padded(fields[ENERGY_LOG_PROBS]), padded(actor["old_log_probs"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(padded(fields["sum_pi_squared"]), padded(actor["sum_pi_squared"]), atol=1e-6, rtol=0)
    wanted = expected(fields | actor, padded(fields["rm_scores"]))
    torch.testing.assert_close(padded(fields["advantages"]), wanted, atol=1e-6, rtol=0)
    assert (expected(fields, padded(fields["rm_scores"])) - wanted).abs().max() > 1e-4


def test_many_tokens_alone_in_their_column_recommend_tir(trainer, transfer_queue, caplog):
    advantages._recommend_tir.cache_clear()
    with caplog.at_level("WARNING", "verl_otb"):
        for estimator in ("tir_optimal_token_baseline", "optimal_token_baseline", "optimal_token_baseline"):
            v1 = trainer(f"algorithm.adv_estimator={estimator}")
            metrics = {}
            batch = put_batch(transfer_queue, rows=[("a", 3, 9), ("a", 4, 2)])
            v1._compute_advantage(v1._compute_old_log_prob(batch.meta, metrics={}), metrics)
            assert metrics["otb/single_row_fraction"] > 0.1
            assert "tir_" in caplog.text or estimator.startswith("tir")
    assert caplog.text.count("algorithm.adv_estimator=tir_optimal_token_baseline compares") == 1


def test_nan_from_a_diverged_model_is_named(trainer, transfer_queue):
    v1, batch = trainer(), put_batch(transfer_queue)
    v1.global_steps = 7
    meta = v1._compute_old_log_prob(batch.meta, metrics={})
    rows = batch.fields("sum_pi_squared")["sum_pi_squared"]
    rows[2][4] = float("nan")
    batch.put(sum_pi_squared=rows)
    with pytest.raises(InputError, match=r"^step 7: sum_pi_squared: .* row 2, column 4, uid 'a'") as caught:
        v1._compute_advantage(meta, {})
    error = caught.value
    assert (error.field, error.row, error.column, error.uid) == ("sum_pi_squared", 2, 4, "a")


@pytest.mark.parametrize("weights", [False, True], ids=["on-policy", "importance weights"])
def test_verl_s_variance_proxy_under_v1(trainer, transfer_queue, weights):
    """verl's function on the rows that are no padding, with what the V1 trainer does not fetch for it."""
    v1 = trainer(*["algorithm.rollout_correction.rollout_is=token"] * weights)
    batch, metrics = put_batch(transfer_queue), {"actor/grad_norm": 0.5}
    meta = filled_up(batch)
    meta = v1._compute_old_log_prob(meta, metrics={})
    v1._compute_advantage(meta, {})
    step_metrics(lambda self, batch, metrics: None, v1, meta, metrics)
    fields = batch.fields()
    names = ("old_log_probs", "sum_pi_squared", "response_mask", "advantages")
    log_probs, energy, mask, advantage = (padded(fields[name]) for name in names)
    rho = padded(fields["rollout_is_weights"]) if weights else torch.ones_like(log_probs)
    assert not weights or rho[mask != 0].std() > 0.1
    energy = (1 - 2 * log_probs.exp() + energy) * mask
    lengths = mask.sum(-1)
    mean_advantage, mean_rho = ((values * mask).sum(-1) / lengths for values in (advantage, rho))
    power = (mean_rho**2 * mean_advantage**2 * energy.sum(-1)).mean().item()
    assert metrics["variance_proxy/proxy1_signal_strength"] == 0.25
    assert metrics["variance_proxy/proxy2_total_power"] == pytest.approx(power, rel=1e-4)
    assert metrics["variance_proxy/expected_w"] == pytest.approx((rho**2 * energy).sum(-1).mean().item(), rel=1e-4)


def test_names_of_metrics_are_true_to_verl_s_aggregators(trainer, transfer_queue):
    """They take max, min and sum from the name, and average the others."""
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator as FullyAsync
    from verl.trainer.ppo.v1.utils import MetricsAggregator as V1

    v1, metrics = trainer(), {}
    v1._compute_advantage(v1._compute_old_log_prob(put_batch(transfer_queue).meta, metrics={}), metrics)
    ours = [name for name in metrics if name.startswith("otb/")]
    assert len(ours) > 8
    for name in ours:
        for aggregator in (V1(), FullyAsync(total_gpus=1)):
            kind = aggregator._get_aggregation_type(name)
            assert kind == "max" if name.endswith("/max") else kind in ("avg", "weighted_avg"), name
