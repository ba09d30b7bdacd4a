"""A journal that is not what was written: found at the start, named in one line, never read past."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx.core.facts import RunClosed, RunState
from nvrx.core.ids import Revision, RunId
from nvrx.server.journals import JournalError, Row, codec
from nvrx.server.journals.codec import encode, kind_of
from nvrx.server.journals.repair import repair
from nvrx.server.journals.sqlite import FORMAT, WAL_KEPT_BYTES, SqliteJournal
from nvrx.server.journals.state_dir import FILE_NAME, WAL_SUFFIX

from .damage import change, flip, flip_text, format_1, one_line, written
from .facts import EXAMPLES

R, S = RunId("r"), RunId("s")
TWO_RUNS = [Row(run_id, Revision(place), fact) for run_id in (R, S) for place, fact in enumerate(EXAMPLES, start=1)]


def loaded(directory: Path) -> list[Row]:
    journal = SqliteJournal(directory)
    try:
        return list(journal.load())
    finally:
        journal.close()


def refusal(directory: Path) -> str:
    """The one line with which the journal is refused."""
    with pytest.raises(JournalError) as seen:
        loaded(directory)
    text = one_line(seen.value)
    assert str(directory / FILE_NAME) in text
    return text


@pytest.mark.rule("A8")
def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    SqliteJournal(tmp_path).close()
    change(tmp_path, f"UPDATE meta SET value = '{FORMAT + 1}' WHERE key = 'format'")
    assert f"has format {FORMAT + 1}, this version reads up to {FORMAT}; start the newer" in refusal(tmp_path)
    change(tmp_path, f"UPDATE meta SET value = '{FORMAT}' WHERE key = 'format'")
    assert loaded(tmp_path) == []


@pytest.mark.rule("A8")
def test_a_kind_of_fact_of_a_newer_version_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut the run off there, as is done where a row is damaged, would lose what is whole."""
    written(tmp_path, TWO_RUNS)
    monkeypatch.delitem(codec._KINDS, "NodeFailedCheck")
    monkeypatch.delitem(codec._DECODERS, "NodeFailedCheck")
    text = refusal(tmp_path)
    assert "was written by a newer version: run r revision" in text
    assert "unknown kind of fact 'NodeFailedCheck'; start the newer nvrx-coord" in text
    with pytest.raises(JournalError, match="was written by a newer version"):
        repair(tmp_path, dry_run=False)
    monkeypatch.undo()
    assert loaded(tmp_path) == TWO_RUNS


@pytest.mark.rule("A8", "E5")
def test_a_journal_of_format_1_is_read_and_brought_up_to_date(tmp_path: Path) -> None:
    journal_id = format_1(
        tmp_path, [(one.run_id, one.revision, kind_of(one.fact), encode(one.fact)) for one in TWO_RUNS]
    )
    journal = SqliteJournal(tmp_path)
    assert journal.journal_id == journal_id
    assert list(journal.load()) == TWO_RUNS
    more = Row(S, Revision(len(EXAMPLES) + 1), EXAMPLES[0])
    journal.append([more])
    journal.close()
    assert loaded(tmp_path) == [*TWO_RUNS, more]
    change(tmp_path, "UPDATE facts SET body = replace(body, 'n0', 'n9') WHERE run_id = 'r' AND revision = 4")
    assert "run r revision 4: the row does not match its check" in refusal(tmp_path)


@pytest.mark.rule("A8")
def test_a_row_of_the_first_version_is_read(tmp_path: Path) -> None:
    """Written as that version did: fields that came later are missing."""
    node = '{"node_id":"n0","incarnation":"i","address":"10.0.0.1","pid":7,"order_sources":{"PROCID":"0"}}'
    shape = '{"min_nodes":1,"max_nodes":2,"workers_per_node":8}'
    settings = '{"max_restarts":3,"max_replacements":null,"join_timeout_s":600.0,"last_call_s":1.0}'
    bodies = [
        ("RunOpened", f'{{"at":0.0,"time":1.5,"run_id":"r","shape":{shape},"settings":{settings}}}'),
        ("NodeJoined", f'{{"at":0.0,"time":1.5,"node":{node}}}'),
        ("RunClosed", '{"at":1.0,"time":2.5,"state":"FAILED","reason":"caf\\u00e9","exit_code":1}'),
    ]
    format_1(tmp_path, [("r", place, kind, body) for place, (kind, body) in enumerate(bodies, start=1)])
    rows = loaded(tmp_path)
    assert [kind_of(one.fact) for one in rows] == [kind for kind, _ in bodies]
    assert rows[-1].fact == RunClosed(1.0, RunState.FAILED, "café", 1, time=2.5)


