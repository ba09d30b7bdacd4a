"""One log file of a worker's output: takes bytes from a pipe, keeps its size, outlives a full disk.

Must not know: workers, ranks, processes, sockets, or anything outside the standard library.
What cannot be written is dropped and counted, never kept: a full disk must cost neither memory nor training.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

# The text of a failure record ends with this much of standard error (nvrx.core.facts.MAX_STDERR_TAIL).
TAIL_BYTES = 4096
_RETRY_AFTER_S = 1.0
# A disk that is all but full fails and works again by turns: that is said once, its bytes later.
_QUIET_S = 60.0
_READ_BYTES = 1024 * 1024
_LOG_MODE = 0o644
# A file system without splice says so; a few say it in another way.
_NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Rotation:
    """A file over `max_bytes` becomes `<path>.1`, that one `<path>.2`, up to `<path>.<keep>`."""

    max_bytes: int
    keep: int


class Disk:
    """Says what is wrong with the log files of a node: once for all of them, not once for each."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.say = say
        self.clock = clock
        self._failing: set[bytes] = set()
        self._announced = False
        self._quiet_until_s = clock()

    def fails(self, path: bytes, error: OSError) -> None:
        now_s = self.clock()
        if not self._failing and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            self._announced = True
            self.say(
                f"cannot write {os.fsdecode(path)}: {error.strerror}; what workers print is dropped where it cannot "
                "be written, training goes on; make room, and writing goes on"
            )
        self._failing.add(path)

    def works(self, path: bytes, dropped: int, why: str) -> bool:
        """Whether that was said: not where the trouble was not worth a word, either."""
        said = self._announced
        if said:
            self.say(f"{os.fsdecode(path)} is written again; {dropped} bytes were dropped ({why})")
        self._failing.discard(path)
        self._announced = self._announced and bool(self._failing)
        return said

    def ends(self, path: bytes, dropped: int, why: str) -> None:
        """The output is over, and some of it is missing."""
        self._failing.discard(path)
        self.say(f"{dropped} bytes of {os.fsdecode(path)} were dropped ({why})")


class LogFile:
    """Appends, from wherever the file ends now: somebody may have emptied it meanwhile."""

    def __init__(self, path: bytes, disk: Disk, rotation: Rotation | None = None) -> None:
        self._path = path
        self._disk = disk
        self._rotation = rotation
        self._fd: int | None = None
        self._can_splice = True
        self._failure: OSError | None = None
        self._retry_at_s = 0.0
        self._dropped = 0
        self._unsaid = 0  # dropped earlier, of which only the file tells
        self._dropped_tail = b""
        try:
            self._open()
        except OSError as error:
            self._fail(error)

    @property
    def splices(self) -> bool:
        """False where `write` is to be used: to cut at a line's end, or because the file system cannot."""
        return self._can_splice and self._rotation is None and self._failure is None

    @property
    def missing_tail(self) -> bytes | None:
        """The last of the output where the file lacks it; None where the file has it."""
        return self._dropped_tail if self._failure is not None else None

    def splice(self, pipe: int, count: int) -> int:
        """Move up to `count` bytes, that are in the pipe, into the file; how many are done with.

        Fewer when the file cannot take them in this way: then read them, and `write`.
        """
        moved = 0
        try:
            fd = self._at_end()
            while moved < count:
                moved += os.splice(pipe, fd, count - moved)
        except OSError as error:
            if error.errno in _NO_SPLICE:
                self._can_splice = False
            else:
                self._fail(error)
        return moved

    def write(self, data: bytes) -> None:
        """Write all of it, or count it as dropped."""
        if self._failure is not None and not self._recovers():
            self._drop(data)
            return
        rest = memoryview(data)
        try:
            if self._rotation is None:
                self._write_all(rest)
            else:
                self._write_rotating(data, self._rotation)
        except _Unwritten as unwritten:
            self._fail(unwritten.error)
            self._drop(bytes(unwritten.rest))

    def close(self) -> None:
        if self._dropped:
            self._recovers()
        if missing := self._dropped + self._unsaid:
            self._disk.ends(self._path, missing, self._why())
        if self._fd is not None:
            with contextlib.suppress(OSError):  # network file systems report late; nobody is left to act on it
                os.close(self._fd)
            self._fd = None

    # --- below

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY  # not O_APPEND: splice refuses that
        try:
            self._fd = os.open(self._path, flags, _LOG_MODE)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, flags, _LOG_MODE)
        return self._fd

    def _at_end(self) -> int:
        fd = self._fd if self._fd is not None else self._open()
        os.lseek(fd, 0, os.SEEK_END)
        return fd

    def _write_all(self, rest: memoryview) -> None:
        try:
            fd = self._at_end()
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError as error:
            raise _Unwritten(error, rest) from error

    def _write_rotating(self, data: bytes, rotation: Rotation) -> None:
        start = 0
        while start < len(data):
            try:
                room = rotation.max_bytes - os.lseek(self._at_end(), 0, os.SEEK_CUR)
            except OSError as error:
                raise _Unwritten(error, memoryview(data)[start:]) from error
            end = len(data)
            if end - start > room:
                # At a line's end if there is one; a line longer than a file is cut.
                line_end = data.rfind(b"\n", start, start + max(0, room)) + 1
                end = line_end or (start + room if room >= rotation.max_bytes else start)
            if end > start:
                self._write_all(memoryview(data)[start:end])
                start = end
            if start < len(data):
                self._rotate(rotation, memoryview(data)[start:])

    def _rotate(self, rotation: Rotation, rest: memoryview) -> None:
        try:
            for number in range(rotation.keep - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(b"%s.%d" % (self._path, number), b"%s.%d" % (self._path, number + 1))
            os.replace(self._path, b"%s.1" % self._path)
            assert self._fd is not None
            os.close(self._fd)
            self._fd = None
            self._open()
        except OSError as error:
            raise _Unwritten(error, rest) from error

    def _why(self) -> str:
        return (self._failure.strerror if self._failure is not None else None) or "an earlier failure"

    def _fail(self, error: OSError) -> None:
        self._failure = error
        self._retry_at_s = self._disk.clock() + _RETRY_AFTER_S
        self._disk.fails(self._path, error)

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        self._dropped_tail = (self._dropped_tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]

    def _recovers(self) -> bool:
        """Whether the file can be written again, tried now and then by saying in it what is missing."""
        if self._disk.clock() < self._retry_at_s:
            return False
        why = self._why()
        note = f"\n[nvrx: {self._dropped} bytes were dropped here: {why}]\n" if self._dropped else ""
        try:
            self._write_all(memoryview(note.encode()))
        except _Unwritten as unwritten:
            self._fail(unwritten.error)
            return False
        self._failure = None
        missing = self._dropped + self._unsaid
        self._unsaid = 0 if self._disk.works(self._path, missing, why) else missing
        self._dropped, self._dropped_tail = 0, b""
        return True


class _Unwritten(Exception):
    def __init__(self, error: OSError, rest: memoryview) -> None:
        super().__init__(str(error))
        self.error = error
        self.rest = rest
