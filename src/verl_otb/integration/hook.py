"""What a row of the hook table says, and the verl versions that the table was read against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUPPORTED = ">=0.9,<0.10"


@dataclass(frozen=True)
class Hook:
    """One place in verl, what is done to it and when that can go.

    Attributes:
        id: a name for messages and tables.
        module: the verl module whose import puts the hook in.
        qualname: the attribute inside it, `function` or `Class.method`.
        expects: the target's leading parameters; others may follow.
        handler: ours, `module:function`, imported only when the hook is put in.
        why: what verl lacks here.
        remove_when: the change in verl that makes the hook superfluous.
        kind: `register` calls the handler once; `wrap` replaces the attribute by `handler(original, *args, **kwargs)`.
        verl: the verl versions this hook was read against (PEP 440).
    """

    id: str
    module: str
    qualname: str
    expects: tuple[str, ...]
    handler: str
    why: str
    remove_when: str
    kind: Literal["register", "wrap"] = "wrap"
    verl: str = SUPPORTED

    @property
    def target(self) -> str:
        return f"{self.module}:{self.qualname}"
