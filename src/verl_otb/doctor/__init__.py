"""`verl-otb doctor`: is this installation sound, and will this run's configuration do?"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_otb.doctor.result import Result

DESCRIPTION = """\
Prints the facts that belong into an issue, then one line a check:
  ✓ fine   ✗ broken, with what to do   – does not apply, or cannot be checked here
With Hydra overrides it also judges that run, without starting anything: the overrides, --config-dir and --config-name
are those of `python -m verl.trainer.main_ppo`. The exit status is 1 if there is a ✗."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation, and a run's overrides",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra overrides of a run to judge")
    parser.add_argument("--config-dir", help="as verl's main takes it: another directory of configurations")
    parser.add_argument("--config-name", help="as verl's main takes it (ppo_trainer)")
    parser.add_argument(
        "--ray",
        action="store_true",
        help="the same inside a Ray worker on each node of the cluster that the run would join (RAY_ADDRESS, "
        "ray_kwargs.ray_init.address, or what `ray start` started here), else of a local one for the moment",
    )
    parser.add_argument("--json", action="store_true", help="the same for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if anything failed, else 0."""
    from verl_otb.doctor.facts import facts
    from verl_otb.doctor.result import MARKS

    found: list[Result] = []
    results = _quietly(_everything(args))
    first = [next(results), next(results)]  # of verl-otb's versions and verl's: now verl is imported if it can be
    known = facts()
    if not args.json:
        print("\n".join(f"{name:<12} {value}" for name, value in known.items()), end="\n\n")
    for result in (*first, *results):
        if not args.json:
            if result.where != (found[-1].where if found else ""):
                print(f"\nin a Ray worker on {result.where}:")
            print(result, flush=True)
        found.append(result)
    broken = any(result.status == "failed" for result in found)
    if args.json:
        print(json.dumps({"ok": not broken, "facts": known, "results": [asdict(each) for each in found]}, indent=2))
    else:
        counts = {mark: sum(result.status == status for result in found) for status, mark in MARKS.items()}
        print("\n" + ", ".join(f"{count} {mark}" for mark, count in counts.items()))
    return int(broken)


def _everything(args: argparse.Namespace) -> Iterator[Result]:
    from verl_otb.doctor.installation import attempt, examine, guarded, imported
    from verl_otb.doctor.result import failed, skipped

    if error := attempt("verl_otb.doctor.run_config"):
        yield from examine()
        yield failed("config", f"cannot be composed: {error!r}", 'Install verl: pip install "verl-otb[verl]"')
        return
    from verl_otb.doctor import run_config

    own = bool(args.overrides or args.config_dir or args.config_name)
    overrides = args.overrides if own else run_config.LEAST
    config, composition = run_config.composed(overrides, args.config_dir, args.config_name)
    external_lib = run_config.names_plugin(config)
    yield from examine(external_lib)
    yield composition
    if config is None or not imported("verl"):
        why = "verl cannot be imported" if config else "the configuration does not compose"
        yield from (skipped(name, why) for name in ("config.otb", *(["ray"] if args.ray else [])))
        return
    yield from guarded("config", run_config.judge(config, whole=own))
    if args.ray:
        from verl_otb.doctor import workers

        yield from guarded("ray", workers.check(config, external_lib))


def _quietly(results: Iterable[Result]) -> Iterator[Result]:
    """What the libraries print meanwhile goes to stderr; stdout is the doctor's, and may be JSON."""
    iterator = iter(results)
    while True:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = next(iterator, None)
        if result is None:
            return
        yield result
