"""A little world around the core: nodes that join, are heard, fail and go, under simulated time.

Does what the coordinator's engine does with `decide`, `evolve` and Presence, but without tasks, clock or disk.
After every step the invariants are checked, and that the next deadline lies ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from nvrx.core.commands import Command, CycleExits, Drain, Join, Leave, Promote, Report, Tick
from nvrx.core.decide import decide, is_news, next_deadline
from nvrx.core.facts import Device, Fact, NodeInfo, NodeJoined, NodeLeft, NodeLost, RunOpened, WorkerExit
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, NodeId, RunId
from nvrx.core.invariants import check_state, check_step
from nvrx.core.join import check_join
from nvrx.core.presence import AgentPhase, Health, HealthReport, Presence, StoreMode, Timing, Word
from nvrx.core.ranks import Desired, desired
from nvrx.core.refused import Refused
from nvrx.core.run import Cycle, Run, evolve
from nvrx.core.shape import SettingsWish, Shape
from nvrx.core.topology import OrderSource
from nvrx.core.world import Wait, next_world

RUN_ID = RunId("run")
FIRST_PORT = 20_000
MAX_STEPS = 20_000


@dataclass
class Node:
    """A simulated node; `is_heard`: its agent lives and its stream is open."""

    name: NodeId
    number: int
    order: Mapping[OrderSource, str]
    life: int = 0
    restart_count: int = 0
    last_cycle: CycleNumber | None = None
    is_heard: bool = False
    phase: AgentPhase = AgentPhase.IDLE
    cycle: CycleNumber | None = None
    ports_used: int = 0
    acknowledged: CycleNumber | None = None
    progress: int | None = None
    health: HealthReport | None = None

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}.{self.life}")

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number}"

    @property
    def ports(self) -> tuple[int, ...]:
        first = FIRST_PORT + self.ports_used
        return (first, first + 1)

    def info(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.name,
            incarnation=self.incarnation,
            address=self.address,
            pid=1000 + self.number,
            order_sources={OrderSource.NODE_ID: str(self.name), **self.order},
            devices=(Device(LocalRank(0), uuid=f"GPU-{self.name}"),),
            restart_count=self.restart_count,
            last_cycle=self.last_cycle,
        )


@dataclass
class World:
    """One run and its nodes. Times in seconds."""

    min_nodes: int
    max_nodes: int
    workers: int = 2
    wish: SettingsWish = field(default_factory=SettingsWish)
    timing: Timing = field(default_factory=Timing)
    store: StoreMode = StoreMode.RANK0
    now: float = 0.0
    opened: Run | None = None
    facts: list[Fact] = field(default_factory=list)
    transactions: list[int] = field(default_factory=list)
    """How many facts there were after each command that had any: what a journal can end with."""
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    next_beat: float = 1.0
    offers_fresh_ports: bool = True

    def __post_init__(self) -> None:
        self.presence = Presence(self.timing, self.store)

    # ---- what there is --------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        assert self.opened is not None, "nobody has joined yet"
        return self.opened

    @property
    def cycle(self) -> Cycle:
        cycle = self.run.cycle
        assert cycle is not None, "no world was chosen yet"
        return cycle

    @property
    def shape(self) -> Shape:
        return Shape(self.min_nodes, self.max_nodes, self.workers)

    @property
    def is_training(self) -> bool:
        cycle = self.opened.cycle if self.opened is not None else None
        return cycle is not None and cycle.is_live

    def active(self) -> list[str]:
        """The nodes of the current cycle, in group-rank order."""
        return [str(seat.node.node_id) for seat in self.cycle.seats]

    def waiting(self) -> str:
        """Why there is no live cycle."""
        found = next_world(self.run, self.presence, self.now)
        assert isinstance(found, Wait), found
        return found.reason

    def desired(self, name: str) -> Desired:
        node = self.nodes[NodeId(name)]
        return desired(self.run, node.name, node.incarnation, "")

    def node(self, name: str, order: Mapping[OrderSource, str] | None = None) -> Node:
        """A node by its name, made on first mention."""
        node_id = NodeId(name)
        if node_id not in self.nodes:
            self.nodes[node_id] = Node(node_id, len(self.nodes), order or {})
        return self.nodes[node_id]

    # ---- steps ----------------------------------------------------------------------------------------

    def submit(self, command: Command) -> list[Fact]:
        """Have a command decided, as the engine does. Raises Refused, after seeing that nothing changed."""
        before = self.opened
        facts: list[Fact] = []
        run = before
        try:
            if run is None:
                assert isinstance(command, Join)
                facts.append(RunOpened(0.0, RUN_ID, command.shape, check_join(command)))
                run = evolve(None, facts[0])
            facts += decide(run, self.presence, command, self.now)
        except Refused:
            if before is not None:
                assert before == reduce(evolve, self.facts, None)
            raise
        finally:
            if isinstance(command, Join):
                self.presence.somebody_spoke(self.now)
        self.opened = after = reduce(evolve, facts, before)
        self.facts += facts
        if facts:
            self.transactions.append(len(self.facts))
        assert after is not None
        check_step(before, command, facts, after)
        check_state(after)
        self._note_world(after)
        for fact in facts:
            if isinstance(fact, NodeJoined):
                self.presence.joined(fact.node.node_id, fact.node.incarnation, self.now)
            elif isinstance(fact, NodeLeft | NodeLost):
                self.presence.forget(fact.node_id)
        return facts

    def _note_world(self, run: Run) -> None:
        if run.cycle is not None and run.cycle.is_live:
            self.presence.note_world(True, self.now)
        elif run.is_open:
            found = next_world(run, self.presence, self.now)
            if isinstance(found, Wait):
                self.presence.note_world(found.allows_world, self.now)

    def tick(self) -> list[Fact]:
        if self.opened is None:
            return []
        facts = self.submit(Tick())
        assert self.submit(Tick()) == [], "a second look at the same moment found more to say"
        due = self.deadline()
        assert due is None or due > self.now, f"the engine would spin: next deadline {due} at {self.now}"
        return facts

    def deadline(self) -> float | None:
        return next_deadline(self.run, self.presence, self.now) if self.opened is not None else None

    def advance(self, seconds: float) -> None:
        """Let time pass: nodes are heard every second, and the engine's one timer rings when it is due."""
        target = self.now + seconds
        for _ in range(MAX_STEPS):
            due = [target, self.next_beat]
            deadline = self.deadline()
            if deadline is not None:
                due.append(deadline)
            self.now = max(self.now, min(due))
            if self.now >= self.next_beat:
                self.beat()
                self.next_beat += self.timing.heartbeat_interval_s
            self.tick()
            if self.now >= target:
                return
        raise AssertionError(f"{MAX_STEPS} steps and time stands at {self.now}, not {target}")

    # ---- membership -----------------------------------------------------------------------------------

    def join_command(self, name: str, *, reopen: bool = False) -> Join:
        return Join(self.node(name).info(), self.shape, self.wish, reopen)

    def join(self, *names: str, reopen: bool = False) -> None:
        """Nodes join, each as it is now, and connect. Raises Refused."""
        for name in names:
            self.submit(self.join_command(name, reopen=reopen))
            self.connect(name)

    def rejoin(self, *names: str, reopen: bool = False) -> None:
        """A fresh agent process, or one that was declared lost, joins as a new incarnation. Raises Refused."""
        for name in names:
            node = self.node(name)
            node.life += 1
            node.phase, node.cycle = AgentPhase.IDLE, None
            self.join(name, reopen=reopen)

    def connect(self, name: str) -> None:
        """A member's stream opens, and it is heard."""
        node = self.nodes[NodeId(name)]
        node.is_heard = True
        self.presence.connected(node.name, self.now)
        self.hear(name)

    def hear(self, name: str) -> None:
        """A member says what it does. The engine decides anew if that is news."""
        node = self.nodes[NodeId(name)]
        known = self.presence.nodes.get(node.name)
        if known is None or known.incarnation != node.incarnation:
            node.is_heard = False
            return
        if self.offers_fresh_ports:
            used = [one.master.port for one in self.run.cycles if one.master and one.master.address == node.address]
            node.ports_used = max(used, default=FIRST_PORT - 1) + 1 - FIRST_PORT
        word = Word(node.phase, node.cycle, node.ports, node.acknowledged, node.progress, node.health)
        if self.presence.heard(node.name, word, self.now) or is_news(self.run, word):
            self.tick()

    def progress(self, name: str, step: int) -> None:
        """A member tells how far its workers came."""
        self.nodes[NodeId(name)].progress = step
        self.hear(name)

    def ails(self, name: str, state: Health = Health.UNHEALTHY, check: str = "disk", reason: str = "is full") -> None:
        """A member tells what its checks say."""
        self.nodes[NodeId(name)].health = HealthReport(state, check, reason)
        self.hear(name)

    def heals(self, *names: str) -> None:
        for name in names:
            self.ails(name, Health.HEALTHY, "", "")

    def beat(self) -> None:
        """Everyone who lives is heard."""
        for node in list(self.nodes.values()):
            if node.is_heard:
                self.hear(str(node.name))

    def kill(self, *names: str) -> None:
        """Agents die: their streams break."""
        for name in names:
            node = self.nodes[NodeId(name)]
            node.is_heard = False
            self.presence.disconnected(node.name, node.incarnation, self.now)
        self.tick()

    def freeze(self, *names: str) -> None:
        """Nodes fall silent; their streams stay open (a cable is pulled)."""
        for name in names:
            self.nodes[NodeId(name)].is_heard = False

    def leave(self, name: str, *, stopped: bool = False, grace_s: float = 15.0) -> list[Fact]:
        node = self.nodes[NodeId(name)]
        node.is_heard = False
        return self.submit(Leave(node.name, node.incarnation, "told to", stopped, grace_s))

    def promote(self, name: str, *, immediate: bool = False) -> list[Fact]:
        return self.submit(Promote(NodeId(name), immediate=immediate))

    def drain(self, name: str, *, immediate: bool = False) -> list[Fact]:
        return self.submit(Drain(NodeId(name), immediate))

    def restart_coordinator(self) -> None:
        """The coordinator is killed and comes back with its journal; nobody is connected yet (rule E5)."""
        before = self.run
        self.opened = reduce(evolve, self.facts, None)
        assert self.opened == before, "the journal does not give the state back"
        self.now = self.run.last_at
        self.next_beat = self.now + self.timing.heartbeat_interval_s
        self.presence = Presence(self.timing, self.store)
        self.presence.recover([(one.info.node_id, one.info.incarnation) for one in self.run.live_members()], self.now)
        for node in self.nodes.values():
            node.is_heard = False
        self.tick()

    # ---- workers --------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Active nodes (all of them unless named) report their workers started."""
        for name in names or self.active():
            node = self.nodes[NodeId(name)]
            if not node.is_heard:
                continue
            node.phase, node.cycle = AgentPhase.RUNNING, self.cycle.number
            self.hear(name)

    def report(self, name: str, exits: Sequence[WorkerExit], cycle: CycleNumber | None = None) -> list[Fact]:
        node = self.nodes[NodeId(name)]
        number = self.cycle.number if cycle is None else cycle
        return self.submit(Report(node.name, node.incarnation, (CycleExits(number, tuple(exits)),)))

    def exit(self, name: str, local_rank: int, code: int = 0, signal: str = "") -> list[Fact]:
        """One worker of the current cycle ends."""
        return self.report(name, [ended(local_rank, code, signal)])

    def stopped(self, *names: str) -> None:
        """Agents have stopped all workers of the current cycle that had not ended."""
        for name in names:
            known = self.cycle.exits.get(NodeId(name), {})
            left = [rank for rank in range(self.workers) if LocalRank(rank) not in known]
            self.report(name, [ended(rank, signal="SIGTERM", stopped=True) for rank in left])

    def finish(self, *names: str) -> None:
        """All workers of nodes exit 0."""
        for name in names:
            self.nodes[NodeId(name)].phase = AgentPhase.SUCCEEDED
            self.report(name, [ended(rank) for rank in range(self.workers)])

    def of(self, kind: type[Fact]) -> list[Fact]:
        """All facts of a kind so far."""
        return [one for one in self.facts if isinstance(one, kind)]


def ended(local_rank: int, code: int = 0, signal: str = "", *, stopped: bool = False) -> WorkerExit:
    """How a worker ended."""
    return WorkerExit(LocalRank(local_rank), None if signal else code, signal, stopped_by_agent=stopped)


def trained(min_nodes: int = 2, max_nodes: int = 3, workers: int = 2, wish: SettingsWish | None = None) -> World:
    """A world of n0, n1, ... in which cycle 0 runs and all of MAX nodes are there."""
    world = World(min_nodes, max_nodes, workers, wish or SettingsWish())
    world.join(*(f"n{number}" for number in range(max_nodes)))
    world.start()
    return world
