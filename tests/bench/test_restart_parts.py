"""The journal that starts are timed on is one that a run can leave, and each part of a start is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

from bench.restart_journal import RUN_ID, facts, write
from nvrx.core.facts import WorkersExited
from nvrx.core.invariants import check_state
from nvrx.core.run import evolve
from nvrx.server.journals.sqlite import SqliteJournal

BENCH = str(Path(__file__).resolve().parents[2] / "bench" / "restart.py")


@pytest.mark.parametrize("exits", [False, True])
def test_the_journal_is_one_that_a_run_can_leave(tmp_path: Path, exits: bool) -> None:
    members, cycles = 6, 4
    rows = write(tmp_path, members, cycles, exits=exits)
    journal = SqliteJournal(tmp_path)
    found = [row.fact for row in journal.load()]
    journal.close()
    assert found == list(facts(members, cycles, exits=exits))
    assert len(found) == rows
    run = reduce(evolve, found[1:], evolve(None, found[0]))
    check_state(run)
    assert run.run_id == RUN_ID
    assert [len(one.seats) for one in run.cycles] == [members] * cycles
    told = sum(isinstance(one, WorkersExited) for one in found)
    assert told == (cycles - 1) * (members + 1 if exits else 1)


def test_a_start_is_measured_in_all_its_parts(tmp_path: Path) -> None:
    """In a process of its own: a benchmark ends all that is below it."""
    figures = tmp_path / "figures.json"
    options = ["--members", "4", "--cycles", "2", "--reps", "1", "--work-dir", str(tmp_path), "--json", str(figures)]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:3] == ["4", "2", "11"]
    (measured,) = json.loads(figures.read_text())
    (sample,) = measured["samples"]
    assert all(value > 0 for value in sample.values())
    assert not [one for one in tmp_path.iterdir() if one != figures]
