"""The workers that torch's agent started, seen from the same process: their ends at once, and what they left.

They are children of this process, which torch's agent reaps. So their ends are looked at without reaping; where it was
faster, how a worker ended is not known here. Starts, signals and decides nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank
from nvrx.core.ranks import Assignment

from .worker_environment import OURS, Place, WorkerPaths, worker_environment
from .worker_files import WorkerFiles, words_in
from .worker_start import signal_name

ERROR_FILE = b"TORCHELASTIC_ERROR_FILE="
STANDARD_ERROR = "stderr.log"
"""Where torch's agent writes a worker's standard error, beside its error file, when told to redirect it."""


@dataclass(frozen=True)
class _Watched:
    local_rank: LocalRank
    handle: int
    error_file: Path | None


class WorkerWatch:
    """The workers of one cycle. `on_exit` hears each end, without saying whether somebody had asked for it."""

    def __init__(self, on_exit: Callable[[WorkerExit], None]) -> None:
        self._on_exit = on_exit
        self._watched: dict[LocalRank, _Watched] = {}

    def add(self, local_rank: LocalRank, pid: int) -> None:
        """Watch a child of this process; one that is gone already is passed over."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        self._watched[local_rank] = one = _Watched(local_rank, handle, _error_file(pid))
        asyncio.get_running_loop().add_reader(handle, self._ended, one)

    def settle(self) -> None:
        """Hear of ends that the loop has not come to yet."""
        for one in list(self._watched.values()):
            self._ended(one)

    def close(self) -> None:
        for local_rank in list(self._watched):
            self._forget(local_rank)

    def _forget(self, local_rank: LocalRank) -> None:
        one = self._watched.pop(local_rank)
        asyncio.get_running_loop().remove_reader(one.handle)
        os.close(one.handle)

    def _ended(self, one: _Watched) -> None:
        if one.local_rank not in self._watched:
            return
        try:
            found = os.waitid(os.P_PIDFD, one.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._forget(one.local_rank)  # torch's agent has reaped it
            return
        if found is None:
            return
        self._forget(one.local_rank)
        self._on_exit(_exit_of(one, found))


def our_variables(place: Place, given: Assignment, files: WorkerFiles, failed: CycleNumber | None) -> dict[str, str]:
    """Our part of what workers see (rule G1); torch's names are its agent's own.

    `failed` is the latest cycle that failed with this node in it.
    """
    paths = WorkerPaths(
        error_file="",
        rank_map=str(files.rank_map(given.cycle)),
        failed_rank_map=str(files.failed_rank_map(failed)) if failed is not None else None,
    )
    whole = worker_environment({}, place, given, LocalRank(0), paths)
    return {name: value for name, value in whole.items() if name in OURS and name.startswith("NVRX_")}


def _exit_of(one: _Watched, found: os.waitid_result) -> WorkerExit:
    has_exited = found.si_code == os.CLD_EXITED
    if has_exited and found.si_status == 0:
        return WorkerExit(one.local_rank, 0)
    message, tail = "", ""
    if one.error_file is not None:
        words = words_in(one.error_file, one.error_file.with_name(STANDARD_ERROR))
        message, tail = words.message, words.stderr_tail
    if has_exited:
        return WorkerExit(one.local_rank, found.si_status, message=message, stderr_tail=tail)
    return WorkerExit(one.local_rank, None, signal_name(found.si_status), message, stderr_tail=tail)


def _error_file(pid: int) -> Path | None:
    """The file that a worker's errors go to, as its environment says; None where that cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = next((one for one in entries if one.startswith(ERROR_FILE)), None)
    return Path(os.fsdecode(found.removeprefix(ERROR_FILE))) if found is not None else None
