"""Real processes: started with an environment made from scratch, heard line by line, ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from .board import PATIENCE_S, Board

ROOT = Path(__file__).resolve().parents[2]
MARKER = "E2E_CLUSTER"
COORDINATOR = (sys.executable, "-m", "nvrx.server.cli")
NODE = (sys.executable, "-m", "nvrx.client.cli")
_TAIL_LINES = 30


class Program:
    """A running command. Its output is kept, and announced line by line."""

    def __init__(self, board: Board, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT) -> None:
        self.name = name
        self.out: list[str] = []
        self.err: list[str] = []
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self._board = board
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [self._read(self.process.stdout, self.out), self._read(self.process.stderr, self.err)]
        threading.Thread(target=self._reap, daemon=True).start()
        board.describe_with(self.tail)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self, pipe: IO[bytes], lines: list[str]) -> threading.Thread:
        def read() -> None:
            with pipe, contextlib.suppress(ValueError):
                for line in pipe:
                    lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                    self._board.announce()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def _reap(self) -> None:
        code = self.process.wait()
        self.ended_at = time.monotonic()
        # Children may hold the pipes open; what the process itself wrote is there already.
        for one in self._readers:
            one.join(0.5)
        self.exit_code = code
        self._board.announce()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; the exit code."""
        return self._board.until(lambda: self.exit_code, f"the end of {self.name}", timeout_s)

    def said(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait for a line on standard output or error."""

        def found() -> re.Match[str] | None:
            return next((hit for line in [*self.out, *self.err] if (hit := re.search(pattern, line))), None)

        return self._board.until(found, f"{self.name} to say {pattern!r}", timeout_s)

    def tail(self) -> str:
        state = "running" if self.exit_code is None else f"exit {self.exit_code}"
        lines = [*self.out[-_TAIL_LINES:], *self.err[-_TAIL_LINES:]]
        return "\n".join([f"--- {self.name} (pid {self.pid}, {state})", *lines])


def marked(mark: str) -> list[int]:
    """Every process that was started, directly or not, with this mark in its environment."""
    entry = f"{MARKER}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> None:
    """SIGKILL until none with this mark is left; a process that ends has an empty environment."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := marked(mark):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} outlived SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            _gone(pid)


def _gone(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with contextlib.closing(os.fdopen(handle, "rb", closefd=True)):
        select.select([handle], [], [], 1.0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and is not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
