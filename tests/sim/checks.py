"""The ear of a simulation: everything decided, written, said and done is held against the rules as it happens.

Keeps the transcript. The first broken rule ends the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nvrx.core import agent as machine
from nvrx.core.facts import Fact, NodeJoined, NodeLeft, NodeLost, RunState, WorkerExit
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, NodeId
from nvrx.core.narrate import tell
from nvrx.core.presence import Timing
from nvrx.server.journals import Row
from nvrx.v1 import common_pb2, heartbeat_pb2, join_pb2, promote_pb2

from .agent import AgentProcess
from .calls import ServerCall
from .decisions import Truth, Violation, check_decision, require
from .hearing import Hearing
from .ledger import Ledger
from .node import Node

OF_ITS_OWN = {
    machine.Ending.SIGNALLED,
    machine.Ending.CUT_OFF,
    machine.Ending.FENCED,
    machine.Ending.EXCLUDED,
}
"""Why an agent stops its workers whatever the coordinator says."""
OPERATED = (promote_pb2.PromoteResponse, promote_pb2.DrainResponse, promote_pb2.UndrainResponse)


class Checks:
    """Hears all. `failed` is called with the first violation."""

    def __init__(self, truth: Truth, timing: Timing, clock: Callable[[], float], failed: Callable[[Violation], None]):
        self.truth = truth
        self._timing = timing
        self._clock = clock
        self._failed = failed
        self.lines: list[str] = []
        self.at: list[Ledger] = [Ledger()]
        """The durable ledger at each revision."""
        self.facts: list[Fact] = []
        self._decided = Ledger()
        self._former: frozenset[Incarnation] = frozenset()
        """Incarnations that were members before the state was lost."""
        self._had_succeeded = False
        self._started: dict[NodeId, list[CycleNumber]] = {}
        """Cycles that were started on each node since the state was lost; of before, only agents that live on know."""
        self._unwritten: deque[tuple[Fact, float]] = deque()
        self.hearing = Hearing(0.0, timing, {})
        self._said_revision: dict[ServerCall, int] = {}
        self._reported: dict[ServerCall, list[tuple[int, CycleNumber, LocalRank]]] = {}

    @property
    def durable(self) -> Ledger:
        """All that is on disk."""
        return self.at[-1]

    def note(self, text: str) -> None:
        self.lines.append(f"{self._clock():9.3f}  {text}")

    def hold(self, check: Callable[..., None], *given: Any) -> None:
        try:
            check(*given)
        except Violation as violation:
            self.note(f"BROKEN {violation}")
            self._failed(violation)

    def state_lost(self) -> None:
        """All that was on disk is gone; agents of before go by what they were told, until they hear of it."""
        self._former |= self.durable.joined_ever
        self._started.clear()
        self._had_succeeded |= self.durable.closed is not None and self.durable.closed.state is RunState.SUCCEEDED
        self.at = [Ledger()]
        self.facts = []

    # ---- the coordinator --------------------------------------------------------------------------------

    def began(self) -> None:
        """A coordinator started on what is on disk."""
        self._decided = self.durable
        self._unwritten.clear()
        self._said_revision.clear()
        self._reported.clear()
        live = dict(self.durable.live)
        self.hearing = Hearing(self._clock(), self._timing, live, dict(live))

    def decided(self, facts: Sequence[Fact]) -> None:
        self.hold(self._check_decided, facts)

    def _check_decided(self, facts: Sequence[Fact]) -> None:
        now_s = self._clock()
        self.truth.joining = frozenset(fact.node.node_id for fact in facts if isinstance(fact, NodeJoined))
        for fact in facts:
            if isinstance(fact, NodeJoined):
                self.hearing.forget(fact.node.node_id)
                self.hearing.joined_s[fact.node.incarnation] = now_s
            check_decision(fact, self._decided, self.hearing, self.truth, now_s)
            if isinstance(fact, NodeLeft | NodeLost):
                self.hearing.forget(fact.node_id)
            self._decided = self._decided.after(fact, now_s)
            self._unwritten.append((fact, now_s))

    def durable_now(self, rows: Sequence[Row]) -> None:
        self.hold(self._check_durable, rows)

    def _check_durable(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.note(f"disk {row.revision}: {tell(row.fact)}")
            require(row.revision == len(self.at), "revisions", f"{row.revision} was written after {len(self.at) - 1}")
            require(bool(self._unwritten), "journal", f"{row.fact} was written, and nobody had decided it")
            fact, at_s = self._unwritten.popleft()
            require(fact == row.fact, "journal", f"{fact} was decided, and {row.fact} was written")
            self.at.append(self.durable.after(row.fact, at_s))
            self.facts.append(row.fact)

    # ---- the wire, at the coordinator's end -------------------------------------------------------------

    def heard(self, call: ServerCall, message: Any) -> None:
        if isinstance(message, heartbeat_pb2.HeartbeatRequest):
            self.hearing.heard(call, message, self._clock())
            told = [(message.sequence, CycleNumber(one.cycle), LocalRank(one.local_rank)) for one in message.workers]
            self._reported.setdefault(call, []).extend(told)

    def over(self, call: ServerCall) -> None:
        self.hearing.over(call, self._clock())
        self._reported.pop(call, None)
        self._said_revision.pop(call, None)

    def told(self, call: ServerCall, message: Any) -> None:
        self.hold(self._check_told, call, message)

    def _check_told(self, call: ServerCall, message: Any) -> None:
        if isinstance(message, heartbeat_pb2.HeartbeatResponse):
            if message.HasField("rank_map"):
                self._check_map(message.rank_map)
            else:
                self._check_desired(call, message)
                self._check_acknowledged(call, message)
        elif isinstance(message, join_pb2.JoinResponse):
            self._check_revision(call, message.revision)
            incarnation = Incarnation(call.first.incarnation)
            require(incarnation in self.durable.joined_ever, "journal", f"{incarnation} was let in and is not on disk")
        elif isinstance(message, join_pb2.LeaveResponse):
            is_member = Incarnation(call.first.incarnation) in self.durable.live.values()
            require(not is_member, "journal", f"{call.first.incarnation} was let go, and is a member on disk")
        elif isinstance(message, OPERATED):
            self._check_revision(call, message.revision)

    def _check_revision(self, call: ServerCall, revision: int) -> None:
        before = self._said_revision.get(call, 0)
        on_disk = len(self.at) - 1
        require(revision <= on_disk, "journal", f"revision {revision} was told, and {on_disk} are on disk")
        require(revision >= before, "revisions", f"revision {revision} was told after {before}")
        self._said_revision[call] = revision

    def _check_map(self, told: common_pb2.RankMap) -> None:
        cycle = self.durable.find(CycleNumber(told.cycle))
        require(cycle is not None, "H1", f"the rank map of cycle {told.cycle} was sent, which is not on disk")
        assert cycle is not None
        ranks = {NodeId(one.node_id): one.group_rank for one in told.nodes}
        require(
            ranks == cycle.ranks, "H1", f"the rank map of cycle {told.cycle} has {ranks}, on disk are {cycle.ranks}"
        )

    def _check_desired(self, call: ServerCall, message: heartbeat_pb2.HeartbeatResponse) -> None:
        self._check_revision(call, message.revision)
        ledger, wanted = self.at[message.revision], message.desired
        node_id, incarnation = NodeId(call.first.node_id), Incarnation(call.first.incarnation)
        cycle = ledger.cycle
        seated = cycle is not None and cycle.incarnations.get(node_id) == incarnation
        is_live = cycle is not None and cycle.is_live
        what = f"{incarnation} was told {common_pb2.DesiredAction.Name(wanted.action)} at revision {message.revision}"
        if not ledger.is_open or node_id not in ledger.live:
            require(wanted.action == common_pb2.DESIRED_ACTION_EXIT, "D1", f"{what}, and is to exit")
        elif seated and is_live and cycle is not None:
            given = wanted.assignment
            require(wanted.action == common_pb2.DESIRED_ACTION_RUN, "D1", f"{what}, and is active in {cycle.number}")
            place = (given.cycle, given.group_rank)
            truly = (cycle.number, cycle.ranks[node_id])
            require(place == truly, "C6", f"{what} with cycle and rank {place}, on disk are {truly}")
            size = given.world_size
            assert ledger.shape is not None
            require(size == ledger.shape.world_size, "D10", f"{what} with a world of {size}")
        else:
            stops = wanted.action in {common_pb2.DESIRED_ACTION_WAIT, common_pb2.DESIRED_ACTION_STOP}
            require(stops, "D1", f"{what}, and has no place in a live cycle")

    def _check_acknowledged(self, call: ServerCall, message: heartbeat_pb2.HeartbeatResponse) -> None:
        """What is acknowledged is on disk, unless it is of a cycle in which the node has no seat."""
        node_id = NodeId(call.first.node_id)
        reported = self._reported.get(call, [])
        for sequence, number, rank in reported:
            cycle = self.durable.find(number)
            if sequence > message.acknowledged or cycle is None or node_id not in cycle.ranks:
                continue
            known = self.durable.exits.get((number, node_id), {})
            require(
                rank in known, "journal", f"the end of worker {rank} of {node_id} was acknowledged and is not on disk"
            )
        self._reported[call] = [one for one in reported if one[0] > message.acknowledged]

    # ---- the nodes --------------------------------------------------------------------------------------

    def joining(self, node: Node, incarnation: Incarnation) -> None:
        self.note(f"{node.node_id}: joins as {incarnation}")
        has_workers = node.agent is not None and node.agent.supervisor.has_workers
        self.hold(require, not has_workers, "E4", f"{incarnation} joins while workers of before live")

    def joined(self, node: Node, incarnation: Incarnation) -> None:
        self.note(f"{node.node_id}: is told that {incarnation} is a member")

    def spawned(self, node: Node, incarnation: Incarnation, cycle: CycleNumber) -> None:
        self.note(f"{node.node_id}: starts the workers of cycle {cycle}")
        self.hold(self._check_spawned, node, incarnation, cycle)

    def _check_spawned(self, node: Node, incarnation: Incarnation, cycle: CycleNumber) -> None:
        living = [one.cycle for one in node.machine.living()]
        require(living == [cycle], "D2", f"{node.node_id} has workers of the cycles {living}")
        assert node.agent is not None
        here = self._started.setdefault(node.node_id, [])
        earlier = [*here, *node.agent.supervisor.spawned[:-1]]
        if incarnation not in self._former:
            here.append(cycle)
        require(all(one < cycle for one in earlier), "A3", f"{node.node_id} starts cycle {cycle} after {earlier}")
        chosen = self.durable.find(cycle)
        seat = chosen.incarnations.get(node.node_id) if chosen is not None else None
        known = seat == incarnation or incarnation in self._former
        require(known, "journal", f"{incarnation} starts cycle {cycle}; on disk its seat has {seat}")

    def did(self, node: Node, incarnation: Incarnation, deed: machine.Deed, agent: machine.Agent) -> None:
        match deed:
            case machine.Stop():
                self.note(f"{node.node_id}: stops its workers: {deed.reason}")
                self.hold(self._check_stop, node, incarnation, agent)
            case machine.Report():
                ends = ", ".join(map(_end, deed.exits))
                self.note(f"{node.node_id}: reports of cycle {deed.cycle}: {ends}")
            case machine.Rejoin():
                self.note(f"{node.node_id}: is to join anew: {deed.reason}")
            case _:
                pass

    def _check_stop(self, node: Node, incarnation: Incarnation, agent: machine.Agent) -> None:
        """E5: workers are stopped for a reason that is on disk, or on the node."""
        workers, ledger = agent.workers, self.durable
        assert workers is not None
        cycle = ledger.find(workers.assignment.cycle)
        by_itself = workers.has_failed or agent.ending in OF_ITS_OWN
        over = cycle is not None and not cycle.is_live
        member = ledger.live.get(node.node_id) == incarnation
        why = f"{node.node_id} stops the workers of cycle {workers.assignment.cycle}, which is live"
        require(by_itself or over or not member or not ledger.is_open, "E5", why)

    def agent_ended(self, node: Node, process: AgentProcess, code: int, reason: str) -> None:
        self.note(f"{node.node_id}: its agent exits {code}: {reason}")
        self.hold(self._check_exit, node, process, code)

    def _check_exit(self, node: Node, process: AgentProcess, code: int) -> None:
        closed = self.durable.closed
        if code == 0:
            well = self._had_succeeded or (closed is not None and closed.state is RunState.SUCCEEDED)
            require(well, "D8", f"the agent of {node.node_id} exits 0, and the run has not succeeded")
        has_workers = process.supervisor.has_workers
        require(not has_workers, "E2", f"the agent of {node.node_id} has exited, and its workers live")


def _end(one: WorkerExit) -> str:
    how = (one.signal or f"exit {one.exit_code}") if one.has_ended else "hangs"
    return f"{one.local_rank} {how}{' (stopped)' if one.stopped_by_agent else ''}"
