"""From the rows of a prompt group to the columns in which they are compared."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Columns(NamedTuple):
    """Tensors of shape (groups, rows, columns).

    Attributes:
        returns, weights: float64, 0 where the row is not compared.
        live: bits (`masking`), set where the row has a token in the column.
        compared: likewise, where it takes part in the column's baseline. `live` itself unless finished rows are carried
            on.
    """

    returns: torch.Tensor
    weights: torch.Tensor
    live: torch.Tensor
    compared: torch.Tensor


def token_columns(live: torch.Tensor) -> torch.Tensor:
    """The column of each token: the k-th unmasked one of a row goes to column k, masked ones, all zeros, to 0."""
    return live.cumsum(-1).neg_().bitwise_and_(live)


def by_token(columns: Columns, places: torch.Tensor) -> Columns:
    """Columns as the tokens lie, moved to their `token_columns`: one column more than there are tokens."""

    def moved(values: torch.Tensor) -> torch.Tensor:
        *shape, tokens = values.shape
        return values.new_zeros(*shape, tokens + 1).scatter_(-1, places, values)

    live = moved(columns.live)
    return Columns(moved(columns.returns), moved(columns.weights), live, live)


def carry_finished_rows(columns: Columns) -> Columns:
    """Each row with a token stays in the columns after its last one, with that one's return and weight."""
    places = torch.arange(columns.live.shape[-1], device=columns.live.device)
    last = (places * -columns.live).amax(-1, keepdim=True)
    finished = (places > last) & (columns.live.sum(-1, keepdim=True) < 0)
    returns, weights = (
        torch.where(finished, values.gather(-1, last), values) for values in (columns.returns, columns.weights)
    )
    return Columns(returns, weights, columns.live, columns.compared - finished.long())
