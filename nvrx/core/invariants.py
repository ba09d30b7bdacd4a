"""What holds of every run after every step, whatever happened. Tests run these after each command.

Pure, and deliberately written without `decide`, `world` and `placement`: a second opinion that shares only the
state and its names with them. Each broken rule is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .commands import Command, Join, Leave, Report, Tick
from .facts import (
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
from .groups import counted
from .ids import CycleNumber, Incarnation, LocalRank, NodeId
from .member import Membership, trainable
from .run import Cycle, CycleState, Run, evolve
from .shape import RankPolicy, RestartBudget
from .topology import OrderSource, order_key

DEGRADED = "degraded ("
"""How the reason begins why a node that says so of itself was chosen last."""


class Broken(AssertionError):
    """A rule does not hold: our bug, never the peer's."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message


def require(holds: bool, rule: str, message: str) -> None:
    if not holds:
        raise Broken(rule, message)


# ---- a state ----------------------------------------------------------------------------------------------


def check_state(run: Run) -> None:
    """Raise Broken if `run` is a state that no run may be in."""
    _check_numbers(run)
    for cycle in run.cycles:
        _check_seats(run, cycle)
        _check_times(run, cycle)
    _check_live_cycle(run)
    _check_masters(run)
    _check_members(run)
    _check_closed(run)


def _check_numbers(run: Run) -> None:
    numbers = [one.number for one in run.cycles]
    require(all(a < b for a, b in pairwise(numbers)), "A3", f"cycle numbers do not rise: {numbers}")
    if numbers:
        highest = run.highest_cycle
        require(highest is not None and highest >= numbers[-1], "A3", f"cycle {numbers[-1]} is above {highest}")


def _check_seats(run: Run, cycle: Cycle) -> None:
    of_this_life = cycle.number >= run.life_began_with
    names = [seat.node.node_id for seat in cycle.seats]
    if of_this_life:
        count = len(names)
        require(
            count == run.shape.min_nodes, "A5", f"cycle {cycle.number} has {count} nodes, not {run.shape.min_nodes}"
        )
        for node_id, exits in cycle.exits.items():
            within = all(0 <= rank < run.shape.workers_per_node for rank in exits)
            require(within, "D4", f"cycle {cycle.number}: {node_id} has exits of workers that do not exist: {exits}")
    ranks = [seat.group_rank for seat in cycle.seats]
    require(ranks == list(range(len(ranks))), "C6", f"cycle {cycle.number} has group ranks {ranks}")
    everyone = [*names, *(one.node.node_id for one in cycle.standbys)]
    require(len(set(everyone)) == len(everyone), "A5", f"cycle {cycle.number} has a node twice: {everyone}")
    strangers = {*cycle.exits, *cycle.lost} - set(names)
    require(not strangers, "D4", f"cycle {cycle.number} knows exits or losses of {strangers}, which had no seat")


def _check_times(run: Run, cycle: Cycle) -> None:
    require(
        cycle.is_live == (cycle.failure is None), "D4", f"cycle {cycle.number}: ended without a cause, or live with one"
    )
    times = [one for one in (cycle.started_at, cycle.running_at, cycle.ended_at) if one is not None]
    require(times == sorted(times), "D1", f"cycle {cycle.number} went back in time: {times}")
    require(times[-1] <= run.last_at, "D1", f"cycle {cycle.number} is ahead of its run: {times} > {run.last_at}")


def _check_live_cycle(run: Run) -> None:
    live = [one for one in run.cycles if one.is_live]
    require(len(live) <= 1, "D1", f"{len(live)} cycles are live: {[one.number for one in live]}")
    if not live:
        return
    cycle = live[0]
    require(
        cycle is run.cycles[-1], "D1", f"cycle {cycle.number} is live and cycle {run.cycles[-1].number} came after it"
    )
    require(run.is_open, "D1", f"the run is {run.state.value} and cycle {cycle.number} is live")
    require(
        cycle.number >= run.life_began_with, "A3", f"cycle {cycle.number} lives on in a life of the run after its own"
    )
    for seat in cycle.seats:
        node_id = seat.node.node_id
        if cycle.has_finished(node_id, run.shape.workers_per_node):
            continue
        member = run.live(node_id)
        there = member is not None and member.info.incarnation == seat.node.incarnation
        require(there and node_id not in cycle.lost, "D2", f"cycle {cycle.number} goes on without {node_id}")
        failed = [one for one in cycle.exits.get(node_id, {}).values() if one.failed]
        require(not failed, "D2", f"cycle {cycle.number} goes on after a worker of {node_id} failed: {failed}")


