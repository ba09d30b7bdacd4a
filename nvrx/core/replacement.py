"""Unhealthy nodes in the world (rule G11): replaced now, or kept, and then why. One function decides and explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .budgets import spent
from .facts import Cause, CycleEnded, Failure, Seat
from .health import degraded, is_excused_with_others, well_again
from .ids import NodeId
from .narrate import describe_suspect, list_names
from .placement import Shortage
from .presence import Presence
from .run import Cycle, Run, evolve
from .world import place_world


@dataclass(frozen=True)
class Kept:
    """Unhealthy nodes that train on, and why."""

    node_ids: tuple[NodeId, ...]
    reason: str


def replace_unhealthy(run: Run, presence: Presence, now: float) -> CycleEnded | Kept | None:
    """The end of a cycle that has unhealthy nodes; Kept where nothing better would follow. None: all are well.

    A cycle is never ended for a node's health if the run would end with it: training on goes before a budget.
    """
    cycle = run.cycle
    if cycle is None or not cycle.is_live or presence.is_recovering(now):
        return None
    sick = _sick(run, presence, cycle)
    if not sick:
        return None
    names = tuple(seat.node.node_id for seat in sick)
    first = min(sick, key=lambda seat: (run.unhealthy[seat.node.node_id].at, seat.group_rank))
    others = f" (and {len(sick) - 1} more)" if len(sick) > 1 else ""
    failure = Failure(
        cause=Cause.NODE_UNHEALTHY,
        node_id=first.node.node_id,
        group_rank=first.group_rank,
        message=f"{run.unhealthy[first.node.node_id]}{others}",
        at=now,
    )
    ended = CycleEnded(now, cycle.number, failure)
    after = evolve(run, ended)
    over = spent(after)
    if over is not None:
        return Kept(names, f"{over.limit}, and the run would end")
    found = place_world(after, presence, now)
    return Kept(names, f"there is no world without: {found.reason}") if isinstance(found, Shortage) else ended


def _sick(run: Run, presence: Presence, cycle: Cycle) -> list[Seat]:
    """The places of a world whose nodes are unhealthy and still have work to do, in group-rank order.

    Not of those that only wait for a place among MAX: they are well again, or a suspect check found them.
    """
    found = []
    for node_id, ailment in run.unhealthy.items():
        seat, member = cycle.seat_of.get(node_id), run.live(node_id)
        if seat is None or member is None or member.info.incarnation != seat.node.incarnation:
            continue
        waits = well_again(run, presence, node_id) or is_excused_with_others(run, ailment)
        if not waits and not cycle.has_finished(node_id, run.shape.workers_per_node):
            found.append(seat)
    return sorted(found, key=lambda seat: seat.group_rank)


def health_notices(run: Run, presence: Presence, now: float) -> Iterator[str]:
    """What speaks against nodes of an open run and their checks, in sentences for status."""
    if not run.is_open:
        return
    yield from (describe_suspect(one) for one in run.suspected_checks.values())
    found = replace_unhealthy(run, presence, now)
    if isinstance(found, Kept):
        yield f"unhealthy, and kept in the world: {_named(run, list(found.node_ids))}; {found.reason}"
    works = run.cycle.seat_of if run.cycle is not None and run.cycle.is_live else {}
    out = [one for one in run.unhealthy if one not in works and run.live(one) is not None]
    if out:
        yield f"unhealthy, and kept out of the world: {_named(run, out)}"
    again = [str(one) for one in run.unhealthy if well_again(run, presence, one)]
    if again:
        yield f"well again, and waiting for a place (the run has its MAX nodes): {list_names(again)}"
    last = degraded(run, presence)
    if last:
        yield f"degraded, and chosen last for the next world: {last}"


def _named(run: Run, node_ids: list[NodeId]) -> str:
    return list_names([f"{one} ({run.unhealthy[one]})" for one in node_ids])
