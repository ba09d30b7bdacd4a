"""What is taken whole or not at all: complete replacement groups, or single nodes (rules C2, C3).

Says of every other candidate why it cannot be chosen. Compares units, and chooses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, NewType, TypeAlias

from ..ids import DomainId, GroupId, NodeId
from ..narrate import list_names
from ..shape import Shape
from .model import Absent, Candidate, Wanted

Position = NewType("Position", int)
"""A candidate's place in infra order, from 0."""


class Worth(NamedTuple):
    """What a set of nodes costs; the smaller is better. Sets are compared that have equally many nodes."""

    unasked: int
    """Nodes that nobody asked for: the most important, so that what is asked for is in the world if possible."""
    last_resort: int
    fresh: int
    """Nodes that were not in the world before."""
    positions: tuple[Position, ...]
    """Ascending."""


class Residue(NamedTuple):
    """How many nodes of a domain a unit has beyond whole segments: 1 to segment size - 1."""

    domain: DomainId
    nodes: int


Residues: TypeAlias = tuple[Residue, ...]
"""By domain. Units with the same residues are interchangeable as far as segments go."""


class Unit(NamedTuple):
    """A complete group, or a single node where there are no groups. Units sort by worth."""

    worth: Worth
    residues: Residues


@dataclass(frozen=True)
class Field:
    """The candidates in infra order, the units they make, and why the others make none."""

    nodes: Sequence[Candidate]
    units: Sequence[Unit]
    unusable: dict[Position, str] = field(default_factory=dict)
    excluded: int = 0


def combined(parts: Sequence[Worth]) -> Worth:
    """What several disjoint sets cost together."""
    if len(parts) == 1:
        return parts[0]
    return Worth(
        sum(one.unasked for one in parts),
        sum(one.last_resort for one in parts),
        sum(one.fresh for one in parts),
        tuple(sorted(position for one in parts for position in one.positions)),
    )


def in_infra_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sorted by order key, then id, so that no two tie; by plain tuples, because sorting by objects is slow."""
    return sorted(candidates, key=lambda one: (one.order.missing, one.order.first, one.order.second, str(one.node_id)))


def lay_out(
    candidates: Sequence[Candidate],
    shape: Shape,
    previous: Collection[NodeId],
    wanted: Wanted,
    absent: Sequence[Absent],
) -> Field:
    """Sort the candidates and join them to units."""
    nodes = in_infra_order(candidates)
    unusable: dict[Position, str] = {}
    usable: list[Position] = []
    for index, one in enumerate(nodes):
        position = Position(index)
        if one.node_id in wanted.exclude:
            unusable[position] = wanted.why_not(one.node_id)
        else:
            usable.append(position)
    excluded = len(unusable)
    if shape.replacement_group_size > 1:
        sets = _whole_groups(nodes, usable, shape, absent, unusable)
    else:
        sets = [(position,) for position in usable]
    if shape.segment_size is not None:
        sets = _with_domains(nodes, sets, shape.segment_size, unusable)
    residues = _all_residues(nodes, sets, shape.segment_size)
    units = [Unit(_worth(nodes, one, previous, wanted.include), rest) for one, rest in zip(sets, residues, strict=True)]
    return Field(nodes, units, unusable, excluded)


def _whole_groups(
    nodes: Sequence[Candidate],
    usable: Sequence[Position],
    shape: Shape,
    absent: Sequence[Absent],
    unusable: dict[Position, str],
) -> list[tuple[Position, ...]]:
    """C2: exactly `size` members of a group are candidates, or none of it counts."""
    size = shape.replacement_group_size
    members: dict[GroupId, list[Position]] = {}
    for position in usable:
        group = nodes[position].group
        if group is None:
            unusable[position] = f"it has no replacement group id, and groups have {size} nodes"
        else:
            members.setdefault(group, []).append(position)
    missing: dict[GroupId, list[str]] = {}
    for gone in absent:
        if gone.group is not None:
            missing.setdefault(gone.group, []).append(f"{gone.node_id} {gone.why}")
    for position, why in unusable.items():
        group = nodes[position].group
        if group is not None:
            missing.setdefault(group, []).append(f"{nodes[position].node_id} {why}")
    whole: list[tuple[Position, ...]] = []
    for group, found in members.items():
        if len(found) == size:
            whole.append(tuple(found))
            continue
        text = f"its group {group} has {count_of_group(len(found), size, missing.get(group, []))}"
        unusable.update(dict.fromkeys(found, text))
    return whole


def count_of_group(found: int, size: int, missing: Sequence[str]) -> str:
    """How much of a group is here, in words."""
    if found > size:
        return f"{found} nodes here, and groups have {size}"
    names = f" ({list_names(sorted(missing))})" if missing else ""
    return f"{found} of {size} nodes here{names}"


def _with_domains(
    nodes: Sequence[Candidate],
    sets: Sequence[tuple[Position, ...]],
    segment_size: int,
    unusable: dict[Position, str],
) -> list[tuple[Position, ...]]:
    """C3: where segments count, a node needs a domain, and so does its group."""
    known: list[tuple[Position, ...]] = []
    for one in sets:
        without = [position for position in one if nodes[position].domain is None]
        if not without:
            known.append(one)
            continue
        names = list_names([str(nodes[position].node_id) for position in without])
        for position in one:
            unusable[position] = (
                f"it has no domain, and segments have {segment_size} nodes of one domain"
                if position in without
                else f"{names} of its group {nodes[position].group} has no domain"
            )
    return known


def _worth(
    nodes: Sequence[Candidate],
    positions: tuple[Position, ...],
    previous: Collection[NodeId],
    include: frozenset[NodeId],
) -> Worth:
    unasked = last_resort = fresh = 0
    for position in positions:
        one = nodes[position]
        unasked += one.node_id not in include
        last_resort += one.last_resort
        fresh += one.node_id not in previous
    return Worth(unasked, last_resort, fresh, positions)


def _all_residues(
    nodes: Sequence[Candidate], sets: Sequence[tuple[Position, ...]], segment_size: int | None
) -> Iterator[Residues]:
    """For each set, what it has beyond whole segments."""
    if segment_size is None:
        yield from repeat((), len(sets))
        return
    inside: dict[DomainId, Residues] = {}
    for one in sets:
        first = nodes[one[0]].domain
        if first is not None and all(nodes[position].domain == first for position in one):
            found = inside.get(first)
            if found is None:
                found = inside[first] = _residues({first: len(one)}, segment_size)
            yield found
        else:
            domains = [domain for position in one if (domain := nodes[position].domain) is not None]
            yield _residues(Counter(domains), segment_size)


def _residues(counts: Mapping[DomainId, int], segment_size: int) -> Residues:
    return tuple(
        sorted(Residue(domain, count % segment_size) for domain, count in counts.items() if count % segment_size)
    )