def _check_masters(run: Run) -> None:
    used = [(one.master.address, one.master.port) for one in run.cycles if one.master is not None]
    require(len(set(used)) == len(used), "I2", f"two cycles share a store endpoint: {used}")


def _check_members(run: Run) -> None:
    live = [one.info for one in run.live_members()]
    count = sum(1 for _ in counted(run))
    require(count <= run.shape.max_nodes, "A5", f"{count} members count, at most {run.shape.max_nodes} are allowed")
    enough = trainable(run.able_members(), run.shape)
    short = enough < run.shape.min_nodes
    require(short == (run.short_since is not None), "D9", f"{enough} can train, yet short since {run.short_since}")
    source = run.order_source
    if source is not None and source is not OrderSource.NODE_ID:
        texts = [(one.order_sources.get(source), one.node_id) for one in live]
        keys = [order_key(source, text, node_id) for text, node_id in texts if text is not None]
        require(len(set(keys)) == len(keys), "B4", f"two live nodes share a value of {source.value}: {texts}")


def _check_closed(run: Run) -> None:
    if run.is_open:
        require(not run.close_reason and run.exit_code == 0, "D1", f"an open run ended with {run.close_reason!r}")
    else:
        well = run.state is RunState.SUCCEEDED
        require(
            well == (run.exit_code == 0), "D8", f"a run that {run.state.value} ends its agents with {run.exit_code}"
        )
        require(bool(run.close_reason), "D5", f"a run that {run.state.value} does not say why")


# ---- a step -----------------------------------------------------------------------------------------------


def check_step(before: Run | None, command: Command, facts: Sequence[Fact], after: Run) -> None:
    """Raise Broken if `facts` may not follow from `command` in `before`. A refused command has no facts."""
    run = before
    for fact in facts:
        if isinstance(fact, RunOpened):
            require(run is None, "A3", "a run was opened twice")
        else:
            require(run is not None, "A3", f"a run began with {fact}")
            assert run is not None
            require(fact.at >= run.last_at, "D1", f"time went back from {run.last_at} to {fact.at} with {fact}")
            _CHECKS[type(fact)](run, fact)
            _check_asked_for(run, command, fact)
        run = evolve(run, fact)
    require(run == after, "E5", "the state is not what its facts make of the state before")


def _check_asked_for(run: Run, command: Command, fact: Fact) -> None:
    """Some facts follow from one command only, and from no old incarnation of its sender (rule B2)."""
    if isinstance(fact, NodeJoined):
        require(isinstance(command, Join) and command.node == fact.node, "B2", f"{fact} follows from {command}")
    elif isinstance(fact, RunReopened):
        require(isinstance(command, Join), "A3", f"{fact} follows from {command}")
    elif isinstance(fact, WorkersExited):
        member = run.members.get(fact.node_id)
        if member is not None and member.membership is Membership.LOST:
            member = None
        told = isinstance(command, Report) and command.node_id == fact.node_id and member is not None
        require(told, "B2", f"{fact} follows from {command}")
        assert isinstance(command, Report)
        assert member is not None
        require(member.info.incarnation == command.incarnation, "B2", f"{command} is of an old incarnation")
    elif isinstance(fact, NodeLeft | NodeStopped):
        told = isinstance(command, Leave) and (command.node_id, command.incarnation) == (fact.node_id, fact.incarnation)
        require(told, "E1", f"{fact} follows from {command}")
    elif isinstance(fact, NodeLost):
        replaced = isinstance(command, Join) and command.node.node_id == fact.node_id
        by_silence = isinstance(command, Tick | Report | Leave | Join)
        require(replaced or by_silence, "E1", f"{fact} follows from {command}")


def _reopened(run: Run, fact: RunReopened) -> None:
    require(not run.is_open, "A3", "an open run was reopened")


def _joined(run: Run, fact: NodeJoined) -> None:
    require(run.is_open, "A3", f"{fact.node.node_id} joined a closed run")
    require(run.live(fact.node.node_id) is None, "B2", f"{fact.node.node_id} joined while it was a member")
    known = run.members.get(fact.node.node_id)
    is_new = known is None or known.info.incarnation != fact.node.incarnation or known.joined_at < _life_began_at(run)
    require(is_new, "B2", f"{fact.node.node_id} came back as the incarnation that was declared gone")


