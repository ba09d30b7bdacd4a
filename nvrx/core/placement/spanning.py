"""Groups that span domains: what a component of domains tied together can give, for every number of units.

A frontier programme: domain after domain is closed. A state is the residues of the open domains and the number of
units taken; the best value of each is kept. A domain is open from the first of its classes to the last, then its
residue must be 0. In general the number of states grows exponentially (the problem contains exact cover), so they are
counted, never timed: the same inputs give the same answer on every machine (rule C8). Past the bound only the most
promising states are followed, and the table says that it is not exact. Knows no words.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, TypeAlias

from ..ids import DomainId
from .model import Bounds
from .units import Residues, Unit, combined
from .values import Value, Values

Table: TypeAlias = Mapping[int, Value]
"""The best value for each possible number of units."""
Code = NewType("Code", int)
"""The residues of the open domains: digits in base segment size, one slot per open domain."""
States: TypeAlias = dict[Code, dict[int, Value]]
"""By the residues, then the number of units taken."""
Classes: TypeAlias = Mapping[Residues, Sequence[Unit]]

NARROW = 64
"""States followed per layer where the bound was passed, at least."""


@dataclass
class Search:
    """How much was looked at so far, in all components."""

    bounds: Bounds
    spent: int = 0


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


def explore(
    classes: Classes, segment_size: int, at_least: int, at_most: int, values: Values, search: Search
) -> Explored:
    """The best value for each number of units from `at_least` to `at_most` of one component."""
    walk = _Walk(classes, segment_size, at_least, at_most)
    allowed = min(search.bounds.component, search.bounds.total - search.spent)
    try:
        found = walk.run(allowed, width=None)
        is_exact = True
    except _TooMany:
        width = max(NARROW, search.bounds.component // (8 * len(walk.steps)))
        found = walk.run(None, width)
        is_exact = False
    search.spent += walk.looks
    table = {taken: walk.translate(value, values) for taken, value in sorted(found.items())}
    return Explored(table, is_exact)


class _Walk:
    def __init__(self, classes: Classes, segment_size: int, at_least: int, at_most: int) -> None:
        self.classes = classes
        self.base = segment_size
        self.at_least = at_least
        self.at_most = at_most
        self.steps = _order(classes)
        # Positions of this component alone: small numbers instead of bits for every node of the cluster.
        self.values = Values(p for units in classes.values() for unit in units for p in unit.worth.positions)
        self.unit_of = {unit.worth.positions[0]: unit for units in classes.values() for unit in units}
        self.looks = 0

    def run(self, allowed: int | None, width: int | None) -> dict[int, Value]:
        """Decide class after class. Raises _TooMany once more than `allowed` states were looked at."""
        states: States = {Code(0): {0: Value(0)}}
        slots: dict[DomainId, int] = {}
        free = [*range(len({one.domain for step in self.steps for one in step.residues}))]
        remaining = sum(map(len, self.classes.values()))
        for step in self.steps:
            for residue in step.residues:
                if residue.domain not in slots:
                    slots[residue.domain] = heapq.heappop(free)
            remaining -= len(self.classes[step.residues])
            states = self._decide(states, step.residues, slots, remaining, allowed)
            for domain in step.closes:
                slot = slots.pop(domain)
                place = self.base**slot
                heapq.heappush(free, slot)
                states = {code: taken for code, taken in states.items() if code // place % self.base == 0}
            if width is not None:
                states = _thinned(states, width, self.base)
        return states.get(Code(0), {})

    def _decide(
        self, states: States, residues: Residues, slots: Mapping[DomainId, int], remaining: int, allowed: int | None
    ) -> States:
        """Take the best 0, 1, 2 ... units of a class, in every state."""
        prefix = [Value(0)]
        for unit in self.classes[residues]:
            prefix.append(Value(prefix[-1] + self.values.of(unit.worth)))
        least = self.at_least - remaining
        after: States = {}
        for code, taken in states.items():
            self.looks += len(taken) * len(prefix)
            if allowed is not None and self.looks > allowed:
                raise _TooMany
            for more, worth in enumerate(prefix):
                target = after.setdefault(self._shifted(code, residues, slots, more), {})
                for units, value in taken.items():
                    count = units + more
                    if least <= count <= self.at_most:
                        found = Value(value + worth)
                        known = target.get(count)
                        if known is None or found > known:
                            target[count] = found
        return after

    def _shifted(self, code: Code, residues: Residues, slots: Mapping[DomainId, int], more: int) -> Code:
        for residue in residues:
            place = self.base ** slots[residue.domain]
            digit = code // place % self.base
            code = Code(code + ((digit + more * residue.nodes) % self.base - digit) * place)
        return code

    def translate(self, value: Value, values: Values) -> Value:
        """The same set, in the numbers of the whole."""
        chosen = [self.unit_of[one] for one in self.values.positions(value) if one in self.unit_of]
        return values.of(combined([unit.worth for unit in chosen]))


def _thinned(states: States, width: int, base: int) -> States:
    """The most promising states, for every number of units: fewest open residues first, then the best value."""
    by_count: dict[int, list[tuple[int, Value, Code]]] = {}
    for code, taken in states.items():
        open_residues = _digits(code, base)
        for units, value in taken.items():
            by_count.setdefault(units, []).append((open_residues, Value(-value), code))
    if sum(map(len, by_count.values())) <= width:
        return states
    share = max(1, width // max(1, len(by_count)))
    kept: States = {}
    for units, some in by_count.items():
        for _, value, code in heapq.nsmallest(share, some):
            kept.setdefault(code, {})[units] = Value(-value)
    return kept


def _digits(code: int, base: int) -> int:
    """How many digits are not 0."""
    found = 0
    while code:
        found += code % base != 0
        code //= base
    return found


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
