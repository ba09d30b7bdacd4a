"""Laws of `place` on large inputs, where no twin can follow; and the bound of its search (C2-C5, C8)."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from nvrx.core.ids import GroupRank, NodeId
from nvrx.core.placement import Bounds, Candidate, Placement, Shortage, Wanted, place
from nvrx.core.placement.choosing import choose
from nvrx.core.placement.units import lay_out
from nvrx.core.shape import RankPolicy, Shape

from .placement_twin import has_whole_segments, node, seats, shape_of


@dataclass(frozen=True)
class Cluster:
    """A cluster, its shape, and which share of its nodes is lost."""

    name: str
    nodes: int
    domain_size: int
    group_size: int
    segment_size: int | None
    min_nodes: int
    offset: int = 0
    """Groups begin so many nodes before a domain does: they then span domains."""
    lost: float = 0.05

    def candidates(self) -> list[Candidate]:
        return [
            node(f"n{index}", f"g{(index + self.offset) // self.group_size}", f"d{index // self.domain_size}")
            for index in range(self.nodes)
        ]

    def shape(self, policy: RankPolicy = RankPolicy.INFRA) -> Shape:
        return shape_of(self.min_nodes, self.group_size, self.segment_size, policy)


CLUSTERS = [
    Cluster("plain", 1024, 8, 1, None, 900),
    Cluster("groups", 1024, 8, 4, None, 640),
    Cluster("segments", 1024, 18, 1, 16, 640),
    Cluster("groups in domains", 1024, 8, 4, 4, 640),
    Cluster("blocks of several groups", 1024, 16, 2, 8, 512),
    Cluster("groups span domains", 1080, 18, 4, 2, 720),
    Cluster("a chain of domains", 512, 8, 2, 4, 240, offset=1, lost=0.01),
    Cluster("triples", 960, 8, 3, 4, 600, lost=0.01),
]


def survivors(cluster: Cluster, seed: int) -> list[Candidate]:
    """In an order of its own, and a few of them unwell."""
    chance = random.Random(seed)
    left = [one for one in cluster.candidates() if chance.random() >= cluster.lost]
    chance.shuffle(left)
    return [
        Candidate(one.node_id, one.order, one.group, one.domain, last_resort=chance.random() < 0.01) for one in left
    ]


def units_of(nodes: Sequence[Candidate], group_size: int) -> list[list[Candidate]]:
    if group_size == 1:
        return [[one] for one in nodes]
    groups: dict[str, list[Candidate]] = {}
    for one in nodes:
        groups.setdefault(str(one.group), []).append(one)
    return [some for some in groups.values() if len(some) == group_size]


def check_laws(
    found: Placement, nodes: Sequence[Candidate], shape: Shape, previous: Mapping[NodeId, GroupRank]
) -> None:
    """The exact count, whole groups, whole segments; and no swap of two units is an improvement."""
    by_id = {one.node_id: one for one in nodes}
    ranks = [by_id[one] for one in found.chosen]
    names = set(found.chosen)
    assert len(names) == len(ranks) == shape.min_nodes
    assert names | {one.node_id for one in found.left_out} == set(by_id)
    units = units_of(nodes, shape.replacement_group_size)
    inside = [unit for unit in units if unit[0].node_id in names]
    outside = [unit for unit in units if unit[0].node_id not in names]
    assert sum(map(len, inside)) == shape.min_nodes, "whole groups"
    assert names.isdisjoint(one.node_id for unit in outside for one in unit), "whole groups"
    if shape.segment_size is not None:
        assert has_whole_segments(ranks, shape.segment_size)
    position = {one.node_id: index for index, one in enumerate(sorted(nodes, key=lambda one: one.order))}

    def worth(unit: Sequence[Candidate]) -> tuple[int, int, list[int]]:
        return (
            sum(one.last_resort for one in unit),
            -sum(one.node_id in previous for one in unit),
            sorted(position[one.node_id] for one in unit),
        )

    def domains(unit: Sequence[Candidate]) -> tuple[tuple[str, int], ...]:
        size = shape.segment_size
        counts = Counter(str(one.domain) for one in unit)
        return () if size is None else tuple(sorted((one, n % size) for one, n in counts.items() if n % size))

    worst: dict[tuple[tuple[str, int], ...], tuple[int, int, list[int]]] = {}
    for unit in inside:
        worst[domains(unit)] = max(worst.get(domains(unit), worth(unit)), worth(unit))
    for unit in outside:
        assert domains(unit) not in worst or worth(unit) > worst[domains(unit)], f"{unit} should be in the world"


@pytest.mark.rule("C2", "C3", "C4", "C5", "C8")
@pytest.mark.parametrize("policy", RankPolicy)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: one.name)
def test_laws(cluster: Cluster, policy: RankPolicy) -> None:
    shape = cluster.shape(policy)
    previous: dict[NodeId, GroupRank] = {}
    for seed in range(3):
        nodes = survivors(cluster, seed)
        found = place(nodes, shape, previous)
        assert isinstance(found, Placement), found
        assert found.proven
        check_laws(found, nodes, shape, previous)
        again = place(random.Random(seed).sample(nodes, len(nodes)), shape, previous)
        assert again == found
        well = [one for one in nodes if not one.last_resort]
        if {one.node_id for one in well} >= set(found.chosen):
            kept = place(well, shape, seats(found.chosen))
            assert isinstance(kept, Placement)
            assert set(kept.chosen) == set(found.chosen), "the world is kept while its nodes are there"
        previous = seats(found.chosen)


@pytest.mark.rule("C6")
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: one.name)
def test_sticky_ranks_stay_where_no_segment_broke(cluster: Cluster) -> None:
    shape = cluster.shape(RankPolicy.STICKY)
    before = place(cluster.candidates(), shape, {})
    assert isinstance(before, Placement)
    previous = seats(before.chosen)
    nodes = survivors(cluster, 7)
    found = place(nodes, shape, previous)
    assert isinstance(found, Placement)
    size = shape.segment_size or 1
    after = {node_id: rank for rank, node_id in enumerate(found.chosen)}
    domain_of = {one.node_id: one.domain for one in cluster.candidates()}
    given = Counter(domain_of[one] for one in found.chosen)
    had = Counter(domain_of[one] for one in before.chosen)
    for start in range(0, shape.min_nodes, size):
        segment = before.chosen[start : start + size]
        moved = [one for one in segment if one in after and after[one] != previous[one]]
        if shape.segment_size is None:
            assert not moved
        elif after.keys() >= set(segment):
            assert not moved or given[domain_of[segment[0]]] < had[domain_of[segment[0]]]


# ---- the bound ------------------------------------------------------------------------------------------


def tangle(nodes: int, seed: int = 3) -> list[Candidate]:
    """Pairs whose two nodes are in domains drawn at random: about the hardest that can be asked."""
    chance = random.Random(seed)
    domains = [index // 8 for index in range(nodes)]
    chance.shuffle(domains)
    return [node(f"n{index}", f"g{index // 2}", f"d{domains[index]}") for index in range(nodes)]


@pytest.mark.rule("C4", "C5")
def test_past_the_bound_the_answer_says_so_and_is_legal() -> None:
    nodes = tangle(192)
    shape = shape_of(96, 2, 2)
    bounds = Bounds(5_000, 50_000)
    found = place(nodes, shape, {}, bounds=bounds)
    assert isinstance(found, Placement)
    assert not found.proven
    assert found.remark == "not proven best: 93 groups tie 24 domains"
    assert all(one.reason.endswith("(not proven best)") for one in found.left_out)
    names = set(found.chosen)
    assert all(len({one.node_id for one in unit} & names) in {0, 2} for unit in units_of(nodes, 2))
    by_id = {one.node_id: one for one in nodes}
    assert has_whole_segments([by_id[one] for one in found.chosen], 2)


@pytest.mark.rule("C5", "D10")
def test_a_world_that_is_there_is_kept_without_any_search() -> None:
    """Standbys that come and go restart nothing, and cost nothing, however hard the question is otherwise."""
    nodes = tangle(192)
    shape = shape_of(96, 2, 2)
    before = place(nodes, shape, {}, bounds=Bounds(5_000, 50_000))
    assert isinstance(before, Placement)
    again = place(nodes, shape, seats(before.chosen), bounds=Bounds(0, 0))
    assert isinstance(again, Placement)
    assert again.proven
    assert again.chosen == before.chosen


@pytest.mark.rule("C4")
def test_too_few_nodes_are_a_proven_shortage_even_past_the_bound() -> None:
    found = place(tangle(64), shape_of(64, 2, 4), {}, bounds=Bounds(0, 0))
    assert isinstance(found, Placement)
    found = place(tangle(64)[:-2], shape_of(64, 2, 4), {}, bounds=Bounds(0, 0))
    assert isinstance(found, Shortage)
    assert found.reason.startswith("62 of 64 nodes are ready: ")


@pytest.mark.rule("C8")
def test_the_bounds_bound_the_work() -> None:
    """Three times the bound at most is looked at: the exact search, and twice what is tried instead."""
    nodes = tangle(256)
    shape = shape_of(128, 2, 4)
    field = lay_out(nodes, shape, {}, Wanted(), ())
    for component in (1_000, 10_000, 50_000):
        choice = choose(field.units, 64, 4, Bounds(component, 10 * component))
        assert not choice.proven
        assert choice.states < 3 * component + 64 * 1_000
        assert (choice.tied_groups, choice.tied_domains) == (124, 32)


@pytest.mark.rule("C4", "C5")
def test_a_loss_in_a_chain_past_the_bound_is_mended_where_it_is() -> None:
    """The world keeps to what it was, except around the domain that lost a group."""
    cluster = Cluster("triples", 240, 8, 3, 4, 180)
    nodes = cluster.candidates()
    shape = cluster.shape()
    before = place(nodes, shape, {})
    assert isinstance(before, Placement)
    left = [one for one in nodes if one.group != "g17"]
    best = place(left, shape, seats(before.chosen))
    found = place(left, shape, seats(before.chosen), bounds=Bounds(15, 10_000))
    assert isinstance(best, Placement)
    assert isinstance(found, Placement)
    assert best.proven
    kept = len(set(best.chosen) & set(before.chosen))
    assert len(set(found.chosen) & set(before.chosen)) >= kept - 24