def _life_began_at(run: Run) -> float:
    """When members of this life can have joined at the earliest."""
    ends = [one.ended_at or one.started_at for one in run.cycles if one.number < run.life_began_with]
    return max(ends, default=0.0)


def _gone(run: Run, node_id: NodeId, incarnation: Incarnation) -> None:
    member = run.live(node_id)
    there = member is not None and member.info.incarnation == incarnation
    require(there, "B2", f"{incarnation} of {node_id} went, and was no member")


def _went(run: Run, fact: NodeLeft | NodeLost) -> None:
    _gone(run, fact.node_id, fact.incarnation)


def _node_stopped(run: Run, fact: NodeStopped) -> None:
    require(fact.node_id in run.stopping, "D2", f"{fact.node_id} stopped, and nobody waited for it")


def _world_chosen(run: Run, fact: WorldChosen) -> None:
    require(run.is_open, "D1", f"a world was chosen for a run that {run.state.value}")
    require(run.cycle is None or not run.cycle.is_live, "D1", "a world was chosen beside a live cycle")
    require(fact.cycle == run.next_cycle, "A3", f"cycle {fact.cycle} was chosen, {run.next_cycle} is next")
    for node in [*(one.node for one in fact.seats), *(one.node for one in fact.standbys)]:
        member = run.live(node.node_id)
        there = member is not None and member.info.incarnation == node.incarnation
        require(there, "C1", f"cycle {fact.cycle} counts {node.node_id} ({node.incarnation}), which is no member")
    sick = [seat.node.node_id for seat in fact.seats if seat.node.node_id in run.unhealthy]
    require(not sick, "C1", f"cycle {fact.cycle} has {sick} in its world, which are unhealthy")
    waited_for = {name: until for name, until in run.stopping.items() if fact.at < until}
    require(not waited_for, "D2", f"cycle {fact.cycle} begins while workers are still stopping: {waited_for}")
    _check_order(run, fact)
    _check_survivors(run, fact)
    _check_budgets(run)


def _check_order(run: Run, fact: WorldChosen) -> None:
    if run.order_source is not None:
        require(fact.order_source is run.order_source, "B4", f"the order changed to {fact.order_source}")
    size = run.shape.segment_size
    for start in range(0, len(fact.seats), size or len(fact.seats)):
        domains = {seat.node.domain_id for seat in fact.seats[start : start + (size or 0)]}
        require(
            len(domains) <= 1, "C3", f"cycle {fact.cycle}: the segment at {start} is of {sorted(map(str, domains))}"
        )
    if size is not None or run.shape.rank_policy is not RankPolicy.INFRA:
        return
    source = fact.order_source
    infos = [run.members[seat.node.node_id].info for seat in fact.seats]
    keys = [order_key(source, one.order_sources.get(source), one.node_id) for one in infos]
    require(keys == sorted(keys), "C6", f"cycle {fact.cycle} is not in the order of {source.value}")


def _check_survivors(run: Run, fact: WorldChosen) -> None:
    last = run.cycle
    if last is None or last.number < run.life_began_with:
        return
    if run.shape.segment_size is not None or run.shape.replacement_group_size > 1:
        return  # a survivor may have lost the others of its group or segment
    newcomers = [seat.node.node_id for seat in fact.seats if seat.node.node_id not in last.seat_of]
    passed_over = run.quarantined.keys() | run.suspected.keys() | run.unhealthy.keys()
    # What a node says of itself is in no fact but this one.
    passed_over |= {one.node.node_id for one in fact.standbys if one.reason.startswith(DEGRADED)}
    by_hand = run.drained | run.replaced | passed_over
    displaced = [
        one.node.node_id
        for one in fact.standbys
        if one.node.node_id in last.seat_of and one.node.node_id not in by_hand and not run.promoted
    ]
    require(not (newcomers and displaced), "C5", f"{newcomers} took the seats of {displaced}, which are well")


