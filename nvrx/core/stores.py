"""Which cycles' stores are still needed (rule I2). Reads a Run and what was heard; decides nothing.

A store is needed while workers of its cycle may be there: until each active node has told how all of them ended, or can
tell no more. A lost node's workers, if any are left, must not meet anybody.
"""

from __future__ import annotations

from .facts import Endpoint
from .ids import NodeId
from .presence import Presence
from .run import Cycle, Run

LOOKED_BACK = 16
"""Cycles that may still have workers: each node has those of one cycle only, and tells of it before the next."""


def hosted_ports(run: Run) -> frozenset[int]:
    """Ports that recent cycles were given, whether or not they are still needed."""
    ports = (_hosted_port(cycle) for cycle in run.cycles[-LOOKED_BACK:])
    return frozenset(port for port in ports if port is not None)


def ports_in_use(run: Run, presence: Presence) -> frozenset[int]:
    """Ports of hosted stores that must stay open."""
    return frozenset(store.port for store in stores_in_use(run, presence))


def stores_in_use(run: Run, presence: Presence) -> frozenset[Endpoint]:
    """Hosted stores that must stay there, whichever coordinator's host they are on."""
    return frozenset(
        cycle.master
        for cycle in run.cycles[-LOOKED_BACK:]
        if cycle.master is not None and _hosted_port(cycle) is not None and _is_needed(run, cycle, presence)
    )


def _hosted_port(cycle: Cycle) -> int | None:
    master = cycle.master
    return master.port if master is not None and master.lasting_port is not None else None


def _is_needed(run: Run, cycle: Cycle, presence: Presence) -> bool:
    return cycle.is_live or any(may_have_workers(run, cycle, seat.node.node_id, presence) for seat in cycle.seats)


def may_have_workers(run: Run, cycle: Cycle, node_id: NodeId, presence: Presence) -> bool:
    """Whether workers of an ended cycle may be left on one of its nodes that can still tell."""
    exits = cycle.exits.get(node_id, {})
    if len(exits) == cycle.shape.workers_per_node and all(one.has_ended for one in exits.values()):
        return False
    seat = cycle.seat_of[node_id]
    member = run.live(node_id)
    if member is None or member.info.incarnation != seat.node.incarnation:
        # Lost; or it left, and its workers may be writing a checkpoint.
        return node_id in run.stopping
    heard = presence.nodes.get(node_id)
    if heard is None or heard.incarnation != seat.node.incarnation:
        return False
    if not run.is_open:
        return heard.connected  # nobody judges leases any more
    return heard.cycle is None or heard.cycle <= cycle.number or not heard.phase.has_started
