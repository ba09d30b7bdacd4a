"""Why a node is left out, what a shortage lacks: in words that a person can act on. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import lcm

from ..ids import DomainId, GroupId, NodeId
from ..narrate import list_names
from ..shape import Shape
from .model import Absent, Candidate, Unplaced, Wanted
from .units import Field, Position, Unit, count_of_group

MAX_PARTS = 8
LAST_RESORT = "quarantined or degraded: chosen last"


def _usable_in_domains(field: Field) -> Counter[DomainId | None]:
    return Counter([field.nodes[position].domain for unit in field.units for position in unit.worth.positions])


class LeftOut:
    """Explains, for one world, why each of the other nodes is not in it."""

    def __init__(
        self, field: Field, shape: Shape, chosen: frozenset[Position], previous: Collection[NodeId], wanted: Wanted
    ) -> None:
        self.field = field
        self.shape = shape
        self.chosen = sorted(chosen)
        self.kept = sum(field.nodes[one].node_id in previous for one in chosen)
        self.asked = sum(
            field.nodes[one].node_id in wanted.include and field.nodes[one].node_id not in previous for one in chosen
        )
        self.usable: Counter[DomainId | None] = Counter()
        self.given: Counter[DomainId | None] = Counter()
        if shape.segment_size is not None:
            self.usable = _usable_in_domains(field)
            self.given = Counter([field.nodes[p].domain for p in chosen])

    def explain(self, proven: bool) -> tuple[Unplaced, ...]:
        """All nodes left out, in infra order."""
        reasons = dict(self.field.unusable)
        chosen = set(self.chosen)
        for unit in self.field.units:
            if unit.worth.positions[0] not in chosen:
                for position in unit.worth.positions:
                    text = self._why(unit, position)
                    reasons[position] = text if proven else f"{text} (not proven best)"
        return tuple(Unplaced(self.field.nodes[one].node_id, reasons[one]) for one in sorted(reasons))

    def _why(self, unit: Unit, position: Position) -> str:
        one = self.field.nodes[position]
        if one.last_resort:
            return one.why_last or LAST_RESORT
        if unit.worth.last_resort:
            sick = [self.field.nodes[p] for p in unit.worth.positions if self.field.nodes[p].last_resort]
            why = sick[0].why_last or LAST_RESORT
            return f"{list_names([str(each.node_id) for each in sick])} of its group {one.group} is {why}"
        left_over = self._left_over(unit)
        if left_over is not None:
            return left_over
        if self.asked and unit.worth.fresh < len(unit.worth.positions):
            return "nodes asked for by hand take its place"
        size = self.shape.min_nodes
        if self.kept and unit.worth.fresh:
            return f"the world of {size} keeps {self.kept} nodes of the cycle before"
        if self.chosen[-1] < position:
            return f"{size} nodes come before it in infra order"
        return f"{whole(self.shape)} that are better or come first make the world of {size}"

    def _left_over(self, unit: Unit) -> str | None:
        """Whether a domain of the unit gives all the whole segments that it has."""
        size = self.shape.segment_size
        if size is None:
            return None
        step = lcm(size, self.shape.replacement_group_size)
        for domain in sorted({str(self.field.nodes[p].domain) for p in unit.worth.positions}):
            has, gives = self.usable[DomainId(domain)], self.given[DomainId(domain)]
            if has - gives < (step if len(unit.residues) <= 1 else size):
                return f"domain {domain} gives {gives} of its {has} nodes: segments have {size}"
        return None


def whole(shape: Shape) -> str:
    """What every world is made of."""
    parts = ["groups"] if shape.replacement_group_size > 1 else []
    parts += ["segments"] if shape.segment_size is not None else []
    return f"whole {' and whole '.join(parts)}" if parts else "nodes"


def _listed(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else ""
    return "; ".join(parts[:MAX_PARTS]) + more


def shortage(field: Field, shape: Shape, wanted: Wanted, absent: Sequence[Absent]) -> str:
    """What is missing for a world, with numbers."""
    ready = len(field.nodes) - field.excluded
    parts = _missing(field, shape, wanted, absent)
    because = f": {_listed(parts)}" if parts else ""
    if ready < shape.min_nodes:
        return f"{ready} of {shape.min_nodes} nodes are ready{because}"
    most = at_most(field, shape)
    if most < shape.min_nodes:
        return f"{ready} nodes are ready, but at most {most} of {shape.min_nodes} can train together{because}"
    return f"{ready} nodes are ready, but no {shape.min_nodes} of them make {whole(shape)}{because}"


def undecided(field: Field, groups: int, domains: int) -> str:
    """Nothing was found within the bound, and nothing is proven either."""
    ready = len(field.nodes) - field.excluded
    return f"undecided: {groups} groups tie {domains} domains; no world was found among {ready} ready nodes so far"


def at_most(field: Field, shape: Shape) -> int:
    """No world has more nodes than this; it may be that none has as many, if groups span domains."""
    size, group = shape.segment_size or 1, shape.replacement_group_size
    total = 0
    if shape.segment_size is None:
        return len(field.units) * group
    alone = all(len(unit.residues) <= 1 for unit in field.units)
    for count in _usable_in_domains(field).values():
        step = lcm(size, group) if alone else size
        total += count - count % step
    return total - total % group


def _missing(field: Field, shape: Shape, wanted: Wanted, absent: Sequence[Absent]) -> list[str]:
    here = [one for one in field.nodes if one.node_id not in wanted.exclude]
    drained = [f"{one.node_id} {wanted.why_not(one.node_id)}" for one in field.nodes if one.node_id in wanted.exclude]
    gone = drained + [f"{one.node_id} {one.why}" for one in absent]
    parts: list[str] = []
    if shape.replacement_group_size > 1:
        parts += _missing_groups(field, here, shape, wanted, absent)
    elif gone:
        parts.append(list_names(gone))
    if shape.segment_size is not None:
        parts += _missing_domains(field, here, shape)
    return parts


def _missing_groups(
    field: Field, here: Sequence[Candidate], shape: Shape, wanted: Wanted, absent: Sequence[Absent]
) -> list[str]:
    size = shape.replacement_group_size
    counts: dict[GroupId, int] = {}
    missing: dict[GroupId, list[str]] = {}
    lone: list[str] = []
    for one in here:
        if one.group is None:
            lone.append(str(one.node_id))
        else:
            counts[one.group] = counts.get(one.group, 0) + 1
    for one in field.nodes:
        if one.node_id in wanted.exclude and one.group is not None:
            counts.setdefault(one.group, 0)
            missing.setdefault(one.group, []).append(f"{one.node_id} {wanted.why_not(one.node_id)}")
    for gone in absent:
        if gone.group is not None:
            counts.setdefault(gone.group, 0)
            missing.setdefault(gone.group, []).append(f"{gone.node_id} {gone.why}")
    parts = [
        f"group {group} has {count_of_group(found, size, missing.get(group, [])).replace(' nodes here', '', 1)}"
        for group, found in sorted(counts.items())
        if found != size
    ]
    return parts + ([f"{list_names(lone)}: no replacement group id"] if lone else [])


def _missing_domains(field: Field, here: Sequence[Candidate], shape: Shape) -> list[str]:
    size = shape.segment_size or 1
    usable = _usable_in_domains(field)
    parts = [
        f"domain {domain} has {count} of {size} (segments of {size})"
        if count < size
        else f"domain {domain} gives {count - count % size} of its {count} (segments of {size})"
        for domain, count in sorted(usable.items(), key=lambda item: str(item[0]))
        if count % size
    ]
    lone = [str(one.node_id) for one in here if one.domain is None]
    return parts + ([f"{list_names(lone)}: no domain"] if lone else [])
