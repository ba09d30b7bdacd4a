"""Watches the workers of this node for hangs (rule G9), and hears how far they came (rule D6).

The shell around `nvrx.core.hang`: sockets, one timer, this machine's clock. Must not know what follows from a hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from nvrx.core import hang
from nvrx.core.ids import CycleNumber, LocalRank
from nvrx.worker import BEAT_EVERY_S

from .worker_sockets import Heard, WorkerSockets

log = logging.getLogger("nvrx.node")

LOOK_EVERY_S = 1.0
"""At the latest: how late this comes says whether the agent itself was stalled."""
LATE_S = 0.25


class HangWatch:
    """One node's workers, cycle after cycle. `on_hung` is called with those that hang, until `stop`."""

    def __init__(
        self,
        hang_timeout_s: float | None,
        start_timeout_s: float | None,
        runtime_dir: Path,
        on_hung: Callable[[CycleNumber, tuple[hang.Hung, ...]], None],
    ) -> None:
        self._limits = hang.Limits(hang_timeout_s, start_timeout_s, slack_s=BEAT_EVERY_S)
        self._runtime_dir = runtime_dir
        self._on_hung = on_hung
        self._watch = hang.Watch(self._limits)
        self._cycle: CycleNumber | None = None
        self._sockets: WorkerSockets | None = None
        self._speakers: dict[LocalRank, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = 0.0
        self._due_s = 0.0

    def step(self, cycle: CycleNumber) -> int | None:
        """The furthest that a worker of this cycle told; None where it is not the latest that was begun here."""
        return self._watch.step if cycle == self._cycle else None

    def speaker(self, rank: LocalRank) -> int | None:
        """The process that spoke last for a worker: itself, or one below it where that is a script."""
        return self._speakers.get(rank) or None

    def open(self, cycle: CycleNumber, count: int) -> list[str]:
        """A cycle's workers are about to be started: where each is to speak, by local rank; empty where it cannot."""
        self.close()
        self._cycle = cycle
        self._watch = hang.Watch(self._limits)
        self._speakers = {}
        try:
            self._sockets = WorkerSockets(self._runtime_dir, count)
        except OSError as error:
            log.error("workers cannot tell heartbeats and progress: no sockets in %s: %s", self._runtime_dir, error)
            return []
        return self._sockets.paths

    def started(self, cycle: CycleNumber, ranks: list[LocalRank]) -> None:
        """A cycle's workers run. What they said before this was known waits to be read."""
        if cycle != self._cycle or self._sockets is None:
            return
        self._watch = hang.begin(self._limits, ranks, time.monotonic())
        loop = asyncio.get_running_loop()
        for fd, rank in self._sockets.filenos().items():
            loop.add_reader(fd, self._on_readable, rank)
        self._arm()

    def ended(self, rank: LocalRank) -> None:
        """A worker ended; its last words count."""
        self.look()
        self._watch = hang.end(self._watch, rank)

    def look(self) -> None:
        """Hear what was said meanwhile."""
        if self._sockets is not None:
            for heard in self._sockets.read():
                self._hear(heard)

    def stop(self) -> None:
        """The workers are being stopped: nothing hangs any more."""
        self._watch = hang.end_all(self._watch)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def gone(self, cycle: CycleNumber) -> None:
        """No worker of this cycle is left. May be said again, when the next ones are about to be started."""
        if cycle == self._cycle:
            self.close()

    def close(self) -> None:
        """No worker is left."""
        self.stop()
        if self._sockets is not None:
            for fd in self._sockets.filenos():
                asyncio.get_running_loop().remove_reader(fd)
            self._sockets.close()
            self._sockets = None

    # ---- below --------------------------------------------------------------------------------------------

    def _on_readable(self, rank: LocalRank) -> None:
        assert self._sockets is not None
        heard = self._sockets.read_one(rank)
        if heard is not None:
            self._hear(heard)

    def _hear(self, heard: Heard) -> None:
        self._speakers[heard.local_rank] = heard.pid
        more = heard.may_have_said_more
        self._watch = hang.hear(self._watch, heard.local_rank, heard.word, time.monotonic(), may_have_said_more=more)

    def _arm(self) -> None:
        """Not anew for each word: when it is due, it looks how things stand by then."""
        if not self._watch.workers or (self._limits.hang_timeout_s is None and self._limits.start_timeout_s is None):
            return
        now_s = time.monotonic()
        deadline_s = hang.next_deadline(self._watch)
        wait_s = LOOK_EVERY_S if deadline_s is None else min(LOOK_EVERY_S, max(0.0, deadline_s - now_s))
        self._armed_s, self._due_s = now_s, now_s + wait_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if now_s - self._due_s > LATE_S:
            # When the agent was stalled nobody knows: all the time since its timer was set is given back.
            self._watch = hang.extend(self._watch, now_s - self._armed_s)
        self.look()
        hung = hang.find_hung(self._watch, now_s)
        if hung and self._cycle is not None:
            self._on_hung(self._cycle, hung)
        self._arm()
