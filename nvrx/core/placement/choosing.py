"""Which units make the best world (rules C2-C5), exactly, wherever the search bound allows it.

Knows units, their worth and their residues; knows no node ids, no groups' names and no words.

Why it is exact. Write a set of nodes as a sum of one bit per node, the first in infra order being the highest bit. Of
two sets of equal size the one with the lexicographically smaller sorted positions has the larger sum, since the first
node in which they differ decides both. So the whole objective is a *sum over units*, compared lexicographically:
nodes asked for, last resort, kept, bits; and no two different sets have the same value. With sums one may exchange:

1. Units with the same residues are interchangeable as to segments. If k units of such a class are taken, they are its
   k best: exchanging one for a better one changes no domain's count and improves the sum.
2. A class that shares none of its domains must give a multiple of its *period* p, the least p for which p units come
   to whole segments. By 1 its units are cut, best first, into blocks of p; j blocks are the first j, and each is at
   least as good as the next. So the sum over such classes of equal period is greatest for the best blocks overall:
   taking the best never asks for a block without those before it. Without spanning groups every domain is one class
   of period lcm(segment, group) / group, and that is all. Sorting makes it n log n.
3. Classes that share domains make a component. `spanning.py` finds, for every number of units, the best that the
   component can give. Components of the same form as in 2 (multiples of the period, each step worth less than the one
   before) join the blocks there; the others are combined count by count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm
from typing import TypeAlias

from ..ids import DomainId
from .model import Bounds
from .spanning import NARROW, Component, Search, Table, explore
from .units import Position, Residues, Unit, Worth, combined
from .values import Value, Values

Classes: TypeAlias = Mapping[Residues, Sequence[Unit]]


@dataclass(frozen=True)
class Choice:
    """The nodes chosen, or None if there are none; whether that is proven, and what tied too much together if not."""

    positions: frozenset[Position] | None
    tied_groups: int = 0
    tied_domains: int = 0
    states: int = 0

    @property
    def proven(self) -> bool:
        return self.tied_groups == 0


def choose(units: Sequence[Unit], count: int, segment_size: int, bounds: Bounds) -> Choice:
    """The best `count` units of which every domain gives a multiple of `segment_size` nodes."""
    classes: dict[Residues, list[Unit]] = {}
    for unit in sorted(units):
        classes.setdefault(unit.residues, []).append(unit)
    components = _components(classes)
    blocks: dict[int, list[Worth]] = {}
    for residues in components.alone:
        size = period(residues, segment_size)
        blocks.setdefault(size, []).extend(_cut(classes[residues], size))
    if not components.tied and len(blocks) <= 1:
        return Choice(_best_blocks(blocks, count))
    if _is_best(before := [unit for unit in units if unit.worth.fresh == 0], units, count, segment_size):
        return Choice(frozenset(position for unit in before for position in unit.worth.positions))
    return _Mixture(classes, count, segment_size, bounds).choose(components.tied, blocks)


def _is_best(before: Sequence[Unit], units: Sequence[Unit], count: int, segment_size: int) -> bool:
    """Whether the world before is there, unharmed: then it is best, since no other keeps as many."""
    sums: Counter[DomainId] = Counter()
    for unit in before:
        for domain, nodes in unit.residues:
            sums[domain] += nodes
    asked = [unit for unit in units if unit.worth.unasked < len(unit.worth.positions)]
    return (
        len(before) == count
        and not any(unit.worth.last_resort for unit in before)
        and not any(unit.worth.fresh for unit in asked)
        and not any(nodes % segment_size for nodes in sums.values())
    )


def period(residues: Residues, segment_size: int) -> int:
    """How many units of a class come to whole segments in each of its domains."""
    return lcm(*(segment_size // gcd(one.nodes, segment_size) for one in residues))


def _cut(units: Sequence[Unit], size: int) -> list[Worth]:
    """Blocks of `size` units, best first; what is left over at the end is in none."""
    return [
        combined([unit.worth for unit in units[start : start + size]])
        for start in range(0, len(units) - size + 1, size)
    ]


def _best_blocks(blocks: Mapping[int, list[Worth]], count: int) -> frozenset[Position] | None:
    for size, some in blocks.items():
        if count % size == 0 and len(some) >= count // size:
            best = sorted(some)[: count // size]
            return frozenset(position for block in best for position in block.positions)
    return None


@dataclass(frozen=True)
class Components:
    """Classes that share no domain with another, and sets of classes that do."""

    alone: Sequence[Residues]
    tied: Sequence[Sequence[Residues]]


def _components(classes: Classes) -> Components:
    """In the order of their best units."""
    of_domain: dict[DomainId, list[Residues]] = {}
    for residues in classes:
        for one in residues:
            of_domain.setdefault(one.domain, []).append(residues)
    alone: list[Residues] = []
    tied: list[list[Residues]] = []
    seen: set[Residues] = set()
    for start in classes:
        if start in seen:
            continue
        seen.add(start)
        component = [start]
        for residues in component:
            for one in residues:
                fresh = [other for other in of_domain[one.domain] if other not in seen]
                seen.update(fresh)
                component += fresh
                of_domain[one.domain] = []
        if len(component) == 1:
            alone.append(start)
        else:
            tied.append(component)
    return Components(alone, tied)


class _Mixture:
    """Blocks of several periods, and components of tied domains, put together count by count."""

    def __init__(self, classes: Classes, count: int, segment_size: int, bounds: Bounds) -> None:
        self.classes = classes
        self.count = count
        self.segment_size = segment_size
        self.total = sum(map(len, classes.values()))
        self.values = Values(p for units in classes.values() for unit in units for p in unit.worth.positions)
        best = sorted(unit for units in classes.values() for unit in units)[:count]
        self.anchor = Counter([unit.residues for unit in best])
        self.search = Search(bounds)
        self.tied_groups = self.tied_domains = 0

    def choose(self, tied: Sequence[Sequence[Residues]], blocks: Mapping[int, list[Worth]]) -> Choice:
        tables = [self._ladder(size, some) for size, some in sorted(blocks.items())]
        tables += [self._explored(component) for component in tied]
        tables = [table for table in tables if table.keys() != {0}]
        # Tables whose steps fall by whole strides need no looking at every count: the commonest stride of these.
        falling = [stride for table in tables for stride in _falling_stride(table)]
        strides = Counter(falling)
        main = max(strides, key=lambda stride: (strides[stride], stride), default=1)
        steps: list[Value] = []
        others: list[Table] = []
        for table in tables:
            if _falling_stride(table) == [main]:
                steps += _steps(table)
            else:
                others.append(table)
        steps.sort(reverse=True)
        sums = self._sum_up(others, main * len(steps), tied)
        best = self._finish(sums, main, steps)
        positions = None if best is None else self.values.positions(best)
        return Choice(positions, self.tied_groups, self.tied_domains, self.search.spent)

    def _ladder(self, size: int, some: list[Worth]) -> Table:
        """The best of each number of blocks of one period."""
        value = Value(0)
        table = {0: value}
        for index, block in enumerate(sorted(some), start=1):
            value = Value(value + self.values.of(block))
            table[index * size] = value
        return table

    def _explored(self, tied: Sequence[Residues]) -> Table:
        classes = {residues: self.classes[residues] for residues in tied}
        elsewhere = self.total - sum(map(len, classes.values()))
        at_least = max(0, self.count - elsewhere)
        component = Component(classes, self.segment_size, at_least, self.count, self.anchor)
        explored = explore(component, self.values, self.search)
        if not explored.is_exact:
            self._give_up(tied)
        return explored.best

    def _give_up(self, tied: Sequence[Residues]) -> None:
        self.tied_groups += sum(len(self.classes[residues]) for residues in tied if len(residues) > 1)
        self.tied_domains += len({one.domain for residues in tied for one in residues})

    def _sum_up(self, tables: Sequence[Table], most: int, tied: Sequence[Sequence[Residues]]) -> Table:
        """The best of every number of units that some tables give together; the rest gives `most` units at most."""
        sums: Table = {0: Value(0)}
        later = sum(max(table, default=0) for table in tables) + most
        for table in tables:
            later -= max(table, default=0)
            if len(sums) * len(table) > self.search.left:
                sums = self._thinned(sums, table)
                if self.proven:
                    for component in tied:
                        self._give_up(component)
            self.search.spent += len(sums) * len(table)
            fresh: dict[int, Value] = {}
            for so_far, value in sums.items():
                for more, worth in table.items():
                    units = so_far + more
                    if self.count - later <= units <= self.count:
                        found = Value(value + worth)
                        known = fresh.get(units)
                        if known is None or found > known:
                            fresh[units] = found
            sums = fresh
        return sums

    @property
    def proven(self) -> bool:
        return self.tied_groups == 0

    def _thinned(self, sums: Table, table: Table) -> Table:
        """The sums with most units: whatever is still to come need not give anything."""
        kept = sorted(sums, reverse=True)[: max(1, NARROW * NARROW // len(table))]
        return {units: sums[units] for units in kept}

    def _finish(self, sums: Table, main: int, steps: Sequence[Value]) -> Value | None:
        """Fill up with the best steps."""
        best: Value | None = None
        filled = [Value(0)]
        for step in steps[: self.count // main]:
            filled.append(Value(filled[-1] + step))
        for units, value in sums.items():
            more, rest = divmod(self.count - units, main)
            if rest == 0 and more < len(filled):
                found = Value(value + filled[more])
                if best is None or found > best:
                    best = found
        return best


def _steps(table: Table) -> list[Value]:
    """What each further count of a table adds."""
    counts = sorted(table)
    return [Value(table[more] - table[fewer]) for fewer, more in pairwise(counts)]


def _falling_stride(table: Table) -> list[int]:
    """The stride of a table that goes from 0 up in equal strides, each worth less than the one before; else nothing."""
    counts = sorted(table)
    if len(counts) < 2 or counts != [counts[1] * index for index in range(len(counts))]:
        return []
    steps = _steps(table)
    return [counts[1]] if steps == sorted(steps, reverse=True) else []
