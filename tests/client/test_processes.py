"""The tools below the supervisor: the tree, signals to exactly one process, and the timing of a stop."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from nvrx.client.processes import ProcessId, handles_signal, read_stat, send_signals
from nvrx.client.worker_start import describe_end, signal_name

from .supervision import ROOT, alive


@pytest.mark.rule("G4")
@pytest.mark.parametrize("handles", [True, False])
async def test_a_signal_reaches_only_the_process_that_was_seen(handles: bool) -> None:
    """Field case C116: the same pid with another start time is a stranger. Also on kernels without pidfds."""

    def send(target: ProcessId) -> bool:
        if handles:
            return send_signals(target, signal.SIGKILL)
        return send_signals(target, signal.SIGKILL, open_handle=lambda _: None)

    process = await asyncio.create_subprocess_exec("sleep", "1000")
    stat = read_stat(process.pid)
    assert stat is not None
    assert not send(replace(stat.id, start_time_ticks=stat.id.start_time_ticks + 1))
    assert alive(process.pid)
    assert send(stat.id)
    assert await process.wait() == -signal.SIGKILL
    assert not send(stat.id)


def test_never_signals_everybody_init_or_itself() -> None:
    for pid in (-1, 0, 1, os.getpid()):
        with pytest.raises(AssertionError, match="refusing"):
            send_signals(ProcessId(pid, 0), signal.SIGTERM)


def test_knows_which_signals_are_handled() -> None:
    """Ignored is not handled: Python ignores SIGPIPE and handles SIGINT."""
    assert handles_signal(os.getpid(), signal.SIGINT)
    assert not handles_signal(os.getpid(), signal.SIGPIPE)
    assert not handles_signal(os.getpid(), 40)


@pytest.mark.rule("G5")
def test_words_of_an_end() -> None:
    assert describe_end(37 << 8).message == "exit code 37"
    assert describe_end(11 | 0x80).message == "SIGSEGV (core dumped)"
    assert [signal_name(signo) for signo in (9, 34, 40, 64)] == [
        "SIGKILL",
        "SIGRTMIN",
        "signal 40",
        "SIGRTMAX",
    ]


_STUCK = """
import os, subprocess
from nvrx.client.tree_stop import TreeStop
child = subprocess.Popen(["sleep", "1000"])  # killed, but never reaped: still there
stop = TreeStop(now_s=100.0, grace_s=0.0)
said = [stop.step(100.0 + after_s) for after_s in (0.0, 2.9, 3.0, 7.9, 8.0)]
assert said == [[], [], [child.pid], [], [child.pid]], said
assert child.wait() == -9
"""


@pytest.mark.rule("G4")
def test_says_now_and_then_what_survives_sigkill() -> None:
    """In a process of its own, as it ends everything below it; on a clock of its own, as it reads none."""
    subprocess.run([sys.executable, "-c", _STUCK], cwd=ROOT, check=True)
