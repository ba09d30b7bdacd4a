"""`nvrx-coord repair`: keeps what is whole of a damaged journal, deletes nothing, touches no other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx.core.facts import NodeLost, RunClosed, RunState
from nvrx.core.ids import Incarnation, NodeId, Revision, RunId
from nvrx.server.cli import main
from nvrx.server.journals import JournalError, Row
from nvrx.server.journals.codec import encode, kind_of
from nvrx.server.journals.sqlite import FORMAT, SqliteJournal
from nvrx.server.journals.state_dir import FILE_NAME, WAL_SUFFIX

from .damage import change, flip, flip_text, format_1, written
from .facts import EXAMPLES

RUNS = (RunId("q"), RunId("r"), RunId("s"))
LAST = len(EXAMPLES)
ROWS = [Row(run_id, Revision(place), fact) for run_id in RUNS for place, fact in enumerate(EXAMPLES, start=1)]
FLIPS = 5000 if os.environ.get("NVRX_SOAK") else 150
SEED = 7


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command: its exit code, standard output and standard error."""

    def run(directory: Path, *options: str) -> tuple[int, str, str]:
        code = main(["repair", "--state-dir", str(directory), *options])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return run


def files(directory: Path) -> dict[str, bytes]:
    """All files but the lock, which has the pid of whoever was there last."""
    return {one.name: one.read_bytes() for one in directory.iterdir() if one.name != "lock"}


def loaded(directory: Path) -> list[Row]:
    journal = SqliteJournal(directory)
    try:
        return list(journal.load())
    finally:
        journal.close()


def of(rows: list[Row], run_id: RunId) -> list[Row]:
    return [one for one in rows if one.run_id == run_id]


@pytest.mark.rule("J6")
def test_a_whole_journal_is_left_as_it_is(tmp_path: Path, told: Callable[..., tuple[int, str, str]]) -> None:
    written(tmp_path, ROWS)
    before = files(tmp_path)
    for options in ((), ("--dry-run",)):
        code, out, err = told(tmp_path, *options)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"the journal in {tmp_path} is whole; nothing was changed"
        assert f"run r: kept up to revision {LAST}" in out
        assert files(tmp_path) == before


@pytest.mark.rule("J6", "E5")
def test_each_run_is_kept_up_to_its_damage(tmp_path: Path, told: Callable[..., tuple[int, str, str]]) -> None:
    journal_id = written(tmp_path, ROWS)
    change(tmp_path, "UPDATE facts SET body = replace(body, 'n0', 'n9') WHERE run_id = 'r' AND revision = 4")
    change(tmp_path, "DELETE FROM facts WHERE run_id = 's' AND revision = 1")
    before = files(tmp_path)
    cut = [
        f"run q: kept up to revision {LAST}",
        f"run r: kept up to revision 3, {LAST - 3} rows cut (run r revision 4: the row does not match its check)",
        f"run s: nothing kept, {LAST} rows cut (run s revision 1: the row is missing)",
    ]
    code, out, _ = told(tmp_path, "--dry-run")
    assert (code, out.splitlines()) == (0, [*cut, "nothing was changed; without --dry-run it would be cut so"])
    assert files(tmp_path) == before

    code, out, _ = told(tmp_path)
    aside = tmp_path / f"{FILE_NAME}.damaged-1"
    assert (code, out.splitlines()[:-1]) == (0, cut)
    assert out.splitlines()[-1].startswith(f"the damaged journal is {aside}; the new one has the id ")
    assert aside.read_bytes() == before[FILE_NAME]
    assert set(files(tmp_path)) == {FILE_NAME, aside.name}

    journal = SqliteJournal(tmp_path)
    assert journal.journal_id != journal_id
    assert out.strip().endswith(journal.journal_id)
    assert list(journal.load()) == [*of(ROWS, RUNS[0]), *of(ROWS, RUNS[1])[:3]]
    journal.append(of(ROWS, RUNS[1])[3:5])
    journal.close()
    assert len(loaded(tmp_path)) == LAST + 5
    assert told(tmp_path)[1].startswith(f"the journal in {tmp_path} is whole")

    change(tmp_path, "DELETE FROM facts WHERE run_id = 'q' AND revision = 7")
    assert told(tmp_path)[0] == 0
    assert set(files(tmp_path)) == {FILE_NAME, aside.name, f"{FILE_NAME}.damaged-2"}


@pytest.mark.rule("J6")
def test_rows_in_the_log_are_kept_too(tmp_path: Path, told: Callable[..., tuple[int, str, str]]) -> None:
    """Files as a killed coordinator leaves them: what came last stands in the log alone."""
    closed = [
        Row(RUNS[0], Revision(place), RunClosed(1.0, RunState.FAILED, f"why-{place:03}", 1)) for place in range(1, 300)
    ]
    live = tmp_path / "live"
    written(live, closed)
    journal = SqliteJournal(live)
    journal.append(of(ROWS, RUNS[2]))
    for suffix in ("", WAL_SUFFIX):
        (tmp_path / (FILE_NAME + suffix)).write_bytes((live / (FILE_NAME + suffix)).read_bytes())
    journal.close()
    flip_text(tmp_path, b"why-005")
    log = (tmp_path / (FILE_NAME + WAL_SUFFIX)).read_bytes()
    assert log
    code, out, _ = told(tmp_path)
    assert code == 0
    assert out.splitlines()[1] == f"run s: kept up to revision {LAST}"
    assert (tmp_path / f"{FILE_NAME}.damaged-1{WAL_SUFFIX}").read_bytes() == log
    assert loaded(tmp_path) == [*closed[:4], *of(ROWS, RUNS[2])]


