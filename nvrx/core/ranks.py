"""Ranks and rank maps: which worker was where, both ways (rules C6, H1, H2); what each node is to do.

Four different values: infra rank orders nodes, group rank is a node's place in a world, global rank a worker's,
local rank a worker's place on its node. Reads a Run and decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from .facts import Cause, Endpoint, Placed, Seat, WorkerExit
from .ids import CycleNumber, GlobalRank, GroupRank, Incarnation, LocalRank, NodeId
from .member import Member
from .narrate import describe_failure
from .run import Cycle, Run, SeatState
from .topology import OrderKey, order_key, settle_source

EXIT_EXCLUDED = 5
"""Exit code of an agent whose node is out of the run while the run goes on."""


class Action(enum.Enum):
    """What a node is to do."""

    WAIT = "WAIT"
    RUN = "RUN"
    STOP = "STOP"
    EXIT = "EXIT"


@dataclass(frozen=True)
class Assignment:
    """A node's place in a cycle's world, and where its workers meet."""

    cycle: CycleNumber
    group_rank: GroupRank
    world_size: int
    group_world_size: int
    workers_per_node: int
    max_restarts: int
    infra_rank: int
    replacement_group_id: str
    master: Endpoint | None
    fetch_rank_map: bool = False
    """The cycle's rank map does not come by itself; set by the wire where it is too large."""


@dataclass(frozen=True)
class Desired:
    """The state that a node is to reach. Said again whenever either side may have missed it."""

    action: Action
    cycle: CycleNumber | None = None
    assignment: Assignment | None = None
    reason: str = ""
    exit_code: int | None = None
    failed_cycle: CycleNumber | None = None
    """The latest cycle that ended in failure, if this node took part in it."""
    excluded: bool = False
    """This node is kept out of the world while the run goes on: its agent may end (rule E8)."""


def desired(run: Run, node_id: NodeId, incarnation: Incarnation, waiting: str) -> Desired:
    """What the member `node_id` is to do now; `waiting` is the reason shown while it waits."""
    cycle = run.cycle
    number = cycle.number if cycle is not None else None
    failed = _failed_cycle(run, node_id)
    if not run.is_open:
        return Desired(Action.EXIT, number, None, run.close_reason, run.exit_code, failed)
    if run.live(node_id) is None:
        # It said so itself and is ending its workers; one that did not (somebody else said it) has to go as well.
        return Desired(Action.EXIT, number, None, "this node has left the run", EXIT_EXCLUDED, failed)
    if cycle is None or cycle.number < run.life_began_with:
        return Desired(Action.WAIT, None, None, waiting, None, failed)
    seat = cycle.seat_of.get(node_id)
    mine = seat is not None and seat.node.incarnation == incarnation
    if not cycle.is_live:
        out = node_id in run.drained or node_id in run.unhealthy  # quarantined ones may yet be chosen
        if not mine:
            return Desired(Action.WAIT, number, None, _excluded(run, node_id) or waiting, None, failed, out)
        why = "; ".join(one for one in (_how_it_ended(cycle), waiting) if one)
        # Told at once: without it, there may be no next world before another node has come in its place.
        return Desired(Action.STOP, number, None, _excluded(run, node_id) if out else why, None, failed, out)
    if seat is None or not mine:
        why = _excluded(run, node_id)
        return Desired(Action.WAIT, number, None, why or f"standby of cycle {number}", None, failed, bool(why))
    return Desired(Action.RUN, number, _assignment(run, cycle, seat), _why_anew(run), None, failed)


def _excluded(run: Run, node_id: NodeId) -> str:
    """E8: why a node without a seat is kept out of the world; empty if it just stands by."""
    if node_id in run.drained:
        return "excluded: drained by an operator"
    ailment = run.unhealthy.get(node_id)
    if ailment is not None:
        return f"excluded: unhealthy, {ailment}"
    found = run.quarantined.get(node_id)
    return f"excluded: in quarantine, {found.reason}" if found is not None else ""


def _why_anew(run: Run) -> str:
    """Why the current cycle began; empty for the first."""
    return _how_it_ended(run.cycles[-2]) if len(run.cycles) > 1 else ""


def _how_it_ended(cycle: Cycle) -> str:
    return f"cycle {cycle.number} ended: {describe_failure(cycle.failure)}" if cycle.failure is not None else ""


def _failed_cycle(run: Run, node_id: NodeId) -> CycleNumber | None:
    for cycle in reversed(run.cycles[-2:]):
        if cycle.failure is not None and cycle.failure.cause is not Cause.SUCCEEDED:
            return cycle.number if node_id in cycle.seat_of else None
    return None


def _assignment(run: Run, cycle: Cycle, seat: Seat) -> Assignment:
    return Assignment(
        cycle=cycle.number,
        group_rank=seat.group_rank,
        world_size=run.shape.world_size,
        group_world_size=run.shape.min_nodes,
        workers_per_node=run.shape.workers_per_node,
        max_restarts=run.settings.max_restarts,
        infra_rank=seat.node.infra_rank,
        replacement_group_id=str(seat.node.replacement_group_id or ""),
        master=cycle.master,
    )


@dataclass(frozen=True)
class MappedNode:
    """A row of a rank map."""

    node: Placed
    group_rank: GroupRank
    state: SeatState | None
    exits: tuple[WorkerExit, ...]


