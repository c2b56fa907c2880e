"""The checks of one process: this one, or a Ray worker.

verl is imported by name: that it is missing or broken is what is to be found out.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_otb.doctor import kernels
from verl_otb.doctor.result import Result, failed, ok, reason, skipped
from verl_otb.errors import VerlOtbError
from verl_otb.integration import patching
from verl_otb.integration.hook import SUPPORTED, Hook
from verl_otb.integration.hooks import HOOKS, TRAINER

PLUGIN = "verl_otb.plugin"
REPORT = "This should not be: please report it, with the facts above."
# Without these no run starts; what else verl has may want packages that a run does not use.
EVERY_RUN = ("verl.trainer.ppo.core_algos", "verl.utils.config", "verl.trainer.main_ppo", TRAINER)

Check = Callable[[bool], Iterator[Result]]


def examine(external_lib: bool = False) -> Iterator[Result]:
    """Every check of the table, in its order.

    Args:
        external_lib: the run names the plugin in `actor_rollout_ref.model.external_lib`.
    """
    for name, check, needs_verl in CHECKS:
        if needs_verl and not imported("verl"):
            yield skipped(name, "verl cannot be imported")
        else:
            yield from guarded(name, check(external_lib))


def guarded(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """These results; if the check itself breaks, that is one, with the reason."""
    try:
        yield from results
    except Exception as error:
        yield failed(name, f"the check itself failed: {reason(error)}", REPORT)


def imported(module: str) -> bool:
    return sys.modules.get(module) is not None


def attempt(module: str) -> BaseException | None:
    """Import a module; what it raised, or None. A plugin ends the process by SystemExit where verl hides the rest."""
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        return error
    return None


def versions(_: bool) -> Iterator[Result]:
    """verl-otb's own requirements, as its metadata has them, against what is installed."""
    try:
        own = metadata.metadata("verl-otb")
    except metadata.PackageNotFoundError:
        todo = "Install it into this Python: pip install . in a clone of verl-otb."
        yield failed("versions", "verl-otb is importable, but not installed", todo)
        return
    required = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    found = [("python", platform.python_version(), SpecifierSet(own["Requires-Python"]))]
    found += [(each.name, metadata.version(each.name), each.specifier) for each in required if each.marker is None]
    for name, version, range_ in found:
        if not range_.contains(version, prereleases=True):
            yield failed("versions", f"{name} {version}, {range_} is needed", f'Install "{name}{range_}".')
            return
    yield ok("versions", ", ".join(f"{name} {version} ({range_ or 'any'})" for name, version, range_ in found))


def verl(_: bool) -> Iterator[Result]:
    if error := attempt("verl"):
        yield failed("verl", f"cannot be imported: {reason(error)}", 'Install or mend it: pip install "verl-otb[verl]"')
        return
    version = patching.verl_version()
    if patching.within(version, SUPPORTED):
        yield ok("verl", f"{version} (supported: {SUPPORTED})")
    else:
        todo = f'Install "verl{SUPPORTED}", or a verl-otb that supports {version}.'
        yield failed("verl", f"{version} is not supported, {SUPPORTED} is", todo)


