"""The default journal: one SQLite file in WAL mode, synchronous=FULL, in a state directory that is locked.

Rows are written by one thread and read over a connection of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from nvrx.core.ids import JournalId, Revision, RunId

from . import JournalError, Row
from . import rows as stored
from .codec import ManyDecoder, UnreadableFact, decode
from .rows import FILE_ERRORS, told
from .state_dir import FILE_NAME, hold, refuse_network_file_system

log = logging.getLogger("nvrx.coord")

FORMAT = 2
FORMAT_WITHOUT_CHECKS = 1
WAL_KEPT_BYTES = 16 * 1024 * 1024
"""What the write-ahead log is cut to once its rows are in the file; a large batch makes it larger for a while."""
_PATIENCE_S = 5.0
_PRIMARY_CODE = 0xFF
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT}
"""SQLITE_ERROR: our statements are right, so it is the schema that is not ours."""


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
            refuse_network_file_system(directory)
        self._lock = hold(directory)
        try:
            self._writer = self._connect()
            self.journal_id = self._prepare()
            self._reader = self._connect()
            self._file = os.stat(self._path)
        except FILE_ERRORS as error:
            os.close(self._lock)
            raise self._failed("open", error) from error
        except JournalError:
            os.close(self._lock)
            raise
        self._adding = stored.Writer(self._writer)
        self._reading = threading.Lock()

    def _connect(self) -> sqlite3.Connection:
        connection = stored.connect(str(self._path), _PATIENCE_S)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA journal_size_limit={WAL_KEPT_BYTES}")
        return connection

    def _prepare(self) -> JournalId:
        """Make what is missing, bring an older format up to date, and empty the write-ahead log."""
        with _transaction(self._writer):
            meta = read_meta(self._writer)
            if not meta:
                meta = {"format": str(FORMAT), "journal_id": uuid.uuid4().hex}
                make_tables(self._writer, meta)
        problem = format_problem(meta)
        if problem is not None:
            raise JournalError(damage_told(self._path, problem))
        require_known(self._path, meta)
        if int(meta["format"]) == FORMAT_WITHOUT_CHECKS:
            with _transaction(self._writer):
                count = _add_checks(self._writer)
            log.info("the journal %s had format 1 and has format 2 now: %d rows got a check", self._path, count)
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return JournalId(meta["journal_id"])

    def load(self) -> Iterator[Row]:
        decoder = ManyDecoder()
        try:
            heads = stored.heads(self._reader)
            for run_id in sorted(heads.keys() | set(stored.run_ids(self._reader))):
                name = RunId(run_id.decode("utf-8", "replace"))
                for row in stored.rows_of(self._reader, run_id, heads.get(run_id), decoder):
                    yield Row(name, row.revision, row.fact)
        except stored.FromNewer as error:
            raise JournalError(newer_told(self._path, error)) from error
        except stored.Damaged as error:
            raise JournalError(damage_told(self._path, str(error))) from error

    def append(self, rows: Sequence[Row]) -> None:
        self._require_in_place()
        try:
            with _transaction(self._writer):
                heads = self._adding.add(rows)
        except FILE_ERRORS as error:
            raise self._failed("write", error) from error
        self._adding.remember(heads)

    def _require_in_place(self) -> None:
        """What was deleted, or moved away, is written to without an error, and is gone with this process."""
        try:
            is_there = os.path.samestat(os.stat(self._path), self._file)
        except OSError:
            is_there = False
        if not is_there:
            raise JournalError(
                f"the journal {self._path} was deleted or replaced while it was in use: nothing can be kept in it; put "
                "it back, or start again without it (nodes join anew)"
            )

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        query = (
            "SELECT revision, kind, body FROM facts WHERE run_id = ? AND revision >= ? ORDER BY revision LIMIT ?",
            (run_id, first, limit),
        )
        try:
            with self._reading, closing(self._reader.execute(*query)) as cursor:
                return [Row(run_id, Revision(at), decode(kind.decode(), body)) for at, kind, body in cursor]
        except FILE_ERRORS as error:
            raise self._failed("read", error) from error
        except (UnreadableFact, UnicodeError) as error:
            raise JournalError(damage_told(self._path, f"run {run_id}: unreadable row ({error})")) from error

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
        os.close(self._lock)

    def _failed(self, what: str, error: Exception) -> JournalError:
        if isinstance(error, UnicodeDecodeError) or primary_code(error) in _DAMAGE:
            return JournalError(damage_told(self._path, told(error)))
        return JournalError(f"cannot {what} the journal {self._path}: {error}")


def primary_code(error: Exception) -> int:
    """SQLite's code for what went wrong; 0 where it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & _PRIMARY_CODE


def damage_told(path: Path, problem: str) -> str:
    """The one line about a damaged journal."""
    return (
        f"the journal {path} is damaged: {problem}; put back a copy of the state directory, or keep each run up to the "
        f"damage with: nvrx-coord repair --state-dir {path.parent}"
    )


def newer_told(path: Path, error: stored.FromNewer) -> str:
    """The one line about a journal that is whole, and says more than this version knows."""
    return (
        f"the journal {path} was written by a newer version: {error}; start the newer nvrx-coord, or give another "
        "--state-dir"
    )


def make_tables(connection: sqlite3.Connection, meta: dict[str, str]) -> None:
    """The tables of a new journal."""
    for statement in stored.TABLES:
        connection.execute(statement)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Format and journal id; empty in a new file. Raises sqlite3.Error."""
    with closing(connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'")) as cursor:
        if cursor.fetchone()[0] == 0:
            return {}
    with closing(connection.execute("SELECT key, value FROM meta")) as cursor:
        found = {stored.as_bytes(key): stored.as_bytes(value) for key, value in cursor}
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in found.items()}


def format_problem(meta: Mapping[str, str]) -> str | None:
    """Why a journal is none of ours; None if it is one."""
    found = meta.get("format", "")
    if "journal_id" in meta and found.isascii() and found.isdigit():
        return None
    return f"its format is {found[:32]!a}, which is none of ours"


def require_known(path: Path, meta: Mapping[str, str]) -> None:
    """Raise JournalError if a newer version wrote the journal."""
    if int(meta["format"]) > FORMAT:
        raise JournalError(
            f"the journal {path} has format {meta['format']}, this version reads up to {FORMAT}; start the newer "
            "nvrx-coord, or give another --state-dir"
        )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite ends a transaction itself where the disk is full
            connection.execute("ROLLBACK")
        raise


def _add_checks(connection: sqlite3.Connection) -> int:
    """Format 1 had no checks: its rows get those that they would have. Returns how many."""
    for statement in stored.TABLES:
        connection.execute(statement)
    connection.execute("ALTER TABLE facts ADD COLUMN chain INTEGER NOT NULL DEFAULT 0")
    heads: dict[bytes, stored.Head] = {}
    found: list[tuple[int, bytes, int]] = []
    with closing(connection.execute("SELECT run_id, revision, kind, body FROM facts ORDER BY run_id, revision")) as all:
        for run_id, revision, kind, body in all:
            before = heads.get(run_id, stored.BEFORE_FIRST)
            check = stored.next_check(before.check, run_id, revision, kind, body)
            heads[run_id] = stored.Head(revision, check)
            found.append((check, run_id, revision))
    connection.executemany("UPDATE facts SET chain = ? WHERE run_id = CAST(? AS TEXT) AND revision = ?", found)
    stored.set_heads(connection, heads)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (str(FORMAT),))
    return len(found)
