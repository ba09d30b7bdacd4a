"""Medians, ratios and the table of recovery times. Knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from .measure import Recovery

_LABEL_WIDTH = 55
_CELL_WIDTH = 25
_DIES = {"coordinator": "worker"}
"""Whose death is recovered from where that is not the victim itself: a worker's, once the coordinator is back."""


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f}-{self.most:.3f})"


@dataclass(frozen=True)
class Measure:
    key: str
    label: str
    value: Callable[[Recovery], float | None]


def measures(victim: str) -> list[Measure]:
    """Those of a kind of kill; the second and third are compared between peers."""
    strike = "SIGSTOP" if victim == "node" else "SIGKILL"
    dead = "node suspended" if victim == "node" else f"dead {_DIES.get(victim, victim)}'s pidfd readable"
    own = {
        "node": [Measure("lease_s", "lease over -> last new worker's interpreter runs", lambda r: r.lease_s)],
        "coordinator": [Measure("answer_s", "coordinator started again -> answers GetRun", lambda r: r.answer_s)],
    }
    return [
        Measure("map_s", f"{dead} -> all hold the new map", lambda r: r.map_s),
        Measure("boot_s", f"{strike} -> last new worker's interpreter runs", lambda r: r.boot_s),
        Measure("step_s", f"{strike} -> all ranks did their first all_reduce", lambda r: r.step_s),
        *own.get(victim, []),
        Measure("cold_start_s", "for scale: job start -> first all_reduce", lambda r: r.cold_start_s),
    ]


def spread(recoveries: Sequence[Recovery], peer: str, measure: Measure) -> Spread | None:
    """Over the repetitions that recovered; how many did not is said beside it."""
    values = [measure.value(r) for r in recoveries if r.peer == peer and r.failure is None]
    return Spread.of([value for value in values if value is not None])


def _row(label: str, cells: Sequence[str]) -> str:
    return (label.ljust(_LABEL_WIDTH) + "".join(cell.ljust(_CELL_WIDTH) for cell in cells)).rstrip()


def table(recoveries: Sequence[Recovery], peers: Sequence[str], victim: str) -> str:
    lines = [_row("seconds: median (min-max)", peers)]
    for measure in measures(victim):
        found = [spread(recoveries, peer, measure) for peer in peers]
        if any(found):
            lines.append(_row(measure.label, [str(one) if one else "-" for one in found]))
    lines.append(_row("recovered", [_recovered(recoveries, peer) for peer in peers]))
    if victim == "coordinator":
        disturbed = [sum(r.disturbed for r in recoveries if r.peer == peer) for peer in peers]
        lines.append(_row("workers that the coordinator's death ended, all", [str(count) for count in disturbed]))
    in_vain = [sum(r.starts_in_vain for r in recoveries if r.peer == peer) for peer in peers]
    if any(in_vain):
        lines.append(_row("workers started in vain, all repetitions", [str(count) for count in in_vain]))
    return "\n".join(lines)


def _recovered(recoveries: Sequence[Recovery], peer: str) -> str:
    own = [r for r in recoveries if r.peer == peer]
    return f"{sum(r.failure is None for r in own)} of {len(own)}"


def comparisons(recoveries: Sequence[Recovery], peers: Sequence[str], victim: str) -> str:
    """For each pair of peers the ratio and the difference of the medians."""
    compared = measures(victim)[1:3]
    lines = [_row("medians: ratio, difference", [measure.key for measure in compared])]
    for a, b in combinations(peers, 2):
        cells = []
        for measure in compared:
            first, second = spread(recoveries, a, measure), spread(recoveries, b, measure)
            if first is None or second is None:
                cells.append("-")
            else:
                ratio, difference_s = first.median / second.median, first.median - second.median
                cells.append(f"{ratio:.3g}, {difference_s:+.3f} s")
        lines.append(_row(f"{a} / {b}", cells))
    return "\n".join(lines)


def summary(recoveries: Sequence[Recovery], peers: Sequence[str], victim: str) -> dict[str, object]:
    """The same for machines: {peer: {measure: {median, least, most, count} or None}}."""
    return {
        peer: {
            measure.key: None if (one := spread(recoveries, peer, measure)) is None else vars(one)
            for measure in measures(victim)
        }
        for peer in peers
    }
