"""The log process with a real supervisor and real workers: nothing is lost, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nvrx.client import log_link
from nvrx.client.log_file import Rotation
from nvrx.client.log_link import Flushed, LogLink
from nvrx.client.log_process import LogProcess
from nvrx.client.output_pipes import OutputFiles, OutputPipes
from nvrx.client.processes import read_stat
from nvrx.client.supervisor_channel import Channel, encode
from nvrx.client.supervisor_link import Exited, Gone, SupervisorLink

from .supervision import FOREVER, PATIENCE_S, ROOT, Bench, alive, ended, next_event


class Logged:
    """A supervisor with its log process."""

    def __init__(self, bench: Bench, logs: LogLink, link: SupervisorLink) -> None:
        self.bench = bench
        self.logs = logs
        self.link = link

    def path(self, name: str) -> Path:
        return self.bench.folder / name

    async def exit_code(self) -> int | None:
        return (await next_event(self.link, Exited)).exit_code

    async def close(self) -> None:
        await self.link.close(grace_s=0.0)
        await self.logs.close()


@contextlib.asynccontextmanager
async def started(bench: Bench, rotation: Rotation | None = None) -> AsyncIterator[Logged]:
    logs = await LogLink.start(rotation)
    link = await bench.link(handover_fd=logs.handover_fd)
    logs.supervised(link.hand_outputs_over_again)
    logged = Logged(bench, logs, link)
    try:
        yield logged
    finally:
        await logged.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event."""
    await asyncio.to_thread(_until, condition)


async def grows(path: Path, least: int) -> bytes:
    """Until the file has so much."""
    await until(lambda: path.exists() and path.stat().st_size >= least)
    return await asyncio.to_thread(path.read_bytes)


@pytest.mark.rule("G8")
async def test_output_passes_unchanged_and_files_are_there_without_any(bench: Bench) -> None:
    code = "import os; os.write(1, bytes(range(256)) * 1000); os.write(2, b'last line without an end')"
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.python(code), bench.shell("exit 0", rank=1)])
        await next_event(logged.link, Gone)
    assert logged.path("0.out").read_bytes() == bytes(range(256)) * 1000
    assert logged.path("0.err").read_bytes() == b"last line without an end"
    assert logged.path("1.out").read_bytes() == logged.path("1.err").read_bytes() == b""


@pytest.mark.rule("G8", "G5")
async def test_far_more_than_a_pipe_holds_is_all_written(bench: Bench) -> None:
    """Field case C126."""
    code = """
import os
for i in range(800):
    block = (f'{i:07d}\\n' * 8192).encode()
    for fd in (1, 2):
        rest = block
        while rest:
            rest = rest[os.write(fd, rest):]
"""
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.python(code)])
        assert await logged.exit_code() == 0
    for name in ("0.out", "0.err"):
        text = logged.path(name).read_bytes()
        assert len(text) == 800 * 65536
        assert all(text[at * 65536 : at * 65536 + 8] == f"{at:07d}\n".encode() for at in range(800))


