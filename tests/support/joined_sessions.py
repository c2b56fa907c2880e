"""Sessions of several outputs: a batch of them, and how they are joined by hand and put through the definition."""

from collections import defaultdict
from typing import Any

import torch
from definition import define
from real_trainer import Batch, put_batch

# (uid, session, index), prompt and response length, score; in no order, as TransferQueue may give them.
OUTPUTS = [
    (("a", 0, 1), 3, 4, 1.0),
    (("a", 1, 0), 4, 6, 0.0),
    (("b", 0, 0), 5, 3, 0.5),
    (("a", 0, 0), 2, 5, 1.0),
    (("b", 1, 2), 4, 2, 1.0),
    (("b", 1, 0), 3, 3, 1.0),
    (("a", 0, 2), 6, 1, 1.0),
    (("b", 1, 1), 2, 4, 1.0),
]


def put_sessions(queue: Any) -> Batch:
    """Each output of a session carries the session's score, as verl's agent loop copies it."""
    batch = put_batch(
        queue,
        rows=[(uid, prompt, response) for (uid, _, _), prompt, response, _ in OUTPUTS],
        keys=[f"{uid}-sessions_{session}_{index}" for (uid, session, index), *_ in OUTPUTS],
    )
    scores = []
    for _, _, length, score in OUTPUTS:
        row = torch.zeros(length)
        row[-1] = score
        scores.append(row)
    mask = [torch.ones(length, dtype=torch.int64) for _, _, length, _ in OUTPUTS]
    mask[3][2] = 0  # a hole in the middle, and a row that ends in tool output: its length still counts
    mask[5][-1] = 0
    batch.put(rm_scores=scores, response_mask=mask)
    return batch


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
