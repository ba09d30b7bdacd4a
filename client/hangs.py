"""What this node does about hangs (rule G9): who is silent for too long is told, and its stack kept in its log.

Puts watch, py-spy and log files together. What follows for the cycle is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvrx.core import agent as machine
from nvrx.core import hang
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, GlobalRank, LocalRank, global_rank
from nvrx.core.ranks import Assignment

from .hang_watch import HangWatch
from .processes import read_stat
from .slow_files import done_within
from .stacks import PROGRAM, Stack, append_stack, find_py_spy, take_stack
from .supervisor_link import Spawned
from .worker_files import WorkerFiles

log = logging.getLogger("nvrx.node")

KEPT_WITHIN_S = 1.0
LEAST_TIMEOUT_S = 1.0
"""Below, a busy machine is taken for a hung worker."""


@dataclass(frozen=True)
class HangOptions:
    """How long workers may be silent, in seconds; None: for ever."""

    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None

    @property
    def are_given(self) -> bool:
        return self.hang_timeout_s is not None or self.start_timeout_s is not None


@dataclass
class _Running:
    """The cycle whose workers run here, and their pids."""

    given: Assignment
    files: WorkerFiles
    pids: Mapping[LocalRank, int]


class Hangs:
    """One node's workers, cycle after cycle. `observe` hears what the agent's machine is to know."""

    def __init__(
        self,
        options: HangOptions,
        runtime_dir: Path,
        env: Mapping[str, str],
        observe: Callable[[machine.Observation], None],
    ) -> None:
        self.watch = HangWatch(options.hang_timeout_s, options.start_timeout_s, runtime_dir, self._on_hung)
        self._env = env
        self._observe = observe
        self._running: _Running | None = None
        self._py_spy = find_py_spy(env) if options.are_given else None
        if options.are_given and self._py_spy is None:
            log.warning("%s is not on PATH: where a worker hangs will not be known; pip install py-spy", PROGRAM)

    def open(self, given: Assignment, files: WorkerFiles) -> list[str]:
        """Workers are about to be started: the sockets that they are to speak to, by local rank, or none."""
        self._running = _Running(given, files, {})
        return self.watch.open(given.cycle, given.workers_per_node)

    def started(self, event: Spawned) -> None:
        if self._running is not None and self._running.given.cycle == event.cycle:
            self._running.pids = {LocalRank(one.local_rank): one.pid for one in event.workers}
            self.watch.started(CycleNumber(event.cycle), list(self._running.pids))

    def _on_hung(self, cycle: CycleNumber, hung: tuple[hang.Hung, ...]) -> None:
        running = self._running
        assert running is not None
        assert running.given.cycle == cycle
        exits = []
        for one in hung:
            rank = self._rank(running, one.local_rank)
            log.error("cycle %d: rank %d (local rank %d) hangs: %s", cycle, rank, one.local_rank, one.message)
            where = f"; stack in {self._log(running, rank).name}" if self._py_spy is not None else ""
            tail = running.files.last_words(cycle, rank).stderr_tail
            exits.append(WorkerExit(one.local_rank, message=f"{one.message}{where}", stderr_tail=tail, hung=True))
        self._observe(machine.WorkersHung(cycle, tuple(exits)))

    async def take_stacks(self, deed: machine.TakeStacks) -> None:
        """Keep where workers hang, all at once; then say so, whatever came of it."""
        self.watch.stop()
        running = self._running
        if self._py_spy is not None and running is not None and running.given.cycle == deed.cycle:
            await asyncio.gather(*(self._take(running, self._py_spy, one) for one in deed.hung))
        self._observe(machine.StacksTaken(deed.cycle))

    async def _take(self, running: _Running, py_spy: str, one: WorkerExit) -> None:
        rank = self._rank(running, one.local_rank)
        pid = self.watch.speaker(one.local_rank)
        if pid is None or read_stat(pid) is None:
            pid = running.pids[one.local_rank]
        found = await take_stack(py_spy, pid, self._env)
        if not found.text:
            log.warning("no stack of rank %d (pid %d): %s", rank, pid, found.problem)
        about = f"rank {rank} (local rank {one.local_rank}, pid {pid}) hangs: {one.message}"
        path = self._log(running, rank)
        if not await done_within(KEPT_WITHIN_S, lambda: _keep(path, about, found)):
            log.warning("the stack of rank %d is not written to %s yet; the file system may hang", rank, path)

    def _rank(self, running: _Running, local_rank: LocalRank) -> GlobalRank:
        return global_rank(running.given.group_rank, local_rank, running.given.workers_per_node)

    def _log(self, running: _Running, rank: GlobalRank) -> Path:
        return running.files.output(running.given.cycle, rank, "err")


def _keep(path: Path, about: str, found: Stack) -> None:
    try:
        append_stack(path, about, found)
    except OSError as error:
        log.warning("cannot write a stack to %s: %s", path, error.strerror)
