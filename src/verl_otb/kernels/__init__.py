"""log-prob, entropy and Σπ² of each token in one read of the logits, and without logits at all."""

from .dispatch import chosen, sum_pi_squared
from .partials import TokenStatistics

__all__ = ["TokenStatistics", "chosen", "sum_pi_squared"]
