"""Tells heartbeats and progress as it is told to, and hangs as it is told to."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any

import nvrx.worker

from .talk import Line, obey

FOR_EVER_S = 1_000_000


class Trainee:
    """Beats from a thread of its own where asked to, so that orders can be taken meanwhile."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._sections: list[nvrx.worker.section] = []
        self._beats = threading.Event()

    def beat(self, order: dict[str, Any]) -> None:
        nvrx.worker.heartbeat()
        self._line.say("beat")

    def progress(self, order: dict[str, Any]) -> None:
        nvrx.worker.report_progress(order["step"])
        self._line.say("progress", step=order["step"])

    def beat_on(self, order: dict[str, Any]) -> None:
        """Beat until told to be still."""
        self._beats.set()
        threading.Thread(target=self._beat_on, daemon=True).start()
        self._line.say("beats")

    def _beat_on(self) -> None:
        while self._beats.is_set():
            nvrx.worker.heartbeat()
            time.sleep(0.05)

    def be_still(self, order: dict[str, Any]) -> None:
        self._beats.clear()
        self._line.say("still")

    def enter(self, order: dict[str, Any]) -> None:
        self._sections.append(nvrx.worker.section(order["name"], order.get("timeout")))
        self._sections[-1].__enter__()
        self._line.say("entered")

    def leave(self, order: dict[str, Any]) -> None:
        self._sections.pop().__exit__(None, None, None)
        self._line.say("left")

    def read_maps(self, order: dict[str, Any]) -> None:
        self._line.say("maps", now=nvrx.worker.rank_map(), failed=nvrx.worker.failed_rank_map())

    def hang(self, order: dict[str, Any]) -> None:
        """Never comes back, each in its way."""
        {"sleep": hang_asleep, "loop": hang_in_a_loop, "lock": hang_at_a_lock, "c": hang_in_c}[order["how"]]()


def hang_asleep() -> None:
    time.sleep(FOR_EVER_S)


def hang_in_a_loop() -> None:
    while True:
        pass


def hang_at_a_lock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def hang_in_c() -> None:
    """Not even SIGTERM's handler would run: the call goes on after each signal, and never returns to Python."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)  # with the interpreter's lock held


def main() -> None:
    line = Line()
    if sys.argv[1:] == ["fork"]:
        # What a data loader does: a child that was forked by one that has spoken.
        nvrx.worker.heartbeat()
        if os.fork() == 0:
            while True:
                nvrx.worker.heartbeat()
                time.sleep(0.05)
    trainee = Trainee(line)
    names = ("beat", "progress", "beat_on", "be_still", "enter", "leave", "read_maps", "hang")
    obey(line, {name: getattr(trainee, name) for name in names})


if __name__ == "__main__":
    main()