def _check_budgets(run: Run) -> None:
    """D5, counted again: no further cycle once a budget is used up."""
    ended = [one for one in run.cycles if one.number >= run.life_began_with and one.failure is not None]
    limit = run.settings
    if limit.max_restarts == 0:
        by_hand = {Cause.DRAINED, Cause.PROMOTED}
        unplanned = [one.number for one in ended if one.failure is not None and one.failure.cause not in by_hand]
        require(not unplanned, "D5", f"a further cycle after {unplanned} with max_restarts 0")
    causes = [one.failure.cause for one in ended if one.failure is not None]
    failed = causes.count(Cause.WORKER_FAILED) + causes.count(Cause.HANG)
    if limit.restart_budget is RestartBudget.FIXED:
        require(
            failed <= limit.max_restarts, "D5", f"a cycle after {failed} failures, max_restarts {limit.max_restarts}"
        )
        sick = sum(
            1
            for one in ended
            if one.running_at is not None and one.failure is not None and one.failure.cause is Cause.NODE_UNHEALTHY
        )
        together = sum(1 for one, then in pairwise(ended) if _within(one, then, limit.settle_s))
        used = failed + max(0, sick - together)
        require(used <= limit.max_restarts, "D5", f"a cycle after {failed} failures and {sick} unhealthy nodes")
    taken = [one for one in ended if one.failure is not None and one.running_at is not None]
    gone = sum(
        1 for one in taken if one.failure is not None and one.failure.cause in {Cause.NODE_LOST, Cause.NODE_LEFT}
    )
    if limit.max_replacements is not None:
        settled = sum(1 for one, then in pairwise(ended) if _within(one, then, limit.settle_s))
        counted = gone - settled
        require(counted <= limit.max_replacements, "D5", f"a cycle after {gone} losses, of {limit.max_replacements}")


def _within(one: Cycle, then: Cycle, settle_s: float) -> bool:
    return (then.ended_at or 0.0) - (one.ended_at or 0.0) <= settle_s


def _current(run: Run, number: CycleNumber) -> Cycle:
    cycle = run.cycle
    require(cycle is not None and cycle.number == number, "D1", f"cycle {number} is not the current one")
    assert cycle is not None
    return cycle


def _cycle_running(run: Run, fact: CycleRunning) -> None:
    cycle = _current(run, fact.cycle)
    require(cycle.state is CycleState.STARTING, "D1", f"cycle {fact.cycle} was {cycle.state.value} and became RUNNING")


def _workers_exited(run: Run, fact: WorkersExited) -> None:
    cycle = run.find_cycle(fact.cycle)
    require(cycle is not None and fact.node_id in cycle.seat_of, "D4", f"{fact} of a node without a seat")
    assert cycle is not None
    known = cycle.exits.get(fact.node_id, {})
    again = [one.local_rank for one in fact.exits if one.local_rank in known and not _ends_a_hang(one, known)]
    require(bool(fact.exits) and not again, "D4", f"{fact} tells nothing new, or tells {again} again")


def _ends_a_hang(one: WorkerExit, known: Mapping[LocalRank, WorkerExit]) -> bool:
    """That a worker was found hung is told while it runs; then that it is gone."""
    before = known[one.local_rank]
    return before.hung and before.exit_code is None and not before.signal and one.has_ended


def _cycle_ended(run: Run, fact: CycleEnded) -> None:
    cycle = _current(run, fact.cycle)
    require(cycle.is_live, "D1", f"cycle {fact.cycle} ended twice")
    failure, per_node = fact.failure, run.shape.workers_per_node
    if failure.cause is Cause.SUCCEEDED:
        unfinished = [one.node.node_id for one in cycle.seats if not cycle.has_finished(one.node.node_id, per_node)]
        require(not unfinished, "D8", f"cycle {fact.cycle} succeeded, and {unfinished} had not finished")
    else:
        by_hand = failure.cause in {Cause.PROMOTED, Cause.STOPPED}
        sick = failure.cause is Cause.NODE_UNHEALTHY
        require(not sick or failure.node_id in run.unhealthy, "G11", f"{failure.node_id} is not known to be unhealthy")
        _check_suspect_spared(run, failure)
        known = by_hand or failure.node_id in cycle.seat_of
        require(known, "A5", f"cycle {fact.cycle} ended because of {failure.node_id}, which is not in its world")


def _check_suspect_spared(run: Run, failure: Failure) -> None:
    """G11: a check that failed on many within a minute replaces none of them."""
    found = run.unhealthy.get(failure.node_id) if failure.node_id is not None else None
    suspect = run.suspected_checks.get(found.check) if found is not None else None
    if failure.cause is Cause.NODE_UNHEALTHY and found is not None and suspect is not None:
        is_old = found.at < suspect.at - 60.0
        require(is_old, "G11", f"{failure.node_id} is replaced for check {found.check}, which is suspect")


