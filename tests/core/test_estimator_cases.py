"""Every given case, through the core."""

import pytest
from estimator_cases import CASES, ESTIMATORS, NAMES, check, tensors

from verl_otb.core import optimal_token_advantages


@pytest.mark.parametrize("poisoned", [False, True], ids=["as it is", "NaN where masked"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(case, estimator, poisoned):
    advantages, returns = optimal_token_advantages(
        **tensors(case, poisoned=poisoned),
        index=case["index"],
        align=ESTIMATORS[estimator][0],
        handle_zero_tail=case["handle_zero_tail"],
    )
    check(case, estimator, advantages, returns)
