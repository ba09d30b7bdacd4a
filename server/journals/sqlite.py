"""The default journal: one SQLite file in WAL mode, synchronous=FULL, in a state directory that is locked.

Rows are written by one thread and read over a connection of their own.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from nvrx.core.ids import JournalId, Revision, RunId

from . import JournalError, Row, StateTaken
from .codec import UnreadableFact, decode, encode, kind_of

FORMAT = 1
FILE_NAME = "journal.sqlite3"
LOCK_NAME = "lock"
_PATIENCE_S = 5.0
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs"}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (
    run_id TEXT NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run_id, revision)
) WITHOUT ROWID;
"""


class SqliteJournal:
    """A journal in `directory`, made if missing. Raises StateTaken or JournalError with one line."""

    def __init__(self, directory: Path, *, allow_network_file_system: bool = False) -> None:
        self._path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JournalError(
                f"cannot make the state directory {directory}: {error.strerror}; give another with --state-dir"
            ) from error
        if not allow_network_file_system:
            _refuse_network_file_system(directory)
        self._lock = _lock(directory)
        try:
            self._writer = self._connect()
            self.journal_id = self._prepare()
            self._reader = self._connect()
        except sqlite3.Error as error:
            os.close(self._lock)
            raise JournalError(f"cannot open the journal {self._path}: {error}") from error
        except JournalError:
            os.close(self._lock)
            raise
        self._reading = threading.Lock()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _prepare(self) -> JournalId:
        self._writer.executescript(_SCHEMA)
        with closing(self._writer.execute("SELECT key, value FROM meta")) as cursor:
            meta = dict(cursor.fetchall())
        if not meta:
            meta = {"format": str(FORMAT), "journal_id": uuid.uuid4().hex}
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._writer.execute("COMMIT")
        if not meta["format"].isdigit():
            raise JournalError(
                f"the journal {self._path} has the format {meta['format'][:32]!a}, which is none of ours"
            )
        if int(meta["format"]) > FORMAT:
            raise JournalError(
                f"the journal {self._path} has format {meta['format']}, this version reads up to {FORMAT}; "
                "start the newer nvrx-coord, or give another --state-dir"
            )
        return JournalId(meta["journal_id"])

    def load(self) -> Iterator[Row]:
        expected: dict[str, int] = {}
        for row in self._select("SELECT run_id, revision, kind, body FROM facts ORDER BY run_id, revision", ()):
            wanted = expected.get(row.run_id, 1)
            if row.revision != wanted:
                raise JournalError(
                    f"the journal {self._path} lacks revision {wanted} of run {row.run_id}; restore it from a copy"
                )
            expected[row.run_id] = wanted + 1
            yield row

    def append(self, rows: Sequence[Row]) -> None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(
                "INSERT INTO facts VALUES (?, ?, ?, ?)",
                [(row.run_id, row.revision, kind_of(row.fact), encode(row.fact)) for row in rows],
            )
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalError(f"cannot write the journal {self._path}: {error}") from error

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        with self._reading:
            return list(
                self._select(
                    "SELECT run_id, revision, kind, body FROM facts WHERE run_id = ? AND revision >= ? "
                    "ORDER BY revision LIMIT ?",
                    (run_id, first, limit),
                )
            )

    def _select(self, query: str, values: tuple[object, ...]) -> Iterator[Row]:
        try:
            with closing(self._reader.execute(query, values)) as cursor:
                for run_id, revision, kind, body in cursor:
                    try:
                        yield Row(RunId(run_id), Revision(revision), decode(kind, body))
                    except UnreadableFact as error:
                        raise JournalError(
                            f"the journal {self._path} has an unreadable row, run {run_id} revision {revision}: {error}"
                        ) from error
        except sqlite3.Error as error:
            raise JournalError(f"cannot read the journal {self._path}: {error}") from error

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
        os.close(self._lock)


def _lock(directory: Path) -> int:
    """Hold the directory for this process's life (rule J6); the lock file has the holder's pid."""
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


def _refuse_network_file_system(directory: Path) -> None:
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
