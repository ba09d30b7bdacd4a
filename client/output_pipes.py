"""What a worker's standard output and error are: pipes whose read ends go to the log process; the supervisor's part.

Must not know: cycles, how workers start, the agent, what becomes of the output, or anything outside the
standard library. Never blocks: what the log process does not take now waits. Read ends are kept while workers
live: a log process that dies breaks no worker's pipe, and the next one gets them all again.
"""

import array
import contextlib
import fcntl
import json
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PIPE_BYTES = 1024 * 1024
_PIPE_BYTES_LEAST = 64 * 1024
FILES_OF_A_WORKER = 2
# A message is two paths of at most 4096 bytes, each byte at most six characters.
HANDOVER_BYTES = 64 * 1024
_STDOUT, _STDERR = 1, 2
_LOG_MODE = 0o644


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Where a worker's output is to go; `prefix` of its lines on the agent's own streams, None: not shown there."""

    stdout_path: bytes
    stderr_path: bytes
    prefix: bytes | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Open descriptors for a worker to be started with; the caller's only while it starts it."""

    stdout_fd: int
    stderr_fd: int


@dataclass(slots=True)
class _Pair:
    """The read ends of one worker."""

    message: bytes
    fds: tuple[int, ...]
    sent: bool = False
    forgotten: bool = False  # to be closed as soon as it is sent

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class OutputPipes:
    def __init__(self, to_log_process: socket.socket | None) -> None:
        """None: no log process; outputs go straight into the files."""
        self._socket = to_log_process
        self._numbers = 0
        self._pairs: list[_Pair] = []
        self._former: list[_Pair] = []
        self._unsent: deque[_Pair] = deque()
        if to_log_process is not None:
            to_log_process.setblocking(False)

    @contextmanager
    def open(self, files: OutputFiles) -> Iterator[Outputs]:
        """The outputs of one worker, open while it starts. Raises OSError."""
        with contextlib.ExitStack() as ours:
            if self._socket is None:
                yield Outputs(_open_file(files.stdout_path, ours), _open_file(files.stderr_path, ours))
                return
            read_ends: list[int] = []
            write_ends: list[int] = []
            try:
                for _ in range(FILES_OF_A_WORKER):
                    read_end, write_end = make_pipe()
                    os.set_blocking(read_end, False)
                    read_ends.append(read_end)
                    write_ends.append(write_end)
                    ours.callback(os.close, write_end)
            except OSError:
                for read_end in read_ends:
                    os.close(read_end)
                raise
            self._hand_over(files, tuple(read_ends))
            yield Outputs(*write_ends)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def flush(self) -> None:
        """Send what the socket takes now."""
        assert self._socket is not None
        while self._unsent:
            pair = self._unsent[0]
            rights = array.array("i", pair.fds)
            try:
                self._socket.sendmsg([pair.message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except BlockingIOError:
                return
            except OSError:
                pass  # agent and log process are gone: nobody is left to write it
            self._unsent.popleft()
            pair.sent = True
            if pair.forgotten:
                pair.close()

    def hand_over_again(self) -> None:
        """There is a new log process. What the old one took without writing is lost, nothing else."""
        forgotten = [pair for pair in self._unsent if pair.forgotten]
        self._unsent = deque([*forgotten, *self._former, *self._pairs])
        for pair in self._unsent:
            pair.sent = False
        if self._socket is not None:
            self.flush()

    def forget(self) -> None:
        """No process is left that writes.

        What is in the pipes is the log process's; should it die in the same moment, as when memory runs out, the next
        one finds them here until another cycle is over.
        """
        for pair in self._former:
            pair.forgotten = True
            if pair.sent:
                pair.close()
        self._former, self._pairs = self._pairs, []

    # --- below

    def _hand_over(self, files: OutputFiles, read_ends: tuple[int, ...]) -> None:
        named = ((_STDOUT, files.stdout_path), (_STDERR, files.stderr_path))
        plain = []
        for stream, path in named:
            self._numbers += 1
            prefix = files.prefix.decode("latin-1") if files.prefix is not None else None
            plain.append({"number": self._numbers, "path": path.decode("latin-1"), "stream": stream, "prefix": prefix})
        pair = _Pair(json.dumps(plain).encode("ascii"), read_ends)
        self._pairs.append(pair)
        self._unsent.append(pair)
        self.flush()


def make_pipe() -> tuple[int, int]:
    """Read and write end; as large as this user may have one."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    size = PIPE_BYTES
    while size > _PIPE_BYTES_LEAST:
        with contextlib.suppress(OSError):  # over /proc/sys/fs/pipe-max-size, or pipe-user-pages-soft
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, size)
            break
        size //= 2
    return read_end, write_end


def _open_file(path: bytes, ours: contextlib.ExitStack) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, _LOG_MODE)
    ours.callback(os.close, fd)
    return fd
