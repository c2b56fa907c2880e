"""`verl-otb report RUN`: pictures of a run, as a PNG and as a page, from verl's metrics and the dump of OTB.

Needs matplotlib (the extra `plot`), which is imported late; neither verl nor a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from verl_otb.errors import VerlOtbError
from verl_otb.report.data import (
    POWER,
    REWARD,
    Group,
    Metrics,
    choose_group,
    find_dump,
    find_metrics,
    most_telling,
    names_of,
    read_metrics,
    spreads,
)
from verl_otb.report.page import page, tokens_by_energy

_WHAT = "Draw a run: reward and gradient power over its steps, and the advantages of one prompt group."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The subcommand `report`, whose `run` is ours."""
    parser: argparse.ArgumentParser = subparsers.add_parser("report", help=_WHAT, description=_WHAT)
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "RUN",
        type=Path,
        help="the run's directory, with the lines of verl's `file` logger (metrics.jsonl, or the one file of that "
        "form) and the dump (the directory itself, or dump/ in it); or such a file of lines",
    )
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="OTHER_RUN", help="runs to draw with it")
    parser.add_argument("--dump", type=Path, help="the directory of +algorithm.otb.dump_dir, where it is not in RUN")
    parser.add_argument("--step", type=int, help="a dumped step (default: the latest with the most telling group)")
    parser.add_argument(
        "--group", help="number of a prompt group in the step's file, from 1, or its uid (default: scores differ most)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a Hugging Face tokenizer: shows the responses' tokens")
    parser.add_argument("--out", type=Path, help="directory for report.png and report.html (default: that of RUN)")


def run(args: argparse.Namespace) -> int:
    """0 where there was something to draw; else, and for what is wrong in the arguments, 1 and one line on stderr."""
    try:
        _report(args)
    except VerlOtbError as error:
        print(f"verl-otb report: {error}", file=sys.stderr)
        return 1
    return 0


def _report(args: argparse.Namespace) -> None:
    pictures = _pictures()
    missing: list[str] = []
    runs = _runs(args, missing)
    files = _dump(args, missing)
    found = spreads(files, missing)
    dump = {step: files[step] for step in found}
    _compare(runs, dump, missing)
    step = most_telling(found) if found and args.step is None else args.step
    group = choose_group(dump, step, args.group) if dump else None
    sections = []
    if over_steps := pictures.of_runs(runs):
        sections.append(("The run over its steps", [over_steps]))
    if group is not None:
        heat_map, *others = pictures.of_group(group)
        sections.append((f"One prompt group: step {group.step}, group {group.number}", [[heat_map], others]))
    if not sections:
        raise VerlOtbError(f"nothing to draw. {' '.join(missing)}")
    tokens = _tokens(args, group, missing)
    title = f"verl-otb report: {names_of([args.RUN])[0]}"
    subtitle = "" if group is None else f"  ·  one prompt group of step {group.step}"
    sheet = pictures.sheet(title + subtitle, [row for _, rows in sections for row in rows], missing)
    drawn = [
        (heading, [(one.title, one.caption, pictures.png(one)) for row in rows for one in row])
        for heading, rows in sections
    ]
    html = page(title, _facts(runs, dump, group), missing, drawn, tokens)
    out = args.out or (args.RUN if args.RUN.is_dir() else args.RUN.parent)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in (("report.png", sheet), ("report.html", html.encode())):
            (out / name).write_bytes(content)
            print(out / name)
    except OSError as error:
        raise VerlOtbError(f"cannot write the report to {out}: {error}. Name another directory with --out.") from error
    for text in missing:
        print(f"not in the report: {text}")


def _pictures() -> Any:
    try:
        from verl_otb.report import pictures
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise VerlOtbError('the report needs matplotlib. Install it with: pip install "verl-otb[plot]"') from error
    return pictures


def _runs(args: argparse.Namespace, missing: list[str]) -> list[Metrics]:
    paths, runs = [args.RUN, *args.beside], []
    for path in paths:
        if not path.exists():
            raise VerlOtbError(f"{path} is not there.")
    for path, name in zip(paths, names_of(paths), strict=True):
        file = find_metrics(path)
        metrics = read_metrics(file, name) if file is not None else None
        if metrics is None or not metrics.lines:
            missing.append(
                f"{name} over its steps: no metrics in {path}. Train with trainer.logger=[console,file] and "
                "VERL_FILE_LOGGER_PATH=RUN/metrics.jsonl."
            )
            continue
        runs.append(metrics)
    for what, keys, why in (("reward", REWARD, ""), ("gradient power", (POWER,), ", which runs with OTB log")):
        without = [metrics.name for metrics in runs if not np.isfinite(metrics.series(*keys)[1]).any()]
        if without:
            missing.append(
                f"{what} of {', '.join(without)}: no number under {' or '.join(keys)} among the metrics{why}."
            )
    return runs


def _compare(runs: list[Metrics], dump: dict[int, Path], missing: list[str]) -> None:
    """A dump that goes on after the metrics is another run's, or both were left in one directory."""
    if runs and dump and max(dump) > (last := runs[0].lines[-1][0]):
        missing.append(f"nothing, but look: the dump goes to step {max(dump)}, the metrics to {last}: of another run?")


def _dump(args: argparse.Namespace, missing: list[str]) -> dict[int, Path]:
    where = args.dump or args.RUN
    files = find_dump(where)
    if not files and (args.step is not None or args.group is not None or args.dump is not None):
        raise VerlOtbError(f"--dump, --step and --group need a dump; {where} has no step_N.npz, nor dump/step_N.npz.")
    if not files:
        missing.append(
            f"a prompt group: no dump in {where}. Train with +algorithm.otb.dump_dir=RUN/dump, or name its directory "
            "with --dump."
        )
    return files


def _tokens(args: argparse.Namespace, group: Group | None, missing: list[str]) -> str:
    if group is None:
        return ""
    if group.responses is None:
        missing.append("the responses' tokens: the dump has no token ids.")
        return ""
    if args.tokenizer is None:
        missing.append("the responses' tokens: name the model's tokenizer with --tokenizer.")
        return ""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except (ImportError, OSError, ValueError) as error:
        missing.append(f"the responses' tokens: no tokenizer from {args.tokenizer}: {str(error).splitlines()[0]}")
        return ""

    def decode(token: int) -> str:
        text = str(tokenizer.decode([token]))
        # Part of a character: the tokenizer's own name of the bytes says more than a replacement mark.
        return str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text

    return tokens_by_energy(group, decode)


def _facts(runs: list[Metrics], dump: dict[int, Path], group: Group | None) -> list[tuple[str, str]]:
    facts = [(run.name, f"{len(run.lines)} lines of metrics, to step {run.lines[-1][0]}") for run in runs]
    if group is not None:
        facts.append(("dump", f"{len(dump)} steps, {min(dump)} to {max(dump)}"))
        compared = "at the same position" if group.method.align == "position" else "at their k-th generated token"
        facts.append(("prompt group", f"uid {group.uid}, {len(group.score)} responses, compared {compared}"))
        if changed := group.method.changed():
            facts.append(("options", ", ".join(f"algorithm.otb.{option}" for option in changed)))
        if group.cut:
            facts.append(("cut", f"the last {group.cut} tokens of the longest response did not fit into the dump"))
        if group.lost:
            facts.append(("lost", f"{group.lost} steps before this one are not in the dump: its disk was slow or full"))
    return facts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_otb.report", description=_WHAT)
    add_arguments(parser)
    return run(parser.parse_args(argv))
