"""Puts the hooks of the table into verl, takes them out again, and remembers what became of each.

A hook goes in when verl imports its module (at once if it has already), so loading the plugin costs no import and
works however late it comes. A hook that does not fit is not forced: its reason is kept, one line is logged, runs
without OTB go on as if the plugin were not there, and a run with OTB is refused with that reason.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import wrapt
from packaging.specifiers import SpecifierSet

from verl_otb.errors import HookTargetChanged, UnsupportedVerl, VerlOtbError
from verl_otb.integration.hook import SUPPORTED, Hook
from verl_otb.integration.hooks import HOOKS

logger = logging.getLogger("verl_otb")

# hook id -> "waiting" (its module is not imported yet), "in", "out" (uninstalled), or the reason it does not fit.
# With _watched and _wrappers what a process remembers of the hooks.
_status: dict[str, str | VerlOtbError] = {}
_watched: set[str] = set()
_wrappers: dict[str, Callable[..., Any]] = {}  # hook id -> the function of ours that verl calls
_MARK = "__verl_otb_hook__"


def install(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Put every hook in, now or when its module is imported. Twice is as once."""
    for hook in hooks:
        if _status.get(hook.id) in ("waiting", "in"):
            continue
        _status[hook.id] = "waiting"
        if hook.id not in _watched:
            _watched.add(hook.id)
            wrapt.register_post_import_hook(functools.partial(_on_import, hook), hook.module)
        elif hook.module in sys.modules:  # after uninstall: the watch has fired already
            _on_import(hook, sys.modules[hook.module])


def uninstall(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Take every hook out; verl does what it did. Hooks still waiting will not go in.

    A wrapper that somebody else has wrapped since stays in its place, and passes every call straight to verl.
    """
    for hook in reversed(hooks):
        if _status.get(hook.id) == "in":
            if hook.kind == "register":
                _handler_module(hook).unregister()
            else:
                owner, name = _owner(hook, sys.modules[hook.module])
                ours = _wrappers[hook.id]
                if vars(owner)[name] is ours:
                    setattr(owner, name, ours.__wrapped__)  # type: ignore[attr-defined]
                    del _wrappers[hook.id]
        _status[hook.id] = "out"


def status() -> dict[str, str | VerlOtbError]:
    """What became of each hook: `waiting`, `in`, `out`, or the error that says why it does not fit."""
    return dict(_status)


def require_hooks() -> None:
    """Refuse a verl out of range, and raise the stored reason if a hook does not fit. Called wherever OTB is about
    to be used; hooks that still wait for their module say nothing, so the version is looked at by itself.

    Raises:
        UnsupportedVerl, HookTargetChanged, VerlOtbError
    """
    version = verl_version()
    if not within(version, SUPPORTED):
        raise UnsupportedVerl(version, SUPPORTED)
    for reason in _status.values():
        if isinstance(reason, VerlOtbError):
            raise reason


@functools.cache  # asked at every advantage computation
def within(version: str, versions: str) -> bool:
    """Whether a version is in a range (PEP 440), pre-releases included."""
    return SpecifierSet(versions).contains(version, prereleases=True)


def verl_version() -> str:
    """The version of verl in this process (set before verl loads its plugins), else the installed one."""
    return getattr(sys.modules.get("verl"), "__version__", None) or metadata.version("verl")


def _on_import(hook: Hook, module: Any) -> None:
    if _status.get(hook.id) != "waiting":
        return
    try:
        _put_in(hook, module)
        _status[hook.id] = "in"
    except Exception as error:  # never into verl's import: kept, said once, raised where OTB is used
        first = not any(isinstance(reason, VerlOtbError) for reason in _status.values())
        if not isinstance(error, VerlOtbError):
            error = VerlOtbError(f"hook `{hook.id}` could not be put into {hook.target}: {error!r}")
        _status[hook.id] = error
        if os.environ.get("VERL_OTB_STRICT") == "1":
            # verl's plugin loader swallows every Exception; SystemExit is none.
            raise SystemExit(str(error)) from error
        if first:
            logger.warning("verl-otb is off; other estimators train as without it. Reason: %s", error)


def _put_in(hook: Hook, module: Any) -> None:
    version = verl_version()
    if not within(version, hook.verl):
        raise _changed(hook, version, f"verl {version}")
    try:
        owner, name = _owner(hook, module)
        original = vars(owner)[name]
    except (AttributeError, KeyError):
        raise _changed(hook, version, "no such attribute") from None
    if hook.id in _wrappers or getattr(original, _MARK, None) == hook.id:
        return
    if original in _wrappers.values():  # a copy that `from … import` made of what another hook had put in
        original = original.__wrapped__
    found = parameters(original)
    if found[: len(hook.expects)] != hook.expects:
        raise _changed(hook, version, f"parameters ({', '.join(found)})")
    handler = getattr(_handler_module(hook), hook.handler.partition(":")[2])
    if hook.kind == "register":
        handler()
    else:
        _wrappers[hook.id] = _wrapped(hook, original, handler)
        setattr(owner, name, _wrappers[hook.id])


def parameters(target: Any) -> tuple[str, ...]:
    """The names of a function's parameters; `Function.apply` of autograd takes those of its `forward`, less ctx."""
    function = getattr(target, "__self__", None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return tuple(inspect.signature(function.forward).parameters)[1:]
    return tuple(inspect.signature(target).parameters)


def _wrapped(hook: Hook, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    # A plain function, not wrapt's FunctionWrapper: Ray pickles these.
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _status[hook.id] == "out":
            return original(*args, **kwargs)
        return handler(original, *args, **kwargs)

    setattr(wrapped, _MARK, hook.id)
    return wrapped


def _changed(hook: Hook, version: str, found: str) -> HookTargetChanged:
    expected = f"parameters ({', '.join(hook.expects)})"
    return HookTargetChanged(hook.id, hook.target, expected, found, version, SUPPORTED)


def _owner(hook: Hook, module: Any) -> tuple[Any, str]:
    *path, name = hook.qualname.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _handler_module(hook: Hook) -> Any:
    return importlib.import_module(hook.handler.partition(":")[0])
