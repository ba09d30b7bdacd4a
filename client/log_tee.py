"""Shows workers' output on a stream of the agent's own, each line with its prefix; never at a worker's cost.

Must not know: workers, ranks, files, sockets, or anything outside the standard library.
Bytes are never decoded. `offer` never blocks: a thread per stream writes, its queue is bounded, so is the rate,
and what finds no room is left out and counted.
"""

import errno
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable

_QUEUE_BYTES = 8 * 1024 * 1024
# Far more than anybody reads. Beyond it prefixes cost processor time that training, and its log files, need.
_BYTES_PER_S = 8 * 1024 * 1024
# A line without an end is shown after this long, or when it is this long: progress bars have none for hours.
_PARTIAL_AFTER_S = 0.2
_PARTIAL_BYTES = 64 * 1024
# Written at once, cut at the end of a line: others write to the same terminal or pipe.
_PIECE_BYTES = 64 * 1024
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET, errno.ENXIO)
_INNER_START = re.compile(rb"\n(?=[^\r])|\r(?=[^\r\n])")


class Shown:
    """One worker's output, on its way to a stream."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.partial = b""
        self.partial_since_s = 0.0


class Joined:
    """Lines of many on one stream: knows whose line is unfinished there, and where a prefix is due. Pure."""

    def __init__(self) -> None:
        self._open: Shown | None = None
        self._after_return = False

    def add(self, shown: Shown, text: bytes) -> bytes:
        """What to write for this text, that need not end a line."""
        if not text:
            return b""
        before = b"\n" if self._open is not None and self._open is not shown else b""
        starts = self._open is not shown or self._after_return
        if starts and self._after_return and self._open is shown and text[:1] == b"\n":
            starts = False  # a line end in two parts
        elif starts and text[:1] == b"\r" and text[:2] != b"\r\n":
            starts = False  # the line begins after it
        if b"\r" in text:
            inner = _INNER_START.sub(lambda found: found[0] + shown.prefix, text)
        else:
            inner = text[:-1].replace(b"\n", b"\n" + shown.prefix) + text[-1:]
        self._open = None if text.endswith(b"\n") else shown
        self._after_return = text.endswith(b"\r")
        return before + (shown.prefix if starts else b"") + inner

    def end(self, shown: Shown) -> bytes:
        """After the last of this output."""
        if self._open is not shown:
            return b""
        self._open = None
        return b"\n"

    def line(self, text: bytes) -> bytes:
        """A whole line of our own."""
        before = b"\n" if self._open is not None else b""
        self._open = None
        return before + text


class Tee:
    """One stream of the agent."""

    def __init__(
        self, fd: int, name: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._fd = fd
        self._name = name
        self._say = say
        self._joined = Joined()
        self._queue: deque[tuple[Shown | None, bytes | None]] = deque()  # for nobody: a line of our own
        self._queued_bytes = 0
        self._wakeup = threading.Condition()
        self._partials: dict[Shown, None] = {}
        self._gap = 0  # bytes left out since the last note on the stream
        self._left_out = 0
        self._allowance = float(_BYTES_PER_S)
        self._allowed_at_s = self._clock()
        self._gone = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"tee to {name}", daemon=True)
        self._thread.start()

    def has_room(self, size: int) -> bool:
        """Whether so much may be offered now; where not, it counts as left out."""
        with self._wakeup:
            now_s = self._clock()
            earned = (now_s - self._allowed_at_s) * _BYTES_PER_S
            self._allowance = min(self._allowance + earned, _BYTES_PER_S)
            self._allowed_at_s = now_s
            if self._gone or self._queued_bytes + size > _QUEUE_BYTES or self._allowance < size:
                self._leave_out(size)
                return False
            self._allowance -= size
            return True

    def offer(self, shown: Shown, data: bytes | None) -> None:
        """Show this, for which there is room; None: that was all of it."""
        with self._wakeup:
            self._note_gap()
            self._queue.append((shown, data))
            self._queued_bytes += len(data) if data is not None else 0
            self._wakeup.notify()

    def close(self, within_s: float) -> None:
        """Show what is queued, if the reader takes it in time; then say what was not shown."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join(within_s)
        with self._wakeup:
            queued = sum(len(data) for shown, data in self._queue if shown is not None and data is not None)
            unshown = self._left_out + queued
        if unshown:
            self._say(f"{unshown} bytes of workers' output were not shown on {self._name}; they went to the log files")

    # --- below

    def _leave_out(self, size: int) -> None:
        if not self._left_out and not self._gone:
            self._say(
                f"workers write more than is read from {self._name}, or than {_BYTES_PER_S // 1024**2} MiB/s; some of "
                "it is left out there, not in the log files"
            )
        self._left_out += size
        self._gap += size

    def _note_gap(self) -> None:
        if self._gap:
            note = f"[nvrx] {self._gap} bytes of workers' output are left out here; the log files have them\n"
            self._queue.append((None, note.encode()))
            self._queued_bytes += len(note)
            self._gap = 0

    def _run(self) -> None:
        while True:
            with self._wakeup:
                if not self._queue and not self._gap and not self._closing:
                    self._wakeup.wait(self._next_partial_s())
                if not self._queue:
                    self._note_gap()
                shown, data = self._queue.popleft() if self._queue else (None, None)
                closing = self._closing
            if data is None and shown is None:
                self._show_partials(everything=closing)
                if closing:
                    return
                continue
            self._write(self._take(shown, data))
            with self._wakeup:  # only now: what is being written is still held
                self._queued_bytes -= len(data) if data is not None else 0
            self._show_partials(everything=False)

    def _next_partial_s(self) -> float | None:
        if not self._partials:
            return None
        return max(0.0, next(iter(self._partials)).partial_since_s + _PARTIAL_AFTER_S - self._clock())

    def _take(self, shown: Shown | None, data: bytes | None) -> bytes:
        if shown is None:
            return self._joined.line(data or b"")
        if data is None:
            last = self._joined.add(shown, shown.partial)
            self._forget_partial(shown)
            return last + self._joined.end(shown)
        whole_until = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if whole_until:
            text = shown.partial + data[:whole_until]
            self._forget_partial(shown)
            self._hold(shown, data[whole_until:])
            return self._joined.add(shown, text)
        self._hold(shown, shown.partial + data)
        return self._show(shown) if len(shown.partial) > _PARTIAL_BYTES else b""

    def _hold(self, shown: Shown, partial: bytes) -> None:
        if partial and shown not in self._partials:
            shown.partial_since_s = self._clock()
            self._partials[shown] = None
        shown.partial = partial

    def _forget_partial(self, shown: Shown) -> None:
        shown.partial = b""
        self._partials.pop(shown, None)

    def _show(self, shown: Shown) -> bytes:
        text = self._joined.add(shown, shown.partial)
        self._forget_partial(shown)
        return text

    def _show_partials(self, everything: bool) -> None:
        due_s = self._clock() - _PARTIAL_AFTER_S
        for shown in list(self._partials):
            if everything or shown.partial_since_s <= due_s:
                self._write(self._show(shown))

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest and not self._gone:
            start = len(text) - len(rest)
            line_end = text.rfind(b"\n", start, start + _PIECE_BYTES) + 1
            piece = rest[: line_end - start] if line_end and len(rest) > _PIECE_BYTES else rest[:_PIECE_BYTES]
            try:
                rest = rest[os.write(self._fd, piece) :]
            except BlockingIOError:  # somebody made the stream so, for all who share it
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                self._on_error(error, bytes(rest))
                return

    def _on_error(self, error: OSError, rest: bytes) -> None:
        with self._wakeup:
            self._left_out += len(rest)
            if error.errno in _GONE:
                self._gone = True
        if self._gone:
            self._say(f"{self._name} is closed ({error.strerror}): workers' output is in the log files only")
