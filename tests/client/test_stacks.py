"""Stacks of hung workers: from py-spy, without it, and from one that itself hangs or fails."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from nvrx.client import hangs
from nvrx.client.hangs import HangOptions, Hangs
from nvrx.client.stacks import Stack, append_stack, find_py_spy, take_stack
from nvrx.client.supervisor_link import Spawned, SpawnedWorker
from nvrx.client.worker_files import WorkerFiles
from nvrx.core import agent as machine
from nvrx.core.facts import WorkerExit
from nvrx.core.hang import Hung
from nvrx.core.ids import CycleNumber, GroupRank, LocalRank, NodeId, RunId
from nvrx.core.ranks import Assignment

GIVEN = Assignment(CycleNumber(4), GroupRank(1), 4, 2, 2, 3, 0, "", None)
RAN_ON_S = 60.0


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.rule("G9")
async def test_what_the_program_prints_is_the_stack(tmp_path: Path) -> None:
    spy = program(tmp_path / "py-spy", 'echo "$@"')
    assert await take_stack(spy, 77, os.environ) == Stack("dump --subprocesses --pid 77", "")


@pytest.mark.rule("G9")
async def test_one_that_cannot_be_held_up_is_looked_at_in_passing(tmp_path: Path) -> None:
    spy = program(tmp_path / "py-spy", 'case "$*" in *--nonblocking*) echo seen;; *) exit 1;; esac')
    assert await take_stack(spy, 77, os.environ) == Stack("seen", "")


@pytest.mark.rule("G9")
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'Error: Permission Denied' >&2; exit 1", "py-spy: Error: Permission Denied"),
        ("exit 3", "py-spy: exit code 3"),
        ("exit 0", "py-spy: exit code 0"),
        ("sleep 600 & exec sleep 600", "py-spy found none within 0.6 s"),
    ],
)
async def test_why_there_is_no_stack(tmp_path: Path, script: str, problem: str) -> None:
    """It is not waited for, nor are its children, which hold its output open."""
    began = time.monotonic()
    found = await take_stack(program(tmp_path / "py-spy", script), 77, os.environ, within_s=0.6)
    assert found == Stack("", problem)
    assert time.monotonic() - began < RAN_ON_S


@pytest.mark.rule("G9")
async def test_a_program_that_is_gone_is_named(tmp_path: Path) -> None:
    found = await take_stack(str(tmp_path / "gone"), 77, os.environ)
    assert found == Stack("", f"{tmp_path / 'gone'}: No such file or directory")


@pytest.mark.rule("G9")
def test_it_is_looked_for_on_the_path_first(tmp_path: Path) -> None:
    mine = program(tmp_path / "py-spy", "")
    assert find_py_spy({"PATH": str(tmp_path)}) == mine


@pytest.mark.rule("G9")
def test_a_stack_begins_a_line_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.err"
    log.write_text("half a li")
    append_stack(log, "rank 3 hangs: no heartbeat for 30.0 s", Stack("Thread 1\n  train (a.py:3)", ""))
    append_stack(log, "rank 3 hangs: again", Stack("", "py-spy: denied"))
    lines = log.read_text().splitlines()
    assert lines[0] == "half a li"
    assert lines[1].startswith("==== nvrx 2")
    assert lines[1].endswith(": rank 3 hangs: no heartbeat for 30.0 s; its stack:")
    assert lines[2:4] == ["Thread 1", "  train (a.py:3)"]
    assert "no stack: py-spy: denied" in lines


@pytest.mark.rule("G9")
async def test_without_py_spy_it_is_said_once_and_hangs_are_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hangs, "find_py_spy", lambda env: None)
    caplog.set_level(logging.INFO, "nvrx.node")
    observed: list[machine.Observation] = []
    found = Hangs(HangOptions(hang_timeout_s=30.0), tmp_path / "run", os.environ, observed.append)
    assert len([one for one in caplog.messages if "py-spy" in one]) == 1
    files = WorkerFiles(tmp_path, RunId("r"), NodeId("n"))
    assert len(found.open(GIVEN, files)) == 2
    found.started(Spawned(4, (SpawnedWorker(0, 11, 1), SpawnedWorker(1, 12, 1))))
    found._on_hung(CycleNumber(4), (Hung(LocalRank(1), "no heartbeat for 30.0 s"),))
    exit = WorkerExit(LocalRank(1), message="no heartbeat for 30.0 s", hung=True)
    assert observed == [machine.WorkersHung(CycleNumber(4), (exit,))]
    assert "cycle 4: rank 3 (local rank 1) hangs: no heartbeat for 30.0 s" in caplog.messages
    await found.take_stacks(machine.TakeStacks(CycleNumber(4), (exit,)))
    assert observed[1:] == [machine.StacksTaken(CycleNumber(4))]
    assert not files.output(CycleNumber(4), 3, "err").exists()  # type: ignore[arg-type]
    found.watch.close()


@pytest.mark.rule("G9", "G8")
async def test_a_log_that_does_not_answer_keeps_no_hung_worker_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file system at which it hangs may be that of its log; here a pipe that nobody reads."""
    monkeypatch.setattr(hangs, "find_py_spy", lambda env: program(tmp_path / "py-spy", "echo Thread 1"))
    monkeypatch.setattr(hangs, "KEPT_WITHIN_S", 0.1)
    observed: list[machine.Observation] = []
    found = Hangs(HangOptions(hang_timeout_s=30.0), tmp_path / "run", os.environ, observed.append)
    files = WorkerFiles(tmp_path, RunId("r"), NodeId("n"))
    found.open(GIVEN, files)
    found.started(Spawned(4, (SpawnedWorker(0, os.getpid(), 1), SpawnedWorker(1, os.getpid(), 1))))
    found._on_hung(CycleNumber(4), (Hung(LocalRank(1), "no heartbeat for 30.0 s"),))
    [hung] = [one for one in observed if isinstance(one, machine.WorkersHung)]
    log = files.cycle(CycleNumber(4)) / "rank-3.err"
    os.mkfifo(log)
    try:
        await found.take_stacks(machine.TakeStacks(CycleNumber(4), hung.hung))
        assert observed == [hung, machine.StacksTaken(CycleNumber(4))]
        assert "the stack of rank 3 is not written to" in caplog.text
    finally:
        os.close(os.open(log, os.O_RDWR))
        found.watch.close()


@pytest.mark.rule("G9")
async def test_nothing_is_said_of_py_spy_where_no_hang_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hangs, "find_py_spy", lambda env: None)
    caplog.set_level(logging.INFO, "nvrx.node")
    Hangs(HangOptions(), tmp_path, os.environ, lambda _: None)
    assert not caplog.messages


@pytest.mark.rule("G9")
async def test_a_node_that_can_make_no_sockets_trains_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found = Hangs(HangOptions(), tmp_path / "file", os.environ, lambda _: None)
    assert found.open(GIVEN, WorkerFiles(tmp_path, RunId("r"), NodeId("n"))) == []
    assert "workers cannot tell heartbeats and progress" in caplog.text
    found.started(Spawned(4, ()))
    found.watch.close()
