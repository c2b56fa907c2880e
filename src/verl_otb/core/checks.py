"""What the estimators accept, and the error that says where an input is not so."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from verl_otb.core.returns import reward_to_go
from verl_otb.errors import InputError

_LARGEST = torch.finfo(torch.float32).max  # the results are float32: what float32 cannot hold is not finite
_LARGEST_RETURN = _LARGEST / 2  # an advantage is the difference of two returns, and is to be finite too

# What an unmasked token may hold. The slack is for rounding in other people's reductions and for bfloat16.
BOUNDS = {
    "old_log_probs": (-_LARGEST, 1e-3),
    "sum_pi_squared": (-1e-5, 1 + 1e-3),
    "rollout_is_weights": (0.0, _LARGEST),
}

_IF_MISSING = {
    "sum_pi_squared": " Set actor_rollout_ref.actor.calculate_sum_pi_squared=True.",
    "old_log_probs": " They come from the actor's forward pass, beside Σπ².",
}
_IF_BAD = {
    "response_mask": "Give each token 0 or 1, and weights of another kind to the loss.",
    "token_level_rewards": "Look at the reward function, and at the KL penalty where it is part of the reward.",
    "old_log_probs": "Look at the actor's forward pass: a policy that has diverged gives NaN.",
    "sum_pi_squared": "Take it in float32 from the logits that gave old_log_probs; NaN: the policy has diverged.",
    "rollout_is_weights": "Look at the rollout correction and its thresholds.",
}


class Inputs(NamedTuple):
    """The estimators' tensors under verl's names, each of shape (rows, tokens)."""

    token_level_rewards: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor
    sum_pi_squared: torch.Tensor
    rollout_is_weights: torch.Tensor | None = None


def check_shapes(inputs: Inputs, index: Any) -> list[Any]:
    """Refuse what is missing, empty or does not fit together. Reads no values.

    Returns:
        The uids of `index`, one a row.

    Raises:
        InputError: naming the field, what was expected and what was found.
    """
    for field, tensor in inputs._asdict().items():
        if tensor is None and field == "rollout_is_weights":
            continue
        if not isinstance(tensor, torch.Tensor):
            what = f"a tensor, found {type(tensor).__name__}."
            raise InputError(f"{field}: expected {what}{_IF_MISSING.get(field, '') if tensor is None else ''}", field)
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InputError(f"{field}: expected a padded (rows, tokens) tensor, found a {kind} one.", field)
        kinds = "a floating point" if field in BOUNDS else "a real"
        if tensor.is_complex() or (field in BOUNDS and not tensor.is_floating_point()):
            raise InputError(f"{field}: expected {kinds} tensor, found {tensor.dtype}.", field)
        if tensor.device != inputs.token_level_rewards.device:
            where = f"{inputs.token_level_rewards.device}, where token_level_rewards are, found on {tensor.device}."
            raise InputError(f"{field}: expected on {where}", field)
        shape, expected = tuple(tensor.shape), tuple(inputs.token_level_rewards.shape)
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"{field}: expected (rows, tokens), at least one of each, found {shape}.", field)
        if shape != expected:
            what = f"{expected}, the shape of token_level_rewards, found {shape}."
            raise InputError(f"{field}: expected {what}", field)
    uids = index.tolist() if hasattr(index, "tolist") else index
    if not isinstance(uids, (list, tuple)):
        raise InputError(f"index: expected an array of one uid a row, found {type(index).__name__}.", "index")
    if len(uids) != len(inputs.token_level_rewards):
        what = f"one uid for each of {len(inputs.token_level_rewards)} rows, found {len(uids)}."
        raise InputError(f"index: expected {what}", "index")
    return list(uids)


def all_good(
    response_mask: torch.Tensor,
    row_sums: torch.Tensor,
    returns: torch.Tensor,
    log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    importance_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Whether all values of a block are fit for use: one bool on the tensors' device, without waiting for it.

    Args:
        response_mask: as it was given.
        row_sums: sum of each row's rewards, not finite where one of them is not; 0 in fully masked rows.
        returns, log_probs, sum_pi_squared, importance_weights: 0 under masked tokens, which is within every bound.
    """
    good = row_sums.isfinite().all()
    if response_mask.is_floating_point():
        good &= (response_mask == response_mask.round()).all()
    fields = (response_mask, returns, log_probs, sum_pi_squared, importance_weights)
    bounds = ((0, 1), (-_LARGEST_RETURN, _LARGEST_RETURN), *BOUNDS.values())
    for values, (low, high) in zip(fields, bounds, strict=True):
        if values is not None:
            least, most = values.aminmax()  # NaN where there is one, and NaN is within no bounds
            good &= (least >= low) & (most <= high)
    return good


def first_fault(inputs: Inputs, uids: list[Any]) -> InputError:
    """The error for a batch of which `all_good` said no: the first row and column of the first bad field."""
    mask, rewards = inputs.response_mask.double(), inputs.token_level_rewards.double()
    live = mask != 0
    in_use = live.any(-1, keepdim=True)
    to_go = reward_to_go(rewards)
    # field, its values, which of them are bad, what was expected
    rules = [
        ("response_mask", mask, live & (mask != 1), "0 or 1"),
        ("token_level_rewards", rewards, in_use & ~(rewards.abs() <= _LARGEST), "a finite number"),
        ("token_level_rewards", to_go, live & ~(to_go.abs() <= _LARGEST_RETURN), "a sum that float32 can hold"),
    ]
    for field, (low, high) in BOUNDS.items():
        if (tensor := getattr(inputs, field)) is not None:
            values = tensor.double()
            bounds = " and ".join([f"≥ {low:g}"] * (low != -_LARGEST) + [f"≤ {high:g}"] * (high != _LARGEST))
            rules.append((field, values, live & ~((values >= low) & (values <= high)), f"finite, {bounds}"))
    field, values, bad, expected = next(rule for rule in rules if rule[2].any())
    row, column = bad.nonzero()[0].tolist()
    return InputError(
        f"{field}: expected {expected}, found {values[row, column].item():g} at row {row}, column {column}, "
        f"uid {uids[row]!r} ({int(bad.sum())} in {int(bad.any(-1).sum())} of {len(bad)} rows). "
        f"{_IF_BAD[field]}",
        field,
        row,
        column,
        uids[row],
    )
