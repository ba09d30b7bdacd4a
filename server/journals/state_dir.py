"""The state directory: held by one coordinator at a time, and on a file system where SQLite is safe (rule J6).

Knows nothing of what is in the journal.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from . import JournalError, StateTaken

FILE_NAME = "journal.sqlite3"
WAL_SUFFIX = "-wal"
SHM_SUFFIX = "-shm"
LOCK_NAME = "lock"
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs"}


def hold(directory: Path) -> int:
    """Hold the directory until the descriptor returned is closed; the lock file has the holder's pid.

    Raises StateTaken or JournalError.
    """
    path = directory / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(
            f"cannot write in the state directory {directory}: {error.strerror}; give another with --state-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StateTaken(
            f"the state directory {directory} is taken by the coordinator with pid {holder}; stop that one, or give "
            "another with --state-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def refuse_network_file_system(directory: Path) -> None:
    """SQLite's WAL needs shared memory between processes of one host: unsafe on a network file system (J6)."""
    where = directory.resolve()
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, file_system, *_ = line.split(" ")
        point = mounted.replace("\\040", " ")
        if (where == Path(point) or Path(point) in where.parents) and len(point) >= len(best):
            best, kind = point, file_system
    if kind in _NETWORK_FILE_SYSTEMS:
        raise JournalError(
            f"the state directory {directory} is on a network file system ({kind}), where SQLite's journal is not "
            "safe; give a local --state-dir, or --allow-network-state"
        )
