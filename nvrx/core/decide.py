"""What follows from a command, from silence and from time: facts, or a refusal.

`decide` first answers the command itself, then applies the run's rules (`advance`) until none has anything to
add. Pure: `now` is the run's clock, and Presence is only read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

from .budgets import repeat_offender
from .commands import Command, CycleExits, Drain, Join, Leave, Promote, Report, StopRun, Tick, Undrain
from .facts import (
    OWN_FAILURES,
    Cause,
    CauseRevised,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeLeft,
    NodeLost,
    NodeQuarantined,
    NodeStopped,
    ProgressMade,
    QuarantineEnded,
    RunClosed,
    RunState,
    WorkerExit,
    WorkersExited,
)
from .groups import places_taken
from .health import deadlines, judge
from .ids import Incarnation, NodeId
from .join import decide_join
from .member import Member, Membership
from .operate import decide_operation
from .placement import Placement
from .presence import AgentPhase, NodePresence, Presence, Word
from .refused import Reason, Refused
from .replacement import replace_unhealthy
from .run import Cycle, CycleState, Run, evolve, failure_of
from .world import Wait, next_world, place_world, stopping_within, withheld_until

_MAX_STEPS = 1000
_LATE_S = 1.0


def decide(run: Run, presence: Presence, command: Command, now: float) -> list[Fact]:
    """The facts that follow from `command` at `now`. Raises Refused, and then nothing has changed."""
    facts = _answer(run, presence, command, now)
    run = reduce(evolve, facts, run)
    for _ in range(_MAX_STEPS):
        more = advance(run, presence, now)
        if not more:
            return facts
        facts += more
        run = reduce(evolve, more, run)
    raise AssertionError(f"no rest after {_MAX_STEPS} steps; last facts: {facts[-3:]}")


def _answer(run: Run, presence: Presence, command: Command, now: float) -> list[Fact]:
    if isinstance(command, Join):
        return decide_join(run, presence, command, now)
    if isinstance(command, Leave):
        return _leave(run, command, now)
    if isinstance(command, Report):
        return _report(run, command, now)
    if isinstance(command, Promote | Drain | Undrain | StopRun):
        return decide_operation(run, presence, command, now)
    assert isinstance(command, Tick)
    return []


def require_member(run: Run, node_id: NodeId, incarnation: Incarnation, *, may_have_left: bool = False) -> Member:
    """The live member with this incarnation, or one that left and ends its workers. Raises Refused."""
    member = run.members.get(node_id)
    if member is None:
        raise Refused(
            Reason.UNKNOWN_NODE,
            f"node {node_id} is not a member of run {run.run_id}; join first",
            {"node_id": node_id, "run_id": run.run_id},
        )
    is_the_one = member.info.incarnation == incarnation
    if is_the_one and (member.is_live or (may_have_left and member.membership is Membership.LEFT)):
        return member
    if is_the_one:
        happened = f"was declared {member.membership.value.lower()} ({member.gone_reason})"
    else:
        happened = f"was replaced by incarnation {member.info.incarnation}"
    raise Refused(
        Reason.STALE_INCARNATION,
        f"incarnation {incarnation} of node {node_id} {happened}; stop its workers and join as a new one",
        {"node_id": node_id, "incarnation": incarnation, "current_incarnation": member.info.incarnation},
    )


def _leave(run: Run, command: Leave, now: float) -> list[Fact]:
    member = run.members.get(command.node_id)
    if member is not None and not member.is_live and member.info.incarnation == command.incarnation:
        if command.workers_stopped and command.node_id in run.stopping:
            return [NodeStopped(now, command.node_id, command.incarnation)]
        return []
    require_member(run, command.node_id, command.incarnation)
    cycle = run.cycle
    seat = cycle.seat_of.get(command.node_id) if cycle is not None else None
    works = seat is not None and seat.node.incarnation == command.incarnation
    until = now + stopping_within(command.stop_grace_s)
    return [
        NodeLeft(
            now,
            command.node_id,
            command.incarnation,
            command.reason,
            until if works and not command.workers_stopped else None,
        )
    ]


def _report(run: Run, command: Report, now: float) -> list[Fact]:
    require_member(run, command.node_id, command.incarnation, may_have_left=True)
    facts: list[Fact] = []
    for told in command.cycles:
        new = _news(run, command, told)
        if new is not None:
            facts.append(WorkersExited(now, told.cycle, command.node_id, new.exits))
    return facts


def _news(run: Run, command: Report, told: CycleExits) -> CycleExits | None:
    cycle = run.find_cycle(told.cycle)
    seat = cycle.seat_of.get(command.node_id) if cycle is not None else None
    if cycle is None or seat is None:
        return None
    known = cycle.exits.get(command.node_id, {})
    exits = tuple(
        one
        for one in told.exits
        if one.adds_to(known.get(one.local_rank)) and 0 <= one.local_rank < run.shape.workers_per_node
    )
    return CycleExits(told.cycle, exits) if exits else None


def advance(run: Run, presence: Presence, now: float) -> list[Fact]:
    """One step of what follows by itself: the first rule that has something to add."""
    if not run.is_open:
        return []
    for rule in _RULES:
        facts = list(rule(run, presence, now))
        if facts:
            return facts
    return []


def _leases(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """E1: an expired lease makes a node lost; all that expired together are lost together."""
    if presence.is_recovering(now) or withheld_until(run, presence, now) is not None:
        return
    for member in run.live_members():
        node_id = member.info.node_id
        node = presence.nodes.get(node_id)
        if node is None or node.incarnation != member.info.incarnation:
            continue
        if now >= node.lease_until:
            silent_s = now - (node.heard_at if node.heard_at is not None else member.joined_at)
            how = "silent" if node.connected else "its stream broke; silent"
            yield NodeLost(now, node_id, member.info.incarnation, f"{how} for {silent_s:.1f} s")


def _loss_ends_cycle(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D1, D2: an active node that left or is lost ends the live cycle, unless its workers had finished."""
    cycle = run.cycle
    if cycle is not None and cycle.is_live and cycle.lost:
        yield CycleEnded(now, cycle.number, _loss(run, cycle, now))


