"""The hooks of the deprecated trainer on verl's real RayPPOTrainer methods and a real actor."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from real_worker import tiny_config, training_worker

from verl_otb import optimal_token_advantages, token_energy
from verl_otb.errors import ConfigError
from verl_otb.integration.advantages import ENERGY_LOG_PROBS

PROMPT, RESPONSE = 6, 9
# (uid, prompt length, response length)
ROWS = [("b", 5, 7), ("a", 3, 2), ("a", 4, 9), ("b", 6, 1)]
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def unpads():
    """verl 0.9.0 unpads with flash-attn alone: there its deprecated trainer does not run without a GPU."""
    from verl.utils.attention_utils import unpad_input

    try:
        unpad_input(torch.zeros(1, 2, 1), torch.ones(1, 2, dtype=torch.int64))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def worker(tiny_task, unpads):
    return training_worker(tiny_task.model)


def ray_trainer(config, workers):
    """A RayPPOTrainer that is not started: its steps run here."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.actor_rollout_wg, trainer.global_steps = config, workers, 7
    return trainer


@pytest.fixture
def trainer(worker, tiny_task):
    def make(*overrides, compute_log_prob=worker.infer_batch):
        return ray_trainer(tiny_config(tiny_task.model, *overrides), SimpleNamespace(compute_log_prob=compute_log_prob))

    return make


def batch():
    """As verl's rollout leaves it: prompts padded on the left, responses on the right."""
    from verl import DataProto

    generator = torch.Generator().manual_seed(0)
    attention, tokens = (torch.zeros(len(ROWS), PROMPT + RESPONSE, dtype=torch.int64) for _ in range(2))
    scores = torch.zeros(len(ROWS), RESPONSE)
    for row, (_, prompt, response) in enumerate(ROWS):
        own = slice(PROMPT - prompt, PROMPT + response)
        attention[row, own] = 1
        tokens[row, own] = torch.randint(0, 260, (prompt + response,), generator=generator)
        scores[row, response - 1] = row % 3 / 2
    mask = attention[:, PROMPT:]
    fields = {
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        "rollout_log_probs": (-5.5 + torch.rand(scores.shape, generator=generator)) * mask,
    }
    uids = np.array([uid for uid, _, _ in ROWS], dtype=object)
    return DataProto.from_dict(fields, {"uid": uids}, {"temperature": TEMPERATURE, "global_token_num": [1] * len(ROWS)})


def bypassed(trainer):
    """The batch of a bypass step, as far as the advantages."""
    from verl.trainer.ppo import ray_trainer as verl_s
    from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode

    from verl_otb.integration.ray_trainer import step_of

    def step(self):
        data = batch()
        apply_bypass_mode(
            data, trainer.config.algorithm.rollout_correction, trainer.config.actor_rollout_ref.actor.policy_loss
        )
        return verl_s.compute_advantage(data, adv_estimator="optimal_token_baseline", config=self.config.algorithm)

    return step_of(step, trainer)


def test_old_log_prob_brings_the_estimator_s_inputs(trainer, tiny_task):
    from transformers import AutoModelForCausalLM

    data = batch()
    output, _ = trainer()._compute_old_log_prob(data)
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float64, attn_implementation="eager")
    for row, (_, prompt, response) in enumerate(ROWS):
        tokens = data.batch["input_ids"][row, PROMPT - prompt : PROMPT + response]
        log_pi = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        own = log_pi.gather(-1, tokens[prompt:, None]).squeeze(-1)
        found = {name: output.batch[name][row, :response].double() for name in ("old_log_probs", "sum_pi_squared")}
        torch.testing.assert_close(found["old_log_probs"], own, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["sum_pi_squared"], log_pi.exp().square().sum(-1), atol=1e-5, rtol=0)


def test_workers_without_the_plugin(trainer, worker):
    def stock(data):
        output = worker.infer_batch(data)
        del output["sum_pi_squared"]
        return output

    with pytest.raises(ConfigError, match=r"sent no Σπ².*not in the workers"):
        trainer(compute_log_prob=stock)._compute_old_log_prob(batch())


