"""A program as process 1 of a container: it is started below a small process that does what an init has to.

Process 1 inherits every orphan and has to reap it, and is not ended by signals that it does not handle. Must not
know: what the program does. Call before any thread exists.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

_STAYS_OURS = {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}


def be_below_process_1() -> None:
    """Return at once, unless this is process 1: then the program goes on in a child, and this process never returns.

    The child leads a process group of its own, in the terminal's foreground: a Ctrl-C reaches it once. Signals sent
    to process 1 are passed on, and its exit code is the child's, 128 + n after signal n.
    """
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child != 0:
        _be_init(child)
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):  # no terminal
        os.tcsetpgrp(0, os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_init(child: int) -> NoReturn:
    awaited = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    while True:
        status = _reap(child)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        number = signal.sigwait(awaited)
        if number not in _STAYS_OURS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)


def _reap(child: int) -> int | None:
    """Take in whatever has ended; the child's status if it was among them."""
    found = None
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            found = status
        if pid == 0 or found is not None:
            return found
