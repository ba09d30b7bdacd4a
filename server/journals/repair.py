"""Makes a new journal of what can be trusted in a damaged one (`nvrx-coord repair`).

Of each run the rows up to the first that is damaged are kept: what follows may rest on what is lost. The new journal
has another id, so that nobody takes it for the old one. Nothing is deleted: the damaged files stay beside it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.ids import JournalId

from . import JournalError, rows
from .codec import ManyDecoder
from .sqlite import (
    FORMAT,
    FORMAT_WITHOUT_CHECKS,
    format_problem,
    make_tables,
    newer_told,
    primary_code,
    read_meta,
    require_known,
)
from .state_dir import FILE_NAME, SHM_SUFFIX, WAL_SUFFIX, hold

_PATIENCE_S = 5.0
_SCRATCH = ".repair-"
_OF_THE_MACHINE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN}
"""What is no fault of the file: another time it may work."""


class NoJournal(JournalError):
    """There is nothing to repair in the directory."""


@dataclass(frozen=True)
class RunFound:
    """How much of a run is whole. `cut` None: what follows cannot be counted. `problem` None: all of it is whole."""

    run_id: bytes
    head: rows.Head | None
    kept: int
    cut: int | None
    problem: str | None


@dataclass(frozen=True)
class Found:
    """What is in a journal. `problem`: of the file as a whole, None where there is none."""

    runs: tuple[RunFound, ...]
    problem: str | None
    has_checks: bool

    @property
    def is_damaged(self) -> bool:
        return self.problem is not None or any(one.problem is not None for one in self.runs)


@dataclass(frozen=True)
class Repaired:
    """What was done. `aside` and `journal_id` None: nothing was changed."""

    found: Found
    aside: Path | None = None
    journal_id: JournalId | None = None


def repair(directory: Path, *, dry_run: bool) -> Repaired:
    """Replace a damaged journal. Raises NoJournal, StateTaken or JournalError, and then nothing was changed."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise NoJournal(
            f"there is no {FILE_NAME} in {directory}; give the directory of nvrx-coord serve as --state-dir"
        )
    lock = hold(directory)
    try:
        for left in directory.glob(f"{_SCRATCH}*"):  # by one that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
            return _repair(path, Path(scratch), dry_run)
    except OSError as error:
        raise JournalError(f"cannot repair the journal {path}: {error.strerror}: {error.filename}") from error
    except sqlite3.Error as error:
        raise JournalError(f"cannot repair the journal {path}: {error}") from error
    finally:
        os.close(lock)


def _repair(path: Path, scratch: Path, dry_run: bool) -> Repaired:
    """SQLite opens a copy only: it would change the files that are to be kept as they are."""
    copy, new = scratch / FILE_NAME, scratch / "new"
    for suffix in ("", WAL_SUFFIX):
        if (source := _beside(path, suffix)).exists():
            shutil.copyfile(source, _beside(copy, suffix))
    with closing(rows.connect(str(copy), _PATIENCE_S)) as connection:
        found = _examine(path, connection)
        if dry_run or not found.is_damaged:
            return Repaired(found)
        journal_id = JournalId(uuid.uuid4().hex)
        _write(new, journal_id, connection, found)
    return Repaired(found, _replace(path, new), journal_id)


def _examine(path: Path, connection: sqlite3.Connection) -> Found:
    has_checks, problem = True, None
    try:
        meta = read_meta(connection)
        problem = format_problem(meta)
        if problem is None:
            require_known(path, meta)
            has_checks = int(meta["format"]) != FORMAT_WITHOUT_CHECKS
        problem = problem or _integrity(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except rows.FILE_ERRORS as error:
        if primary_code(error) in _OF_THE_MACHINE:
            raise
        problem = rows.told(error)
    heads: dict[bytes, rows.Head] = {}
    names: set[bytes] = set()
    try:
        if has_checks:
            heads = rows.heads(connection)
    except rows.Damaged as error:
        problem = problem or str(error)
    try:
        names.update(rows.run_ids(connection))
    except rows.Damaged as error:
        problem = problem or str(error)
    try:
        runs = [_examine_run(connection, one, heads.get(one), has_checks) for one in sorted(names | heads.keys())]
    except rows.FromNewer as error:
        raise JournalError(newer_told(path, error)) from error
    return Found(tuple(runs), problem, has_checks)


def _integrity(connection: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with the file, also where no row is; None if nothing."""
    with closing(connection.execute("PRAGMA integrity_check(1)")) as cursor:
        first = bytes(cursor.fetchone()[0]).decode("utf-8", "replace").splitlines()
    return None if first == ["ok"] else " ".join(first)


def _examine_run(connection: sqlite3.Connection, run_id: bytes, head: rows.Head | None, has_checks: bool) -> RunFound:
    kept = 0
    try:
        for row in rows.rows_of(connection, run_id, head, ManyDecoder(), has_checks=has_checks):
            kept = row.revision
    except rows.FromNewer:
        raise  # whole: to cut the run off there would only lose what it says
    except rows.Damaged as error:
        cut = _count_after(connection, run_id, kept) if head is None else max(0, head.revision - kept)
        return RunFound(run_id, head, kept, cut, str(error))
    return RunFound(run_id, head, kept, 0, None)


def _count_after(connection: sqlite3.Connection, run_id: bytes, kept: int) -> int | None:
    query = "SELECT count(*) FROM facts WHERE run_id = CAST(? AS TEXT) AND revision > ?"
    try:
        with closing(connection.execute(query, (run_id, kept))) as cursor:
            return int(cursor.fetchone()[0])
    except rows.FILE_ERRORS:
        return None


def _write(path: Path, journal_id: JournalId, source: sqlite3.Connection, found: Found) -> None:
    with closing(rows.connect(str(path), _PATIENCE_S)) as connection:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN IMMEDIATE")
        make_tables(connection, {"format": str(FORMAT), "journal_id": journal_id})
        for run in found.runs:
            last = rows.BEFORE_FIRST
            for row in _kept(source, run, found.has_checks):
                rows.insert(connection, [(row.run_id, row.revision, row.kind, row.body, row.check)])
                last = rows.Head(row.revision, row.check)
            if last != rows.BEFORE_FIRST:
                rows.set_heads(connection, {run.run_id: last})
        connection.execute("COMMIT")


def _kept(source: sqlite3.Connection, run: RunFound, has_checks: bool) -> Iterator[rows.Checked]:
    """The rows to keep, as they are: a newer version may have written fields that this one does not know."""
    if run.kept == 0:
        return
    for row in rows.rows_of(source, run.run_id, run.head, ManyDecoder(), has_checks=has_checks):
        yield row
        if row.revision == run.kept:
            return


def _replace(path: Path, new: Path) -> Path:
    """Put the new file in the place of the old ones, of which copies stay; where these are."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("", WAL_SUFFIX):
        if (source := _beside(path, suffix)).exists():
            shutil.copy2(source, _beside(aside, suffix))
            _sync(_beside(aside, suffix))
    _sync(path.parent)
    # The old log goes first: SQLite would play it into whatever file stands there.
    for suffix in (WAL_SUFFIX, SHM_SUFFIX):
        _beside(path, suffix).unlink(missing_ok=True)
    os.replace(new, path)
    _sync(path.parent)
    return aside


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
