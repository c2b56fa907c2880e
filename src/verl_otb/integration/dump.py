"""The opt-in dump, `+algorithm.otb.dump_dir=DIR`: a few whole prompt groups of each step, for `verl-otb report`.

One `step_N.npz` a training step, with the numbers the step trained on. What it costs the step is a copy of the chosen
rows; a thread of its own computes what lies between, and writes. It bends to the training in everything: a disk too
slow or too full costs steps of the dump, which are counted, and no step of the training.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_otb.core import OptimalTokenBaseline, optimal_token_baseline
from verl_otb.core.groups import group_ids
from verl_otb.core.method import Method
from verl_otb.errors import ConfigError

logger = logging.getLogger("verl_otb")

# At 21 bytes a token and 4 more for its id a file has at most 13 MB, and a directory, before compression, 840 MB.
MAX_GROUPS = 4
MAX_TOKENS = 2**19  # rows × tokens of a file
MAX_FILES = 64
_WAITING = 2  # steps whose rows are copied, but not written yet
_SECONDS_AT_EXIT = 10
_NAME = re.compile(r"step_(\d+)\.npz")


@dataclass(frozen=True)
class _Told:
    """What a trainer knows of a batch, and verl does not pass to an estimator."""

    step: int | None = None
    responses: torch.Tensor | None = None


_told: ContextVar[_Told | None] = ContextVar("verl_otb_told", default=None)


@contextmanager
def telling(**what: Any) -> Iterator[None]:
    """Dumps within have `step`, the trainer's, and `responses`, the token ids (rows, tokens) of the rows as the
    estimator gets them."""
    token = _told.set(replace(_told.get() or _Told(), **what))
    try:
        yield
    finally:
        _told.reset(token)


def record(directory: str, inputs: Mapping[str, torch.Tensor | None], index: Any, method: Method) -> None:
    """Hand this estimate's most telling groups to the thread that writes them. Never raises, never waits.

    Args:
        directory: where the file goes; made if it is not there.
        inputs: the tensors of the estimate, named as the arguments of `optimal_token_baseline`.
        index: likewise.
        method: what the estimate was made with.
    """
    writer = _writer(directory)
    try:
        if not writer.has_room():
            return
        told = _told.get() or _Told()
        rows, groups = _telling_rows(inputs, index)
        if not len(rows):  # rejection has masked all
            return
        writer.put(
            _Job(
                step=told.step,
                # Copies: verl goes on with the batch.
                inputs={name: None if x is None else x.detach()[rows].cpu() for name, x in inputs.items()},
                responses=None if told.responses is None else told.responses[rows].cpu(),
                uids=[str(index[row]) for row in rows.tolist()],
                groups=groups.tolist(),
                method=method,
            )
        )
    except Exception as error:  # whatever it is, the step is worth more
        writer.lose(error)


def check_writable(directory: str) -> None:
    """Make the directory, and a file in it, in the process that will write there, before any worker starts.

    Raises:
        ConfigError: names the override.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"algorithm.otb.dump_dir={directory} is to be a directory that the trainer can write to, found {error}. "
            "Choose another, or remove the override."
        ) from error


def flush(directory: str, seconds: float = _SECONDS_AT_EXIT) -> bool:
    """Wait until all that was handed over is written or lost. False where it takes longer."""
    return _writer(directory).flush(seconds)


