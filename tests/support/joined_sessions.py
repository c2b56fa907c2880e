"""Sessions of several outputs, joined by hand and put through the definition."""

from collections import defaultdict
from typing import Any

import torch
from definition import define


def of_the_definition(
    outputs: list[tuple[str, Any, int]], fields: dict[str, Any], align: str, penalty: list[torch.Tensor] | None = None
) -> list[list[float]]:
    """The advantages of each row of a batch.

    Args:
        outputs: (uid, session, index) of each row.
        fields: the batch's, a list of rows each.
        align: what the rows of a prompt group are compared at.
        penalty: what a KL in the reward takes from each token's reward.
    """
    sessions = defaultdict(list)
    for row in sorted(range(len(outputs)), key=outputs.__getitem__):
        sessions[outputs[row][:2]].append(row)
    names = {"mask": "response_mask", "log_probs": "old_log_probs", "sum_pi_squared": "sum_pi_squared"}
    joined = {name: [] for name in ("rewards", *names)}
    for rows in sessions.values():
        rewards = []
        for row in rows:
            scores = fields["rm_scores"][row].double()
            if row != rows[-1]:
                scores = torch.zeros_like(scores)
            if penalty:
                scores = scores - penalty[row] * fields["response_mask"][row]
            rewards += scores.tolist()
        joined["rewards"].append(rewards)
        for name, field in names.items():
            joined[name].append([value for row in rows for value in fields[field][row].double().tolist()])
    longest = max(map(len, joined["rewards"]))
    padded = {name: [row + [0] * (longest - len(row)) for row in rows] for name, rows in joined.items()}
    defined = define(**padded, index=[uid for uid, _ in sessions], align=align).advantages
    found = [[] for _ in outputs]
    for rows, advantages in zip(sessions.values(), defined, strict=True):
        start = 0
        for row in rows:
            end = start + len(fields["responses"][row])
            found[row], start = advantages[start:end], end
    return found
