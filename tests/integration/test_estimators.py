"""Every given case through verl's own registry, with the arguments that verl's compute_advantage passes."""

import numpy as np
import pytest
import torch
from estimator_cases import CASES, ESTIMATORS, NAMES, check, tensors
from omegaconf import OmegaConf

from verl_otb.errors import ConfigError, InputError


def kwargs(case, poisoned=False):
    return {
        "rollout_is_weights": None,  # verl passes None where there are none
        **tensors(case, poisoned=poisoned),
        "config": OmegaConf.create({"gamma": 1.0, "otb": {"handle_zero_tail": case["handle_zero_tail"]}}),
        "index": np.array(case["index"], dtype=object),
    }


@pytest.fixture(params=ESTIMATORS)
def estimator(request):
    return request.param


def registered(name):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    return get_adv_estimator_fn(name)


@pytest.mark.parametrize("poisoned", [False, True], ids=["as it is", "NaN where masked"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(case, estimator, poisoned):
    check(case, estimator, *registered(estimator)(**kwargs(case, poisoned)))


def test_the_enum_finds_it_too(estimator):
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    assert registered(AdvantageEstimator(estimator)) is registered(estimator)
    assert registered(estimator).__module__ == "verl_otb.integration.estimators"


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_through_compute_advantage(case, estimator):
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    inputs = kwargs(case)
    fields = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
    data = DataProto(batch=TensorDict(fields, batch_size=len(case["index"])), non_tensor_batch={"uid": inputs["index"]})
    result = compute_advantage(data, adv_estimator=estimator, config=inputs["config"]).batch
    check(case, estimator, result["advantages"], result["returns"])


def test_an_unknown_option_lists_the_known(estimator):
    inputs = kwargs(CASES[0])
    inputs["config"].otb.leave_one_in = True
    with pytest.raises(ConfigError, match="no key 'leave_one_in'; it knows bypass, dump_dir, finished_rows"):
        registered(estimator)(**inputs)


def test_a_bad_input_is_named(estimator):
    inputs = kwargs(CASES[0])
    inputs["old_log_probs"][1, 2] = float("inf")
    with pytest.raises(InputError, match="old_log_probs") as caught:
        registered(estimator)(**inputs)
    assert (caught.value.field, caught.value.row, caught.value.column) == ("old_log_probs", 1, 2)


def test_further_arguments_of_later_verls_are_ignored(estimator):
    inputs = kwargs(CASES[0])
    check(CASES[0], estimator, *registered(estimator)(**inputs, batch=None, non_tensor_batch={}, reward_baselines=None))


@pytest.mark.parametrize("zero_tail", [True, False])
def test_handle_zero_tail_as_verl_s_own_take_it(estimator, zero_tail):
    """An argument of verl's functions too; it wins over the option."""
    (case,) = (case for case in CASES if case["name"] == "one surviving row, handle_zero_tail=" + str(zero_tail))
    inputs = kwargs(case)
    inputs["config"].otb.handle_zero_tail = not zero_tail
    check(case, estimator, *registered(estimator)(**inputs, handle_zero_tail=zero_tail))
