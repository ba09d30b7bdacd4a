"""For training scripts: `import nvrx.worker` tells the agent that this worker lives, and how far training came.

    for step, batch in enumerate(batches, start=first):
        nvrx.worker.report_progress(step)
        train(batch)
        if step % 1000 == 0:
            with nvrx.worker.section("checkpoint", timeout=600):
                save(step)

Never raises into training, never blocks, and costs well under a microsecond: words beyond some a second are not sent.
Outside nvrx every call does nothing. Safe from threads and signal handlers. What a worker forks, or starts with
`multiprocessing` (data loaders), says nothing; a program that it starts with `subprocess` speaks for it.

Must not know: anything outside the standard library. `docs/hangs.md` says what the agent makes of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt

if TYPE_CHECKING:  # imported when first needed
    import socket as sockets

__all__ = ["failed_rank_map", "heartbeat", "rank_map", "report_progress", "section"]

SOCKET_VARIABLE = "NVRX_WORKER_SOCKET"
BEAT_EVERY_S = 0.1
"""Heartbeats nearer to the last word than this are not sent."""
STEP_EVERY_S = 0.01
"""The same for steps: the last one before a hang is worth more."""
MAX_STEP = 2**63 - 1

# A word: all that the agent is to know now, so that one that is lost is made good by the next.
MAGIC = b"nvx1"
HEAD = struct.Struct("<4sBqd")  # magic, which of the following are there, step, timeout of the section; then its name
HAS_STEP, IN_SECTION, HAS_TIMEOUT = 1, 2, 4
MAX_NAME_BYTES = 64
MAX_WORD_BYTES = HEAD.size + MAX_NAME_BYTES

# So many bytes of our words may wait to be read, as the kernel counts them (some 800 for each), before heartbeats are
# held back: its queue may take no more than 10 words, and room is kept for those that open and close a section.
_ROOM_BYTES = 3000
_SIOCOUTQ = 0x5411

_now = time.monotonic
_beat_due_s = 0.0
_step_due_s = 0.0
_socket: sockets.socket | None = None
_is_open = False
_step: int | None = None
_complained = False


class _Open:
    """A section that was entered and not left yet."""

    __slots__ = ("name", "timeout_s")

    def __init__(self, name: bytes, timeout_s: float | None) -> None:
        self.name = name
        self.timeout_s = timeout_s


_sections: list[_Open] = []


def heartbeat() -> None:
    """This worker lives. Call it as often as you like."""
    if _now() >= _beat_due_s:
        _say()


def report_progress(step: SupportsInt) -> None:
    """Training came to this step (0 or more; a count of samples or tokens will do). A heartbeat, too."""
    global _step
    try:
        number = int(step)
    except Exception as error:  # noqa: BLE001 - whatever a caller's object raises, training goes on
        _complain(f"report_progress: {error!r}")
        heartbeat()
        return
    if number == _step:
        heartbeat()
        return
    if not 0 <= number <= MAX_STEP:
        _complain(f"report_progress({number}): a step is a number from 0 to 2^63 - 1")
        heartbeat()
        return
    _step = number
    if _now() >= _step_due_s:
        _say()


class section:
    """In it the worker may be silent for `timeout` seconds (None: for ever) instead of `--hang-timeout`.

    `with section("checkpoint", timeout=600): ...` Sections nest: the one entered last counts. One may be used again.
    """

    def __init__(self, name: str, timeout: float | None = None) -> None:
        self._name = b""
        self._timeout_s: float | None = None
        self._entered: list[_Open] = []
        try:
            self._name = str(name).encode("utf-8", "replace")[:MAX_NAME_BYTES]
            self._timeout_s = None if timeout is None or math.isinf(timeout) else float(timeout)
            if self._timeout_s is not None and not self._timeout_s > 0:
                raise ValueError("give seconds above 0, or None for no limit")
        except Exception as error:  # noqa: BLE001 - training goes on
            _complain(f"section({name!r}, timeout={timeout!r}): {error}; taken as without a limit")
            self._timeout_s = None

    def __enter__(self) -> None:
        one = _Open(self._name, self._timeout_s)
        self._entered.append(one)
        _sections.append(one)
        _say(is_urgent=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            one = self._entered.pop()
            _sections[:] = [other for other in _sections if other is not one]
            _say(is_urgent=True)


def rank_map() -> dict[str, Any] | None:
    """Who is who in this cycle; None outside nvrx, and until the map has come (soon after the start)."""
    return _json_in("NVRX_RANK_MAP")


def failed_rank_map() -> dict[str, Any] | None:
    """The map of the latest failed cycle that this node was in, with its failure record; None where there is none."""
    return _json_in("NVRX_FAILED_RANK_MAP")


def _json_in(variable: str) -> dict[str, Any] | None:
    import json

    try:
        with open(os.environ[variable], encoding="utf-8") as file:
            found = json.load(file)
    except (KeyError, OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ---- below ------------------------------------------------------------------------------------------------


def _say(is_urgent: bool = False) -> None:
    """Send a word; where there is no room for it, let it go."""
    global _beat_due_s, _step_due_s
    try:
        now_s = _now()
        _beat_due_s, _step_due_s = now_s + BEAT_EVERY_S, now_s + STEP_EVERY_S
        if not _is_open:
            _open()
        if _socket is None:
            _beat_due_s = _step_due_s = math.inf
        elif is_urgent or _unread_bytes(_socket) < _ROOM_BYTES:
            _socket.send(_word())
    except BlockingIOError:
        _beat_due_s = _step_due_s = 0.0  # the agent is far behind: tell it at the next call
    except Exception:  # noqa: BLE001 - an agent that is gone, a closed descriptor: no matter for training
        pass


def _word() -> bytes:
    step = _step
    # Taken once: another thread may leave its section meanwhile.
    current = next(iter(_sections[-1:]), None)
    flags = 0 if step is None else HAS_STEP
    if current is None:
        return HEAD.pack(MAGIC, flags, step or 0, 0.0)
    flags |= IN_SECTION if current.timeout_s is None else IN_SECTION | HAS_TIMEOUT
    return HEAD.pack(MAGIC, flags, step or 0, current.timeout_s or 0.0) + current.name


def _unread_bytes(channel: sockets.socket) -> int:
    import fcntl

    try:
        return int.from_bytes(fcntl.ioctl(channel.fileno(), _SIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:  # a kernel that does not tell
        return 0


class _Processes(Protocol):
    def parent_process(self) -> object | None: ...


def _open() -> None:
    """Find the agent. In vain outside nvrx and in processes that `multiprocessing` began."""
    global _is_open, _socket
    _is_open = True
    path = os.environ.get(SOCKET_VARIABLE)
    processes: _Processes | None = sys.modules.get("multiprocessing.process")
    if not path or (processes is not None and processes.parent_process() is not None):
        return
    import socket

    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        channel.connect(path)
    except OSError as error:
        channel.close()
        _complain(f"cannot reach the agent at {path}: {error}; heartbeats are not sent")
        return
    _socket = channel


def _after_fork() -> None:
    """A child of a worker that has spoken keeps silent; what was forked before a word was said finds its own agent."""
    global _beat_due_s, _step_due_s, _socket, _is_open, _step
    _sections.clear()
    _step = None
    if _socket is not None:
        _socket.close()  # this process's copy alone
        _socket = None
        _beat_due_s = _step_due_s = math.inf
    else:
        _is_open = False
        _beat_due_s = _step_due_s = 0.0


def _complain(text: str) -> None:
    """Once: a slip in a script's call is to be seen, not to fill its log."""
    global _complained
    if not _complained:
        _complained = True
        with contextlib.suppress(Exception):  # standard error may be closed
            print(f"nvrx.worker: {text}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=_after_fork)
