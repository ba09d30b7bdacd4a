"""Unhealthy nodes in the world (rule G11): replaced now, or kept, and then why. One function decides and explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .budgets import spent
from .facts import Cause, CycleEnded, Failure, Seat
from .health import degraded, well_again
from .ids import NodeId
from .narrate import describe_suspect, list_names
from .placement import Shortage
from .presence import Presence
from .run import Run, evolve
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
    sick = [seat for seat in cycle.seats if _is_sick(run, seat)]
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
    if spent(after) is not None:
        return Kept(names, f"max_restarts {run.settings.max_restarts} is used up, and the run would end")
    found = place_world(after, presence, now)
    return Kept(names, f"there is no world without: {found.reason}") if isinstance(found, Shortage) else ended


def _is_sick(run: Run, seat: Seat) -> bool:
    node_id = seat.node.node_id
    member = run.live(node_id)
    if node_id not in run.unhealthy or member is None or member.info.incarnation != seat.node.incarnation:
        return False
    assert run.cycle is not None
    return not run.cycle.has_finished(node_id, run.shape.workers_per_node)


def health_notices(run: Run, presence: Presence, now: float) -> Iterator[str]:
    """What speaks against nodes of an open run and their checks, in sentences for status."""
    if not run.is_open:
        return
    yield from (describe_suspect(one) for one in run.suspected_checks.values())
    found = replace_unhealthy(run, presence, now)
    kept = found.node_ids if isinstance(found, Kept) else ()
    if isinstance(found, Kept):
        yield f"unhealthy, and kept in the world: {_named(run, list(kept))}; {found.reason}"
    out = [one for one in run.unhealthy if one not in kept and run.live(one) is not None]
    if out:
        yield f"unhealthy, and kept out of the world: {_named(run, out)}"
    again = [str(one) for one in out if well_again(run, presence, one)]
    if again:
        yield f"well again, and waiting for a place (the run has its MAX nodes): {list_names(again)}"
    last = degraded(run, presence)
    if last:
        yield f"degraded, and chosen last for the next world: {last}"


def _named(run: Run, node_ids: list[NodeId]) -> str:
    return list_names([f"{one} ({run.unhealthy[one]})" for one in node_ids])