@pytest.mark.rule("G8", "D4")
async def test_what_a_killed_worker_wrote_is_in_the_file_once_it_was_asked_for(bench: Bench) -> None:
    """Field case C135: many times, for it is a race if it is one."""
    code = (
        "import os, sys; sys.stderr.write('Traceback\\n' * 5000 + 'last'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    )
    async with started(bench) as logged:
        for cycle in range(20):
            await logged.link.spawn(cycle, [bench.python(code)])
            assert (await next_event(logged.link, Exited)).signal == signal.SIGKILL
            assert await logged.logs.flush(str(logged.path("0.err"))) == Flushed(None)
            assert logged.path("0.err").read_bytes() == (b"Traceback\n" * 5000 + b"last") * (cycle + 1)
            await next_event(logged.link, Gone)


@pytest.mark.rule("G8", "D4")
def test_an_answer_comes_after_what_was_asked_for_is_written(tmp_path: Path) -> None:
    """In this process, so that the answer comes before anything else was looked at; not even the handover was."""
    ours, theirs = socket.socketpair()
    supervisors_end, handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handover.setblocking(False)
    process = LogProcess(Channel(theirs), handover, os.getppid(), os.pipe2(os.O_NONBLOCK), None)
    out, err = (os.fsencode(tmp_path / name) for name in ("out", "err"))
    with OutputPipes(supervisors_end).open(OutputFiles(out, err, None)) as outputs:
        os.write(outputs.stdout_fd, b"output")
        os.write(outputs.stderr_fd, b"last words")
    ours.sendall(encode({"type": "flush", "number": 1, "paths": [os.fsdecode(one) for one in (err, out)]}))
    process._on_rest(PATIENCE_S)
    assert ours.recv(4096).endswith(b'"missing_tail":null}')
    assert (tmp_path / "out").read_bytes() == b"output"
    assert (tmp_path / "err").read_bytes() == b"last words"
    ours.close()


@pytest.mark.rule("G8", "D4")
async def test_last_words_reach_the_agent_from_a_full_disk(bench: Bench) -> None:
    (bench.folder / "0.err").symlink_to("/dev/full")
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.shell("seq 1000 >&2; echo -n boom >&2; exit 3")])
        assert await logged.exit_code() == 3
        flushed = await logged.logs.flush(str(logged.path("0.err")))
    assert flushed.missing_tail is not None
    assert flushed.missing_tail.endswith(b"\n999\n1000\nboom")
    assert len(flushed.missing_tail) == sum(len(f"{number}\n") for number in range(1, 1001)) + 4


@pytest.mark.rule("G8", "G5")
async def test_an_exit_is_seen_at_once_and_strays_are_still_heard(bench: Bench) -> None:
    """Grandchildren hold the pipes open: what they say later is written, too."""
    async with started(bench) as logged:
        script = "(echo $BASHPID > $LINES; while [ ! -e go ]; do sleep 0.05; done; echo late; sleep 1000) & exit 4"
        await logged.link.spawn(0, [bench.shell(script)])
        [stray] = await bench.lines.next_pids(1)
        assert await logged.exit_code() == 4
        assert await logged.logs.flush(str(logged.path("0.out"))) == Flushed(None)
        assert alive(stray)
        logged.path("go").touch()
        assert await grows(logged.path("0.out"), 5) == b"late\n"
        assert alive(stray)


@pytest.mark.rule("G8")
async def test_a_log_process_that_dies_is_replaced_and_breaks_no_pipe(bench: Bench) -> None:
    """SIGKILL, as of the OOM killer, again and again under a worker that writes all the time."""
    code = """
import os, time
number = 0
while not os.path.exists('go'):
    number += 1
    os.write(1, b'%d\\n' % number)
    time.sleep(0.0005)
os.write(1, b'end')
"""
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.python(code)])
        path = logged.path("0.out")
        for _ in range(3):
            size = len(await grows(path, 1))
            pid = logged.logs.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await ended(pid)
            await grows(path, size + 1000)
        logged.path("go").touch()
        assert await logged.exit_code() == 0
    lines = path.read_bytes().splitlines()
    assert lines[-1] == b"end"
    numbers = [int(line) for line in lines[:-1] if line]
    # What it had taken and not written is lost, a moment's worth; nothing comes twice.
    assert len(numbers) == len(set(numbers))
    assert numbers[-1] - len(numbers) < 0.2 * numbers[-1]


@pytest.mark.rule("G8")
async def test_a_worker_that_starts_while_there_is_no_log_process_is_written(bench: Bench) -> None:
    async with started(bench) as logged:
        pid = logged.logs.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await ended(pid)
        await logged.link.spawn(0, [bench.shell("echo early; echo more >&2")])
        assert await logged.exit_code() == 0
        assert await grows(logged.path("0.out"), 6) == b"early\n"
        assert await grows(logged.path("0.err"), 5) == b"more\n"


