"""Facts in words: one line for a person, for logs and for the list of facts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from .ids import CycleNumber, NodeId
from .run import Run
from .topology import FROM_NODENAME, VARIABLE, OrderSource

MAX_NAMED = 16
MAX_TEXT = 160
"""Characters of a worker's own words that fit in a line; the rank map has more of them."""


@dataclass(frozen=True)
class Subject:
    """What a fact is about."""

    cycle: CycleNumber | None
    node_id: NodeId | None


def subject_of(fact: Fact) -> Subject:
    """The cycle and the node that a fact is about, where there is one."""
    if isinstance(fact, NodeJoined):
        return Subject(None, fact.node.node_id)
    if isinstance(fact, NodesPromoted | NodesDrained | NodesUndrained):
        return Subject(None, fact.node_ids[0])
    if isinstance(fact, CycleEnded | CauseRevised):
        return Subject(fact.cycle, fact.failure.node_id)
    cycle = getattr(fact, "cycle", None)
    node_id = getattr(fact, "node_id", None)
    return Subject(cycle, node_id)


def list_names(names: list[str], count: int | None = None) -> str:
    """Names in a sentence: the first MAX_NAMED, and how many more there are; of `count`, where not all are given."""
    more = (len(names) if count is None else count) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


def _exit(one: WorkerExit) -> str:
    if not one.has_ended:
        return f"local rank {one.local_rank} hangs: {one.message[:MAX_TEXT]}"
    how = one.signal or f"exit {one.exit_code}"
    by_us = " (stopped by agent)" if one.stopped_by_agent else ""
    return f"local rank {one.local_rank}: {how}{by_us}{', after it hung' if one.hung else ''}"


def describe_failure(failure: Failure) -> str:
    """One line: what ended a cycle, and where."""
    where = f" on {failure.node_id}" if failure.node_id is not None else ""
    if failure.cause is Cause.STORE_LOST:
        return f"store lost: {describe_failure(dataclasses.replace(failure, cause=Cause.WORKER_FAILED))}"
    if failure.cause is Cause.HANG:
        return f"rank {failure.rank} (local rank {failure.local_rank}){where} hung: {failure.message[:MAX_TEXT]}"
    if failure.cause is not Cause.WORKER_FAILED:
        what = failure.cause.value.lower().replace("_", " ")
        return f"{what}{where}: {failure.message}" if failure.message else f"{what}{where}"
    how = failure.signal or f"exit {failure.exit_code}"
    last_line = failure.message.strip().splitlines()[-1:] or [""]
    text = f": {last_line[0][:MAX_TEXT]}" if last_line[0] else ""
    return f"rank {failure.rank} (local rank {failure.local_rank}){where} failed with {how}{text}"


def describe_suspect(fact: CheckSuspected) -> str:
    """One line: why a health check counts for nobody (rule G11)."""
    names = list_names(list(map(str, fact.node_ids)))
    return (
        f"check {fact.check} failed on {len(fact.node_ids)} of {fact.nodes} nodes within a minute ({names}): it is "
        "itself the suspect, and replaces nobody"
    )


def tell(fact: Fact) -> str:
    """A fact as one line."""
    match fact:
        case RunOpened():
            shape = fact.shape
            per_node = shape.workers_per_node
            return f"run opened: {shape.min_nodes}:{shape.max_nodes} nodes, {per_node} workers each"
        case RunReopened():
            return "run reopened: budgets start anew"
        case NodeJoined():
            return f"node {fact.node.node_id} joined from {fact.node.address} (pid {fact.node.pid})"
        case NodeLeft():
            return f"node {fact.node_id} left: {fact.reason}"
        case NodeStopped():
            return f"the workers of node {fact.node_id}, which had left, are gone"
        case NodeLost():
            return f"node {fact.node_id} lost: {fact.reason}"
        case WorldChosen():
            names = list_names([str(seat.node.node_id) for seat in fact.seats])
            standbys = f"; {len(fact.standbys)} standby" if fact.standbys else ""
            remark = f" ({fact.remark})" if fact.remark else ""
            return f"cycle {fact.cycle}: world {names}{standbys}{remark}"
        case CycleRunning():
            return f"cycle {fact.cycle} running"
        case WorkersExited():
            ended = " ended" if all(one.has_ended for one in fact.exits) else ""
            return f"cycle {fact.cycle}: workers of {fact.node_id}{ended}: {', '.join(map(_exit, fact.exits))}"
        case CycleEnded():
            return f"cycle {fact.cycle} ended: {describe_failure(fact.failure)}"
        case CauseRevised():
            return f"cycle {fact.cycle} had ended because of {describe_failure(fact.failure)}"
        case NodesPromoted():
            instead = f" in place of {list_names(list(map(str, fact.replaced)))}" if fact.replaced else ""
            return f"an operator promotes {list_names(list(map(str, fact.node_ids)))}{instead}"
        case NodesDrained():
            return f"an operator drains {list_names(list(map(str, fact.node_ids)))}"
        case NodesUndrained():
            return f"an operator returns {list_names(list(map(str, fact.node_ids)))}"
        case ProgressMade():
            return f"cycle {fact.cycle}: training came to step {fact.step}"
        case NodeQuarantined():
            return f"node {fact.node_id} is quarantined: {fact.reason}"
        case QuarantineEnded():
            return f"the quarantine of node {fact.node_id} is over"
        case NodeFailedCheck():
            return f"node {fact.node_id} is unhealthy: {fact.check}: {fact.reason}"
        case NodeRecovered():
            if fact.suspect:
                return f"node {fact.node_id} may be chosen again: check {fact.suspect} is itself the suspect"
            return f"node {fact.node_id} is well again"
        case CheckSuspected():
            return describe_suspect(fact)
        case CheckTrusted():
            return f"check {fact.check} fails on few nodes only: it counts again"
        case RunClosed():
            return f"run closed, {fact.state.value.lower()}: {fact.reason}"


def order_warning(run: Run, fact: Fact) -> str | None:
    """What a person should know of the order of nodes after `fact` (rules B3, B4); None where all is plain."""
    source = run.order_source
    if source is None:
        return None
    if isinstance(fact, NodeJoined) and source not in fact.node.order_sources:
        lacking = f"node {fact.node.node_id} has no {_variable(source)}, by which run {run.run_id} is ordered"
        return f"{lacking}: it comes after the nodes that have it"
    if isinstance(fact, WorldChosen) and fact.cycle == run.cycles[0].number:
        return _mixed_sources(run, fact)
    return None


def _variable(source: OrderSource) -> str:
    return FROM_NODENAME if source is OrderSource.NODENAME else VARIABLE[source]


def _mixed_sources(run: Run, fact: WorldChosen) -> str | None:
    """A better source than the one settled on, which only some of the nodes have."""
    placed = [*(seat.node for seat in fact.seats), *(standby.node for standby in fact.standbys)]
    members = [run.members[one.node_id].info for one in placed]
    for source in OrderSource:
        if source is fact.order_source:
            return None
        having = sorted(str(one.node_id) for one in members if source in one.order_sources)
        lacking = sorted(str(one.node_id) for one in members if source not in one.order_sources)
        if having:
            return (
                f"run {run.run_id} is ordered by {_variable(fact.order_source)}: {_variable(source)} goes before it, "
                f"but is missing on {list_names(lacking)} (there on {list_names(having)})"
            )
    return None
