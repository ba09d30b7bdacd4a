"""Which cycles' stores are still needed (rule I2). Reads a Run and what was heard; decides nothing.

A store is needed while workers of its cycle may be there: until each active node has told how all of them ended, or can
tell no more. A lost node's workers, if any are left, must not meet anybody.
"""

from __future__ import annotations

from .ids import NodeId
from .presence import Presence
from .run import Cycle, Run

LOOKED_BACK = 16
"""Cycles that may still have workers: each node has those of one cycle only, and tells of it before the next."""


def ports_in_use(run: Run, presence: Presence) -> frozenset[int]:
    """Ports of hosted stores that must stay open."""
    return frozenset(
        cycle.master.port
        for cycle in run.cycles[-LOOKED_BACK:]
        if cycle.master is not None and cycle.master.lasting_port is not None and _has_workers(run, cycle, presence)
    )


def _has_workers(run: Run, cycle: Cycle, presence: Presence) -> bool:
    if cycle.is_live:
        return True
    return any(may_have_workers(run, cycle, seat.node.node_id, presence) for seat in cycle.seats)


def may_have_workers(run: Run, cycle: Cycle, node_id: NodeId, presence: Presence) -> bool:
    """Whether workers of an ended cycle may be left on one of its nodes that can still tell."""
    return not _is_done(run, cycle, node_id, presence)


def _is_done(run: Run, cycle: Cycle, node_id: NodeId, presence: Presence) -> bool:
    if len(cycle.exits.get(node_id, {})) == cycle.shape.workers_per_node:
        return True
    seat = cycle.seat_of[node_id]
    member = run.live(node_id)
    if member is None or member.info.incarnation != seat.node.incarnation:
        # Lost; or it left, and its workers may be writing a checkpoint.
        return node_id not in run.stopping
    heard = presence.nodes.get(node_id)
    if heard is None or heard.incarnation != seat.node.incarnation:
        return True
    if not run.is_open:
        return not heard.connected  # nobody judges leases any more
    return heard.cycle is not None and heard.cycle > cycle.number and heard.phase.has_started


def hosted_ports(run: Run) -> frozenset[int]:
    """Ports that recent cycles were given, whether or not they are still needed."""
    return frozenset(
        cycle.master.port
        for cycle in run.cycles[-LOOKED_BACK:]
        if cycle.master is not None and cycle.master.lasting_port is not None
    )