def _cause_revised(run: Run, fact: CauseRevised) -> None:
    cycle = run.find_cycle(fact.cycle)
    was = cycle.failure if cycle is not None else None
    from_worker = (
        was is not None and was.cause in {Cause.WORKER_FAILED, Cause.HANG} and fact.failure.cause is Cause.NODE_LOST
    )
    require(from_worker, "D4", f"cycle {fact.cycle}: {was} became {fact.failure}")
    assert cycle is not None
    node_id = fact.failure.node_id
    lost = node_id in cycle.seat_of and node_id in run.members
    require(lost, "D12", f"cycle {fact.cycle} is put down to {node_id}, which was not in its world")
    assert node_id is not None
    member = run.members[node_id]
    is_gone = member.membership is Membership.LOST or member.info.incarnation != cycle.seat_of[node_id].node.incarnation
    require(is_gone, "D12", f"cycle {fact.cycle} is put down to {node_id}, which is not lost")


def _progress_made(run: Run, fact: ProgressMade) -> None:
    _current(run, fact.cycle)
    further = run.progress is None or fact.step > run.progress
    require(further, "D6", f"progress to step {fact.step}, which was {run.progress} before")


def _node_quarantined(run: Run, fact: NodeQuarantined) -> None:
    last = run.cycle
    failed = last is not None and last.failure is not None and last.failure.node_id == fact.node_id
    require(failed, "D7", f"{fact.node_id} is quarantined, and did not fail last")
    require(fact.node_id not in run.quarantined, "D7", f"{fact.node_id} is quarantined twice")


def _quarantine_ended(run: Run, fact: QuarantineEnded) -> None:
    found = run.quarantined.get(fact.node_id)
    is_over = found is not None and found.until is not None and fact.at >= found.until
    require(is_over, "D7", f"the quarantine of {fact.node_id} ended early: {found}")


def _failed_check(run: Run, fact: NodeFailedCheck) -> None:
    _gone(run, fact.node_id, fact.incarnation)
    require(fact.node_id not in run.unhealthy, "G11", f"{fact.node_id} is found unhealthy twice")
    require(fact.check not in run.suspected_checks, "G11", f"{fact.check} is suspect, and counts for {fact.node_id}")


def _recovered(run: Run, fact: NodeRecovered) -> None:
    was = fact.node_id in run.unhealthy and run.live(fact.node_id) is not None
    require(was, "G11", f"{fact.node_id} is well again, and was not known to be unhealthy")


def _check_suspected(run: Run, fact: CheckSuspected) -> None:
    count = len(set(fact.node_ids))
    require(count > 1 and count > fact.nodes / 10, "G11", f"{fact.check} is suspect for {count} of {fact.nodes} nodes")
    require(fact.check not in run.suspected_checks, "G11", f"{fact.check} becomes suspect twice")


def _check_trusted(run: Run, fact: CheckTrusted) -> None:
    require(fact.check in run.suspected_checks, "G11", f"{fact.check} counts again, and was not suspect")


def _by_hand(run: Run, fact: NodesPromoted | NodesDrained | NodesUndrained) -> None:
    require(run.is_open, "F1", f"{fact} changes a run that {run.state.value}")
    require(bool(fact.node_ids), "F1", f"{fact} names nobody")
    strangers = [one for one in fact.node_ids if run.live(one) is None]
    require(not strangers, "F1", f"{fact} names {strangers}, which are no members")


def _run_closed(run: Run, fact: RunClosed) -> None:
    require(run.is_open, "D1", "a closed run was closed")
    require(run.cycle is None or not run.cycle.is_live, "D1", "a run was closed beside a live cycle")


_CHECKS: dict[type, Callable[[Run, Any], None]] = {
    RunReopened: _reopened,
    NodeJoined: _joined,
    NodeLeft: _went,
    NodeStopped: _node_stopped,
    NodeLost: _went,
    WorldChosen: _world_chosen,
    CycleRunning: _cycle_running,
    WorkersExited: _workers_exited,
    CycleEnded: _cycle_ended,
    CauseRevised: _cause_revised,
    NodesPromoted: _by_hand,
    NodesDrained: _by_hand,
    NodesUndrained: _by_hand,
    ProgressMade: _progress_made,
    NodeQuarantined: _node_quarantined,
    QuarantineEnded: _quarantine_ended,
    NodeFailedCheck: _failed_check,
    NodeRecovered: _recovered,
    CheckSuspected: _check_suspected,
    CheckTrusted: _check_trusted,
    RunClosed: _run_closed,
}
