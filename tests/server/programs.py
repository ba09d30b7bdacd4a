"""`nvrx-coord` as a process: started, waited for by what it says, ended by its pid."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

WAIT_S = 30.0
COMMAND = [sys.executable, "-m", "nvrx.server.cli"]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without any NVRX_ variable, and with `changes`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("NVRX_")} | changes


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=environment(**changes),
        check=False,
    )


class Program:
    """A coordinator as a process; `out` and `err` hold what it has said so far."""

    def __init__(self, *arguments: str, **changes: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**changes),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, kept), daemon=True)
            for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        self.address = ""

    def _read(self, stream: Iterator[str], kept: list[str]) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            if kept is self.out:
                self._lines.put(kept[-1])
        if kept is self.out:
            self._lines.put(None)

    def ready(self) -> str:
        """Wait for the ready line; the address in it."""
        line = self._lines.get(timeout=WAIT_S)
        assert line is not None, f"it ended with {self.wait()}: {self.err}"
        prefix = "nvrx-coord listening on "
        assert line.startswith(prefix)
        self.address = line.removeprefix(prefix)
        return self.address

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        return code

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Have it end by a signal; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait()


@contextlib.contextmanager
def coordinator(*arguments: str, ready: bool = True, **changes: str) -> Iterator[Program]:
    """A coordinator on a free port, in memory unless told otherwise."""
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    state = () if {"--state", "--state-dir"} & set(arguments) else ("--state", "memory")
    program = Program(*listen, *state, *arguments, **changes)
    try:
        if ready:
            program.ready()
        yield program
    finally:
        if program.process.poll() is None:
            program.process.kill()
        program.process.wait(WAIT_S)
