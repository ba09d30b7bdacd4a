"""What an operator asks of a run: promote a standby, drain a node, return it, stop the run (rule F1).

A wish is a fact; the next world is chosen under it. What would leave no legal world is refused, with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

from .commands import Drain, Promote, StopRun, Undrain
from .facts import Cause, CycleEnded, Fact, Failure, NodesDrained, NodesPromoted, NodesUndrained, RunClosed, RunState
from .groups import places_taken
from .ids import NodeId
from .member import Member
from .placement import Placement, Shortage
from .presence import Presence
from .refused import Reason, Refused
from .run import Cycle, Run, evolve
from .world import place_world, wished_world

EXIT_STOPPED = 1
"""Exit code of agents whose run an operator stopped: it has not succeeded."""

Operation: TypeAlias = Promote | Drain | Undrain | StopRun


def decide_operation(run: Run, presence: Presence, command: Operation, now: float) -> list[Fact]:
    """The facts that an operator's command leads to. Raises Refused."""
    _require_open(run)
    if isinstance(command, StopRun):
        return list(_stop(run, now))
    if isinstance(command, Undrain):
        return _undrain(run, command, now)
    return _change(run, presence, command, now).facts


def _undrain(run: Run, command: Undrain, now: float) -> list[Fact]:
    drained = _group_of(run, _require_member(run, command.node_id)) & (run.drained | run.quarantined.keys())
    if not drained:
        return []
    fact = NodesUndrained(now, tuple(sorted(drained)))
    count = places_taken(evolve(run, fact))
    if count > run.shape.max_nodes:
        raise Refused(
            Reason.RUN_FULL,
            f"with node {command.node_id} run {run.run_id} would have {count} nodes, and it allows "
            f"{run.shape.max_nodes}; end the agent of a standby first",
            {"run_id": run.run_id, "nodes": str(count), "max_nodes": str(run.shape.max_nodes)},
            by_state=True,
        )
    return [fact]


@dataclass(frozen=True)
class Preview:
    """What a change would lead to: its facts, the run after them, and the world that would be chosen."""

    facts: list[Fact]
    run: Run
    placement: Placement


def preview(run: Run, presence: Presence, command: Promote | Drain, now: float) -> Preview:
    """A change that is not made. Raises Refused as the change would."""
    _require_open(run)
    return _change(run, presence, command, now)


def _change(run: Run, presence: Presence, command: Promote | Drain, now: float) -> Preview:
    facts: list[Fact] = [_promoted(run, command, now) if isinstance(command, Promote) else _drained(run, command, now)]
    after = reduce(evolve, facts, run)
    # What is promoted now must come true; a drain goes before promotions of earlier.
    found = (wished_world if isinstance(command, Promote) else place_world)(after, presence, now)
    if isinstance(found, Shortage):
        raise Refused(
            Reason.ILLEGAL_WORLD,
            f"no legal world would be left: {found.reason}",
            {"run_id": run.run_id, "node_id": command.node_id},
            by_state=True,
        )
    cycle = run.cycle
    if command.immediate and cycle is not None and cycle.is_live and _concerns(command, facts[0], cycle):
        cause = Cause.PROMOTED if isinstance(command, Promote) else Cause.DRAINED
        failure = Failure(cause, command.node_id, message=_by_hand(command), at=now)
        facts.append(CycleEnded(now, cycle.number, failure))
        after = evolve(after, facts[-1])
    return Preview(facts, after, found)


def _concerns(command: Promote | Drain, fact: Fact, cycle: Cycle) -> bool:
    """Whether a change touches the world of a cycle: a drained standby does not."""
    return isinstance(command, Promote) or any(one in cycle.seat_of for one in getattr(fact, "node_ids", ()))


def _by_hand(command: Promote | Drain) -> str:
    if isinstance(command, Drain):
        return "drained by an operator"
    return f"promoted by an operator in place of {command.replace}" if command.replace else "promoted by an operator"


def _promoted(run: Run, command: Promote, now: float) -> NodesPromoted:
    member = _require_member(run, command.node_id)
    nodes = _group_of(run, member)
    active = set(run.cycle.seat_of) if run.cycle is not None and run.cycle.is_live else set()
    if command.node_id in active:
        raise Refused(
            Reason.INVALID_FIELD,
            f"node {command.node_id} is active already; name a standby",
            {"run_id": run.run_id, "node_id": command.node_id},
        )
    drained = sorted(nodes & run.drained)
    if drained:
        raise Refused(
            Reason.ILLEGAL_WORLD,
            f"node {drained[0]} is drained; undrain it first",
            {"run_id": run.run_id, "node_id": command.node_id},
            by_state=True,
        )
    replaced: frozenset[NodeId] = frozenset()
    if command.replace is not None:
        if command.replace not in active:
            raise Refused(
                Reason.INVALID_FIELD,
                f"node {command.replace} is not active, so nothing can take its place",
                {"run_id": run.run_id, "node_id": command.replace},
            )
        replaced = _group_of(run, _require_member(run, command.replace))
    return NodesPromoted(now, tuple(sorted(nodes)), tuple(sorted(replaced)))


def _drained(run: Run, command: Drain, now: float) -> NodesDrained:
    return NodesDrained(now, tuple(sorted(_group_of(run, _require_member(run, command.node_id)))))


def _stop(run: Run, now: float) -> Iterator[Fact]:
    cycle = run.cycle
    if cycle is not None and cycle.is_live:
        yield CycleEnded(now, cycle.number, Failure(Cause.STOPPED, message="stopped by an operator", at=now))
    yield RunClosed(now, RunState.STOPPED, "stopped by an operator", EXIT_STOPPED)


def _group_of(run: Run, member: Member) -> frozenset[NodeId]:
    """The node and its sisters: a replacement group moves as one."""
    group = member.info.replacement_group_id
    if group is None or run.shape.replacement_group_size == 1:
        return frozenset({member.info.node_id})
    return frozenset(one.info.node_id for one in run.live_members() if one.info.replacement_group_id == group)


def _require_member(run: Run, node_id: NodeId) -> Member:
    member = run.live(node_id)
    if member is None:
        raise Refused(
            Reason.UNKNOWN_NODE,
            f"node {node_id} is not a member of run {run.run_id}; nvrx-coord nodes lists them",
            {"run_id": run.run_id, "node_id": node_id},
        )
    return member


def _require_open(run: Run) -> None:
    if not run.is_open:
        raise Refused(
            Reason.RUN_CLOSED,
            f"run {run.run_id} is closed ({run.state.value}: {run.close_reason})",
            {"run_id": run.run_id, "state": run.state.value},
        )
