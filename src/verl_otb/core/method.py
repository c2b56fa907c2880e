"""Which of its variants the estimator computes."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from verl_otb.errors import InputError

Align = Literal["position", "token"]
Weight = Literal["realized", "token", "uniform"]
FinishedRows = Literal["drop", "carry"]

_CHOICES = {"align": get_args(Align), "weight": get_args(Weight), "finished_rows": get_args(FinishedRows)}


@dataclasses.dataclass(frozen=True)
class Method:
    """The keywords of `optimal_token_baseline`, which explains them."""

    align: Align = "position"
    handle_zero_tail: bool = True
    leave_one_out: bool = False
    weight: Weight = "realized"
    finished_rows: FinishedRows = "drop"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"{name}: expected {' or '.join(map(_quoted, choices))}, found {value!r}.", name)
        for name in ("handle_zero_tail", "leave_one_out"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name}: expected True or False, found {value!r}.", name)

    def changed(self) -> list[str]:
        """Those that are not at their default, but for `align`: `weight=token`."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "align"}
        return [f"{field.name}={value}" for field, value in values.items() if value != field.default]


def _quoted(choice: str) -> str:
    return f'"{choice}"'
