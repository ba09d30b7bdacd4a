"""The agent's end of its log process: starts it, starts another when it dies, asks it to write what it holds.

Must not know: the coordinator, grpc, what a cycle is, or what is in the output. Start it before any grpc
channel exists, from the main thread: the log process watches the life of the thread that starts it.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from .log_file import Rotation
from .supervisor_channel import HEADER, MESSAGE_LIMIT_BYTES, Message, decode, encode, pack_bytes
from .supervisor_link import import_root
from .worker_start import signal_name

log = logging.getLogger("nvrx.node")

_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from nvrx.client.log_process import main; sys.exit(main(sys.argv[1:]))"
)
_HELD_BACK_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_FLUSH_WITHIN_S = 0.5
# All waits together: as many workers fail at once as there are. This much of it comes back in a second.
_PATIENCE_AGAIN = 0.05
_LEAST_PATIENCE_S = 0.1
_CLOSE_WITHIN_S = 5.0
# One that dies as soon as it starts is not started again and again without a pause.
_LIVES_AT_LEAST_S = 5.0
_START_AGAIN_AFTER_S = 1.0


class LogError(Exception):
    """The log process could not be started."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """`missing_tail`: the end of the output where the file lacks it, as on a full disk."""

    missing_tail: bytes | None = None


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    started_s: float


class LogLink:
    def __init__(self, rotation: Rotation | None) -> None:
        self._rotation = rotation
        # Its end of the handover is kept here: what a process that died left unread, the next one reads.
        self._supervisors_end, self._handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._on_new_process: Callable[[], None] = lambda: None
        self._current: _Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Flushed]] = {}
        self.is_late = False
        self._patience_s = _FLUSH_WITHIN_S
        self._patience_at_s = time.monotonic()
        self._closing = False

    @classmethod
    async def start(cls, rotation: Rotation | None = None) -> "LogLink":
        """Raises LogError."""
        link = cls(rotation)
        try:
            link._current = await link._start_process()
        except OSError as error:
            link._supervisors_end.close()
            link._handover.close()
            raise LogError(f"cannot start the process that writes workers' output: {error}") from error
        link._keeping = asyncio.create_task(link._keep(), name="log process")
        return link

    @property
    def handover_fd(self) -> int:
        """For the supervisor to be started with; see `supervised`."""
        return self._supervisors_end.fileno()

    @property
    def pid(self) -> int | None:
        return self._current.process.pid if self._current is not None else None

    def supervised(self, on_new_process: Callable[[], None]) -> None:
        """The supervisor has its end, and is to be told when another log process has been started."""
        self._supervisors_end.close()
        self._on_new_process = on_new_process

    async def flush(self, path: str, *others: str) -> Flushed:
        """Returns once everything that was in the pipes of these files is written, or after half a second.

        What is missing is told of the first.
        While an earlier answer is overdue (a file system hangs) it does not wait at all, and where many follow each
        other no longer than half a second for all of them.
        """
        patience_s = self._patience()
        if self._current is None or self.is_late or patience_s < _LEAST_PATIENCE_S:
            return Flushed()
        number = next(self._numbers)
        answer: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send({"type": "flush", "number": number, "paths": [pack_bytes(one) for one in (path, *others)]})
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self.is_late = number in self._asked
            log.warning("the last of %s is not written yet; the file system may hang", path)
            return Flushed()
        finally:
            self._patience_s -= time.monotonic() - self._patience_at_s

    def _patience(self) -> float:
        """How long a flush may wait now."""
        now_s = time.monotonic()
        again_s = (now_s - self._patience_at_s) * _PATIENCE_AGAIN
        self._patience_s, self._patience_at_s = min(max(0.0, self._patience_s) + again_s, _FLUSH_WITHIN_S), now_s
        return self._patience_s

    async def close(self) -> None:
        """Once no worker is left: returns when all output is written, or after seconds."""
        self._closing = True
        self._supervisors_end.close()
        self._handover.close()
        self._send({"type": "close"})
        assert self._keeping is not None
        done, _ = await asyncio.wait([self._keeping], timeout=_CLOSE_WITHIN_S)
        if not done:
            log.warning("workers' output is still being written; process %s goes on with it", self.pid)
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping

    # --- below

    def _send(self, message: Message) -> None:
        if self._current is not None:
            self._current.writer.write(encode(message))

    async def _keep(self) -> None:
        """Hear the process; start another when it dies."""
        while True:
            if self._current is not None:
                how = await self._hear(self._current)
                lived_s = time.monotonic() - self._current.started_s
                self._current = None
                self._forget_asked()
                if self._closing:
                    return
                log.error("the process that writes workers' output ended (%s); starting another", how)
                if lived_s < _LIVES_AT_LEAST_S:
                    await asyncio.sleep(_START_AGAIN_AFTER_S)
            if self._closing:
                return
            try:
                self._current = await self._start_process()
                self._on_new_process()
            except OSError as error:
                log.error("cannot start the process that writes workers' output: %s; trying again", error)
                await asyncio.sleep(_START_AGAIN_AFTER_S)

    def _forget_asked(self) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(Flushed())
        self._asked.clear()
        self.is_late = False

    async def _hear(self, current: _Process) -> str:
        """Until its end; how it ended."""
        try:
            while True:
                (length,) = HEADER.unpack(await current.reader.readexactly(HEADER.size))
                if length > MESSAGE_LIMIT_BYTES:
                    break
                self._take(decode(await current.reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # its end; what kind of end, its exit status says
        finally:
            current.writer.close()
        code = await asyncio.to_thread(current.process.wait)
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    def _take(self, message: Message) -> None:
        if message["type"] == "warning":
            log.warning("%s", message["text"])
            return
        answer = self._asked.pop(message["number"], None)
        self.is_late = False
        if answer is not None and not answer.done():
            missing = message["missing_tail"]
            answer.set_result(Flushed(missing.encode("latin-1") if missing is not None else None))

    async def _start_process(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = self._popen(theirs.fileno())
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return _Process(process, reader, writer, time.monotonic())

    def _popen(self, fd: int) -> subprocess.Popen[bytes]:
        limits = (self._rotation.max_bytes, self._rotation.keep) if self._rotation is not None else (0, 0)
        handover_fd = self._handover.fileno()
        # Held back until it ignores them itself: a signal to the whole step must not end it half-started.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK_SIGNALS)
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT),
                    *(str(import_root()), str(fd), str(handover_fd), str(os.getpid()), *map(str, limits)),
                ],
                pass_fds=(fd, handover_fd),
                stdin=subprocess.DEVNULL,  # standard output and error are the agent's: there workers' lines go
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