def _loss(run: Run, cycle: Cycle, now: float) -> Failure:
    gone = [seat for seat in cycle.seats if seat.node.node_id in cycle.lost]
    first = min(gone, key=lambda seat: (run.members[seat.node.node_id].gone_at or now, seat.group_rank))
    member = run.members[first.node.node_id]
    why = member.gone_reason
    if member.info.incarnation != first.node.incarnation:
        why = f"replaced by incarnation {member.info.incarnation}"
    others = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
    return Failure(
        cause=Cause.NODE_LEFT if member.membership is Membership.LEFT else Cause.NODE_LOST,
        node_id=first.node.node_id,
        group_rank=first.group_rank,
        message=f"{why}{others}",
        at=member.gone_at or now,
    )


def _worker_ends_cycle(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D2, D4: the first worker that fails by itself ends the live cycle."""
    cycle = run.cycle
    if cycle is None or not cycle.is_live:
        return
    for node_id, exits in cycle.exits.items():
        failed = next((one for one in exits.values() if one.failed), None)
        if failed is not None:
            failure = failure_of(cycle, node_id, failed, now)
            if _store_explains(cycle, failed, presence):
                failure = dataclasses.replace(failure, cause=Cause.STORE_LOST)
            yield CycleEnded(now, cycle.number, failure)
            return


def _store_explains(cycle: Cycle, failed: WorkerExit, presence: Presence) -> bool:
    """I6: the cycle's store is gone, and the worker did not die of something that has nothing to do with it.

    Python ends an unhandled error with an exit code; torch's own threads end it by SIGABRT.
    """
    master = cycle.master
    is_gone = master is not None and master.lasting_port is not None and master.port in presence.stores.lost
    return is_gone and not failed.hung and failed.signal in {"", "SIGABRT"}


def _all_finished(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D8: all active nodes' workers exited 0."""
    cycle = run.cycle
    if cycle is None or not cycle.is_live:
        return
    per_node = run.shape.workers_per_node
    if len(cycle.exits) == len(cycle.seats) and all(
        cycle.has_finished(seat.node.node_id, per_node) for seat in cycle.seats
    ):
        yield CycleEnded(now, cycle.number, Failure(Cause.SUCCEEDED, at=now))
        yield RunClosed(
            now, RunState.SUCCEEDED, f"all {run.shape.world_size} workers of cycle {cycle.number} exited 0", 0
        )


def _all_started(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D1: STARTING becomes RUNNING when every active agent reports its workers started."""
    cycle = run.cycle
    if cycle is None or cycle.state is not CycleState.STARTING:
        return
    per_node = run.shape.workers_per_node
    for seat in cycle.seats:
        node = presence.nodes.get(seat.node.node_id)
        started = (
            node is not None
            and node.incarnation == seat.node.incarnation
            and node.cycle == cycle.number
            and node.phase in {AgentPhase.RUNNING, AgentPhase.SUCCEEDED}
        )
        if not started and not cycle.has_finished(seat.node.node_id, per_node):
            return
    yield CycleRunning(now, cycle.number)


def _loss_explains(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D4, D12: a node found lost before the next cycle runs was what made the ended one's workers fail; once that runs,
    only if it has no part in that, and its stream broke within the reconnect grace after them."""
    running: Cycle | None = None
    for cycle in reversed(run.cycles):
        if cycle.number < run.life_began_with:
            return
        if cycle.state is CycleState.RUNNING:
            running = cycle
            continue
        if cycle.failure is not None and cycle.failure.cause in OWN_FAILURES:
            until = (cycle.ended_at or 0.0) + 2 * presence.timing.reconnect_grace_s
            if running is not None and now > until + _LATE_S:
                return  # no need to look at each seat again and again
            lost = _lost_after(run, cycle, None if running is None else _Recently(running, until))
            if lost is not None:
                yield CauseRevised(now, cycle.number, lost)
                return
        if cycle.running_at is not None:
            return


@dataclass(frozen=True)
class _Recently:
    """The cycle after runs already: only who is not in it, and was lost until then, explains anything."""

    running: Cycle
    until: float

    def allows(self, node_id: NodeId, gone_at: float) -> bool:
        return node_id not in self.running.seat_of and gone_at <= self.until


def _lost_after(run: Run, cycle: Cycle, recently: _Recently | None) -> Failure | None:
    for seat in cycle.seats:
        member = run.members.get(seat.node.node_id)
        if member is None or member.info.incarnation != seat.node.incarnation:
            continue
        gone_at = member.gone_at or 0.0
        if (
            member.membership is Membership.LOST
            and gone_at >= (cycle.ended_at or 0.0)
            and (recently is None or recently.allows(seat.node.node_id, gone_at))
        ):
            return Failure(
                cause=Cause.NODE_LOST,
                node_id=seat.node.node_id,
                group_rank=seat.group_rank,
                message=member.gone_reason,
                at=gone_at,
            )
    return None


def _progress(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D6: training came further than ever before; told once per cycle, and how far when it has ended."""
    cycle = run.cycle
    if cycle is None or cycle.number < run.life_began_with or (cycle.is_live and cycle.progressed):
        return
    steps = [
        node.progress
        for seat in cycle.seats
        if (node := presence.nodes.get(seat.node.node_id)) is not None
        and node.incarnation == seat.node.incarnation
        and node.cycle == cycle.number
        and node.progress is not None
    ]
    if steps and (run.progress is None or max(steps) > run.progress):
        yield ProgressMade(now, cycle.number, max(steps))


def _quarantine(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D7: a node whose own workers fail first again and again is chosen last."""
    found = repeat_offender(run)
    if found is None or found.node_id in run.quarantined:
        return
    for_s = run.settings.quarantine_s
    reason = f"its workers failed first in {found.times} cycles in a row"
    yield NodeQuarantined(now, found.node_id, reason, None if for_s is None else now + for_s)


def _quarantine_over(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D7, A5: a quarantine may be for some time only; who would be one too many then waits for a place."""
    for node_id, found in run.quarantined.items():
        if found.until is not None and now >= found.until:
            ended = QuarantineEnded(now, node_id)
            if places_taken(evolve(run, ended)) <= run.shape.max_nodes:
                yield ended
                return


def _suspects(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """D12: nodes that do not take up their places are passed over, if there is a world without them."""
    cycle = run.cycle
    if cycle is None or cycle.state is not CycleState.STARTING or presence.is_recovering(now):
        return
    late = {node_id: until for node_id, until in _unacknowledged(run, cycle, presence).items() if now >= until}
    if not late:
        return
    within_s = presence.timing.acknowledged_within_s
    first = min(late, key=lambda one: cycle.seat_of[one].group_rank)
    others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    failure = Failure(
        cause=Cause.NODE_LOST,
        node_id=first,
        group_rank=cycle.seat_of[first].group_rank,
        message=f"suspect: it did not take up its place within {within_s:g} s{others}",
        at=now,
    )
    ended = CycleEnded(now, cycle.number, failure, tuple(sorted(late)))
    if isinstance(place_world(evolve(run, ended), presence, now), Placement):
        yield ended


def _unhealthy_ends_cycle(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """G11: an unhealthy node is replaced now, where a world without it follows."""
    found = replace_unhealthy(run, presence, now)
    if isinstance(found, CycleEnded):
        yield found


def _unacknowledged(run: Run, cycle: Cycle, presence: Presence) -> dict[NodeId, float]:
    """Connected nodes of a starting cycle that have not said that they know of it, and until when they may."""
    within_s = presence.timing.acknowledged_within_s
    return {
        node_id: max(cycle.started_at, node.connected_at or 0.0, presence.stalled_at) + within_s
        for node_id, seat in cycle.seat_of.items()
        if (node := presence.nodes.get(node_id)) is not None
        and node.connected
        and node.incarnation == seat.node.incarnation
        and not presence.has_taken_up(node_id, cycle.number, cycle.started_at)
        and len(cycle.exits.get(node_id, {})) < run.shape.workers_per_node
    }


def is_news(run: Run, word: Word) -> bool:
    """Whether the progress that a node tells changes anything now (rule D6)."""
    cycle = run.cycle
    if word.progress is None or not run.is_open or cycle is None or not cycle.is_live or cycle.progressed:
        return False
    return run.progress is None or word.progress > run.progress


def _next_world(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """C, D2, D5, D9: with no live cycle, close the run, choose the next world, or wait."""
    if run.cycle is not None and run.cycle.is_live:
        return
    found = next_world(run, presence, now)
    if not isinstance(found, Wait):
        yield found


_RULES: tuple[Callable[[Run, Presence, float], Iterator[Fact]], ...] = (
    _leases,
    _loss_explains,
    _loss_ends_cycle,
    _all_finished,
    _worker_ends_cycle,
    _all_started,
    _progress,
    _quarantine_over,
    _quarantine,
    _suspects,
    judge,
    _unhealthy_ends_cycle,
    _next_world,
)


def next_deadline(run: Run, presence: Presence, now: float) -> float | None:
    """When `decide(Tick)` may next have something to add, on the run's clock; None: only after news."""
    if not run.is_open:
        return None
    withheld = withheld_until(run, presence, now)
    times = [
        _judged_at(node, presence, withheld, now)
        for node_id, node in presence.nodes.items()
        if (member := run.live(node_id)) is not None and member.info.incarnation == node.incarnation
    ]
    # Whose time is over already waits for a place, and that comes with news.
    times += [one.until for one in run.quarantined.values() if one.until is not None and one.until > now]
    times += deadlines(run, presence, now)
    if run.cycle is None or not run.cycle.is_live:
        found = next_world(run, presence, now)
        if isinstance(found, Wait):
            times += [one for one in (found.until, found.gives_up_at) if one is not None]
    elif run.cycle.state is CycleState.STARTING:
        # Who is late already waits for a world without it, and that comes with news.
        times += [until for until in _unacknowledged(run, run.cycle, presence).values() if until > now]
    return min(times) if times else None


def _judged_at(node: NodePresence, presence: Presence, withheld: float | None, now: float) -> float:
    """When a silent node is to be looked at: at the end of its lease, and later while nobody is judged."""
    at = node.lease_until
    if presence.is_recovering(now):
        at = max(at, presence.recovering_until or 0.0)  # some are still away after a restart
    return at if at > now or withheld is None else withheld
