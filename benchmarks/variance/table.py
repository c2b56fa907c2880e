"""A table, into a CSV and onto the screen."""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: an int from `least` on."""

    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, found {value}")
        return value

    return integer


def require_writable(directory: Path) -> None:
    """Make the directory, and end the script if that cannot be: before the work and not after it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        sys.exit(f"results cannot be written to {directory}: {error}")


def spread(
    values: Iterable[float | None], name: str, mean: Callable[[list[float]], float] = fmean
) -> dict[str, float | str]:
    """Mean, least and most of the values that are there, as three columns; empty where none is."""
    there = [value for value in values if value is not None]
    figures = (mean(there), min(there), max(there)) if there else ("", "", "")
    return dict(zip((name, f"{name}_min", f"{name}_max"), figures, strict=True))


def write_csv(rows: list[dict[str, Any]], path: Path, lineterminator: str = "\r\n") -> None:
    """Rows of the same keys, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator=lineterminator)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def write_table(rows: list[dict[str, Any]], path: Path, show: bool = True) -> None:
    """Write rows of the same keys, and print them. Floats get four significant digits."""
    text = [{key: _short(value) for key, value in row.items()} for row in rows]
    write_csv(text, path)
    if not show:
        return
    widths = {key: max(len(key), *(len(row[key]) for row in text)) for key in text[0]}
    for row in [dict(zip(widths, widths, strict=True)), *text]:
        print("  ".join(row[key].rjust(width) for key, width in widths.items()))


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) <= 1e-12 else f"{value:.4g}"  # less is rounding
