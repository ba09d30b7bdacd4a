"""Journals: rows go in, in order, all or none, and come out the same, whatever happens to the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx.core.facts import Fact
from nvrx.core.ids import Revision, RunId
from nvrx.server.journals import Journal, JournalError, Row, StateTaken
from nvrx.server.journals.memory import MemoryJournal
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.server.journals.state_dir import LOCK_NAME

from .append_forever import BATCH
from .facts import EXAMPLES

R, S = RunId("r"), RunId("s")


def rows(run_id: RunId, facts: list[Fact], first: int = 1) -> list[Row]:
    return [Row(run_id, Revision(place), fact) for place, fact in enumerate(facts, start=first)]


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made: Journal = MemoryJournal() if request.param == "memory" else SqliteJournal(tmp_path / "state")
    yield made
    made.close()


@pytest.mark.rule("E5")
def test_rows_come_out_as_they_went_in(journal: Journal) -> None:
    given = rows(R, EXAMPLES)
    journal.append(given[:5])
    journal.append(given[5:])
    assert list(journal.load()) == given
    assert journal.read(R, Revision(1), 1000) == given


@pytest.mark.rule("E5")
def test_runs_are_kept_apart_and_each_in_order(journal: Journal) -> None:
    first, second = rows(R, EXAMPLES), rows(S, EXAMPLES[:4])
    journal.append([first[0], second[0], first[1], second[1]])
    journal.append([*second[2:], *first[2:]])
    loaded = list(journal.load())
    assert [one for one in loaded if one.run_id == R] == first
    assert [one for one in loaded if one.run_id == S] == second
    order = [one.run_id for one in loaded]
    assert order == sorted(order)


@pytest.mark.rule("E5")
def test_a_part_is_read_from_a_revision(journal: Journal) -> None:
    given = rows(R, EXAMPLES)
    journal.append([*given, *rows(S, EXAMPLES[:1])])
    assert journal.read(R, Revision(4), 3) == given[3:6]
    assert journal.read(R, Revision(0), 1) == given[:1]
    assert journal.read(R, Revision(len(given)), 10) == given[-1:]
    assert journal.read(R, Revision(len(given) + 1), 10) == []
    assert journal.read(RunId("nowhere"), Revision(1), 10) == []


@pytest.mark.rule("E5")
def test_an_empty_journal_has_nothing(journal: Journal) -> None:
    assert list(journal.load()) == []
    assert len(journal.journal_id) == 32


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[[], SqliteJournal]]:
    """Opens the journal in the test's directory, the one opened before closed."""
    opened: list[SqliteJournal] = []

    def again() -> SqliteJournal:
        while opened:
            opened.pop().close()
        opened.append(SqliteJournal(tmp_path))
        return opened[-1]

    yield again
    for one in opened:
        one.close()


@pytest.mark.rule("E5")
def test_a_batch_is_kept_whole_or_not_at_all(reopen: Callable[[], SqliteJournal]) -> None:
    given = rows(R, EXAMPLES)
    journal = reopen()
    journal.append(given[:2])
    with pytest.raises(JournalError, match="cannot write the journal"):
        journal.append([*given[2:5], given[1]])
    assert list(reopen().load()) == given[:2]


@pytest.mark.rule("E5")
def test_a_journal_keeps_its_id_and_goes_on_where_it_was(reopen: Callable[[], SqliteJournal]) -> None:
    given = rows(R, EXAMPLES)
    journal = reopen()
    journal.append(given[:3])
    journal_id = journal.journal_id
    journal = reopen()
    assert journal.journal_id == journal_id
    journal.append(given[3:])
    assert list(journal.load()) == given


@pytest.mark.rule("J6")
def test_a_second_coordinator_on_the_directory_is_refused_by_pid(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    with pytest.raises(StateTaken, match=f"pid {os.getpid()};"):
        SqliteJournal(tmp_path)
    journal.append(rows(R, EXAMPLES[:1]))
    journal.close()
    again = SqliteJournal(tmp_path)
    assert len(list(again.load())) == 1
    again.close()


@pytest.mark.rule("J6")
def test_the_lock_of_a_dead_coordinator_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("999999\n")
    journal = SqliteJournal(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    journal.close()


@pytest.mark.rule("J6")
def test_the_directory_is_its_owners_alone(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "a" / "state")
    assert (tmp_path / "a" / "state").stat().st_mode & 0o077 == 0
    journal.close()


@pytest.mark.rule("J6")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(JournalError, match="cannot make the state directory"):
        SqliteJournal(tmp_path / "file" / "state")
    (tmp_path / "state" / LOCK_NAME).mkdir(parents=True)
    with pytest.raises(JournalError, match="cannot write in the state directory"):
        SqliteJournal(tmp_path / "state")
    with pytest.raises(JournalError):
        SqliteJournal(Path("/proc/self/nvrx-state"))


@pytest.mark.rule("J6")
def test_a_network_file_system_is_refused_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def mounts(path: Path) -> str:
        if path != Path("/proc/mounts"):
            return read_text(path)
        return f"overlay / overlay rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}/local tmpfs rw 0 0\n"

    monkeypatch.setattr(Path, "read_text", mounts)
    with pytest.raises(JournalError, match=r"network file system \(nfs4\)"):
        SqliteJournal(tmp_path / "state")
    SqliteJournal(tmp_path / "state", allow_network_file_system=True).close()
    SqliteJournal(tmp_path / "local" / "state").close()


@pytest.mark.rule("E5")
def test_a_killed_process_loses_no_row_that_it_was_told_is_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        state = tmp_path / str(attempt)
        command = [sys.executable, "-m", "tests.server.append_forever", str(state)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
            writer.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
            writer.wait(20)
        journal = SqliteJournal(state)
        kept = [row.revision for row in journal.load()]
        journal.close()
        assert kept == list(range(1, len(kept) + 1))
        assert len(kept) % BATCH == 0
        assert acknowledged[-1] <= kept[-1] <= acknowledged[-1] + BATCH
