"""The Optimal Token Baseline on plain tensors; knows torch only."""

from verl_otb.core.advantage import OptimalTokenBaseline, optimal_token_advantages, optimal_token_baseline
from verl_otb.core.baseline import optimal_baseline
from verl_otb.core.diagnostics import Diagnostics
from verl_otb.core.energy import realized_energy, token_energy
from verl_otb.core.returns import reward_to_go

__all__ = [
    "Diagnostics",
    "OptimalTokenBaseline",
    "optimal_baseline",
    "optimal_token_advantages",
    "optimal_token_baseline",
    "realized_energy",
    "reward_to_go",
    "token_energy",
]
