"""algorithm.otb.leave_one_out, weight and finished_rows through verl: its configuration, its compute_advantage."""

import numpy as np
import pytest
import torch
from definition import define
from estimator_cases import ESTIMATORS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import batches
from tensordict import TensorDict
from variants import VARIANTS, named
from verl_config import OTB, verl_config

from verl_otb.integration.config import check


def algorithm(estimator, variant):
    """verl's own, composed with the options as overrides, and let pass by the plugin."""
    config = verl_config(
        *OTB,
        f"algorithm.adv_estimator={estimator}",
        *(f"+algorithm.otb.{name}={value}" for name, value in variant.items()),
    )
    check(config)
    return config.algorithm


def computed(batch, config, estimator):
    """Advantages and returns by verl's compute_advantage."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    fields = {name: value for name, value in batch.items() if name != "index"}
    uid = np.array(batch["index"], dtype=object)
    data = DataProto(batch=TensorDict(fields, batch_size=len(uid)), non_tensor_batch={"uid": uid})
    result = compute_advantage(data, adv_estimator=estimator, config=config).batch
    return result["advantages"], result["returns"]


def made_batch():
    """Rows of several lengths with holes, a row of zeros and a group of one."""
    generator = torch.Generator().manual_seed(0)
    pi = 0.05 + 0.9 * torch.rand(9, 7, generator=generator)
    mask = (torch.rand(9, 7, generator=generator) < 0.8).long()
    mask *= torch.arange(7) < torch.tensor([7, 3, 5, 7, 2, 6, 0, 4, 7])[:, None]
    return {
        "token_level_rewards": torch.randn(9, 7, generator=generator),
        "response_mask": mask,
        "old_log_probs": pi.log(),
        "sum_pi_squared": pi**2 + (1 - pi) ** 2 * torch.rand(9, 7, generator=generator),
        "index": ["a", "b", "a", "b", "a", "b", "a", "b", "alone"],
    }


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_option_is_what_verl_computes_with(estimator, variant):
    batch = made_batch()
    advantages, returns = computed(batch, algorithm(estimator, variant), estimator)
    names = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
    values = [batch[name].double().tolist() for name in names]
    truth = define(*values, batch["index"], align=ESTIMATORS[estimator][0], **variant)
    np.testing.assert_allclose(advantages, truth.advantages, atol=1e-5)
    np.testing.assert_allclose(returns, truth.returns, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_two_of_them_are_the_same(estimator):
    batch = made_batch()
    found = [computed(batch, algorithm(estimator, variant), estimator)[0] for variant in VARIANTS]
    assert not any(torch.equal(found[i], found[j]) for i in range(len(found)) for j in range(i))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_defaults_named_are_the_defaults(estimator):
    batch = made_batch()
    named, unnamed = (computed(batch, algorithm(estimator, options), estimator) for options in (VARIANTS[0], {}))
    for ours, theirs in zip(named, unnamed, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_with_uniform_weights_they_are_verl_s_rloo(estimator, data):
    """Rows carried on, each left out of its own baseline, one reward at the end: nothing of OTB is left."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    batch = data.draw(batches(importance_weights=False, holes=estimator != "optimal_token_baseline"))
    batch["response_mask"][:, 0] = 1  # RLOO counts rows without a token, OTB does not
    last = (torch.arange(batch["response_mask"].shape[1]) * batch["response_mask"]).argmax(-1, keepdim=True)
    scores = batch["token_level_rewards"].sum(-1, keepdim=True)
    batch["token_level_rewards"] = torch.zeros_like(batch["token_level_rewards"]).scatter(1, last, scores)
    config = {"otb": {"leave_one_out": True, "weight": "uniform", "finished_rows": "carry"}}
    ours, _ = get_adv_estimator_fn(estimator)(**batch, config=config)
    theirs, _ = get_adv_estimator_fn("rloo")(
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        index=np.array(batch["index"], dtype=object),
    )
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-5 * (1 + scores.abs().max().item()))
