"""The state of one run, made from facts alone: `reduce(evolve, facts)`.

`evolve` is total: it never refuses a fact, live, on replay and in tests. Decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .cycle import Cycle as Cycle
from .cycle import CycleState as CycleState
from .cycle import SeatState as SeatState
from .facts import (
    PLANNED,
    TAKEN_AWAY,
    Cause,
    CauseRevised,
    CheckSuspected,
    CheckTrusted,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeFailedCheck,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeQuarantined,
    NodeRecovered,
    NodesDrained,
    NodesPromoted,
    NodeStopped,
    NodesUndrained,
    ProgressMade,
    QuarantineEnded,
    RunClosed,
    RunOpened,
    RunReopened,
    RunState,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from .grown import changed, plus
from .ids import CycleNumber, Incarnation, NodeId, RunId, global_rank
from .member import Member, Membership, trainable
from .shape import Settings, Shape
from .standing import Ailment, Quarantine, Suspicion
from .topology import OrderSource

MAX_CONSEQUENCES = 64


@dataclass(frozen=True)
class Run:
    """One training job across all its restarts. An unopened run has no shape."""

    run_id: RunId
    shape: Shape
    settings: Settings
    state: RunState = RunState.OPEN
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    cycles: tuple[Cycle, ...] = ()
    stopping: Mapping[NodeId, float] = field(default_factory=dict)
    """Nodes that left while their workers were being stopped, and until when they are waited for."""
    short_since: float | None = 0.0
    """Since when members have been too few for a world; None while there are enough."""
    life_began_with: CycleNumber = CycleNumber(0)
    """First cycle of this life of the run: budgets count from here."""
    restart_count: int = 0
    drained: frozenset[NodeId] = frozenset()
    """Nodes that an operator keeps out of every world, whoever runs on them."""
    promoted: frozenset[NodeId] = frozenset()
    """Nodes that an operator wants in the next world."""
    replaced: frozenset[NodeId] = frozenset()
    """Nodes that an operator wants out of the next world, for the promoted ones."""
    quarantined: Mapping[NodeId, Quarantine] = field(default_factory=dict)
    """Nodes that are chosen last, because their own workers failed first again and again."""
    pardoned: Mapping[NodeId, CycleNumber] = field(default_factory=dict)
    """From which cycle on the failures of nodes that were in quarantine count again."""
    suspected: Mapping[NodeId, Suspicion] = field(default_factory=dict)
    """Nodes that did not take up their place, whether or not they have been heard since."""
    unhealthy: Mapping[NodeId, Ailment] = field(default_factory=dict)
    """Nodes that are in no further world until they are well again."""
    suspected_checks: Mapping[str, CheckSuspected] = field(default_factory=dict)
    """Health checks that count for nobody, because they failed on so many nodes at once."""
    progress: int | None = None
    """The furthest step of training that was told in this life of the run; None where nobody tells."""
    highest_cycle: CycleNumber | None = None
    """The highest cycle number that this run or, before a journal was lost, a node of it has seen."""
    close_reason: str = ""
    exit_code: int = 0
    last_at: float = 0.0

    @property
    def cycle(self) -> Cycle | None:
        """The current cycle: the latest with an assignment."""
        return self.cycles[-1] if self.cycles else None

    @property
    def is_open(self) -> bool:
        return self.state is RunState.OPEN

    @property
    def next_cycle(self) -> CycleNumber:
        return CycleNumber(0 if self.highest_cycle is None else self.highest_cycle + 1)

    @property
    def order_source(self) -> OrderSource | None:
        """The source that was settled when the first world was chosen (rule B4)."""
        return self.cycles[0].order_source if self.cycles else None

    def live_members(self) -> Iterator[Member]:
        return (one for one in self.members.values() if one.is_live)

    def able_members(self) -> Iterator[Member]:
        """Members that are not known to be unhealthy."""
        return (one for one in self.live_members() if one.info.node_id not in self.unhealthy)

    def live(self, node_id: NodeId) -> Member | None:
        member = self.members.get(node_id)
        return member if member is not None and member.is_live else None

    def find_cycle(self, number: CycleNumber) -> Cycle | None:
        if not self.cycles or not self.cycles[0].number <= number <= self.cycles[-1].number:
            return None
        return next((one for one in reversed(self.cycles) if one.number == number), None)

    def as_of(self, cycle: Cycle) -> Run:
        """This run with the shape that it had in a cycle (rule H1)."""
        return self if cycle.shape == self.shape else dataclasses.replace(self, shape=cycle.shape)


def open_run(fact: RunOpened) -> Run:
    """The state after a run's first fact."""
    return Run(run_id=fact.run_id, shape=fact.shape, settings=fact.settings, last_at=fact.at)


