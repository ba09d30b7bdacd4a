"""What every benchmark does around its measurements: a folder, host names from files, and nothing left behind.

Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import hostnames, processes


@dataclass
class Frame:
    """Where to measure. `keep_logs`: the folder stays. `names_problem`: why names are looked up as set up here."""

    scratch: Path
    names_problem: str | None
    keep_logs: bool


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_on_sigterm(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def framed(options: argparse.Namespace, *, keep_logs: bool, where: str) -> Iterator[Frame]:
    """Measure within. `where`: in which figures look-ups would be held, if names cannot come from files only."""
    signal.signal(signal.SIGTERM, end_on_sigterm)  # the default would leave processes behind
    processes.become_subreaper()
    if options.work_dir:
        options.work_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="nvrx-bench-", dir=options.work_dir))
    frame = Frame(scratch, None, keep_logs)
    try:
        frame.names_problem = hostnames.use_files_only(scratch)
        if frame.names_problem:
            say(f"host names stay as set up here ({frame.names_problem}): {where} may hold reverse look-ups")
        yield frame
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        processes.kill_descendants()
        if not frame.keep_logs:
            shutil.rmtree(scratch, ignore_errors=True)
