"""Groups that span domains: what a component of domains tied together can give, for every number of units.

A frontier programme: domain after domain is closed. A state is the residues of the open domains and the number of
units taken; the best value of each is kept. A domain is open from the first of its classes to the last, then its
residue must be 0. In general the number of states grows exponentially (the problem contains exact cover), so they are
counted, never timed: the same inputs give the same answer on every machine (rule C8). Past the bound only the most
promising states are followed, and the table says that it is not exact. Knows no words.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, TypeAlias

from ..ids import DomainId
from .model import Bounds
from .units import Residues, Unit, combined
from .values import Value, Values

Table: TypeAlias = Mapping[int, Value]
"""The best value for each possible number of units."""
Code = NewType("Code", int)
"""The residues of the open domains, one field of bits each."""
States: TypeAlias = dict[Code, dict[int, Value]]
"""By the residues, then the number of units taken."""
Classes: TypeAlias = Mapping[Residues, Sequence[Unit]]

NARROW = 64
"""States followed per layer where the bound was passed, at least."""


STATES_PER_COUNT = 8
"""Of these at least that many have the same number of units."""
RADII = (0, 1, 2, 4, 8)
"""How far around domains that are not in order the units are chosen anew, past the bound."""


@dataclass
class Search:
    """How many states were looked at so far, in all components."""

    bounds: Bounds
    spent: int = 0

    @property
    def left(self) -> int:
        return max(0, self.bounds.total - self.spent)


@dataclass(frozen=True)
class Component:
    """Classes that domains tie together, and what is asked of them."""

    classes: Classes
    segment_size: int
    at_least: int
    at_most: int
    anchor: Mapping[Residues, int]
    """How many units of each class are among the best of all, segments apart: what is kept, and the first in order."""


@dataclass(frozen=True)
class Explored:
    """What a component can give; not exact if the bound was passed."""

    best: Table
    is_exact: bool


class _TooMany(Exception):
    """The bound is passed."""


@dataclass(frozen=True)
class Step:
    """One class is decided, after which some domains have all of theirs decided."""

    residues: Residues
    closes: Sequence[DomainId]


def explore(component: Component, values: Values, search: Search) -> Explored:
    """The best value for each number of units from `at_least` to `at_most` of one component."""
    walk = _Walk(component)
    try:
        found = walk.run(min(search.bounds.component, search.left))
        is_exact = True
    except _TooMany:
        found = _nearby(component, walk, min(search.bounds.component, search.left))
        is_exact = False
    search.spent += walk.looks
    table = {taken: walk.translate(value, values) for taken, value in sorted(found.items())}
    return Explored(table, is_exact)


def _nearby(component: Component, walk: _Walk, allowed: int) -> dict[int, Value]:
    """Past the bound: keep to the anchor where it makes whole segments, choose anew around domains where it does not;
    and follow the most promising states everywhere. All that is found is possible, but need not be the best."""
    units = sum(map(len, component.classes.values()))
    best = walk.run(None, width=max(NARROW, allowed // (units + len(walk.steps))))
    limit = walk.looks + allowed
    for radius in RADII:
        try:
            found = walk.run(limit - walk.looks, fixed=_fixed(component, radius))
        except _TooMany:
            break
        for taken, value in found.items():
            if taken not in best or value > best[taken]:
                best[taken] = value
    return best


def _fixed(component: Component, radius: int) -> frozenset[Residues]:
    """Classes that have a domain further than `radius` from all those that the anchor leaves with broken segments."""
    sums: dict[DomainId, int] = {}
    for residues in component.classes:
        for domain, nodes in residues:
            sums[domain] = sums.get(domain, 0) + nodes * component.anchor[residues]
    near = {domain for domain, nodes in sums.items() if nodes % component.segment_size}
    for _ in range(radius):
        near |= {one.domain for residues in component.classes for one in residues if _touches(residues, near)}
    return frozenset(residues for residues in component.classes if any(one.domain not in near for one in residues))


def _touches(residues: Residues, domains: Collection[DomainId]) -> bool:
    return any(one.domain in domains for one in residues)


class _Walk:
    """One way through the classes of a component, gone once or several times."""

    def __init__(self, component: Component) -> None:
        self.component = component
        self.classes = component.classes
        self.base = component.segment_size
        self.steps = _order(self.classes)
        # Positions of this component alone: small numbers instead of bits for every node of the cluster.
        self.values = Values(p for units in self.classes.values() for unit in units for p in unit.worth.positions)
        self.unit_of = {unit.worth.positions[0]: unit for units in self.classes.values() for unit in units}
        self.looks = 0
        self.field_bits = (self.base - 1).bit_length()
        self.slots = len({one.domain for residues in self.classes for one in residues})

    def run(
        self, allowed: int | None, *, width: int | None = None, fixed: Collection[Residues] = ()
    ) -> dict[int, Value]:
        """Decide class after class. Raises _TooMany once more than `allowed` states were looked at.

        `width`: states followed from one class to the next; `fixed`: classes that give what the anchor has.
        """
        limit = None if allowed is None else self.looks + allowed
        states: States = {Code(0): {0: Value(0)}}
        slots: dict[DomainId, int] = {}
        free = [*range(self.slots)]
        remaining = sum(map(len, self.classes.values()))
        expected = 0
        for step in self.steps:
            for residue in step.residues:
                if residue.domain not in slots:
                    slots[residue.domain] = heapq.heappop(free)
            here, anchor = len(self.classes[step.residues]), self.component.anchor[step.residues]
            remaining -= here
            expected += anchor
            choices = range(anchor, anchor + 1) if step.residues in fixed else range(here + 1)
            least = self.component.at_least - remaining
            states = self._decide(states, step.residues, slots, choices, least, limit)
            for domain in step.closes:
                slot = slots.pop(domain)
                heapq.heappush(free, slot)
                states = {code: taken for code, taken in states.items() if self._residue(code, slot) == 0}
            if width is not None:
                states = self._thinned(states, width, expected)
        return states.get(Code(0), {})

    def _decide(
        self,
        states: States,
        residues: Residues,
        slots: Mapping[DomainId, int],
        choices: range,
        least: int,
        limit: int | None,
    ) -> States:
        """Take the best 0, 1, 2 ... units of a class, in every state."""
        prefix = [Value(0)]
        for unit in self.classes[residues]:
            prefix.append(Value(prefix[-1] + self.values.of(unit.worth)))
        after: States = {}
        for code, taken in states.items():
            self.looks += len(taken) * len(choices)
            if limit is not None and self.looks > limit:
                raise _TooMany
            for more in choices:
                worth = prefix[more]
                target = after.setdefault(self._shifted(code, residues, slots, more), {})
                for units, value in taken.items():
                    count = units + more
                    if least <= count <= self.component.at_most:
                        found = Value(value + worth)
                        known = target.get(count)
                        if known is None or found > known:
                            target[count] = found
        return {code: taken for code, taken in after.items() if taken}

    def _shifted(self, code: Code, residues: Residues, slots: Mapping[DomainId, int], more: int) -> Code:
        for residue in residues:
            slot = slots[residue.domain]
            before = self._residue(code, slot)
            after = (before + more * residue.nodes) % self.base
            code = Code(code + ((after - before) << slot * self.field_bits))
        return code

    def _residue(self, code: Code, slot: int) -> int:
        return code >> slot * self.field_bits & ((1 << self.field_bits) - 1)

    def _broken(self, code: Code) -> int:
        """How many residues are not 0."""
        any_bit = int(code)
        for shift in range(1, self.field_bits):
            any_bit |= code >> shift
        lowest = ((1 << self.slots * self.field_bits) - 1) // ((1 << self.field_bits) - 1)
        return (any_bit & lowest).bit_count()

    def _thinned(self, states: States, width: int, expected: int) -> States:
        """The `width` most promising: numbers of units near the anchor's, fewest open residues, then best value."""
        if sum(map(len, states.values())) <= width:
            return states
        by_count: dict[int, list[tuple[int, int, Code]]] = {}
        for code, taken in states.items():
            open_residues = self._broken(code)
            for units, value in taken.items():
                by_count.setdefault(units, []).append((open_residues, -value, code))
        near = sorted(by_count, key=lambda count: (abs(count - expected), count))[: max(1, width // STATES_PER_COUNT)]
        share = width // len(near)
        kept: States = {}
        for units in near:
            for _, bad, code in heapq.nsmallest(share, by_count[units]):
                kept.setdefault(code, {})[units] = Value(-bad)
        return kept

    def translate(self, value: Value, values: Values) -> Value:
        """The same set, in the numbers of the whole."""
        chosen = [self.unit_of[one] for one in self.values.positions(value) if one in self.unit_of]
        return values.of(combined([unit.worth for unit in chosen]))


def _order(classes: Classes) -> list[Step]:
    """Close domain after domain, always one that opens the fewest others; any order is right, a good one is narrow."""
    of_domain: dict[DomainId, list[Residues]] = {}
    for residues in sorted(classes, key=lambda one: classes[one][0].worth.positions):
        for one in residues:
            of_domain.setdefault(one.domain, []).append(residues)
    rank = {domain: index for index, domain in enumerate(of_domain)}
    beside: dict[DomainId, set[DomainId]] = {
        domain: {one.domain for residues in some for one in residues} - {domain} for domain, some in of_domain.items()
    }
    opened: set[DomainId] = set()
    decided: set[Residues] = set()
    left = {domain: len(some) for domain, some in of_domain.items()}

    def cost(domain: DomainId) -> int:
        return len(beside[domain] - opened) - (domain in opened)

    heap = [(cost(domain), rank[domain], domain) for domain in of_domain]
    heapq.heapify(heap)
    steps: list[Step] = []
    while heap:
        known, _, domain = heapq.heappop(heap)
        if left[domain] == 0:
            continue
        if known != cost(domain):
            heapq.heappush(heap, (cost(domain), rank[domain], domain))
            continue
        for residues in of_domain[domain]:
            if residues in decided:
                continue
            decided.add(residues)
            for one in residues:
                left[one.domain] -= 1
                if one.domain not in opened:
                    opened.add(one.domain)
                    for other in (one.domain, *beside[one.domain]):
                        if left[other]:
                            heapq.heappush(heap, (cost(other), rank[other], other))
            steps.append(Step(residues, [one.domain for one in residues if left[one.domain] == 0]))
    return steps