def _telling_rows(inputs: Mapping[str, torch.Tensor | None], index: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the whole groups whose scores differ most (by their standard deviation), and their groups' numbers.

    At least one group, at most MAX_GROUPS, and of further ones only what MAX_TOKENS allows. Rows without trained
    tokens are left out: they take no part in a baseline.
    """
    rewards, mask = inputs["token_level_rewards"], inputs["response_mask"]
    assert rewards is not None
    assert mask is not None
    live = (mask != 0).any(-1).cpu()
    scores = rewards.sum(-1, dtype=torch.float64).cpu()
    groups = group_ids(list(index))
    size = torch.bincount(groups[live], minlength=len(groups))
    mean = torch.zeros(len(size), dtype=torch.float64).index_add_(0, groups[live], scores[live]) / size
    away = (scores - mean[groups]).square()
    spread = torch.zeros(len(size), dtype=torch.float64).index_add_(0, groups[live], away[live]) / size
    # A group without trained tokens has 0/0.
    order = spread.nan_to_num(-1.0).argsort(descending=True, stable=True)[: int((size > 0).sum())].tolist()
    chosen: list[int] = []
    tokens = 0
    for group in order[:MAX_GROUPS]:
        tokens += int(size[group]) * mask.shape[1]
        if chosen and tokens > MAX_TOKENS:
            break
        chosen.append(group)
    rows = torch.tensor([row for group in chosen for row in ((groups == group) & live).nonzero().flatten().tolist()])
    return rows.long(), groups[rows.long()]


@dataclass(frozen=True)
class _Job:
    """Copies of the rows of one step, of whole groups."""

    step: int | None
    inputs: dict[str, torch.Tensor | None]
    responses: torch.Tensor | None
    uids: list[str]
    groups: list[int]
    method: Method

    def arrays(self) -> dict[str, Any]:
        """What the file has: the rows' B, w and W again (a group is all that they depend on), in float32,
        and the method.

        Columns after the last trained token of these rows (`longest`) are cut off, and those beyond MAX_TOKENS.
        """
        estimate = optimal_token_baseline(
            **self.inputs,  # type: ignore[arg-type]
            index=self.groups,
            **asdict(self.method),
        )
        rewards, mask = self.inputs["token_level_rewards"], self.inputs["response_mask"]
        assert rewards is not None
        assert mask is not None
        live = mask != 0
        longest = int(live.any(0).nonzero().max()) + 1
        width = min(longest, max(1, MAX_TOKENS // len(live)))
        arrays = {
            "uid": np.array(self.uids),
            "group": np.array(self.groups),
            "score": rewards.sum(-1, dtype=torch.float64).float().numpy(),
            "response_mask": live[:, :width].numpy(),
            "longest": np.array(longest),
        }
        arrays |= {name: np.array(value) for name, value in asdict(self.method).items()}
        for field in fields(OptimalTokenBaseline):
            arrays[field.name] = getattr(estimate, field.name)[:, :width].numpy()
        if self.responses is not None:
            arrays["responses"] = self.responses[:, :width].to(torch.int32).numpy()
        return arrays


class _Writer:
    """The one thread that writes to a directory."""

    def __init__(self, directory: str):
        self.directory = Path(directory)
        self.lost = 0  # steps that are not in the dump: the disk was too slow, or failed
        self._last_step = 0
        self._queue: queue.Queue[_Job] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="verl-otb-dump", daemon=True)
        self._failed = self._dropped = False

    def has_room(self) -> bool:
        if not self._queue.full():
            return True
        self.lost += 1
        if not self._dropped:
            self._dropped = True
            logger.warning(
                "%s is slower than the training: this step is left out of the dump, and others may be. Each file "
                "counts them in `lost`; there is no further warning.",
                self.directory,
            )
        return False

    def put(self, job: _Job) -> None:
        self._queue.put_nowait(job)  # the trainer's thread alone puts, and has asked for room
        if not self._thread.is_alive():
            self._thread.start()

    def lose(self, error: Exception) -> None:
        self.lost += 1
        if not self._failed:
            self._failed = True
            logger.warning(
                "the dump to %s failed, and the training goes on: %s: %s. Each file counts the steps lost in `lost`; "
                "there is no further warning.",
                self.directory,
                type(error).__name__,
                error,
            )

    def flush(self, seconds: float) -> bool:
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            try:
                self._write(job)
            except Exception as error:
                self.lose(error)
            finally:
                self._queue.task_done()

    def _write(self, job: _Job) -> None:
        step = self._last_step + 1 if job.step is None else job.step
        self._last_step = step
        self.directory.mkdir(parents=True, exist_ok=True)
        self._make_room(step)
        file = self.directory / f"step_{step}.npz"
        part = self.directory / f".{file.name}.part"
        try:
            with part.open("wb") as out:
                np.savez_compressed(out, step=step, lost=self.lost, **job.arrays())
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, step: int) -> None:
        """Every second file goes when there are MAX_FILES, but for the first and the last: what is left lies thinner
        the longer ago it was."""
        numbers = sorted(int(name[1]) for name in map(_NAME.fullmatch, os.listdir(self.directory)) if name)
        if len(numbers) >= MAX_FILES and step not in numbers:
            for number in numbers[1:-1:2]:
                (self.directory / f"step_{number}.npz").unlink(missing_ok=True)


@functools.cache
def _writer(directory: str) -> _Writer:
    writer = _Writer(directory)
    atexit.register(writer.flush, _SECONDS_AT_EXIT)
    return writer
