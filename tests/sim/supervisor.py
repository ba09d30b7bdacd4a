"""The simulated supervisor of one agent process, and the workers of a node as its kernel sees them.

What happened to each worker is kept as the truth that reports are held against. Knows no coordinator.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from nvrx.core import agent as machine
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank

SPAWN_S = (0.05, 1.0)
SLOW_SPAWN_S = (3.0, 8.0)
TERM_S = (0.0, 0.6)
TREE_GONE_S = (0.0, 0.2)
STACKS_S = (0.0, 9.0)
ORPHANS_DIE_S = (0.0, 5.0)
"""Workers of a dead agent die within 5 s (rule G4)."""


@dataclass
class Tree:
    """The workers of one cycle on one node, with whatever they started. `alive`: those that have not ended."""

    cycle: CycleNumber
    alive: set[LocalRank]
    has_processes: bool = True
    stop_sent: bool = False


@dataclass
class Machine:
    """What lasts while a node has power: its processes. `ends`: how each worker of each cycle ended, in truth."""

    random: Random
    workers_per_node: int
    stop_grace_s: float
    trees: list[Tree] = field(default_factory=list)
    ends: dict[tuple[CycleNumber, LocalRank], WorkerExit] = field(default_factory=dict)
    hung: set[tuple[CycleNumber, LocalRank]] = field(default_factory=set)
    """Workers that were found hung, in truth."""
    spawned: list[CycleNumber] = field(default_factory=list)
    """Cycles whose workers were started here, in order."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ignores_term: bool = False
    spawns_slowly: bool = False
    fails_next_spawn: bool = False

    def living(self) -> list[Tree]:
        return [one for one in self.trees if one.has_processes]

    def remove(self, tree: Tree) -> None:
        tree.alive.clear()
        tree.has_processes = False
        self.trees.remove(tree)
        self.news.set()

    def lose_power(self) -> None:
        for tree in list(self.trees):
            self.remove(tree)


class Supervisor:
    """Takes commands in order, as the real one does. `observe` hears what happens to the workers."""

    def __init__(
        self,
        node: Machine,
        observe: Callable[[machine.Observation], None],
        spawned: Callable[[CycleNumber], None],
    ) -> None:
        self._machine = node
        self._observe = observe
        self._spawned = spawned
        self._loop = asyncio.get_running_loop()
        self._commands: asyncio.Queue[CycleNumber | None] = asyncio.Queue()
        self._tree: Tree | None = None
        self.spawned: list[CycleNumber] = []
        self._is_dead = False
        self._working = self._loop.create_task(self._work(), name="supervisor")

    @property
    def has_workers(self) -> bool:
        return self._tree is not None and self._tree in self._machine.trees

    def spawn(self, cycle: CycleNumber) -> None:
        self._commands.put_nowait(cycle)

    def stop(self) -> None:
        self._commands.put_nowait(None)

    def kill(self) -> None:
        if self._tree is not None:
            self._end_all(self._tree, signal.SIGKILL)

    def die(self) -> None:
        """The agent and its supervisor die; their workers follow a little later."""
        self._is_dead = True
        self._working.cancel()
        for tree in list(self._machine.trees):
            self._loop.call_later(self._machine.random.uniform(*ORPHANS_DIE_S), self._orphan_dies, tree)

    def _orphan_dies(self, tree: Tree) -> None:
        if tree in self._machine.trees:
            self._machine.remove(tree)

    async def _work(self) -> None:
        while True:
            cycle = await self._commands.get()
            if cycle is None:
                self._stop_tree()
            else:
                await self._spawn(cycle)

    async def _spawn(self, cycle: CycleNumber) -> None:
        node = self._machine
        while node.living():  # an older agent's workers: killed, and waited for, before any are started
            node.news.clear()
            await node.news.wait()
        await asyncio.sleep(node.random.uniform(*(SLOW_SPAWN_S if node.spawns_slowly else SPAWN_S)))
        node.spawns_slowly = False
        if node.fails_next_spawn:
            node.fails_next_spawn = False
            ranks = [LocalRank(one) for one in range(node.workers_per_node)]
            for rank in ranks:
                node.ends[cycle, rank] = WorkerExit(rank, machine.EXIT_NOT_STARTED, message="no such file")
            self._tell(machine.SpawnFailed(cycle, "no such file"))
            return
        self._tree = Tree(cycle, {LocalRank(one) for one in range(node.workers_per_node)})
        node.trees.append(self._tree)
        node.spawned.append(cycle)
        self.spawned.append(cycle)
        node.ends = {of: end for of, end in node.ends.items() if of[0] != cycle}
        node.hung = {of for of in node.hung if of[0] != cycle}
        self._spawned(cycle)
        self._tell(machine.WorkersStarted(cycle))

    def _stop_tree(self) -> None:
        tree, node = self._tree, self._machine
        if tree is None or tree.stop_sent or tree not in node.trees:
            return
        tree.stop_sent = True
        for rank in sorted(tree.alive):
            after_s = node.stop_grace_s if node.ignores_term else node.random.uniform(*TERM_S)
            number = signal.SIGKILL if after_s >= node.stop_grace_s else signal.SIGTERM
            self._loop.call_later(min(after_s, node.stop_grace_s), self._end, tree, rank, None, number)
        if not tree.alive:
            self._loop.call_later(node.random.uniform(*TREE_GONE_S), self._gone, tree)

    def _end_all(self, tree: Tree, number: signal.Signals) -> None:
        tree.stop_sent = True
        for rank in sorted(tree.alive):
            self._end(tree, rank, None, number)

    def end_worker(self, rank: LocalRank, code: int | None, number: signal.Signals | None) -> bool:
        """A worker ends by itself. False where it does not run."""
        if self._is_dead or self._tree is None or self._tree.stop_sent or rank not in self._tree.alive:
            return False
        self._end(self._tree, rank, code, number)
        return True

    def hang_worker(self, rank: LocalRank) -> bool:
        """A worker has been silent for too long, and runs on. False where it does not run."""
        if self._is_dead or self._tree is None or self._tree.stop_sent or rank not in self._tree.alive:
            return False
        self._machine.hung.add((self._tree.cycle, rank))
        hung = WorkerExit(rank, message="no heartbeat for 30.0 s", hung=True)
        self._tell(machine.WorkersHung(self._tree.cycle, (hung,)))
        return True

    def take_stacks(self, cycle: CycleNumber) -> None:
        """Takes a while, and is not waited for by an agent that dies."""
        after_s = self._machine.random.uniform(*STACKS_S)
        self._loop.call_later(after_s, self._tell, machine.StacksTaken(cycle))

    def _end(self, tree: Tree, rank: LocalRank, code: int | None, number: signal.Signals | None) -> None:
        node = self._machine
        if rank not in tree.alive or tree not in node.trees:
            return
        tree.alive.discard(rank)
        ended = WorkerExit(rank, code, number.name if number is not None else "", stopped_by_agent=tree.stop_sent)
        node.ends[tree.cycle, rank] = ended
        self._tell(machine.WorkerEnded(tree.cycle, ended))
        if not tree.alive and tree in node.trees:
            self._loop.call_later(node.random.uniform(*TREE_GONE_S), self._gone, tree)

    def _gone(self, tree: Tree) -> None:
        if tree not in self._machine.trees:
            return
        self._machine.remove(tree)
        self._tell(machine.TreeGone(tree.cycle))

    def _tell(self, observed: machine.Observation) -> None:
        if not self._is_dead:
            self._observe(observed)
