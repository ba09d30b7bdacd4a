"""What is seen of workers that another part of this process started, and reaps: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nvrx.client.torchrun_workers import ERROR_FILE, STANDARD_ERROR, WorkerWatch
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import LocalRank

WAIT_S = 20.0


class Seen:
    """A watch, and what it heard."""

    def __init__(self) -> None:
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.watch = WorkerWatch(self.exits.put_nowait)

    async def next(self) -> WorkerExit:
        async with asyncio.timeout(WAIT_S):
            return await self.exits.get()


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    seen = Seen()
    yield seen
    seen.watch.close()


def child(program: str, error_file: Path | None = None) -> subprocess.Popen[bytes]:
    """A worker that does what it is told by the end of its input."""
    env = {} if error_file is None else {ERROR_FILE.decode().rstrip("="): str(error_file)}
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, os, signal\nsys.stdin.read()\n{program}"], stdin=subprocess.PIPE, env=env
    )


def let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.rule("G5", "D4")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("sys.exit(0)", WorkerExit(LocalRank(3), 0)),
        ("sys.exit(7)", WorkerExit(LocalRank(3), 7)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", WorkerExit(LocalRank(3), None, "SIGSEGV")),
        ("os.kill(os.getpid(), 40)", WorkerExit(LocalRank(3), None, "signal 40")),
    ],
)
async def test_an_end_is_seen_at_once_and_left_to_be_reaped(seen: Seen, program: str, expected: WorkerExit) -> None:
    process = child(program)
    seen.watch.add(LocalRank(3), process.pid)
    let_go(process)
    assert await seen.next() == expected
    assert process.wait() == (expected.exit_code if expected.exit_code is not None else process.returncode)
    assert process.returncode != 0 or expected.exit_code == 0
    seen.watch.settle()
    assert seen.exits.empty()


@pytest.mark.rule("D4")
async def test_what_a_failed_worker_wrote_is_read_from_where_torchs_agent_told_it_to(
    seen: Seen, tmp_path: Path
) -> None:
    error_file = tmp_path / "error.json"
    process = child("sys.exit(1)", error_file)
    seen.watch.add(LocalRank(0), process.pid)
    error_file.write_text(json.dumps({"message": {"message": "ValueError: no such layer"}}))
    (tmp_path / STANDARD_ERROR).write_text("a\nb\n")
    let_go(process)
    assert await seen.next() == WorkerExit(LocalRank(0), 1, "", "ValueError: no such layer", stderr_tail="a\nb\n")
    process.wait()


@pytest.mark.rule("G5")
async def test_one_that_was_reaped_before_it_was_looked_at_is_not_guessed_at(seen: Seen) -> None:
    process = child("sys.exit(7)")
    seen.watch.add(LocalRank(0), process.pid)
    let_go(process)
    process.wait()  # the loop has not run since
    seen.watch.settle()
    gone = child("sys.exit(0)")
    let_go(gone)
    gone.wait()
    seen.watch.add(LocalRank(1), gone.pid)
    await asyncio.sleep(0)
    assert seen.exits.empty()


async def test_settling_hears_of_an_end_that_the_loop_has_not_come_to(seen: Seen) -> None:
    process = child("signal.pause()")
    seen.watch.add(LocalRank(0), process.pid)
    seen.watch.settle()
    assert seen.exits.empty()
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must not run meanwhile
    seen.watch.settle()
    assert seen.exits.get_nowait() == WorkerExit(LocalRank(0), None, "SIGKILL")
    process.wait()