@pytest.mark.rule("J6")
@pytest.mark.parametrize(
    ("start", "count"), [(lambda size: size // 2, 4096), (lambda size: 0, 64), (lambda size: 4096, 4096)]
)
def test_pages_that_sqlite_cannot_read(
    tmp_path: Path, told: Callable[..., tuple[int, str, str]], start: Callable[[int], int], count: int
) -> None:
    written(tmp_path, ROWS)
    flip(tmp_path, start, count)
    before = files(tmp_path)
    assert told(tmp_path)[0] == 0
    assert files(tmp_path)[f"{FILE_NAME}.damaged-1"] == before[FILE_NAME]
    _are_prefixes(loaded(tmp_path))


def _are_prefixes(rows: list[Row]) -> None:
    for run_id in RUNS:
        mine = of(rows, run_id)
        assert mine == of(ROWS, run_id)[: len(mine)]
    assert {one.run_id for one in rows} <= set(RUNS)


@pytest.mark.rule("J6", "E5")
def test_wherever_a_byte_is_flipped_nothing_false_is_read(
    tmp_path: Path, told: Callable[..., tuple[int, str, str]]
) -> None:
    """A flip is refused or harms no row; repair then keeps prefixes. Anywhere in the file."""
    written(tmp_path / "whole", ROWS)
    content = (tmp_path / "whole" / FILE_NAME).read_bytes()
    dice = random.Random(SEED)
    refused = 0
    for number in range(FLIPS):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(content)
        flip(directory, dice.randrange, 1, bits=dice.randrange(1, 256))
        refusal = ""
        try:
            assert loaded(directory) == ROWS
        except JournalError as error:
            refusal = str(error)
        if refusal:
            refused += 1
            assert len(refusal.splitlines()) == 1
            code, _, err = told(directory)
            assert code == (1 if "has format" in refusal else 0), err
            if code == 0:
                _are_prefixes(loaded(directory))
    assert refused > FLIPS // 3


@pytest.mark.rule("J6")
def test_a_file_that_is_no_database_gives_an_empty_journal(
    tmp_path: Path, told: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    code, out, _ = told(tmp_path)
    assert code == 0
    assert out.splitlines()[0] == "the file: file is not a database"
    assert loaded(tmp_path) == []
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == b"no database" * 1000


@pytest.mark.rule("J6", "A8")
def test_a_damaged_journal_of_format_1_becomes_one_of_this(
    tmp_path: Path, told: Callable[..., tuple[int, str, str]]
) -> None:
    old = [(one.run_id, one.revision, kind_of(one.fact), encode(one.fact)) for one in ROWS]
    old[2] = (*old[2][:3], "{")
    format_1(tmp_path, old)
    code, out, _ = told(tmp_path)
    assert code == 0
    assert f"run q: kept up to revision 2, {LAST - 2} rows cut (run q revision 3: unreadable row" in out
    assert loaded(tmp_path) == [*ROWS[:2], *ROWS[LAST:]]


@pytest.mark.rule("J6")
def test_rows_are_kept_as_they_are(tmp_path: Path, told: Callable[..., tuple[int, str, str]]) -> None:
    """Fields that a newer version wrote are not lost on the way."""
    lost = encode(NodeLost(1.0, NodeId("n"), Incarnation("i"), "silent"))
    newer = lost[:-1] + ',"colour":"blue"}'
    format_1(tmp_path, [("r", 1, "NodeLost", newer), ("r", 2, "NodeLost", "{")])
    assert told(tmp_path)[0] == 0
    assert b'"colour":"blue"' in (tmp_path / FILE_NAME).read_bytes()


@pytest.mark.rule("J6")
def test_what_cannot_be_repaired_is_left_alone(tmp_path: Path, told: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = told(tmp_path / "nowhere")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not (tmp_path / "nowhere").exists()
    code, out, err = told(tmp_path)
    assert (code, out) == (2, "")
    assert f"there is no {FILE_NAME} in {tmp_path}" in err

    journal = SqliteJournal(tmp_path)
    code, out, err = told(tmp_path)
    assert (code, out) == (2, "")
    assert f"taken by the coordinator with pid {os.getpid()}" in err
    journal.close()

    change(tmp_path, f"UPDATE meta SET value = '{FORMAT + 1}' WHERE key = 'format'")
    before = files(tmp_path)
    code, out, err = told(tmp_path)
    assert (code, out) == (1, "")
    assert f"has format {FORMAT + 1}" in err
    assert files(tmp_path) == before
