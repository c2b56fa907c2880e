"""log-prob, entropy and Σπ² of each token in one read of the logits, and without logits at all."""

from .dispatch import chosen, linear_token_statistics, sum_pi_squared, token_statistics
from .partials import TokenStatistics

__all__ = ["TokenStatistics", "chosen", "linear_token_statistics", "sum_pi_squared", "token_statistics"]
