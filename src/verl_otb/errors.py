"""What verl-otb raises. Every error survives pickling, for Ray sends them from process to process."""

from __future__ import annotations


class VerlOtbError(Exception):
    """Base of every error of this package."""


class ConfigError(VerlOtbError, ValueError):
    """A configuration that OTB cannot run with. The message names the override to change."""


class InputError(VerlOtbError, ValueError):
    """A tensor or an index that the estimators cannot use.

    Attributes, each None where it does not apply:
        field: name of the argument, as verl spells it.
        row, column: position of the first bad value, both from 0.
        uid: the row's entry in `index`.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        row: int | None = None,
        column: int | None = None,
        uid: object = None,
    ) -> None:
        super().__init__(message)  # pickle calls the class with these arguments, then restores the attributes
        self.field, self.row, self.column, self.uid = field, row, column, uid


class HookTargetChanged(VerlOtbError):
    """The place in verl that a hook fits into is not as the hook expects it.

    Attributes:
        hook: id of the hook.
        target: `module:qualname` in verl.
        expected, found: what the hook needs there, and what is there.
        verl: the version of verl found.
        supported: the versions of verl that this verl-otb fits, as a specifier (`>=0.9,<0.10`).
    """

    def __init__(self, hook: str, target: str, expected: str, found: str, verl: str, supported: str) -> None:
        super().__init__(hook, target, expected, found, verl, supported)
        self.hook, self.target, self.expected, self.found = hook, target, expected, found
        self.verl, self.supported = verl, supported

    def __str__(self) -> str:
        return (
            f"hook `{self.hook}` does not fit verl {self.verl}.\n"
            f"  target    {self.target}\n"
            f"  expected  {self.expected} in verl {self.supported}\n"
            f"  found     {self.found}\n"
            f'Install "verl{self.supported}", or a verl-otb that supports {self.verl}, '
            "or choose another estimator to train without it."
        )


class UnsupportedVerl(VerlOtbError):
    """The installed verl is not one that the hooks were read against.

    Attributes:
        verl: the version found.
        supported: the versions that this verl-otb fits, as a specifier.
    """

    def __init__(self, verl: str, supported: str) -> None:
        super().__init__(verl, supported)
        self.verl, self.supported = verl, supported

    def __str__(self) -> str:
        return (
            f"verl {self.verl} is installed, and this verl-otb supports verl {self.supported}. "
            f'Install "verl{self.supported}", or a verl-otb that supports {self.verl}, '
            "or choose another estimator to train without it."
        )
