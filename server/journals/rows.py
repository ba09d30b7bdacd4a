"""Rows of facts in an SQLite file, each with a check that covers it and all rows of its run before it.

The check is a CRC-32 that runs on from row to row: a row that was changed, moved, lost or put in breaks it from there
on. It finds accidents, not forgers. Knows the tables and what a row is; knows nothing of files, locks and formats.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from nvrx.core.facts import Fact
from nvrx.core.ids import Revision, RunId

from . import Row
from .codec import ManyDecoder, UnreadableFact, encode, kind_of

TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS facts (run_id TEXT NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, chain INTEGER NOT NULL, PRIMARY KEY (run_id, revision)) WITHOUT ROWID",
)
BEFORE_FIRST = 0
"""The check before a run's first row."""
_INSERT = "INSERT INTO facts VALUES (CAST(? AS TEXT), ?, CAST(? AS TEXT), CAST(? AS TEXT), ?)"


@dataclass(frozen=True)
class Checked:
    """A row as the file has it, with its check and the fact in it."""

    run_id: bytes
    revision: Revision
    kind: bytes
    body: bytes
    check: int
    fact: Fact


class Damaged(Exception):
    """A row is not what was written. `run_id` None: it cannot be told which run comes next."""

    def __init__(self, run_id: str | None, revision: int, problem: str) -> None:
        where = "the list of runs" if run_id is None else f"run {run_id} revision {revision}"
        super().__init__(f"{where}: {problem}")
        self.run_id = run_id
        self.revision = revision


def next_check(before: int, run_id: bytes, revision: int, kind: bytes, body: bytes) -> int:
    """The check of a row, from that of the row before it."""
    return zlib.crc32(body, zlib.crc32(b"%b\0%d\0%b\0" % (run_id, revision, kind), before))


def connect(path: str, patience_s: float) -> sqlite3.Connection:
    """Texts come as bytes: what is in a damaged row need not be text."""
    connection = sqlite3.connect(path, timeout=patience_s, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes
    return connection


def readable(run_id: bytes) -> str:
    """A run's id for people, however damaged."""
    text = run_id.decode("utf-8", "replace")
    return text if text.isprintable() else ascii(text)


def run_ids(connection: sqlite3.Connection) -> Iterator[bytes]:
    """All runs, in order. Raises Damaged."""
    query = "SELECT run_id FROM facts WHERE run_id > CAST(? AS TEXT) ORDER BY run_id LIMIT 1"
    last: bytes | None = b""
    while True:
        try:
            with closing(connection.execute(query, (last,))) as cursor:
                found = cursor.fetchone()
        except sqlite3.Error as error:
            raise Damaged(None, 0, str(error)) from error
        if found is None:
            return
        last = found[0] if isinstance(found[0], bytes) else str(found[0]).encode()
        yield last


def rows_of(
    connection: sqlite3.Connection, run_id: bytes, decoder: ManyDecoder, *, has_checks: bool = True
) -> Iterator[Checked]:
    """A run's rows in order, each checked. Raises Damaged at the first that is not what was written."""
    check = "chain" if has_checks else "NULL"
    query = f"SELECT revision, kind, body, {check} FROM facts WHERE run_id = CAST(? AS TEXT) ORDER BY revision"
    before, wanted = BEFORE_FIRST, 1
    try:
        with closing(connection.execute(query, (run_id,))) as cursor:
            for values in cursor:
                row = _checked(run_id, before, wanted, values, decoder, has_checks)
                before, wanted = row.check, wanted + 1
                yield row
    except sqlite3.Error as error:
        raise Damaged(readable(run_id), wanted, str(error)) from error


def _checked(
    run_id: bytes, before: int, wanted: int, values: Sequence[Any], decoder: ManyDecoder, has_checks: bool
) -> Checked:
    revision, kind, body, chain = values
    if revision != wanted:
        raise Damaged(readable(run_id), wanted, "the row is missing")
    if not (isinstance(kind, bytes) and isinstance(body, bytes)):
        raise Damaged(readable(run_id), wanted, "the row holds no text")
    check = next_check(before, run_id, wanted, kind, body)
    if has_checks and check != chain:
        raise Damaged(readable(run_id), wanted, "the row does not match its check")
    try:
        fact = decoder.decode(kind.decode("utf-8", "replace"), body)
    except UnreadableFact as error:
        # Nothing happened to it: a newer version wrote it, or one without checks kept what was damaged already.
        raise Damaged(readable(run_id), wanted, f"unreadable row ({error})") from error
    return Checked(run_id, Revision(wanted), kind, body, check, fact)


def insert(connection: sqlite3.Connection, rows: Iterable[tuple[bytes, int, bytes, bytes, int]]) -> None:
    """Add rows as they are, texts as bytes. Raises sqlite3.Error."""
    connection.executemany(_INSERT, rows)


class Writer:
    """Adds rows over a connection; the caller has begun a transaction. Remembers each run's last check."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._checks: dict[RunId, int] = {}

    def add(self, rows: Sequence[Row]) -> dict[RunId, int]:
        """Add rows; the checks to `remember` once they are durable. Raises sqlite3.Error."""
        checks: dict[RunId, int] = {}
        values: list[tuple[bytes, int, bytes, bytes, int]] = []
        for row in rows:
            before = checks.get(row.run_id)
            if before is None:
                before = self._last(row.run_id)
            run_id, kind, body = row.run_id.encode(), kind_of(row.fact).encode(), encode(row.fact).encode()
            checks[row.run_id] = next_check(before, run_id, row.revision, kind, body)
            values.append((run_id, row.revision, kind, body, checks[row.run_id]))
        insert(self._connection, values)
        return checks

    def remember(self, checks: dict[RunId, int]) -> None:
        """These rows are durable."""
        self._checks.update(checks)

    def _last(self, run_id: RunId) -> int:
        known = self._checks.get(run_id)
        if known is not None:
            return known
        query = "SELECT chain FROM facts WHERE run_id = ? ORDER BY revision DESC LIMIT 1"
        with closing(self._connection.execute(query, (run_id,))) as cursor:
            found = cursor.fetchone()
        return BEFORE_FIRST if found is None else int(found[0])
