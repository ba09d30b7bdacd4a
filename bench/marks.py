"""Marks that workers send, and the wait for them. Knows nothing of who starts the workers.

Nothing here polls: one select waits for the datagrams and, when asked, for the death of one process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_LARGEST_MARK = 512
_RECEIVE_BUFFER = 1 << 20


def monotonic_s() -> float:
    """The clock of the workers' marks: CLOCK_MONOTONIC, the same for all processes of the machine."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class NotRecovered(Exception):
    """No new world came up; the text says how far it got."""


class TimedOut(NotRecovered):
    """What was waited for did not come in time."""


class PeerEnded(NotRecovered):
    """A process that must live on ended."""


@dataclass(frozen=True)
class Mark:
    kind: str  # "boot": the interpreter runs its first line; "step": the first all_reduce is done
    rank: int
    pid: int
    node: str
    cycle: int  # the peer's own count, for the record only
    at_s: float

    @classmethod
    def parse(cls, text: str) -> Mark:
        kind, rank, pid, node, cycle, at_s = text.split()
        return cls(kind, int(rank), int(pid), node, int(cycle), float(at_s))


@dataclass(frozen=True)
class World:
    """One start of all workers that came as far as an all_reduce on every rank."""

    boots: dict[int, Mark]  # by rank
    steps: dict[int, Mark]  # by rank
    starts_seen: int  # interpreters that started on the way; more than the ranks: some were started in vain

    @property
    def last_boot_s(self) -> float:
        return max(mark.at_s for mark in self.boots.values())

    @property
    def last_step_s(self) -> float:
        return max(mark.at_s for mark in self.steps.values())

    @property
    def nodes(self) -> set[str]:
        return {mark.node for mark in self.steps.values()}


class MarkBox:
    """The socket that the workers of one job send their marks to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._socket.bind(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def wait_for_world(self, world_size: int, since_s: float, deadline_s: float, processes: Mapping[int, str]) -> World:
        """The first world whose workers all started after `since_s` and did an all_reduce.

        An all_reduce needs all ranks, so the newest mark of each rank is of one and the same world.
        `processes` are the pidfds, with names, of what must live on meanwhile.
        Raises TimedOut at `deadline_s`, PeerEnded when one of the processes ends.
        """
        boots: dict[int, Mark] = {}
        steps: dict[int, Mark] = {}
        starts_seen = 0
        while len(steps) < world_size:
            so_far = f"{len(boots)} of {world_size} ranks started, {len(steps)} did an all_reduce"
            mark = self._receive(deadline_s, processes, so_far)
            if mark.kind == "boot" and mark.at_s >= since_s:
                starts_seen += 1
                boots[mark.rank] = mark
                steps.pop(mark.rank, None)
            elif mark.kind == "step" and mark.rank in boots and boots[mark.rank].pid == mark.pid:
                steps[mark.rank] = mark
        return World(boots, steps, starts_seen)

    def _receive(self, deadline_s: float, processes: Mapping[int, str], so_far: str) -> Mark:
        wait_s = max(0.0, deadline_s - monotonic_s())
        own = self._socket.fileno()
        ready, _, _ = select.select([own, *processes], [], [], wait_s)
        if not ready:
            raise TimedOut(f"time is up: {so_far}")
        if own in ready:
            return Mark.parse(self._socket.recv(_LARGEST_MARK).decode())
        raise PeerEnded(f"{processes[ready[0]]} ended by itself: {so_far}")


def kill_and_wait(pids: list[int], timeout_s: float) -> float:
    """SIGKILL all, return as soon as the first of them is dead: when (monotonic, s) the signal was sent."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        sent_s = monotonic_s()
        for handle in handles:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handles[0]], [], [], timeout_s)[0]:
            raise TimedOut(f"process {pids[0]} outlived SIGKILL")
    finally:
        for handle in handles:
            os.close(handle)
    return sent_s
