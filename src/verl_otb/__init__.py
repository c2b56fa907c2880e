"""The Optimal Token Baseline for verl.

Here are the public math and nothing else: importing this package imports torch, but neither verl nor ray nor triton.
"""

from importlib.metadata import version

from verl_otb.core import (
    OptimalTokenBaseline,
    optimal_token_advantages,
    optimal_token_baseline,
    realized_energy,
    reward_to_go,
    token_energy,
)
from verl_otb.kernels import sum_pi_squared

__version__ = version("verl-otb")
__all__ = [
    "OptimalTokenBaseline",
    "__version__",
    "optimal_token_advantages",
    "optimal_token_baseline",
    "realized_energy",
    "reward_to_go",
    "sum_pi_squared",
    "token_energy",
]
