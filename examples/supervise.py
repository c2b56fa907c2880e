"""Run a command, and end its whole process tree with it: Ray and vLLM leave none of their processes behind.

    python examples/supervise.py [--timeout SECONDS] [--usage FILE] -- COMMAND...

Exits with the command's status, 124 after the timeout. FILE gets its wall time and the peak memory of the tree.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
SAMPLE_SECONDS = 3.0  # between two looks at the memory; less at first, for commands that end soon
# SystemExit passes through `finally`; the default action would leave the tree.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def tree_memory() -> int:
    """Bytes held by the tree, shared pages counted once (the sum of PSS)."""
    total = 0
    for process in descendants():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def leave(number: int, _: object) -> None:
    hold_out()
    sys.exit(128 + number)


def hold_out() -> None:
    """No further signal: whoever signals a process group sends several, and the next would interrupt the ending."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_tree() -> None:
    """Kill every descendant, until none is left."""
    hold_out()
    while True:
        for process in descendants():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        # The kernel's word, not psutil's: its list is made of many readings of /proc, and can lack a process.
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.02)


def supervise(command: list[str], timeout: float) -> tuple[int, float, int]:
    """Run `command`; returns (exit status, wall seconds, peak bytes)."""
    # Orphans of the command become children of this process, so that none is lost from sight (Linux only).
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    start, next_sample, peak = time.monotonic(), 0.0, 0
    # A session of its own: a Ctrl-C reaches this process only, and this one ends the tree.
    child = subprocess.Popen(command, start_new_session=True)
    try:
        while (status := child.poll()) is None:
            wall = time.monotonic() - start
            if wall > timeout:
                print(f"supervise: ended after {timeout:.0f} s", file=sys.stderr, flush=True)
                return 124, wall, peak
            if wall >= next_sample:
                next_sample = wall + min(wall, SAMPLE_SECONDS)
                peak = max(peak, tree_memory())
            time.sleep(0.2)
        return status, time.monotonic() - start, peak
    finally:
        end_tree()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--usage", type=Path, metavar="FILE")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    for number in SIGNALS:
        signal.signal(number, leave)
    status, wall, peak = supervise(args.command, args.timeout)
    if args.usage:
        args.usage.write_text(json.dumps({"wall_seconds": round(wall, 1), "peak_bytes": peak}))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
