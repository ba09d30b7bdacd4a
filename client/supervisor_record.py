"""One supervisor per key on a node: its lock, its record of running workers, and what a dead one left behind.

Must not know: the agent, the protocol, how workers start or stop, or anything outside the standard library.
The lock is held for the supervisor's life and inherited by nobody, so it falls free exactly when that ends.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nvrx.runtime_dir import make_private

from .processes import (
    ProcessId,
    all_pids,
    descendants,
    environment_has,
    is_running,
    pid_space,
    read_stat,
    send_signals,
)

MARKER_NAME = "NVRX_SUPERVISOR"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class RunningWorker:
    local_rank: int
    id: ProcessId


class RecordError(Exception):
    """The run-time directory cannot be used; the text says why."""


def marker(supervisor: ProcessId) -> bytes:
    """An environment entry of every worker: it says whose a process is when its parents are gone."""
    return f"{MARKER_NAME}={supervisor.pid}.{supervisor.start_time_ticks}".encode()


class Record:
    """`<runtime_dir>/<key>.lock` and `<key>.json`."""

    def __init__(self, runtime_dir: bytes, key: str, identity: dict[str, Any]) -> None:
        if not _KEY.fullmatch(key):
            raise RecordError(f"{key!r} cannot name a file: letters, digits, '.', '_' and '-' only, at most 200")
        own = read_stat(os.getpid())
        assert own is not None
        self._own = own.id
        self._identity = identity
        self._json_path = os.path.join(runtime_dir, key.encode() + b".json")
        try:
            make_private(runtime_dir)
            self._lock_fd = os.open(
                os.path.join(runtime_dir, key.encode() + b".lock"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise RecordError(f"run-time directory {os.fsdecode(runtime_dir)}: {error.strerror}") from error

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RecordError(f"{os.fsdecode(self._json_path)}: no lock: {error.strerror}") from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
        return True

    def holder_pid(self) -> int | None:
        """Who holds the lock; None when it has not written its name yet."""
        text = os.pread(self._lock_fd, 32, 0)
        return int(text) if text.isdigit() else None

    def write(self, cycle: int | None, workers: Iterable[RunningWorker]) -> None:
        """Raises OSError. Not synced: after a crash of the machine no process in it is alive."""
        content = {
            "pid_space": pid_space(),
            "supervisor": _plain(self._own),
            "identity": self._identity,
            "cycle": cycle,
            "workers": [{"local_rank": worker.local_rank, **_plain(worker.id)} for worker in workers],
        }
        new_path = self._json_path + b".new"
        fd = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            json.dump(content, file)
        os.replace(new_path, self._json_path)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._json_path)

    def kill_leftovers(self) -> list[int]:
        """Under the lock: send SIGKILL to what the last supervisor left; returns those that still run.

        They are no children of ours, so nothing tells of their end: call again until none is returned.
        """
        left = self._leftovers()
        for target in left:
            send_signals(target, signal.SIGKILL)
        return [target.pid for target in left]

    def _leftovers(self) -> list[ProcessId]:
        try:
            with open(self._json_path) as file:
                content = json.load(file)
            if content["pid_space"] != pid_space():
                return []
            supervisor = _process_id(content["supervisor"])
            workers = [_process_id(worker) for worker in content["workers"]]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            return []  # not written by us, as ours are renamed into place whole
        left: dict[ProcessId, None] = {}
        for worker in workers:
            stat = read_stat(worker.pid)
            if stat is not None and stat.id == worker:
                tree = [stat, *descendants(worker.pid)]
                left.update(dict.fromkeys(each.id for each in tree if is_running(each)))
        left.update(dict.fromkeys(_session_members(supervisor)))
        return list(left)


def _session_members(supervisor: ProcessId) -> list[ProcessId]:
    """What a supervisor that was killed left in its session below workers that died with it.

    The marker is asked for as well, as the session's number may have passed to strangers.
    """
    entry = marker(supervisor)
    return [
        stat.id
        for pid in all_pids()
        if (stat := read_stat(pid)) is not None
        and stat.session_id == supervisor.pid
        and pid not in (os.getpid(), supervisor.pid)
        and is_running(stat)
        and environment_has(pid, entry)
    ]


def _plain(id: ProcessId) -> dict[str, int]:
    return {"pid": id.pid, "start_time_ticks": id.start_time_ticks}


def _process_id(plain: dict[str, Any]) -> ProcessId:
    return ProcessId(int(plain["pid"]), int(plain["start_time_ticks"]))
