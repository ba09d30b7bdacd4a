"""How long it takes to choose a world, from 512 to 32,768 nodes: time, states looked at, and how both grow.

Each case chooses a first world, loses nodes, and chooses again, keeping what it can; the second choice is measured.
Needs no cluster and no other process.

    python bench/placement.py [--plot FILE.svg] [--most NODES]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in {None, ""}:  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nvrx.core.ids import DomainId, GroupId, GroupRank, NodeId
from nvrx.core.placement import BOUNDS, Candidate, Placement, Wanted, place
from nvrx.core.placement.choosing import choose
from nvrx.core.placement.units import lay_out
from nvrx.core.shape import RankPolicy, Shape
from nvrx.core.topology import OrderSource, order_key

SIZES = tuple(2**power for power in range(9, 16))
REPETITIONS = 5
AIMS_S = {4_096: 0.1, 32_768: 1.0}
BAR = 50


@dataclass(frozen=True)
class Case:
    """One kind of cluster, whatever its size."""

    name: str
    domain_size: int
    group_size: int
    segment_size: int | None
    min_share: float
    offset: int = 0
    """Groups begin so many nodes before a domain does, so that they span domains."""
    lost: float = 0.05
    policy: RankPolicy = RankPolicy.INFRA
    has_aim: bool = False

    def shape(self, nodes: int) -> Shape:
        step = math.lcm(self.group_size, self.segment_size or 1)
        return Shape(
            int(nodes * self.min_share) // step * step,
            nodes,
            8,
            segment_size=self.segment_size,
            replacement_group_size=self.group_size,
            rank_policy=self.policy,
        )

    def candidates(self, nodes: int) -> list[Candidate]:
        return [
            Candidate(
                NodeId(f"n{index}"),
                order_key(OrderSource.NODE_ID, f"n{index}", NodeId(f"n{index}")),
                GroupId(f"g{(index + self.offset) // self.group_size}"),
                DomainId(f"d{index // self.domain_size}"),
            )
            for index in range(nodes)
        ]


IN_DOMAINS = Case("groups of 4 in domains of 8, segments of 4", 8, 4, 4, 0.75, has_aim=True)
CASES = (
    IN_DOMAINS,
    replace(IN_DOMAINS, name="the same, sticky ranks", policy=RankPolicy.STICKY),
    Case("no groups, no segments", 8, 1, None, 0.75, has_aim=True),
    Case("groups of 4 across domains of 18, segments of 16", 18, 4, 16, 0.375),
    Case("groups of 3 across domains of 8, segments of 4", 8, 3, 4, 0.5),
    Case("pairs across every border of domains of 8, segments of 4", 8, 2, 4, 0.25, offset=1),
)


@dataclass(frozen=True)
class Point:
    """One size of one case."""

    nodes: int
    min_nodes: int
    seconds: float
    """Median, of this process's processor time: others on the machine do not count."""
    states: int
    answer: str


def measure(case: Case, nodes: int) -> Point:
    shape = case.shape(nodes)
    everyone = case.candidates(nodes)
    first = place(everyone, shape, {})
    previous = _seats(first.chosen) if isinstance(first, Placement) else {}
    chance = random.Random(nodes)
    left = [one for one in everyone if chance.random() >= case.lost]
    chance.shuffle(left)
    times = []
    for _ in range(REPETITIONS):
        gc.collect()
        began = time.process_time()
        found = place(left, shape, previous)
        times.append(time.process_time() - began)
    field = lay_out(left, shape, previous, Wanted(), ())
    choice = choose(field.units, shape.min_nodes // case.group_size, case.segment_size or 1, BOUNDS)
    answer = found.reason.split(":")[0] if not isinstance(found, Placement) else found.remark or "proven"
    return Point(nodes, shape.min_nodes, median(times), choice.states, answer)


def _seats(chosen: Sequence[NodeId]) -> Mapping[NodeId, GroupRank]:
    return {node_id: GroupRank(rank) for rank, node_id in enumerate(chosen)}


def exponent(points: Sequence[Point], value: Callable[[Point], float]) -> float | None:
    """The slope of log(value) over log(nodes), by least squares; None where a value is 0."""
    if len(points) < 2 or any(value(one) <= 0 for one in points):
        return None
    xs = [math.log(one.nodes) for one in points]
    ys = [math.log(value(one)) for one in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def report(case: Case, points: Sequence[Point]) -> str:
    """The table of a case, with a bar per size; bars are on a logarithmic scale."""
    lines = [f"\n{case.name}, {case.lost:.0%} lost"]
    least = min(one.seconds for one in points)
    most = max(one.seconds for one in points)
    for one in points:
        share = math.log(one.seconds / least) / math.log(most / least) if most > least else 1.0
        bar = "#" * (1 + round(share * (BAR - 1)))
        aim = AIMS_S.get(one.nodes) if case.has_aim else None
        met = "" if aim is None else f"  (aim {aim * 1e3:.0f} ms: {'met' if one.seconds <= aim else 'MISSED'})"
        lines.append(
            f"{one.nodes:7,} nodes, MIN {one.min_nodes:6,}: {one.seconds * 1e3:8.1f} ms {one.states:9,} states"
            f"  {one.answer}{met}\n{'':8}|{bar}"
        )
    grows = exponent(points, lambda one: one.seconds)
    states = exponent(points, lambda one: float(one.states))
    more = "" if states is None else f", states as nodes^{states:.2f}"
    lines.append(f"  time grows as nodes^{grows:.2f}{more}" if grows is not None else "  one size only")
    return "\n".join(lines)


def plot(path: Path, results: Mapping[str, Sequence[Point]]) -> None:
    """Time over nodes, both logarithmic. Says so if matplotlib is not installed."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no plot is written: matplotlib is not installed; the bars above show the same")
        return
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in results.items():
        axes.loglog([one.nodes for one in points], [one.seconds for one in points], marker="o", label=name)
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds to choose the next world")
    axes.legend(fontsize="small")
    figure.savefig(path)
    print(f"plot written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path, default=Path("placement.svg"), help="where to write the plot")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the largest number of nodes")
    given = parser.parse_args()
    print(f"median processor time of {REPETITIONS} choices after a loss; Python {sys.version.split()[0]}")
    results: dict[str, Sequence[Point]] = {}
    for case in CASES:
        results[case.name] = [measure(case, nodes) for nodes in SIZES if nodes <= given.most]
        print(report(case, results[case.name]), flush=True)
    plot(given.plot, results)


if __name__ == "__main__":
    main()
