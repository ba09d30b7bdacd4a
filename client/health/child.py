"""A process beside the agent, as leader of a group of its own: started, read and reaped without ever being waited for.

Whatever it left behind in its group goes with it. Knows nothing of health.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

CHUNK_BYTES = 64 * 1024
CHUNKS_AT_ONCE = 16
"""So much is read in one go; then others have their turn."""
LAST_CHUNKS = 64
"""What is still in the pipe when a process has ended: more than any pipe holds."""
_THROUGH_SH = ("/bin/sh", "-c", 'exec "$@"', "sh")
_DEAF = ("/bin/sh", "-c", 'trap "" HUP INT QUIT TERM USR1 USR2; exec "$@"', "sh")
"""A batch scheduler signals every process of a step: what it asks for is between workers and agent."""


class Child:
    """A running process. `ended` has its exit code (negative: the signal), once it is reaped.

    The command is found by a shell that it then replaces: where its file does not answer, that waits and not the agent.
    `is_ours`: it is one of our programs, that ignores signals and is asked on its standard input.
    Raises OSError where not even the shell can be started.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], on_output: Callable[[bytes], None], *, is_ours: bool = False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._process = subprocess.Popen(
            [*(_DEAF if is_ours else _THROUGH_SH), *argv],
            env=dict(env),
            stdin=subprocess.PIPE if is_ours else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._handle = os.pidfd_open(self._process.pid)
        self.ended: asyncio.Future[int] = self._loop.create_future()
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._loop.add_reader(self._output, self._read, CHUNKS_AT_ONCE)
        self._loop.add_reader(self._handle, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self, chunks: int) -> None:
        for _ in range(chunks):
            try:
                data = os.read(self._output, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._on_output(data)

    def tell(self, line: str) -> None:
        """A line to its standard input. One that does not read gets none."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def kill(self) -> None:
        """SIGKILL to its whole group; `ended` follows, unless the kernel holds it."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        # It has ended and is not reaped: its number is still its own, and that of its group.
        self._loop.remove_reader(self._handle)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._read(LAST_CHUNKS)
        self._loop.remove_reader(self._output)
        os.close(self._handle)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if not self.ended.done():
            self.ended.set_result(code)

    async def ends_within(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        done, _ = await asyncio.wait([self.ended], timeout=seconds)
        return bool(done)