def _switched_on(name: str) -> bool:
    """Whether verl's policy of entry points has this one in it; read as verl reads it."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    return policy == "auto" or name in [part.strip() for part in policy.split(",")]


def entry_point(external_lib: bool) -> Iterator[Result]:
    values = [entry.value for entry in metadata.entry_points(group="verl.plugins") if entry.name == "otb"]
    if PLUGIN not in values:
        problem = "no entry point otb in the group verl.plugins"
        todo = "Install verl-otb into this Python: pip install . in a clone of verl-otb."
    elif not _switched_on("otb"):
        problem = f"switched off by VERL_USE_EXTERNAL_PLUGINS={os.environ['VERL_USE_EXTERNAL_PLUGINS']}"
        todo = f"Unset that variable, or add otb to it, or set VERL_USE_EXTERNAL_MODULES={PLUGIN}."
    else:
        yield ok("entry_point", f"otb = {PLUGIN}")
        return
    other = _loaded_by_variable() or ("the run's external_lib" if external_lib else "")
    if other:
        yield skipped("entry_point", f"{problem}; {other} loads the plugin")
    else:
        yield failed("entry_point", problem, todo)


def _loaded_by_variable() -> str:
    named = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    return "VERL_USE_EXTERNAL_MODULES" if PLUGIN in named else ""


def plugin(external_lib: bool) -> Iterator[Result]:
    how = _loaded_by_variable() or "the entry point"
    if not imported(PLUGIN) and external_lib:  # as the trainer and the workers import it
        how = "the run's external_lib, in the trainer and the workers; the driver is without it"
        attempt(PLUGIN)
    if not imported(PLUGIN):
        todo = "See entry_point, or add the override actor_rollout_ref.model.external_lib=verl_otb.plugin"
        yield failed("plugin", "`import verl` did not load it: OTB would not train", todo)
    elif not patching.status():
        yield failed("plugin", f"loaded by {how}, but has put no hook in", "The log above has the reason.", REPORT)
    else:
        yield ok("plugin", f"loaded by {how}")


def accelerator(_: bool) -> Iterator[Result]:
    """verl's own choice of a platform."""
    try:
        chosen = import_module("verl.plugin.platform").get_platform()
    except ValueError as error:  # a name that nobody has registered
        todo = "Correct VERL_PLATFORM"
        if os.environ.get("VERL_PLATFORM") == "cpu" and not _switched_on("otb_cpu"):
            todo = "Name the entry point otb_cpu in VERL_USE_EXTERNAL_PLUGINS"
        yield failed("accelerator", reason(error), f"{todo}, or unset it.")
        return
    if chosen.is_available():
        yield ok("accelerator", f"verl trains on {chosen.device_name} ({type(chosen).__name__})")
    else:
        yield skipped("accelerator", f"this process has none; verl would look for {chosen.device_name}")


def hooks(_: bool) -> Iterator[Result]:
    """Each hook, after the import of its module."""
    if not patching.status():
        yield skipped("hooks", "the plugin is not loaded")
        return
    errors = {module: attempt(module) for module in dict.fromkeys(hook.module for hook in HOOKS)}
    for hook in HOOKS:
        yield judged(hook, errors[hook.module])


def judged(hook: Hook, error: BaseException | None) -> Result:
    check, state = f"hook.{hook.id}", patching.status()[hook.id]
    if isinstance(state, VerlOtbError):
        found = getattr(state, "found", None)
        detail = f"{hook.target}: expected ({', '.join(hook.expects)}), found {found}" if found else reason(state)
        return failed(check, detail, str(state).splitlines()[-1])
    if isinstance(error, SystemExit):
        return skipped(check, f"VERL_OTB_STRICT=1 ended the import of {hook.module}: see the hook that does not fit")
    if error is not None:
        missing = getattr(error, "name", None) or "verl"
        if isinstance(error, ModuleNotFoundError) and missing.split(".")[0] != "verl" and hook.module not in EVERY_RUN:
            return skipped(check, f"{hook.module} needs {missing}, which is not installed")
        return failed(check, f"{hook.module} cannot be imported: {reason(error)}", "Install what it needs.")
    if state != "in":
        return failed(check, f"{state}, although {hook.module} is imported", REPORT)
    return ok(check, hook.target)


def estimators(_: bool) -> Iterator[Result]:
    from verl_otb.integration.estimators import OURS

    registry = import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    for name, ours in OURS.items():
        found = registry.get(name)
        if found is ours:
            yield ok(f"estimator.{name}", "ours, in verl's registry")
        else:
            what = f"verl's registry has {getattr(found, '__module__', found)}, not ours"
            yield failed(f"estimator.{name}", what, "Load the plugin: see entry_point and plugin.")


# The row's name, the check, and whether it needs verl.
CHECKS: tuple[tuple[str, Check, bool], ...] = (
    ("versions", versions, False),
    ("verl", verl, False),
    ("entry_point", entry_point, False),
    ("plugin", plugin, True),
    ("accelerator", accelerator, True),
    ("hooks", hooks, True),
    ("estimators", estimators, True),
    ("kernels", kernels.check, False),
)
