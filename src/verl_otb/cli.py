"""`verl-otb`: one subcommand a module, which brings its own arguments and imports what is heavy when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verl_otb import __version__, doctor, report

SUBCOMMANDS = (doctor, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `verl-otb` with these arguments (by default the process's); returns the exit status."""
    parser = argparse.ArgumentParser(prog="verl-otb", description="Tools beside the verl-otb plugin.")
    parser.add_argument("--version", action="version", version=f"verl-otb {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
