"""A table, into a CSV and onto the screen."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows of the same keys, and print them. Floats get four significant digits."""
    text = [{key: _short(value) for key, value in row.items()} for row in rows]
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(text)
    widths = {key: max(len(key), *(len(row[key]) for row in text)) for key in text[0]}
    for row in [dict(zip(widths, widths, strict=True)), *text]:
        print("  ".join(row[key].rjust(width) for key, width in widths.items()))


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"  # less is rounding
