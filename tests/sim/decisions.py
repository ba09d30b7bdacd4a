"""What must be so at the moment of a decision: held against the ledger, the wire and the truth on the nodes.

Written without the core's own invariants. Each check names the rule that is broken.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CheckSuspected,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeFailedCheck,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRecovered,
    NodeStopped,
    ProgressMade,
    RunClosed,
    RunState,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, LocalRank, NodeId
from nvrx.core.shape import RestartBudget

from .hearing import FRESH_INTERVALS, ROUNDING_S, Hearing
from .ledger import Ledger, Seated
from .node import Checkpoint, Node

STOPPING_MARGIN_S = 2.0


class Violation(Exception):
    """A rule does not hold."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def require(holds: bool, rule: str, message: str) -> None:
    if not holds:
        raise Violation(rule, message)


@dataclass(frozen=True)
class Operated:
    """An operator asked for something; whether it was granted does not matter."""

    what: Cause
    node_id: NodeId | None


@dataclass
class Truth:
    """What is so, whatever anybody was told."""

    nodes: Mapping[NodeId, Node]
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    operated: set[Operated] = field(default_factory=set)
    joining: frozenset[NodeId] = frozenset()
    """Nodes that join by the decision that is being checked."""


def check_decision(fact: Fact, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    """Raises Violation if `fact` may not be decided now. `ledger`: all that was decided before."""
    check = _CHECKS.get(type(fact))
    if check is not None:
        check(fact, ledger, hearing, truth, now_s)


def _joined(fact: NodeJoined, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    node = fact.node
    require(node.incarnation not in ledger.joined_ever, "B2", f"{node.incarnation} joined a second time")
    require(node.node_id not in ledger.live, "B2", f"{node.node_id} has two incarnations at a time")


def _lost(fact: NodeLost, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    require(ledger.live.get(fact.node_id) == fact.incarnation, "B2", f"{fact.incarnation} was lost and is no member")
    is_replaced = fact.node_id in truth.joining
    process = truth.nodes[fact.node_id].agent
    if is_replaced and (process is None or process.incarnation != fact.incarnation):
        return  # its process is dead, or has become the one that joins (B2)
    from_s = hearing.may_be_lost_from_s(fact.node_id, fact.incarnation, is_replaced=is_replaced)
    rule = "E5" if hearing.away else "E1"
    away = f", {sorted(hearing.away)} may still come back" if hearing.away else ""
    require(
        now_s >= from_s,
        rule,
        f"{fact.incarnation} was lost at {now_s:.3f} s, which may be from {from_s:.3f} s on{away}",
    )


def _left(fact: NodeLeft, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    require(ledger.live.get(fact.node_id) == fact.incarnation, "B2", f"{fact.incarnation} left and is no member")
    node = truth.nodes[fact.node_id]
    excluded = node.leaves_when_excluded and fact.node_id in ledger.excluded_ever
    require(node.sigterms > 0 or excluded, "E2", f"{fact.node_id} left, and nobody had told it to")


def _stopped(fact: NodeStopped, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    living = truth.nodes[fact.node_id].machine.living()
    require(not living, "D2", f"the workers of {fact.node_id} are said to be gone, and live: {living}")


def _chosen(fact: WorldChosen, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    last, shape = ledger.cycle, ledger.shape
    assert shape is not None
    require(ledger.is_open, "D1", "a world was chosen for a closed run")
    require(last is None or not last.is_live, "D1", f"cycle {fact.cycle} was chosen beside a live one")
    numbers = [one.number for one in ledger.cycles]
    require(all(fact.cycle > one for one in numbers), "A3", f"cycle {fact.cycle} came after {numbers}")
    names = [seat.node.node_id for seat in fact.seats]
    require(len(names) == shape.min_nodes == len(set(names)), "D10", f"cycle {fact.cycle} has the nodes {names}")
    require([seat.group_rank for seat in fact.seats] == list(range(len(names))), "C6", f"ranks of {names} have gaps")
    for seat in fact.seats:
        node_id, incarnation = seat.node.node_id, seat.node.incarnation
        require(ledger.live.get(node_id) == incarnation, "C1", f"{incarnation} was chosen and is no member")
        heard = hearing.heard_s.get(incarnation)
        fresh = hearing.may_be_fresh(incarnation, now_s)
        require(fresh, "C1", f"{incarnation} was chosen at {now_s:.3f} s; heard last at {heard}")
        require(node_id not in ledger.drained, "F1", f"{node_id} was chosen and is drained")
        require(node_id not in ledger.unhealthy, "C1", f"{node_id} was chosen and is unhealthy")
    _check_groups(fact, shape.replacement_group_size, shape.segment_size)
    _check_nobody_stops(names, ledger, hearing, truth, now_s)
    require(not _spent(ledger), "D5", f"cycle {fact.cycle} was chosen: {_spent(ledger)}")
    require(not hearing.away or now_s >= hearing.recovered_s, "E5", f"cycle {fact.cycle} was chosen: {hearing.away}")


def _check_groups(fact: WorldChosen, group_size: int, segment_size: int | None) -> None:
    if group_size > 1:
        sizes = Counter(seat.node.replacement_group_id for seat in fact.seats)
        require(set(sizes.values()) == {group_size}, "C2", f"cycle {fact.cycle} has parts of groups: {sizes}")
    if segment_size is not None:
        domains = [seat.node.domain_id for seat in fact.seats]
        for start in range(0, len(domains), segment_size):
            segment = domains[start : start + segment_size]
            require(len(set(segment)) == 1, "C3", f"cycle {fact.cycle}: a segment of the domains {segment}")


def _check_nobody_stops(chosen: list[NodeId], ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    """D2: who leaves the world and still answers has no workers any more, or has had its time."""
    last = ledger.cycle
    since: dict[NodeId, float] = dict(ledger.stopping)
    if last is not None and last.ended_s is not None:
        for node_id, incarnation in last.incarnations.items():
            answers = ledger.live.get(node_id) == incarnation and hearing.is_surely_fresh(incarnation, now_s)
            if answers and node_id not in chosen and node_id not in last.suspects:
                since[node_id] = last.ended_s
    for node_id, since_s in since.items():
        node = truth.nodes[node_id]
        until_s = since_s + node.stop_grace_s + STOPPING_MARGIN_S - ROUNDING_S
        living = [one for one in node.machine.living() if one.alive]
        require(not living or now_s >= until_s, "D2", f"{node_id} leaves the world, and its workers live: {living}")


_BY_WORKERS = (Cause.WORKER_FAILED, Cause.HANG)


def _spent(ledger: Ledger) -> str:
    """Which budget is used up; empty where none is."""
    settings = ledger.settings
    assert settings is not None
    failures = ledger.ended_by(*_BY_WORKERS)
    failures += [one for one in _charged_losses(ledger, settings.settle_s) if _is_sick(one)]
    if settings.restart_budget is RestartBudget.PER_PROGRESS:
        since = max((one.number for one in ledger.cycles if one.progressed), default=0)
        failures = [one for one in failures if one.number >= since]
    failed = len(failures)
    losses = ledger.ended_by(Cause.NODE_LOST, Cause.NODE_LEFT, Cause.NODE_UNHEALTHY)
    gone = sum(1 for one in _charged_losses(ledger, settings.settle_s) if not _is_sick(one))
    if failed > settings.max_restarts or (settings.max_restarts == 0 and losses):
        return f"{failed} failures of workers, {len(losses)} losses, max_restarts {settings.max_restarts}"
    if settings.max_replacements is not None and gone > settings.max_replacements:
        return f"{gone} losses, max_replacements {settings.max_replacements}"
    idle = _cycles_without_progress(ledger)
    if settings.max_no_progress_cycles and idle >= settings.max_no_progress_cycles:
        return f"{idle} cycles without progress, max_no_progress_cycles {settings.max_no_progress_cycles}"
    return ""


def _cycles_without_progress(ledger: Ledger) -> int:
    """D6: those in a row, up to the last, in which workers failed or that ran and lost a node."""
    count = 0
    for one in reversed(ledger.cycles if ledger.progress is not None else ()):
        if one.progressed:
            break
        cause = one.failure.cause if one.failure is not None else None
        taken_away = {Cause.NODE_LOST, Cause.NODE_LEFT, Cause.NODE_UNHEALTHY}
        count += cause in _BY_WORKERS or (one.ran and cause in taken_away)
    return count


def _is_sick(cycle: Seated) -> bool:
    return cycle.failure is not None and cycle.failure.cause is Cause.NODE_UNHEALTHY


def _charged_losses(ledger: Ledger, settle_s: float) -> list[Seated]:
    """D3: a loss before the cycle ran costs nothing, nor does one that settles with a failure before it; nor a node
    that is found unhealthy then."""
    charged: list[Seated] = []
    before_at = -math.inf
    for one in ledger.ended_by(Cause.NODE_LOST, Cause.NODE_LEFT, Cause.NODE_UNHEALTHY, *_BY_WORKERS):
        is_loss = one.failure is not None and one.failure.cause not in _BY_WORKERS
        if is_loss and (not one.ran or one.ended_at - before_at <= settle_s):
            continue
        if is_loss:
            charged.append(one)
        before_at = one.ended_at
    return charged


def _running(fact: CycleRunning, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    cycle = _live(fact.cycle, ledger)
    for node_id in cycle.ranks:
        spawned = truth.nodes[node_id].machine.spawned
        require(fact.cycle in spawned, "D1", f"cycle {fact.cycle} runs, and {node_id} has started no worker of it")


def _live(number: CycleNumber, ledger: Ledger) -> Seated:
    cycle = ledger.cycle
    require(cycle is not None and cycle.number == number and cycle.is_live, "D1", f"cycle {number} is not live")
    assert cycle is not None
    return cycle


def _progressed(fact: ProgressMade, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    step = truth.checkpoint.step
    require(fact.step <= step, "D6", f"step {fact.step} was made in cycle {fact.cycle}, and training is at {step}")
    before = ledger.progress
    require(before is None or fact.step > before, "D6", f"step {fact.step} is no progress after {before}")


def _exited(fact: WorkersExited, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    ends = truth.nodes[fact.node_id].machine.ends
    for one in fact.exits:
        was = ends.get((fact.cycle, one.local_rank))
        if one.hung:
            hung = (fact.cycle, one.local_rank) in truth.nodes[fact.node_id].machine.hung
            require(hung, "G9", f"cycle {fact.cycle}: {fact.node_id} is said to have {one}, and it does not hang")
            if not one.has_ended:
                continue
            one = dataclasses.replace(one, hung=False, message="")
        require(was == one, "D4", f"cycle {fact.cycle}: {fact.node_id} is said to have {one}, and had {was}")


def _ended(fact: CycleEnded, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    cycle, failure = _live(fact.cycle, ledger), fact.failure
    if fact.suspects:
        strangers = [one for one in fact.suspects if one not in cycle.ranks]
        within_s = max(hearing.timing.reconnect_grace_s, FRESH_INTERVALS * hearing.timing.heartbeat_interval_s)
        waited_s = now_s - cycle.chosen_s
        require(not strangers, "D12", f"cycle {cycle.number} ended by suspects {strangers} without a seat")
        require(waited_s >= within_s - ROUNDING_S, "D12", f"{fact.suspects} are suspect after {waited_s:.2f} s")
        return
    _CAUSES[failure.cause](cycle, failure, ledger, truth)


def _by_worker(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    assert failure.node_id is not None
    assert failure.local_rank is not None
    was = truth.nodes[failure.node_id].machine.ends.get((cycle.number, failure.local_rank))
    so = (
        was is not None
        and not was.stopped_by_agent
        and (was.exit_code, was.signal) == (failure.exit_code, failure.signal)
    )
    require(
        so and was is not None and was.exit_code != 0, "D4", f"cycle {cycle.number} ended by {failure}; truth: {was}"
    )


def _by_hang(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    assert failure.node_id is not None
    hung = (cycle.number, failure.local_rank) in truth.nodes[failure.node_id].machine.hung
    require(hung, "G9", f"cycle {cycle.number} ended by {failure}, which does not hang")


def _by_loss(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    incarnation = cycle.incarnations.get(failure.node_id) if failure.node_id is not None else None
    gone = ledger.lost if failure.cause is Cause.NODE_LOST else ledger.left
    require(incarnation in gone, "D4", f"cycle {cycle.number} ended by {failure}; {incarnation} is not gone")


def _by_health(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    known = failure.node_id in ledger.unhealthy and failure.node_id in cycle.ranks
    require(known, "G11", f"cycle {cycle.number} ended by {failure}; unhealthy are {sorted(ledger.unhealthy)}")


def _by_hand(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    asked = Operated(failure.cause, failure.node_id) in truth.operated
    require(asked, "F1", f"cycle {cycle.number} ended by {failure}, and nobody had asked for it")


def _by_success(cycle: Seated, failure: Failure, ledger: Ledger, truth: Truth) -> None:
    for node_id in cycle.ranks:
        machine = truth.nodes[node_id].machine
        for rank in range(machine.workers_per_node):
            was = machine.ends.get((cycle.number, LocalRank(rank)))
            well = was is not None and was.exit_code == 0 and not was.stopped_by_agent
            require(well, "D8", f"cycle {cycle.number} succeeded; local rank {rank} of {node_id}: {was}")


_CAUSES: dict[Cause, Callable[[Seated, Failure, Ledger, Truth], None]] = {
    Cause.WORKER_FAILED: _by_worker,
    Cause.HANG: _by_hang,
    Cause.NODE_LOST: _by_loss,
    Cause.NODE_LEFT: _by_loss,
    Cause.NODE_UNHEALTHY: _by_health,
    Cause.DRAINED: _by_hand,
    Cause.PROMOTED: _by_hand,
    Cause.STOPPED: _by_hand,
    Cause.SUCCEEDED: _by_success,
}


def _failed_check(fact: NodeFailedCheck, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    was = fact.check in truth.nodes[fact.node_id].ailed_of
    require(was, "G11", f"{fact.check} is said to have failed on {fact.node_id}, and never did")
    require(fact.check not in ledger.suspected_checks, "G11", f"{fact.check} is suspect, and counts for {fact.node_id}")
    require(not hearing.away or now_s >= hearing.recovered_s, "E5", f"{fact.node_id} is judged: {hearing.away}")


def _recovered(fact: NodeRecovered, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    require(fact.node_id in ledger.unhealthy, "G11", f"{fact.node_id} is well again, and was not known to be ill")


def _suspected(fact: CheckSuspected, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    truly = [one for one in fact.node_ids if fact.check in truth.nodes[one].ailed_of]
    many = 1 < len(truly) == len(fact.node_ids)
    require(many, "G11", f"{fact.check} is suspect for {fact.node_ids}, and failed on {truly}")


def _revised(fact: CauseRevised, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    cycle = ledger.find(fact.cycle)
    assert cycle is not None
    _by_loss(cycle, fact.failure, ledger, truth)


def _closed(fact: RunClosed, ledger: Ledger, hearing: Hearing, truth: Truth, now_s: float) -> None:
    require(ledger.is_open, "D1", "a closed run was closed again")
    cycle = ledger.cycle
    require(cycle is None or not cycle.is_live, "D1", "a run was closed beside a live cycle")
    if fact.state is RunState.STOPPED:
        require(Operated(Cause.STOPPED, None) in truth.operated, "F1", "a run was stopped, and nobody had asked for it")
    elif fact.state is RunState.SUCCEEDED:
        ended = cycle.failure.cause if cycle is not None and cycle.failure is not None else None
        require(ended is Cause.SUCCEEDED, "D8", f"a run succeeded after {ended}")
    else:
        why = _spent(ledger) or ("join_timeout" if "join_timeout" in fact.reason else "")
        require(bool(why), "D5", f"a run failed, and no budget is used up: {fact.reason}")


_CHECKS: dict[type, Callable[[Any, Ledger, Hearing, Truth, float], None]] = {
    NodeJoined: _joined,
    NodeLost: _lost,
    NodeLeft: _left,
    NodeStopped: _stopped,
    WorldChosen: _chosen,
    CycleRunning: _running,
    ProgressMade: _progressed,
    WorkersExited: _exited,
    CycleEnded: _ended,
    CauseRevised: _revised,
    NodeFailedCheck: _failed_check,
    NodeRecovered: _recovered,
    CheckSuspected: _suspected,
    RunClosed: _closed,
}
