"""Processes that a job starts, and the certainty that none outlives it. Knows nothing of what they do.

This process is made a subreaper: whatever a job leaves behind becomes its child, so that walking the tree
below it finds everything, also workers that lead a session of their own and whose launcher is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
_CLEAN_UP_LIMIT_S = 20.0
REPOSITORY = Path(__file__).resolve().parents[1]  # jobs start there, so that `python -m nvrx...` is found
_CLEAN_UP_PAUSE_S = 0.01


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl: {os.strerror(errno)}")


def start(argv: Sequence[str], env: Mapping[str, str], log: Path, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start in a session of its own, so that Ctrl-C reaches this program only; output goes to the log."""
    with log.open("ab") as file:
        out: IO[bytes] | int = file if stdout is None else stdout
        return subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=file,
            start_new_session=True,
        )


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                # The name may hold blanks and brackets; the parent is the second field after its last one.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def descendants(of: int | None = None) -> list[int]:
    """Process ids below a process, this one unless another is named; parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found, queue = [], [os.getpid() if of is None else of]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """SIGKILL and reap all that was started from here, parents first, so that none restarts a child."""
    deadline_s = time.monotonic() + _CLEAN_UP_LIMIT_S
    while pids := descendants():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"processes {pids} outlived SIGKILL for {_CLEAN_UP_LIMIT_S} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(_CLEAN_UP_PAUSE_S)


def suspend(pid: int) -> None:
    """SIGSTOP to a process and all below it, parents first: for its peers it falls silent, and closes nothing."""
    for one in [pid, *descendants(pid)]:
        os.kill(one, signal.SIGSTOP)