def test_one_worker_of_two_without_the_plugin(trainer, worker):
    """verl joins what its workers return."""
    from verl.utils import tensordict_utils as tu

    def two_workers(data):
        first, second = map(worker.infer_batch, tu.chunk_tensordict(data, 2))
        del second["sum_pi_squared"]
        return tu.concat_tensordict([first, second])

    with pytest.raises(ConfigError, match=r"sent no Σπ².*not in the workers"):
        trainer(compute_log_prob=two_workers)._compute_old_log_prob(batch())


def test_other_failed_assertions_stay_what_they_are(trainer):
    def broken(data):
        raise AssertionError("something else")

    with pytest.raises(AssertionError, match="something else"):
        trainer(compute_log_prob=broken)._compute_old_log_prob(batch())


def test_bypass_keeps_the_rollout_s_log_probs_for_everybody_else(trainer):
    """Loss, data and a dataset of the user's see them, before the metrics and after; the energies the actor's."""
    from verl.trainer.ppo import ray_trainer as verl_s

    actor, _ = trainer()._compute_old_log_prob(batch())
    data = bypassed(trainer(BYPASS))
    live = data.batch["response_mask"] != 0
    torch.testing.assert_close(data.batch[ENERGY_LOG_PROBS][live], actor.batch["old_log_probs"][live])
    wanted, _ = optimal_token_advantages(
        data.batch["token_level_rewards"],
        data.batch["response_mask"],
        actor.batch["old_log_probs"],
        actor.batch["sum_pi_squared"],
        data.non_tensor_batch["uid"],
    )
    torch.testing.assert_close(data.batch["advantages"], wanted, atol=1e-6, rtol=0)

    proxies = verl_s.compute_variance_proxy_metrics(batch=data, gradient_norm=0.5)
    energy = token_energy(actor.batch["old_log_probs"], actor.batch["sum_pi_squared"]) * live
    assert proxies["variance_proxy/expected_w"] == pytest.approx(energy.sum(-1).mean().item(), rel=1e-5)
    torch.testing.assert_close(data.batch["old_log_probs"], data.batch["rollout_log_probs"], atol=0, rtol=0)


def test_metrics_are_those_of_the_step(trainer):
    """Taken once: a batch without an advantage step of ours, as in a validation, shows none."""
    from verl.trainer.ppo import ray_trainer as verl_s

    data = bypassed(trainer(BYPASS))
    data.batch["attention_mask"] = data.batch["attention_mask"].clone()
    metrics = verl_s.compute_data_metrics(batch=data, use_critic=False)
    live = data.batch["response_mask"] != 0
    baseline = (data.batch["returns"] - data.batch["advantages"])[live]
    assert metrics["otb/baseline/mean"] == pytest.approx(baseline.mean().item(), abs=1e-6)
    assert metrics["otb/baseline/std"] == pytest.approx(baseline.std(correction=0).item(), abs=1e-6)
    again = verl_s.compute_data_metrics(batch=data, use_critic=False)
    assert not [name for name in again if name.startswith("otb/")]


@pytest.mark.parametrize(
    "place", ["verl.trainer.ppo.ray_trainer:RayPPOTrainer.init_workers",
              "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer._init_resource_pools"]
)  # fmt: skip
def test_refused_before_any_worker(tiny_task, place):
    """An untied head with fused kernels under FSDP2: known once the model's configuration is read."""
    import importlib

    module, _, name = place.partition(":")
    owner, _, method = name.partition(".")
    owner = getattr(importlib.import_module(module), owner)
    trainer = object.__new__(owner)
    trainer.config = tiny_config(tiny_task.model, "actor_rollout_ref.model.use_fused_kernels=True")
    trainer.resource_pool_manager = SimpleNamespace(create_resource_pool=lambda: pytest.fail("work was begun"))
    with pytest.raises(ConfigError, match="FSDP2 shards an untied head"):
        getattr(trainer, method)()
