"""Rows of facts in an SQLite file, each with a check that covers it and all rows of its run before it.

The check is a CRC-32 that runs on from row to row: a row that was changed, moved, lost or put in breaks it from there
on. Where each run ends stands in a table of its own, written with the rows: SQLite can take a bad page for the end of
a run and say nothing. All this finds accidents, not forgers. Knows nothing of files, locks and formats.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from nvrx.core.facts import Fact
from nvrx.core.ids import Revision

from . import Row
from .codec import ManyDecoder, UnknownKind, UnreadableFact, encode, kind_of

TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS facts (run_id TEXT NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, chain INTEGER NOT NULL, PRIMARY KEY (run_id, revision)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS heads (run_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, chain INTEGER NOT NULL) "
    "WITHOUT ROWID",
)
_SET_HEAD = (
    "INSERT INTO heads VALUES (CAST(? AS TEXT), ?, ?) "
    "ON CONFLICT (run_id) DO UPDATE SET revision = excluded.revision, chain = excluded.chain"
)
_INSERT = "INSERT INTO facts VALUES (CAST(? AS TEXT), ?, CAST(? AS TEXT), CAST(? AS TEXT), ?)"

FILE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading a file may raise; the second where SQLite names a damaged thing in its message."""


@dataclass(frozen=True)
class Head:
    """Where a run ends: its last revision and that row's check."""

    revision: int
    check: int


BEFORE_FIRST = Head(0, 0)
"""Where a run stands that has no row."""


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
    """A row is not what was written; the message says which. `run_id` None: it cannot be told which run comes next."""

    def __init__(self, run_id: str | None, revision: int, problem: str) -> None:
        where = "the list of runs" if run_id is None else f"run {run_id} revision {revision}"
        super().__init__(f"{where}: {problem}")


class FromNewer(Damaged):
    """A row is just what was written, and this version does not know what it says."""


def told(error: Exception) -> str:
    """What SQLite said, in one line of text."""
    if isinstance(error, UnicodeDecodeError):
        return " ".join(error.object.decode("ascii", "replace").split())
    return " ".join(str(error).split())


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


def heads(connection: sqlite3.Connection) -> dict[bytes, Head]:
    """Where each run ends. Raises Damaged."""
    try:
        with closing(connection.execute("SELECT run_id, revision, chain FROM heads")) as cursor:
            return {
                as_bytes(run_id): Head(revision, chain)
                for run_id, revision, chain in cursor
                if isinstance(revision, int) and isinstance(chain, int)
            }
    except FILE_ERRORS as error:
        raise Damaged(None, 0, told(error)) from error


def run_ids(connection: sqlite3.Connection) -> Iterator[bytes]:
    """All runs of which there are rows, in order. Raises Damaged."""
    query = "SELECT run_id FROM facts WHERE run_id > CAST(? AS TEXT) ORDER BY run_id LIMIT 1"
    last = b""
    while True:
        try:
            with closing(connection.execute(query, (last,))) as cursor:
                found = cursor.fetchone()
        except FILE_ERRORS as error:
            raise Damaged(None, 0, told(error)) from error
        if found is None:
            return
        run_id = as_bytes(found[0])
        if run_id <= last:  # as SQLite orders what is no text
            raise Damaged(None, 0, f"{readable(run_id)} comes after {readable(last)}")
        yield run_id
        last = run_id


def as_bytes(value: object) -> bytes:
    """A text as the file has it; of a damaged row it may be anything."""
    return value if isinstance(value, bytes) else str(value).encode()


def rows_of(
    connection: sqlite3.Connection, run_id: bytes, head: Head | None, decoder: ManyDecoder, *, has_checks: bool = True
) -> Iterator[Checked]:
    """A run's rows in order, each checked. Raises Damaged at the first that is not what was written, or is missing."""
    chain = "chain" if has_checks else "NULL"
    query = f"SELECT revision, kind, body, {chain} FROM facts WHERE run_id = CAST(? AS TEXT) ORDER BY revision"
    last = BEFORE_FIRST
    try:
        with closing(connection.execute(query, (run_id,))) as cursor:
            for values in cursor:
                row = _checked(run_id, last, values, decoder, has_checks)
                last = Head(row.revision, row.check)
                yield row
    except FILE_ERRORS as error:
        raise Damaged(readable(run_id), last.revision + 1, told(error)) from error
    if has_checks and last != head:
        ends = "nothing says where the run ends" if head is None else f"the run ends with revision {head.revision}"
        raise Damaged(readable(run_id), last.revision + 1, f"{ends}, and the last row is that of {last.revision}")


def _checked(run_id: bytes, last: Head, values: Sequence[Any], decoder: ManyDecoder, has_checks: bool) -> Checked:
    revision, kind, body, chain = values
    wanted = last.revision + 1
    if revision != wanted:
        raise Damaged(readable(run_id), wanted, "the row is missing")
    if not (isinstance(kind, bytes) and isinstance(body, bytes)):
        raise Damaged(readable(run_id), wanted, "the row holds no text")
    check = next_check(last.check, run_id, wanted, kind, body)
    if has_checks and check != chain:
        raise Damaged(readable(run_id), wanted, "the row does not match its check")
    try:
        fact = decoder.decode(kind.decode("utf-8", "replace"), body)
    except UnknownKind as error:
        raise (FromNewer if has_checks else Damaged)(readable(run_id), wanted, str(error)) from error
    except UnreadableFact as error:
        # Nothing happened to it: a newer version wrote it, or one without checks kept what was damaged already.
        raise Damaged(readable(run_id), wanted, f"unreadable row ({error})") from error
    return Checked(run_id, Revision(wanted), kind, body, check, fact)


def insert(connection: sqlite3.Connection, rows: Iterable[tuple[bytes, int, bytes, bytes, int]]) -> None:
    """Add rows as they are, texts as bytes. Raises sqlite3.Error."""
    connection.executemany(_INSERT, rows)


def set_heads(connection: sqlite3.Connection, found: Mapping[bytes, Head]) -> None:
    """Say where runs end. Raises sqlite3.Error."""
    connection.executemany(_SET_HEAD, [(run_id, head.revision, head.check) for run_id, head in found.items()])


class Writer:
    """Adds rows over a connection; the caller has begun a transaction. Remembers where runs end."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._heads: dict[bytes, Head] = {}

    def add(self, rows: Sequence[Row]) -> dict[bytes, Head]:
        """Add rows; what to `remember` once they are durable. Raises sqlite3.Error."""
        found: dict[bytes, Head] = {}
        values: list[tuple[bytes, int, bytes, bytes, int]] = []
        for row in rows:
            run_id, kind, body = row.run_id.encode(), kind_of(row.fact).encode(), encode(row.fact).encode()
            before = found.get(run_id) or self._head(run_id)
            found[run_id] = Head(row.revision, next_check(before.check, run_id, row.revision, kind, body))
            values.append((run_id, row.revision, kind, body, found[run_id].check))
        insert(self._connection, values)
        set_heads(self._connection, found)
        return found

    def remember(self, found: Mapping[bytes, Head]) -> None:
        """These rows are durable."""
        self._heads.update(found)

    def _head(self, run_id: bytes) -> Head:
        known = self._heads.get(run_id)
        if known is not None:
            return known
        query = "SELECT revision, chain FROM heads WHERE run_id = CAST(? AS TEXT)"
        with closing(self._connection.execute(query, (run_id,))) as cursor:
            found = cursor.fetchone()
        return BEFORE_FIRST if found is None else Head(*found)