@pytest.mark.rule("E5")
def test_damage_of_format_1_is_not_made_good_by_a_check(tmp_path: Path) -> None:
    format_1(tmp_path, [("r", 1, "RunOpened", encode(EXAMPLES[0])), ("r", 2, "RunClosed", "{")])
    assert "run r revision 2: unreadable row (RunClosed: " in refusal(tmp_path)
    format_1(tmp_path / "gap", [("r", 1, "RunOpened", encode(EXAMPLES[0])), ("r", 3, "RunClosed", "{")])
    assert "run r revision 2: the row is missing" in refusal(tmp_path / "gap")


_SWAPPED = """UPDATE facts SET
  kind = (SELECT kind FROM facts AS other WHERE other.run_id = 's' AND other.revision = 5 - facts.revision),
  body = (SELECT body FROM facts AS other WHERE other.run_id = 's' AND other.revision = 5 - facts.revision)
  WHERE run_id = 's' AND revision IN (2, 3)"""


@pytest.mark.rule("E5")
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE facts SET body = replace(body, '2.0', '3.0') WHERE run_id = 's' AND revision = 6", "run s revision 6"),
        ("UPDATE facts SET kind = 'NodeLost' WHERE run_id = 's' AND revision = 6", "run s revision 6"),
        ("UPDATE facts SET body = '{' WHERE run_id = 's' AND revision = 4", "run s revision 4"),
        ("UPDATE facts SET body = x'00ff' WHERE run_id = 's' AND revision = 4", "run s revision 4"),
        ("UPDATE facts SET chain = chain + 1 WHERE run_id = 's' AND revision = 4", "run s revision 4"),
        (_SWAPPED, "run s revision 2"),
        ("DELETE FROM facts WHERE run_id = 's' AND revision = 3", "run s revision 3: the row is missing"),
        ("DELETE FROM facts WHERE run_id = 's' AND revision = 1", "run s revision 1: the row is missing"),
        ("UPDATE facts SET revision = revision - 1 WHERE run_id = 's' AND revision > 1", None),
        ("UPDATE facts SET run_id = 't' WHERE run_id = 's' AND revision = 5", "run s revision 5: the row is missing"),
        ("UPDATE facts SET run_id = 't' WHERE run_id = 's'", "run s revision 1: the run ends with revision"),
        (
            "UPDATE facts SET run_id = CAST('r' AS BLOB) WHERE run_id = 's' AND revision = 5",
            "the list of runs: r comes after s",
        ),
        ("UPDATE heads SET revision = 'x' WHERE run_id = 's'", "nothing says where the run ends"),
        ("DELETE FROM facts WHERE run_id = 's'", "run s revision 1: the run ends with revision"),
        ("DELETE FROM facts WHERE run_id = 's' AND revision >= 20", "run s revision 20: the run ends with revision"),
        ("DELETE FROM heads WHERE run_id = 's'", "nothing says where the run ends"),
        (
            "UPDATE heads SET revision = 5 WHERE run_id = 's'",
            "the run ends with revision 5, and the last row is that of",
        ),
    ],
)
def test_every_change_of_a_row_is_found(tmp_path: Path, statement: str, told: str | None) -> None:
    written(tmp_path, TWO_RUNS)
    if told is None:  # the rows of a run moved up by one, over the first
        change(tmp_path, "DELETE FROM facts WHERE run_id = 's' AND revision = 1")
        told = "run s revision 1: the row does not match its check"
    change(tmp_path, statement)
    text = refusal(tmp_path)
    assert told in text
    assert f"nvrx-coord repair --state-dir {tmp_path}" in text


@pytest.mark.rule("E5")
def test_a_row_of_another_history_is_found_by_the_next(tmp_path: Path) -> None:
    """Whole in itself, with a check that was once right: an old page that came back, say."""
    other = [TWO_RUNS[0], TWO_RUNS[3], *TWO_RUNS[2:4]]
    written(tmp_path / "other", [Row(R, Revision(place), row.fact) for place, row in enumerate(other, start=1)])
    written(tmp_path, TWO_RUNS[:4])
    change(
        tmp_path,
        f"ATTACH '{tmp_path / 'other' / FILE_NAME}' AS other",
        "REPLACE INTO facts SELECT * FROM other.facts WHERE revision = 2",
    )
    assert "run r revision 3: the row does not match its check" in refusal(tmp_path)


@pytest.mark.rule("E5")
def test_rows_go_on_from_the_last_check_after_a_reopening(tmp_path: Path) -> None:
    written(tmp_path, TWO_RUNS[:3])
    written(tmp_path, TWO_RUNS[3 : len(EXAMPLES)])
    assert loaded(tmp_path) == TWO_RUNS[: len(EXAMPLES)]


