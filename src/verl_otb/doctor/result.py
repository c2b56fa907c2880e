"""What a check has found, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from verl_otb.errors import VerlOtbError

Status = Literal["ok", "failed", "skipped"]
MARKS: dict[Status, str] = {"ok": "✓", "failed": "✗", "skipped": "–"}


@dataclass(frozen=True)
class Result:
    """One line of the doctor's.

    Attributes:
        check: what was looked at, `hook.trainer.metrics` for one.
        status: `skipped` is what does not apply, or cannot be checked here.
        detail: what was found; for `skipped` the reason.
        advice: under `failed` what to do, under `ok` what to know; a line each.
        where: the Ray node that it was found on; empty for this process.
    """

    check: str
    status: Status
    detail: str
    advice: tuple[str, ...] = ()
    where: str = ""

    def at(self, where: str) -> Result:
        return replace(self, where=where)

    def __str__(self) -> str:
        lines = [f"{MARKS[self.status]} {self.check:<38} {self.detail}"]
        return "\n".join(lines + [f"    → {line}" for line in self.advice])


def ok(check: str, detail: str, *advice: str) -> Result:
    return Result(check, "ok", detail, advice)


def skipped(check: str, reason: str) -> Result:
    return Result(check, "skipped", reason)


def failed(check: str, detail: str, todo: str, *more: str) -> Result:
    return Result(check, "failed", detail, (todo, *more))


def reason(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def refused(check: str, error: BaseException, otherwise: str) -> Result:
    """A failure in the words of an error: what is wrong first, then, in its last sentence or lines, what to do."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    # OmegaConf's last lines say what kind of node it was: nothing to act on.
    first, *rest = [line for line in lines if line and not line.startswith(("object_type=", "reference_type="))]
    if rest:
        return failed(check, first, *(rest[-1:] if isinstance(error, VerlOtbError) else rest))
    what, _, todo = first.rpartition(". ")
    return failed(check, f"{what}.", todo) if what else failed(check, first, otherwise)
