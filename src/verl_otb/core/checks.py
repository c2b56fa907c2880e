"""What the estimators accept, and the error that says where an input is not so."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, NamedTuple

import torch

from verl_otb.errors import InputError

_LARGEST = torch.finfo(torch.float32).max  # the results are float32: what float32 cannot hold is not finite

# What an unmasked token may hold. The slack is for rounding in other people's reductions and for bfloat16.
BOUNDS = {
    "old_log_probs": (-_LARGEST, 1e-3),
    "sum_pi_squared": (-1e-5, 1 + 1e-3),
    "rollout_is_weights": (0.0, _LARGEST),
}

_IF_MISSING = {
    "sum_pi_squared": "Set actor_rollout_ref.actor.calculate_sum_pi_squared=True.",
    "old_log_probs": "Σπ² needs the log-probs of the same forward pass of the actor beside it.",
}


class Inputs(NamedTuple):
    """The estimators' tensors under verl's names, each of shape (rows, tokens)."""

    token_level_rewards: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor
    sum_pi_squared: torch.Tensor
    rollout_is_weights: torch.Tensor | None = None


def check_shapes(inputs: Inputs, index: Any) -> None:
    """Refuse what is missing, empty or does not fit together. Reads no values.

    Raises:
        InputError: naming the field and both shapes.
    """
    for field, tensor in inputs._asdict().items():
        if tensor is None and field == "rollout_is_weights":
            continue
        if not isinstance(tensor, torch.Tensor):
            hint = _IF_MISSING.get(field, "")
            found = type(tensor).__name__
            raise InputError(f"{field}: expected a tensor, found {found}. {hint}".rstrip(), field)
        shape, expected = tuple(tensor.shape), tuple(inputs.token_level_rewards.shape)
        if len(shape) != 2:
            raise InputError(f"{field}: expected shape (rows, tokens), found {shape}.", field)
        if 0 in shape:
            raise InputError(f"{field}: expected at least one row and one token, found shape {shape}.", field)
        if shape != expected:
            raise InputError(
                f"{field}: expected shape {expected}, that of token_level_rewards, found {shape}.", field
            )
    rows = len(inputs.token_level_rewards)
    if not isinstance(index, Sized) or isinstance(index, (str, bytes)):
        raise InputError(f"index: expected one uid a row, found {type(index).__name__}.", "index")
    if len(index) != rows:
        raise InputError(f"index: expected one uid for each of {rows} rows, found {len(index)}.", "index")


def all_good(
    response_mask: torch.Tensor,
    row_sums: torch.Tensor,
    log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    importance_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Whether all values of a block are fit for use: one bool on the tensors' device, without waiting for it.

    Args:
        response_mask: as it was given.
        row_sums: sum of each row's rewards, not finite where one of them is not; 0 in fully masked rows.
        log_probs, sum_pi_squared, importance_weights: 0 under masked tokens, which is within every bound.
    """
    good = (row_sums.abs() <= _LARGEST).all()
    if response_mask.is_floating_point():
        good &= (response_mask == response_mask.round()).all()
    fields = (response_mask, log_probs, sum_pi_squared, importance_weights)
    for values, (low, high) in zip(fields, ((0, 1), *BOUNDS.values()), strict=True):
        if values is not None:
            least, most = values.aminmax()  # NaN where there is one, and NaN is within no bounds
            good &= (least >= low) & (most <= high)
    return good


def first_fault(inputs: Inputs, index: Any) -> InputError:
    """The error for a batch that is known to hold a bad value: its field, first row and column, and uid."""
    mask = inputs.response_mask
    live = mask != 0
    rewards = inputs.token_level_rewards
    faults = {
        "response_mask": ((mask != 0) & (mask != 1), "0 or 1"),
        "token_level_rewards": (~_finite(rewards) & live.any(-1, keepdim=True), "a finite number"),
    }
    for field, (low, high) in BOUNDS.items():
        values = getattr(inputs, field)
        if values is not None:
            expected = f"at least {low:g}" if high == _LARGEST else f"at most {high:g}"
            if low != -_LARGEST and high != _LARGEST:
                expected = f"from {low:g} to {high:g}"
            faults[field] = (live & ~((values >= low) & (values <= high)), f"a finite number {expected}")
    for field, (bad, expected) in faults.items():
        places = bad.nonzero()
        if len(places):
            row, column = places[0].tolist()
            uid, value = index[row], getattr(inputs, field)[row, column].item()
            return InputError(
                f"{field}: expected {expected}, found {value:g} at row {row}, column {column}, uid {uid!r}; "
                f"{len(places)} such values in {int(bad.any(-1).sum())} of {len(bad)} rows.",
                field,
                row,
                column,
                uid,
            )
    raise AssertionError("no fault found")


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.abs() <= _LARGEST
