"""Which nodes train, in which order, or why there is no world (rules C1-C8).

One pure function, `place`. It knows no clock: its search is bounded by states that it counts, so that the same inputs
give the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ids import GroupRank, NodeId
from ..narrate import list_names
from ..shape import Shape
from .choosing import Choice, choose
from .model import (
    BOUNDS,
    NO_WISHES,
    Absent,
    Bounds,
    Candidate,
    Outcome,
    Placement,
    Shortage,
    Unplaced,
    Wanted,
)
from .seating import seat
from .units import Field, lay_out
from .words import LeftOut, at_most, shortage, undecided, whole

__all__ = [
    "BOUNDS",
    "Absent",
    "Bounds",
    "Candidate",
    "Outcome",
    "Placement",
    "Shortage",
    "Unplaced",
    "Wanted",
    "place",
]


def place(
    candidates: Sequence[Candidate],
    shape: Shape,
    previous: Mapping[NodeId, GroupRank],
    wanted: Wanted = NO_WISHES,
    absent: Sequence[Absent] = (),
    *,
    bounds: Bounds = BOUNDS,
) -> Outcome:
    """Choose exactly `shape.min_nodes` of `candidates` and seat them, or say why not.

    Whole groups (C2) and whole segments (C3). Among the possible worlds the one with fewest last-resort nodes, then
    with most of `previous` kept, then with the lexicographically smallest infra positions (C5): one answer, whatever
    the order of the inputs (C8). `previous` has the group rank of each node of the world before; `absent` only makes
    reasons say more.
    """
    field = lay_out(candidates, shape, previous, wanted, absent)
    refusal = _impossible_wish(field, shape, wanted, absent)
    if refusal is not None:
        return Shortage(refusal)
    choice = choose(field.units, shape.min_nodes // shape.replacement_group_size, shape.segment_size or 1, bounds)
    if choice.positions is None:
        if choice.proven or at_most(field, shape) < shape.min_nodes:
            return Shortage(shortage(field, shape, wanted, absent))
        return Shortage(undecided(field, choice.tied_groups, choice.tied_domains))
    chosen = [field.nodes[one] for one in sorted(choice.positions)]
    unmet = _unmet_wish(field, shape, wanted, choice)
    if unmet is not None:
        return Shortage(unmet)
    remark = "" if choice.proven else _remark(choice)
    return Placement(
        chosen=seat(chosen, shape, previous),
        left_out=LeftOut(field, shape, choice.positions, previous, wanted).explain(choice.proven),
        proven=choice.proven,
        remark=remark,
    )


def _remark(choice: Choice) -> str:
    return f"not proven best: {choice.tied_groups} groups tie {choice.tied_domains} domains"


def _impossible_wish(field: Field, shape: Shape, wanted: Wanted, absent: Sequence[Absent]) -> str | None:
    """Why a node that is asked for cannot be in any world; None if nothing speaks against each by itself."""
    both = wanted.include & wanted.exclude
    if both:
        return f"{list_names(sorted(both))} cannot be in the world and drained at once"
    unusable = {field.nodes[position].node_id: why for position, why in field.unusable.items()}
    ready = {one.node_id for one in field.nodes}
    gone = {one.node_id: one.why for one in absent}
    for node_id in sorted(wanted.include):
        if node_id not in ready:
            return f"{node_id} cannot be in the world: {gone.get(node_id, 'it is not ready')}"
        if node_id in unusable:
            return f"{node_id} cannot be in the world: {unusable[node_id]}"
    asked = [unit for unit in field.units if unit.worth.unasked < len(unit.worth.positions)]
    nodes = len(asked) * shape.replacement_group_size
    if nodes > shape.min_nodes:
        return f"{nodes} nodes are asked for, with their groups, and the world has {shape.min_nodes}"
    return None


def _unmet_wish(field: Field, shape: Shape, wanted: Wanted, choice: Choice) -> str | None:
    """Which nodes are asked for and not in the best world; then no world has all that are asked for."""
    assert choice.positions is not None
    inside = {field.nodes[one].node_id for one in choice.positions}
    unmet = sorted(wanted.include - inside)
    if not unmet:
        return None
    if not choice.proven:
        return undecided(field, choice.tied_groups, choice.tied_domains)
    ready = len(field.nodes) - field.excluded
    others = sorted(wanted.include & inside)
    along = f" together with {list_names(list(map(str, others)))}" if others else ""
    return (
        f"{list_names(list(map(str, unmet)))} cannot be in the world{along}: "
        f"no {shape.min_nodes} of {ready} ready nodes make {whole(shape)} with {'it' if len(unmet) == 1 else 'them'}"
    )
