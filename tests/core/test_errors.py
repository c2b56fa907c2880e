"""Errors travel between processes, and say what a user needs."""

import pickle

import pytest

from verl_otb.errors import ConfigError, HookTargetChanged, InputError, VerlOtbError

HOOK = HookTargetChanged(
    "trainer.advantage_inputs",
    "verl.trainer.ppo.v1.trainer_base:compute_advantage_for_multi_trajectories",
    "parameters (data, batch_keys, adv_estimator)",
    "parameters (batch, spec)",
    "0.10.0",
    ">=0.9,<0.10",
)
ERRORS = [
    VerlOtbError("what"),
    ConfigError("what"),
    InputError("what"),
    InputError("what", "old_log_probs", 3, 5, "uid"),
    HOOK,
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickling_keeps_everything(error):
    error.rank = 3
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.rank == 3


def test_one_base_and_the_builtin_beside_it():
    assert all(isinstance(error, VerlOtbError) for error in ERRORS)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(InputError, ValueError)


def test_a_changed_target_says_what_was_expected_and_what_to_do():
    assert str(HOOK) == (
        "hook `trainer.advantage_inputs` does not fit verl 0.10.0.\n"
        "  target    verl.trainer.ppo.v1.trainer_base:compute_advantage_for_multi_trajectories\n"
        "  expected  parameters (data, batch_keys, adv_estimator) in verl >=0.9,<0.10\n"
        "  found     parameters (batch, spec)\n"
        'Install "verl>=0.9,<0.10", or a verl-otb that supports 0.10.0, '
        "or choose another estimator to train without it."
    )
