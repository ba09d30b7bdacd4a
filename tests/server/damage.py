"""Ways to damage a journal, and journals as older versions left them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from nvrx.server.journals import Row
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.server.journals.state_dir import FILE_NAME


def written(directory: Path, rows: Sequence[Row]) -> str:
    """Add rows to a journal and close it; its id."""
    journal = SqliteJournal(directory)
    journal.append(rows)
    journal.close()
    return journal.journal_id


def change(directory: Path, *statements: str) -> None:
    """Change a closed journal by hand, with everything in the main file."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def flip(directory: Path, start: Callable[[int], int], count: int, bits: int = 0xFF) -> None:
    """Turn `bits` of `count` bytes; `start` is given the file's size."""
    path = directory / FILE_NAME
    content = bytearray(path.read_bytes())
    first = start(len(content))
    for place in range(first, first + count):
        content[place] ^= bits
    path.write_bytes(content)


def flip_text(directory: Path, text: bytes) -> None:
    """Change one character in the middle of a text that stands in the file once."""
    path = directory / FILE_NAME
    content = path.read_bytes()
    assert content.count(text) == 1
    path.write_bytes(content.replace(text, text[:-1] + b"#"))


def format_1(directory: Path, rows: Iterable[tuple[str, int, str, str]]) -> str:
    """A journal as the first version wrote it: by run, revision, kind and body. Its id."""
    directory.mkdir(exist_ok=True)
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(
            """
            CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
            CREATE TABLE IF NOT EXISTS facts (
                run_id TEXT NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
                PRIMARY KEY (run_id, revision)
            ) WITHOUT ROWID;
            INSERT INTO meta VALUES ('format', '1'), ('journal_id', '0123456789abcdef0123456789abcdef');
            """
        )
        connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    return "0123456789abcdef0123456789abcdef"


def one_line(error: BaseException) -> str:
    """The message of an error, which is one line."""
    text = str(error)
    assert len(text.splitlines()) == 1
    return text