def mapped_nodes(run: Run, cycle: Cycle) -> Iterator[MappedNode]:
    """The rows of a cycle's rank map, in group-rank order."""
    for seat in cycle.seats:
        node_id = seat.node.node_id
        exits = sorted(cycle.exits.get(node_id, {}).values(), key=lambda one: one.local_rank)
        yield MappedNode(
            seat.node, seat.group_rank, cycle.seat_state(node_id, run.shape.workers_per_node), tuple(exits)
        )


@dataclass(frozen=True)
class WorkerPlace:
    """Where one worker of one cycle is or was."""

    cycle: Cycle
    seat: Seat
    local_rank: LocalRank


def find_rank(run: Run, cycle: Cycle, rank: GlobalRank) -> WorkerPlace | None:
    """The worker with a global rank in a cycle; None where the world has no such rank."""
    if not 0 <= rank < cycle.shape.world_size:
        return None
    group_rank, local_rank = divmod(rank, cycle.shape.workers_per_node)
    return WorkerPlace(cycle, cycle.seats[group_rank], LocalRank(local_rank))


def find_node(run: Run, node_id: NodeId) -> Iterator[WorkerPlace]:
    """Every worker that a node has had, latest cycle first."""
    for cycle in reversed(run.cycles):
        seat = cycle.seat_of.get(node_id)
        if seat is not None:
            for local_rank in range(cycle.shape.workers_per_node):
                yield WorkerPlace(cycle, seat, LocalRank(local_rank))


def find_gpu(run: Run, uuid: str) -> Iterator[WorkerPlace]:
    """Every worker that a GPU has served, latest cycle first."""
    for cycle in reversed(run.cycles):
        for seat in cycle.seats:
            for device in seat.node.devices:
                if device.uuid == uuid:
                    yield WorkerPlace(cycle, seat, device.local_rank)


@dataclass(frozen=True)
class Replacement:
    """Between two cycles one node left the world and another came into its place."""

    left: NodeId
    came: NodeId


def replacements(run: Run, cycle: Cycle) -> Iterator[Replacement]:
    """Who was replaced by whom when `cycle` was chosen, paired in group-rank order."""
    before = next((one for one in reversed(run.cycles) if one.number < cycle.number), None)
    if before is None:
        return
    left = [seat.node.node_id for seat in before.seats if seat.node.node_id not in cycle.seat_of]
    came = [seat.node.node_id for seat in cycle.seats if seat.node.node_id not in before.seat_of]
    for gone, new in zip(left, came, strict=False):
        yield Replacement(gone, new)


class NodeState(enum.Enum):
    """How a node stands in its run."""

    STANDBY = "STANDBY"
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    QUARANTINED = "QUARANTINED"
    LOST = "LOST"
    LEFT = "LEFT"
    UNHEALTHY = "UNHEALTHY"


def members_in_order(run: Run) -> list[Member]:
    """All members, present and past: active ones by group rank, then the others in infra order."""
    source = run.order_source or settle_source([one.info.order_sources for one in run.members.values()])
    seat_of = run.cycle.seat_of if run.cycle is not None else {}

    def place(member: Member) -> tuple[int, OrderKey, NodeId]:
        info = member.info
        is_active = _is_active(run, member)
        group_rank = seat_of[info.node_id].group_rank if is_active else len(seat_of)
        return group_rank, order_key(source, info.order_sources.get(source), info.node_id), info.node_id

    return sorted(run.members.values(), key=place)


def node_state(run: Run, member: Member) -> NodeState:
    """How a member, present or past, stands."""
    if not member.is_live:
        return NodeState(member.membership.value)
    if not run.is_open:
        return NodeState.LEFT
    if member.info.node_id in run.drained:
        return NodeState.DRAINING
    if _is_active(run, member):
        return NodeState.ACTIVE
    if member.info.node_id in run.unhealthy:
        return NodeState.UNHEALTHY
    return NodeState.QUARANTINED if member.info.node_id in run.quarantined else NodeState.STANDBY


def node_reason(run: Run, member: Member) -> str:
    """Why a member, present or past, stands as it does, where there is more to say than its state."""
    found, ailment = run.quarantined.get(member.info.node_id), run.unhealthy.get(member.info.node_id)
    if not member.is_live or (found is None and ailment is None):
        return member.gone_reason
    if ailment is not None:
        is_kept = _is_active(run, member) and run.cycle is not None and run.cycle.is_live
        kept = "; kept in the world (nvrx-coord status says why)" if is_kept else ""
        return f"unhealthy: {ailment}{kept}"
    assert found is not None
    kept = "; kept in the world, which has no other node for its place" if _is_active(run, member) else ""
    return f"quarantined: {found.reason}{kept}"


def active_nodes(run: Run) -> int:
    """How many members have a seat in the current cycle; a drained one may still be among them."""
    return sum(1 for member in run.members.values() if _is_active(run, member))


def _is_active(run: Run, member: Member) -> bool:
    """Whether a member has a seat in the current cycle."""
    cycle = run.cycle
    if not member.is_live or not run.is_open or cycle is None or cycle.number < run.life_began_with:
        return False
    seat = cycle.seat_of.get(member.info.node_id)
    return seat is not None and seat.node.incarnation == member.info.incarnation
