"""The Optimal Token Baseline for verl.

Here are the public math and nothing else: importing this package imports torch, but neither verl nor ray nor triton.
"""

from verl_otb.core import (
    OptimalTokenBaseline,
    optimal_token_advantages,
    optimal_token_baseline,
    realized_energy,
    reward_to_go,
    token_energy,
)
from verl_otb.kernels import TokenStatistics, linear_token_statistics, sum_pi_squared, token_statistics

__version__ = "0.1.0"
__all__ = [
    "OptimalTokenBaseline",
    "TokenStatistics",
    "__version__",
    "linear_token_statistics",
    "optimal_token_advantages",
    "optimal_token_baseline",
    "realized_energy",
    "reward_to_go",
    "sum_pi_squared",
    "token_energy",
    "token_statistics",
]