def evolve(run: Run | None, fact: Fact) -> Run:
    """The state after one more fact. The first fact of a run is RunOpened."""
    if isinstance(fact, RunOpened):
        return open_run(fact)
    assert run is not None, f"a run's journal begins with RunOpened, found {fact}"
    return changed(_EVOLVE[type(fact)](run, fact), last_at=max(run.last_at, fact.at))


def _higher(one: CycleNumber | None, other: CycleNumber | None) -> CycleNumber | None:
    known = [number for number in (one, other) if number is not None]
    return max(known) if known else None


def _with_member(run: Run, member: Member, at: float) -> Run:
    """One member came or went. Members are counted only where that may tell: replay would cost n * n otherwise."""
    node_id = member.info.node_id
    members = plus(run.members, node_id, member)
    came = member.is_live and run.live(node_id) is None
    is_enough: bool | None
    if came and run.short_since is None:
        is_enough = True  # more members never allow less
    elif (not member.is_live and run.short_since is not None) or len(members) < run.shape.min_nodes:
        is_enough = False
    else:
        is_enough = None
    return _counted_again(changed(run, members=members), at, is_enough)


def _counted_again(run: Run, at: float, is_enough: bool | None = None) -> Run:
    """D9: since when there are too few who could train. `is_enough` where it is known without counting."""
    if is_enough is None:
        is_enough = trainable(run.able_members(), run.shape) >= run.shape.min_nodes
    return changed(run, short_since=None if is_enough else at if run.short_since is None else run.short_since)


def _reopened(run: Run, fact: RunReopened) -> Run:
    return dataclasses.replace(
        run,
        state=RunState.OPEN,
        shape=fact.shape,
        settings=fact.settings,
        restart_count=max(run.restart_count, fact.restart_count),
        life_began_with=run.next_cycle,
        short_since=fact.at,
        stopping={},
        quarantined={},
        pardoned={},
        suspected={},
        promoted=frozenset(),
        replaced=frozenset(),
        progress=None,
        unhealthy={},
        suspected_checks={},
        close_reason="",
        exit_code=0,
        members={name: _gone(one, Membership.LEFT, fact.at, "") for name, one in run.members.items()},
    )


def _gone(member: Member, how: Membership, at: float, reason: str) -> Member:
    if not member.is_live:
        return member
    return dataclasses.replace(member, membership=how, gone_at=at, gone_reason=reason)


def _joined(run: Run, fact: NodeJoined) -> Run:
    info = fact.node
    run = _with_member(run, Member(info, fact.at), fact.at)
    stopping = {name: until for name, until in run.stopping.items() if name != info.node_id}
    highest = _higher(run.highest_cycle, info.last_cycle)
    return changed(
        run,
        stopping=stopping,
        highest_cycle=highest,
        restart_count=max(run.restart_count, info.restart_count),
    )


def _gone_from(run: Run, node_id: NodeId, incarnation: Incarnation, how: Membership, fact: Any) -> Run:
    member = run.members.get(node_id)
    if member is None or member.info.incarnation != incarnation:
        return run
    run = _with_member(run, _gone(member, how, fact.at, fact.reason), fact.at)
    cycle = run.cycle
    if cycle is not None and node_id in cycle.seat_of and not cycle.has_finished(node_id, run.shape.workers_per_node):
        run = _replace_cycle(run, dataclasses.replace(cycle, lost=cycle.lost | {node_id}))
    return run


def _left(run: Run, fact: NodeLeft) -> Run:
    run = _gone_from(run, fact.node_id, fact.incarnation, Membership.LEFT, fact)
    if fact.stopping_until is None:
        return run
    return dataclasses.replace(run, stopping={**run.stopping, fact.node_id: fact.stopping_until})


def _stopped(run: Run, fact: NodeStopped) -> Run:
    stopping = {name: until for name, until in run.stopping.items() if name != fact.node_id}
    return dataclasses.replace(run, stopping=stopping)


