"""What a report is made of: verl's `file` logger and the dump of `algorithm.otb.dump_dir`."""

from __future__ import annotations

import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from verl_otb.core.method import Method
from verl_otb.errors import VerlOtbError

# verl's metrics of a step, the first that is there, and ours.
REWARD = ("critic/score/mean", "critic/rewards/mean")
POWER = "otb/gradient_power"

_STEP = re.compile(r"step_(\d+)\.npz")
_OF_ROWS = ("returns", "baseline", "advantages", "token_energy", "realized_energy")
_OF_FILE = (*_OF_ROWS, "uid", "group", "score", "response_mask", "align", "longest", "lost")
_OF_METHOD = tuple(field.name for field in fields(Method))
# A dump of an older version has fewer options: those that it lacks were at their default.
_OPTIONAL = {"responses", *_OF_METHOD} - {*_OF_FILE}


@dataclass(frozen=True)
class Metrics:
    """One run's metrics: `lines` are (step, metrics of the step) as verl logged them."""

    name: str
    lines: list[tuple[int, dict[str, Any]]]

    def series(self, *keys: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the first of `keys` that the run has, both empty if none; what is no finite number
        counts as NaN."""
        for key in keys:
            points = [(step, data[key]) for step, data in self.lines if key in data]
            if points:
                steps, values = zip(*points, strict=True)
                return np.array(steps), np.array([_finite(value) for value in values])
        return np.array([]), np.array([])


@dataclass(frozen=True)
class Group:
    """One prompt group of a dumped step, its rows by falling score.

    Attributes:
        number: place in the step's file, from 1: the groups whose scores differ most come first.
        method: what the baseline was computed with.
        cut: tokens of the longest row that the dump has no room for.
        lost: steps before this one that are not in the dump.
        score: (rows,), the sum of a row's rewards.
        mask: (rows, tokens), bool; of the same shape, 0 where it is False: `returns` G, `baseline` B, `advantages` A,
            `token_energy` w, `realized_energy` W; `responses`, the token ids, where the dump has them.
    """

    step: int
    number: int
    uid: str
    method: Method
    cut: int
    lost: int
    score: np.ndarray
    mask: np.ndarray
    returns: np.ndarray
    baseline: np.ndarray
    advantages: np.ndarray
    token_energy: np.ndarray
    realized_energy: np.ndarray
    responses: np.ndarray | None

    def by_column(self, values: np.ndarray) -> np.ma.MaskedArray:
        """`values` in the columns in which rows are compared: as they are, or the k-th trained token in column k."""
        if self.method.align == "position":
            return np.ma.masked_array(values, ~self.mask)
        columns = np.ma.masked_array(np.zeros_like(values), True)
        for row, live in enumerate(self.mask):
            columns[row, : live.sum()] = values[row, live]
        return columns


def _finite(value: Any) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan
    except OverflowError:  # JSON's integers have no end
        return math.nan


def find_metrics(run: Path) -> Path | None:
    """The `file` logger's lines of a run: `run` itself, its metrics.jsonl, or the one file of such lines in it.

    Raises:
        VerlOtbError: where there are several.
    """
    if run.is_file():
        return run
    if (run / "metrics.jsonl").is_file():
        return run / "metrics.jsonl"
    found = [path for path in sorted(run.glob("*.jsonl")) if path.is_file() and _lines(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise VerlOtbError(f"{run} has several runs' metrics: {names}. Name one of these files instead.")
    return found[0] if found else None


def read_metrics(path: Path, name: str) -> Metrics:
    return Metrics(name, sorted(_lines(path), key=lambda line: line[0]))


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The lines of the form that verl's logger writes; what else is in a file (half a last line) is left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines.append((int(line["step"]), dict(line["data"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return lines


def names_of(runs: list[Path]) -> list[str]:
    """Each run's name: as much of the end of its path as tells it from the others."""
    parts = [(path.resolve().parent if path.name == "metrics.jsonl" else path.resolve()).parts for path in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def find_dump(run: Path) -> dict[int, Path]:
    """The files of a dump by their step: of `run` itself, else of its directory `dump`."""
    for directory in (run, run / "dump"):
        if directory.is_dir():
            files = {int(name[1]): path for path in directory.iterdir() if (name := _STEP.fullmatch(path.name))}
            if files:
                return dict(sorted(files.items()))
    return {}


def spreads(files: dict[int, Path], missing: list[str]) -> dict[int, float]:
    """Of each file that can be read the largest standard deviation of scores within a group; what the others are goes
    to `missing`.

    Raises:
        VerlOtbError: where none can be read.
    """
    errors: list[VerlOtbError] = []
    found = {}
    for step, file in files.items():
        try:
            found[step] = _largest_spread(_load(file))
        except VerlOtbError as error:
            errors.append(error)
    if files and not found:
        raise errors[0]
    missing += map(str, errors)
    return found


def most_telling(found: dict[int, float]) -> int:
    """The latest of the steps with the largest of `spreads`."""
    return max(found, key=lambda step: (found[step], step))


def choose_group(files: dict[int, Path], step: int | None = None, group: str | None = None) -> Group:
    """One group of a dump, by default the one whose scores differ most, of the latest step that has it.

    Args:
        files: of each step.
        step: one of them.
        group: its number in the step's file, from 1, or its uid.

    Raises:
        VerlOtbError: for a step or a group that the dump does not have, or a file that is none of ours.
    """
    if step is not None and step not in files:
        raise VerlOtbError(f"the dump has no step {step}; it has {_numbers(files)}.")
    if step is None:
        step = most_telling(spreads(files, []))
    arrays = _load(files[step])
    numbers = list(dict.fromkeys(arrays["group"].tolist()))
    uids = [str(arrays["uid"][arrays["group"] == number][0]) for number in numbers]
    chosen = 0
    if group is not None:
        known = {uid: place for place, uid in enumerate(uids)}
        known |= {str(place + 1): place for place in range(len(uids))}
        if group not in known:
            listed = ", ".join(f"{place} (uid {uid})" for place, uid in enumerate(uids, 1))
            raise VerlOtbError(f"step {step} of the dump has no group {group}; it has {listed}.")
        chosen = known[group]
    rows = np.flatnonzero(arrays["group"] == numbers[chosen])
    mask = arrays["response_mask"]
    rows = rows[np.lexsort((-mask[rows].sum(-1), -arrays["score"][rows]))]
    live = np.flatnonzero(mask[rows].any(0))
    columns = slice(0, int(live[-1]) + 1 if len(live) else 1)
    return Group(
        step=step,
        number=chosen + 1,
        uid=uids[chosen],
        method=Method(**{name: arrays[name].item() for name in _OF_METHOD if name in arrays}),
        cut=int(arrays["longest"]) - mask.shape[1],
        lost=int(arrays["lost"]),
        score=arrays["score"][rows],
        mask=mask[rows, columns],
        responses=arrays["responses"][rows, columns] if "responses" in arrays else None,
        **{name: arrays[name][rows, columns] for name in _OF_ROWS},
    )


def _largest_spread(arrays: dict[str, np.ndarray]) -> float:
    groups, scores = arrays["group"], arrays["score"].astype(np.float64)
    return max(round(float(scores[groups == number].std()), 6) for number in np.unique(groups))


def _load(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of the dump.

    Raises:
        VerlOtbError: for a file that is none.
    """
    try:
        with np.load(file) as arrays:
            found = {name: arrays[name] for name in (*_OF_FILE, *(_OPTIONAL & set(arrays.files)))}
            rows = len(found["group"])
            shapes = {found[name].shape for name in (*_OF_ROWS, "response_mask", "responses") if name in found}
            if rows == 0 or len(shapes) > 1 or any(len(shape) != 2 or shape[0] != rows for shape in shapes):
                raise ValueError("its arrays do not fit together")
            return found
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise VerlOtbError(f"{file} is damaged, or no file of algorithm.otb.dump_dir: {error}") from error


def _numbers(steps: Iterable[int]) -> str:
    steps = sorted(steps)
    listed = [str(step) for step in steps] if len(steps) <= 12 else [*map(str, steps[:5]), "…", *map(str, steps[-5:])]
    return ", ".join(listed)