@pytest.mark.rule("G8")
async def test_a_log_process_that_hangs_delays_a_failure_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """As on a network file system that is gone: asked for many last words, it is waited for one time."""
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.shell(FOREVER)])
        pid = logged.logs.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        for _ in range(20):
            assert await logged.logs.flush(str(logged.path("0.err"))) == Flushed(None)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not logged.logs.is_late)
    assert len([record for record in caplog.records if "is not written yet" in record.getMessage()]) == 1


@pytest.mark.rule("G8", "D2")
async def test_a_log_process_that_is_slow_with_each_of_many_delays_them_no_longer_than_one_that_hangs(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer comes late, but it comes: no new cycle begins before the last of them."""
    monkeypatch.setattr(log_link, "_PATIENCE_AGAIN", 0.0)  # however long this machine takes
    async with started(bench) as logged:
        await logged.link.spawn(0, [bench.shell(FOREVER)])
        pid = logged.logs.pid
        assert pid is not None
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            assert await logged.logs.flush(str(logged.path("0.err"))) == Flushed(None)
            os.kill(pid, signal.SIGCONT)
            await until(lambda: not logged.logs.is_late)
    assert len([record for record in caplog.records if "is not written yet" in record.getMessage()]) == 1


@pytest.mark.rule("G8")
async def test_files_are_rotated(bench: Bench) -> None:
    async with started(bench, Rotation(10_000, 2)) as logged:
        await logged.link.spawn(0, [bench.shell("seq 10000")])
        await next_event(logged.link, Gone)
    pieces = [logged.path(name).read_bytes() for name in ("0.out.2", "0.out.1", "0.out")]
    assert "".join(f"{number}\n" for number in range(1, 10001)).encode().endswith(b"".join(pieces))
    assert not logged.path("0.out.3").exists()


@pytest.mark.rule("G8", "G4")
async def test_the_log_process_outlives_its_agent_until_all_is_written(bench: Bench) -> None:
    """The agent is killed, the worker says its last words on SIGTERM: they are in the file, and nobody is left."""
    worker = bench.shell("trap 'seq 1000; echo last words; exit' TERM; echo ready; " + FOREVER)
    order = {
        "runtime_dir": str(bench.folder / "runtime"),
        "key": "key",
        "workers": [{name: getattr(worker, name) for name in worker.__slots__}],
        "leak_descriptors": True,
        "logs": True,
    }
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.client.supervised_agent", json.dumps(order)), cwd=ROOT, stdout=subprocess.PIPE
    )
    bench.pids.append(agent.pid)
    assert agent.stdout is not None
    told = json.loads(await agent.stdout.readline())
    bench.pids.append(told["leaking_pid"])
    assert read_stat(told["log_pid"]) is not None
    await grows(bench.folder / "0.out", 6)
    agent.kill()
    await ended(agent.pid)  # not its output, which the leaking process holds
    await ended(told["supervisor_pid"])
    await ended(told["log_pid"])
    assert (await grows(bench.folder / "0.out", 0)).endswith(b"1000\nlast words\n")


def test_the_log_process_imports_little() -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); import nvrx.client.log_process; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"asyncio", "grpc", "google", "torch", "pickle", "subprocess", "logging"} & set(modules)


@pytest.mark.rule("G8", "G1")
async def test_workers_need_more_descriptors_than_the_soft_limit_and_keep_it_themselves(bench: Bench) -> None:
    """Two cycles, as the read ends of the one before are kept."""
    count = 24
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, given[1]))
    try:
        logged = started(bench)
        running = await logged.__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, given)
    for cycle in range(2):
        await running.link.spawn(cycle, [bench.shell("ulimit -n", rank) for rank in range(count)])
        await next_event(running.link, Gone)
    for rank in range(count):
        assert await grows(running.path(f"{rank}.out"), 6) == b"80\n80\n"
    await logged.__aexit__(None, None, None)