def _lost(run: Run, fact: NodeLost) -> Run:
    return _gone_from(run, fact.node_id, fact.incarnation, Membership.LOST, fact)


def _chosen(run: Run, fact: WorldChosen) -> Run:
    cycle = Cycle(
        number=fact.cycle,
        shape=run.shape,
        order_source=fact.order_source,
        seats=fact.seats,
        standbys=fact.standbys,
        master=fact.master,
        started_at=fact.at,
        started_time=fact.time,
        remark=fact.remark,
    )
    return dataclasses.replace(
        run,
        cycles=(*run.cycles, cycle),
        highest_cycle=_higher(run.highest_cycle, fact.cycle),
        stopping={},
        promoted=frozenset(),
        replaced=frozenset(),
    )


def _replace_cycle(run: Run, cycle: Cycle) -> Run:
    index = next(i for i in reversed(range(len(run.cycles))) if run.cycles[i].number == cycle.number)
    return changed(run, cycles=(*run.cycles[:index], cycle, *run.cycles[index + 1 :]))


def _running(run: Run, fact: CycleRunning) -> Run:
    cycle = run.find_cycle(fact.cycle)
    return run if cycle is None else _replace_cycle(run, dataclasses.replace(cycle, running_at=fact.at))


def _exited(run: Run, fact: WorkersExited) -> Run:
    cycle = run.find_cycle(fact.cycle)
    if cycle is None:
        return run
    known = cycle.exits.get(fact.node_id, {})
    new = {one.local_rank: one for one in fact.exits if one.adds_to(known.get(one.local_rank))}
    consequences = cycle.consequences
    if not cycle.is_live:
        late = [
            failure_of(cycle, fact.node_id, one, fact.at)
            for one in new.values()
            if one.failed and one.local_rank not in known  # that a hung one has ended now is no further failure
        ]
        consequences = (*consequences, *late)[:MAX_CONSEQUENCES]
    return _replace_cycle(
        run,
        changed(cycle, exits=plus(cycle.exits, fact.node_id, {**known, **new}), consequences=consequences),
    )


def failure_of(cycle: Cycle, node_id: NodeId, one: WorkerExit, at: float) -> Failure:
    """The failure record of one worker that ended by itself, or hung."""
    seat = cycle.seat_of[node_id]
    return Failure(
        cause=Cause.HANG if one.hung else Cause.WORKER_FAILED,
        node_id=node_id,
        group_rank=seat.group_rank,
        rank=global_rank(seat.group_rank, one.local_rank, cycle.shape.workers_per_node),
        local_rank=one.local_rank,
        exit_code=one.exit_code,
        signal=one.signal,
        message=one.message,
        stderr_tail=one.stderr_tail,
        at=at,
    )


def _ended(run: Run, fact: CycleEnded) -> Run:
    cycle = run.find_cycle(fact.cycle)
    if cycle is None:
        return run
    run = _settled(run, cycle, fact)
    first = fact.failure
    others = tuple(
        failure_of(cycle, node_id, one, fact.at)
        for node_id, exits in cycle.exits.items()
        for one in exits.values()
        if one.failed and (node_id, one.local_rank) != (first.node_id, first.local_rank)
    )
    suspects = {
        node_id: Suspicion(cycle.seat_of[node_id].node.incarnation, cycle.number)
        for node_id in fact.suspects
        if node_id in cycle.seat_of
    }
    run = dataclasses.replace(run, suspected={**run.suspected, **suspects}) if suspects else run
    return _replace_cycle(
        run,
        dataclasses.replace(
            cycle, ended_at=fact.at, ended_time=fact.time, failure=first, consequences=others[:MAX_CONSEQUENCES]
        ),
    )


def settles_with(run: Run, before: Cycle, at: float) -> bool:
    """D3: whether a loss at `at` is found while the failure that ended the cycle `before` settles."""
    return before.ended_at is not None and at - before.ended_at <= run.settings.settle_s


def _settled(run: Run, cycle: Cycle, fact: CycleEnded) -> Run:
    """D3: a loss that is found while a failure settles is part of that failure's record."""
    before = next((one for one in reversed(run.cycles) if one.number < cycle.number), None)
    if before is None or before.failure is None or before.failure.cause in PLANNED:
        return run
    if fact.failure.cause not in TAKEN_AWAY or not settles_with(run, before, fact.at):
        return run
    consequences = (*before.consequences, fact.failure)[:MAX_CONSEQUENCES]
    return _replace_cycle(run, dataclasses.replace(before, consequences=consequences))


