"""Sessions of several outputs: an agent loop may return its trajectory in pieces, each a row of the batch.

V1 names rows by `{uid}_{session}_{index}`. A session is one trajectory of its prompt group: its rows are joined in
the order of their index, each at its own response length, so that returns run back and energy runs on over all of
them, and a session of many rows weighs as much as any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import torch

_KEY = re.compile(r"(.*_\d+)_(\d+)")  # {uid}_{session}_{index}


@dataclass(frozen=True)
class Sessions:
    """Where the tokens of a batch's rows lie in its sessions.

    Attributes:
        keys: of each session's last row, which is the one that GRPO in verl takes the score from.
        last: number of that row, int64, (sessions,).
        row, column, session, place: int64, (response tokens of the batch,): a token's row and column in the batch,
            its session and its place in there.
        shapes: (rows, tokens) and (sessions, tokens) of tensors in the two forms.
    """

    keys: list[str]
    last: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    session: torch.Tensor
    place: torch.Tensor
    shapes: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, batch_keys: list[str], lengths: torch.Tensor, width: int) -> Sessions | None:
        """The sessions of a batch; None if each has one row.

        Args:
            batch_keys: TransferQueue's keys, one a row.
            lengths: int64, (rows,), the rows' response lengths.
            width: that the batch's tensors are padded to.
        """
        rows_of: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row, key in enumerate(batch_keys):
            # A key of another form is a trajectory of its own.
            parts = _KEY.fullmatch(key)
            session, index = (parts[1], int(parts[2])) if parts else (key, 0)
            rows_of[session].append((index, row))
        if len(rows_of) == len(batch_keys):
            return None
        start = torch.zeros(len(batch_keys), dtype=torch.int64)
        session_of = torch.zeros(len(batch_keys), dtype=torch.int64)
        last, longest = [], 0
        for number, rows in enumerate(rows_of.values()):
            length = 0
            for _, row in sorted(rows):
                start[row], session_of[row] = length, number
                length += int(lengths[row])
            last.append(max(rows)[1])
            longest = max(longest, length)
        row = torch.arange(len(batch_keys)).repeat_interleave(lengths)
        column = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        return cls(
            keys=[batch_keys[i] for i in last],
            last=torch.tensor(last),
            row=row,
            column=column,
            session=session_of[row],
            place=start[row] + column,
            shapes=((len(batch_keys), width), (len(rows_of), longest)),
        )

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) → (sessions, tokens), 0 after a session's end."""
        joined = rows.new_zeros(self.shapes[1])
        joined[self.session, self.place] = rows[self.row, self.column]
        return joined

    def split(self, joined: torch.Tensor) -> torch.Tensor:
        """(sessions, tokens) → (rows, tokens), 0 after a row's end."""
        rows = joined.new_zeros(self.shapes[0])
        rows[self.row, self.column] = joined[self.session, self.place]
        return rows

    def origin(self, session: int, place: int) -> tuple[int, int]:
        """Row and column in the batch of a token of a session."""
        token = ((self.session == session) & (self.place == place)).nonzero()[0].item()
        return int(self.row[token]), int(self.column[token])

    def of_last_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with zeros in all but the sessions' last rows."""
        kept = torch.zeros_like(rows)
        kept[self.last] = rows[self.last]
        return kept