@pytest.mark.rule("E5")
def test_a_torn_last_transaction_is_dropped_and_no_other(tmp_path: Path) -> None:
    """The log is copied as a crash would leave it, and cut anywhere within the last transaction."""
    journal = SqliteJournal(tmp_path / "live")
    log = tmp_path / "live" / (FILE_NAME + WAL_SUFFIX)
    journal.append(TWO_RUNS[:4])
    journal.append(TWO_RUNS[4:8])
    before = log.stat().st_size
    journal.append(TWO_RUNS[8:10])
    after = log.stat().st_size
    assert after > before
    for number, size in enumerate([before, before + 1, (before + after) // 2, after - 1]):
        copy = tmp_path / str(number)
        copy.mkdir()
        (copy / FILE_NAME).write_bytes((tmp_path / "live" / FILE_NAME).read_bytes())
        (copy / log.name).write_bytes(log.read_bytes()[:size])
        assert loaded(copy) == TWO_RUNS[:8]
        written(copy, TWO_RUNS[8:9])
        assert loaded(copy) == TWO_RUNS[:9]
    journal.close()


@pytest.mark.rule("J6")
def test_the_log_is_empty_after_a_start(tmp_path: Path) -> None:
    """Of a coordinator that was killed all rows may stand in the log: the next one brings them in."""
    live = SqliteJournal(tmp_path / "live")
    live.append(TWO_RUNS)
    copy = tmp_path / "killed"
    copy.mkdir()
    for suffix in ("", WAL_SUFFIX):
        (copy / (FILE_NAME + suffix)).write_bytes((tmp_path / "live" / (FILE_NAME + suffix)).read_bytes())
    live.close()
    assert (copy / (FILE_NAME + WAL_SUFFIX)).stat().st_size > 0
    journal = SqliteJournal(copy)
    assert (copy / (FILE_NAME + WAL_SUFFIX)).stat().st_size == 0
    assert list(journal.load()) == TWO_RUNS
    journal.close()


@pytest.mark.rule("J6")
def test_the_log_is_cut_after_a_burst(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    log = tmp_path / (FILE_NAME + WAL_SUFFIX)
    long = RunClosed(1.0, RunState.FAILED, "x" * WAL_KEPT_BYTES, 1)
    journal.append([Row(R, Revision(1), long)])
    assert log.stat().st_size > WAL_KEPT_BYTES
    journal.append([Row(R, Revision(2), EXAMPLES[0])])
    assert log.stat().st_size <= WAL_KEPT_BYTES
    journal.close()


def _flip_pages(directory: Path) -> None:
    flip(directory, lambda size: size // 2, 4096)


def _flip_header(directory: Path) -> None:
    flip(directory, lambda size: 0, 64)


@pytest.mark.rule("J6")
@pytest.mark.parametrize("damage", [_flip_pages, _flip_header], ids=["middle", "header"])
def test_what_sqlite_finds_damaged_is_told_alike(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    written(tmp_path, [Row(R, Revision(place), EXAMPLES[3]) for place in range(1, 400)])
    damage(tmp_path)
    text = refusal(tmp_path)
    assert "is damaged: " in text
    assert f"nvrx-coord repair --state-dir {tmp_path}" in text


@pytest.mark.rule("J6")
def test_a_flipped_byte_within_a_row_is_found(tmp_path: Path) -> None:
    """SQLite sees nothing of it: that is what the check is for."""
    closed = [
        Row(R, Revision(place), RunClosed(float(place), RunState.FAILED, f"why-{place:03}", 1)) for place in range(1, 9)
    ]
    written(tmp_path, closed)
    flip_text(tmp_path, b"why-005")
    assert "run r revision 5: the row does not match its check" in refusal(tmp_path)


@pytest.mark.rule("J6")
@pytest.mark.parametrize("content", [b"this is no database, whatever its name says" * 100, b"SQLite format 3\x00" * 64])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert "is damaged: file is not a database" in refusal(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content
    (tmp_path / FILE_NAME).unlink()
    SqliteJournal(tmp_path).close()


@pytest.mark.rule("J6")
@pytest.mark.parametrize("statement", ["DELETE FROM meta WHERE key = 'format'", "UPDATE meta SET value = 'x'"])
def test_a_journal_without_its_format_is_refused(tmp_path: Path, statement: str) -> None:
    written(tmp_path, TWO_RUNS)
    change(tmp_path, statement)
    assert "which is none of ours" in refusal(tmp_path)


@pytest.mark.rule("E5")
def test_a_page_that_goes_bad_while_it_is_read_is_told(tmp_path: Path) -> None:
    written(tmp_path, TWO_RUNS)
    journal = SqliteJournal(tmp_path)
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("UPDATE facts SET body = '{' WHERE run_id = 'r' AND revision = 4")
    connection.commit()
    connection.close()
    with pytest.raises(JournalError, match=r"run r: unreadable row \(NodeJoined"):
        journal.read(R, Revision(1), 10)
    journal.close()