def _revised(run: Run, fact: CauseRevised) -> Run:
    cycle = run.find_cycle(fact.cycle)
    if cycle is None:
        return run
    before = () if cycle.failure is None else (cycle.failure,)
    consequences = (*before, *cycle.consequences)[:MAX_CONSEQUENCES]
    return _replace_cycle(run, dataclasses.replace(cycle, failure=fact.failure, consequences=consequences))


def _progressed(run: Run, fact: ProgressMade) -> Run:
    cycle = run.find_cycle(fact.cycle)
    # Where training begins is no progress: nobody knows of less.
    came_further = fact.step > (run.progress or 0)
    run = dataclasses.replace(run, progress=max(fact.step, run.progress or 0))
    return (
        run if cycle is None or not came_further else _replace_cycle(run, dataclasses.replace(cycle, progressed=True))
    )


def _quarantined(run: Run, fact: NodeQuarantined) -> Run:
    found = Quarantine(fact.reason, fact.until)
    return dataclasses.replace(run, quarantined={**run.quarantined, fact.node_id: found})


def _quarantine_ended(run: Run, fact: QuarantineEnded) -> Run:
    return _pardoned(run, {fact.node_id})


def _pardoned(run: Run, node_ids: set[NodeId]) -> Run:
    were = node_ids & run.quarantined.keys()
    if not were:
        return run
    return dataclasses.replace(
        run,
        quarantined={name: found for name, found in run.quarantined.items() if name not in were},
        pardoned={**run.pardoned, **dict.fromkeys(were, run.next_cycle)},
    )


def _promoted(run: Run, fact: NodesPromoted) -> Run:
    return dataclasses.replace(
        run, promoted=run.promoted | {*fact.node_ids}, replaced=(run.replaced | {*fact.replaced}) - {*fact.node_ids}
    )


def _drained(run: Run, fact: NodesDrained) -> Run:
    drained = run.drained | {*fact.node_ids}
    return dataclasses.replace(run, drained=drained, promoted=run.promoted - drained)


def _undrained(run: Run, fact: NodesUndrained) -> Run:
    return _pardoned(dataclasses.replace(run, drained=run.drained - {*fact.node_ids}), {*fact.node_ids})


def _failed_check(run: Run, fact: NodeFailedCheck) -> Run:
    if fact.node_id not in run.members:
        return run
    found = Ailment(fact.incarnation, fact.check, fact.reason, fact.at)
    return _counted_again(dataclasses.replace(run, unhealthy={**run.unhealthy, fact.node_id: found}), fact.at)


def _recovered(run: Run, fact: NodeRecovered) -> Run:
    if fact.node_id not in run.unhealthy:
        return run
    unhealthy = {name: found for name, found in run.unhealthy.items() if name != fact.node_id}
    return _counted_again(dataclasses.replace(run, unhealthy=unhealthy), fact.at)


def _check_suspected(run: Run, fact: CheckSuspected) -> Run:
    return dataclasses.replace(run, suspected_checks={**run.suspected_checks, fact.check: fact})


def _check_trusted(run: Run, fact: CheckTrusted) -> Run:
    left = {name: found for name, found in run.suspected_checks.items() if name != fact.check}
    return dataclasses.replace(run, suspected_checks=left)


def _closed(run: Run, fact: RunClosed) -> Run:
    return dataclasses.replace(run, state=fact.state, close_reason=fact.reason, exit_code=fact.exit_code, stopping={})


_EVOLVE: Mapping[type, Callable[[Run, Any], Run]] = {
    RunReopened: _reopened,
    NodeJoined: _joined,
    NodeLeft: _left,
    NodeStopped: _stopped,
    NodeLost: _lost,
    WorldChosen: _chosen,
    CycleRunning: _running,
    WorkersExited: _exited,
    CycleEnded: _ended,
    CauseRevised: _revised,
    NodesPromoted: _promoted,
    NodesDrained: _drained,
    NodesUndrained: _undrained,
    ProgressMade: _progressed,
    NodeQuarantined: _quarantined,
    QuarantineEnded: _quarantine_ended,
    NodeFailedCheck: _failed_check,
    NodeRecovered: _recovered,
    CheckSuspected: _check_suspected,
    CheckTrusted: _check_trusted,
    RunClosed: _closed,
}
