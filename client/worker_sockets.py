"""Where the workers of a cycle speak to their agent: one datagram socket for each, and what comes out of it.

Each has a queue of its own, in a directory of this user alone, under a name that no other cycle has: what a stranger
or an older worker sends goes nowhere. Must not know what silence means, or anything of asyncio.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.hang import Section, Word
from nvrx.core.ids import LocalRank
from nvrx.runtime_dir import make_private
from nvrx.worker import HAS_STEP, HAS_TIMEOUT, HEAD, IN_SECTION, MAGIC, MAX_WORD_BYTES

MAX_PATH_BYTES = 107
"""Of a socket's name, in the kernel."""
MAX_READ = 4096
"""Words that are read before anything else gets its turn, from one worker."""
_QUEUE_LENGTH_FILE = "/proc/sys/net/unix/max_dgram_qlen"
_LEAST_QUEUE = 10
_MANY_WAITING = 64
"""Fewer words than the sender's buffer holds: with more of them waiting, the last may not have been taken."""
_PREFIX = "worker-"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Heard:
    """The last word of one worker that was waiting, and the process that sent it (0: the kernel does not say).

    `may_have_said_more`: its queue had been full, and later words may be lost.
    """

    local_rank: LocalRank
    word: Word
    pid: int
    may_have_said_more: bool


@dataclass(frozen=True)
class _Told:
    word: Word
    pid: int


class WorkerSockets:
    """The sockets of one cycle's workers. Raises OSError where they cannot be made."""

    def __init__(self, runtime_dir: Path, count: int) -> None:
        self._own_directory: Path | None = None
        self._sockets: dict[LocalRank, socket.socket] = {}
        self._queue = _queue_length()
        token = secrets.token_hex(6)
        try:
            directory = self._directory(runtime_dir, f"{_PREFIX}{token}-{count}")
            self.paths = [str(directory / f"{_PREFIX}{token}-{index}") for index in range(count)]
            for index, path in enumerate(self.paths):
                self._sockets[LocalRank(index)] = _bound(path)
        except OSError:
            self.close()
            raise

    def _directory(self, runtime_dir: Path, longest_name: str) -> Path:
        if len(os.fsencode(runtime_dir / longest_name)) <= MAX_PATH_BYTES:
            make_private(str(runtime_dir))
            _remove_left_over(runtime_dir)
            return runtime_dir
        self._own_directory = Path(tempfile.mkdtemp(prefix="nvrx-", dir="/tmp"))
        return self._own_directory

    def filenos(self) -> dict[int, LocalRank]:
        """The descriptors to wait on."""
        return {one.fileno(): rank for rank, one in self._sockets.items()}

    def read(self) -> Iterator[Heard]:
        """What has come from all of them."""
        for rank in self._sockets:
            heard = self.read_one(rank)
            if heard is not None:
                yield heard

    def read_one(self, rank: LocalRank) -> Heard | None:
        """The last valid word that waits; None where there is none. What is no word is passed over."""
        last: _Told | None = None
        count = 0
        while count < MAX_READ:
            try:
                data, ancillary, _, _ = self._sockets[rank].recvmsg(
                    MAX_WORD_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except (BlockingIOError, InterruptedError):
                break
            count += 1
            word = word_in(data)
            last = last if word is None else _Told(word, _sender(ancillary))
        if last is None:
            return None
        return Heard(rank, last.word, last.pid, may_have_said_more=count > min(self._queue, _MANY_WAITING))

    def close(self) -> None:
        for one in self._sockets.values():
            path = one.getsockname()
            one.close()
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._sockets = {}
        if self._own_directory is not None:
            with contextlib.suppress(OSError):
                self._own_directory.rmdir()
            self._own_directory = None


def word_in(data: bytes) -> Word | None:
    """The word in a datagram; None where it is none: whoever sent it."""
    if not HEAD.size <= len(data) <= MAX_WORD_BYTES:
        return None
    magic, flags, step, timeout_s = HEAD.unpack_from(data)
    if magic != MAGIC or flags & ~(HAS_STEP | IN_SECTION | HAS_TIMEOUT):
        return None
    has_timeout = bool(flags & HAS_TIMEOUT)
    if (flags & HAS_STEP and step < 0) or (has_timeout and not (math.isfinite(timeout_s) and timeout_s > 0)):
        return None
    section = None
    if flags & IN_SECTION:
        name = data[HEAD.size :].decode("utf-8", "replace")
        printable = "".join(one if one.isprintable() and one != '"' else "?" for one in name)
        section = Section(printable, timeout_s if has_timeout else None)
    return Word(step if flags & HAS_STEP else None, section)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            pid: int = _CREDENTIALS.unpack_from(data)[0]
            return pid
    return 0


def _bound(path: str) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        one.bind(path)
    except OSError:
        one.close()
        raise
    return one


def _queue_length() -> int:
    try:
        return max(_LEAST_QUEUE, int(Path(_QUEUE_LENGTH_FILE).read_text()))
    except (OSError, ValueError):
        return _LEAST_QUEUE


def _remove_left_over(directory: Path) -> None:
    """Names that agents left which were killed; a socket that somebody listens at is left alone."""
    for path in directory.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as one:
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
