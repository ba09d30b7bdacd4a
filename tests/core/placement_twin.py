"""Small instances of `place`, and a dumb twin that tries every set of nodes and every order of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations

from hypothesis import strategies as st

from nvrx.core.ids import DomainId, GroupId, GroupRank, NodeId
from nvrx.core.placement import Candidate, Wanted
from nvrx.core.shape import RankPolicy, Shape
from nvrx.core.topology import OrderSource, order_key

MAX_TWIN_NODES = 12


def node(name: str, group: str | None = None, domain: str | None = None, *, last_resort: bool = False) -> Candidate:
    node_id = NodeId(name)
    return Candidate(
        node_id,
        order_key(OrderSource.NODE_ID, name, node_id),
        None if group is None else GroupId(group),
        None if domain is None else DomainId(domain),
        last_resort,
    )


def shape_of(min_nodes: int, group_size: int, segment_size: int | None, policy: RankPolicy = RankPolicy.INFRA) -> Shape:
    shape = Shape(
        min_nodes,
        max(min_nodes, 50_000),
        1,
        segment_size=segment_size,
        replacement_group_size=group_size,
        rank_policy=policy,
    )
    assert shape.problem() is None
    return shape


def seats(nodes: Iterable[NodeId]) -> dict[NodeId, GroupRank]:
    return {node_id: GroupRank(rank) for rank, node_id in enumerate(nodes)}


@dataclass(frozen=True)
class Instance:
    """All that `place` is asked."""

    candidates: tuple[Candidate, ...]
    shape: Shape
    previous: Mapping[NodeId, GroupRank] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def in_order(self) -> list[Candidate]:
        return sorted(self.candidates, key=lambda one: one.order)


def is_legal(some: Sequence[Candidate], instance: Instance) -> bool:
    """C2, C3, F1, word by word."""
    names = {one.node_id for one in some}
    shape, wanted = instance.shape, instance.wanted
    if len(names) != shape.min_nodes or names & wanted.exclude or not wanted.include <= names:
        return False
    if shape.replacement_group_size > 1:
        for one in some:
            members = [
                other.node_id
                for other in instance.candidates
                if other.group == one.group and other.node_id not in wanted.exclude
            ]
            if one.group is None or len(members) != shape.replacement_group_size or not names.issuperset(members):
                return False
    if shape.segment_size is not None:
        if any(one.domain is None for one in some):
            return False
        counts = Counter(one.domain for one in some)
        return all(count % shape.segment_size == 0 for count in counts.values())
    return True


def all_worlds(instance: Instance) -> Iterator[tuple[Candidate, ...]]:
    """Every legal set, each in infra order."""
    for some in combinations(instance.in_order, instance.shape.min_nodes):
        if is_legal(some, instance):
            yield some


def best_world(instance: Instance) -> frozenset[NodeId] | None:
    """C1, C5: fewest last resorts, most kept, smallest positions."""
    position = {one.node_id: index for index, one in enumerate(instance.in_order)}
    best = min(
        all_worlds(instance),
        key=lambda some: (
            sum(one.last_resort for one in some),
            -sum(one.node_id in instance.previous for one in some),
            [position[one.node_id] for one in some],
        ),
        default=None,
    )
    return None if best is None else frozenset(one.node_id for one in best)


def has_whole_segments(ranks: Sequence[Candidate], segment_size: int) -> bool:
    """Whether each aligned run of `segment_size` ranks is of one domain."""
    return all(
        len({one.domain for one in ranks[start : start + segment_size]}) == 1
        for start in range(0, len(ranks), segment_size)
    )


def most_at_rest(chosen: Sequence[Candidate], instance: Instance) -> int:
    """C6, sticky: how many of the chosen can keep their group rank, over all seatings."""
    size = instance.shape.segment_size or 1
    return max(at_rest(some, instance) for some in permutations(chosen) if has_whole_segments(some, size) or size == 1)


def at_rest(ranks: Sequence[Candidate], instance: Instance) -> int:
    return sum(instance.previous.get(one.node_id) == rank for rank, one in enumerate(ranks))


def lost(instance: Instance, names: Iterable[NodeId]) -> Instance:
    gone = set(names)
    return replace(instance, candidates=tuple(one for one in instance.candidates if one.node_id not in gone))


# ---- instances ------------------------------------------------------------------------------------------


@st.composite
def instances(draw: st.DrawFn, *, wishes: bool = False) -> Instance:
    """Groups that mostly are whole, domains that they may span, some nodes in no group or domain, some last resorts."""
    group_size = draw(st.sampled_from([1, 2, 2, 3]))
    segment_size = draw(st.sampled_from([None, 1, 2, 2, 3, 4]))
    count = draw(st.integers(1, MAX_TWIN_NODES))
    domains = draw(st.integers(1, 4))
    numbers = draw(st.permutations(range(count)))
    in_a_row = draw(st.booleans())
    candidates = []
    for index in range(count):
        in_block = index * domains // count
        domain = draw(st.sampled_from([in_block, in_block, in_block, *range(domains)]))
        domain_name = None if draw(st.integers(0, 15)) == 15 else f"d{domain}"
        odd = draw(st.integers(0, 15))
        group = None if odd == 15 else f"g{(numbers[index] if in_a_row else index) // group_size if odd < 14 else 0}"
        candidates.append(node(f"n{numbers[index]}", group, domain_name, last_resort=draw(st.integers(0, 7)) == 7))
    step = shape_step(group_size, segment_size)
    min_nodes = step * draw(st.integers(1, max(1, MAX_TWIN_NODES // step)))
    names = [one.node_id for one in candidates]
    before = draw(st.lists(st.sampled_from([*names, NodeId("gone")]), max_size=min_nodes, unique=True))
    wanted = Wanted()
    if wishes:
        some = st.lists(st.sampled_from([*names, NodeId("gone")]), max_size=2)
        wanted = Wanted(frozenset(draw(some)), frozenset(draw(some)))
    policy = draw(st.sampled_from(RankPolicy))
    return Instance(tuple(candidates), shape_of(min_nodes, group_size, segment_size, policy), seats(before), wanted)


def shape_step(group_size: int, segment_size: int | None) -> int:
    """The least number of nodes a world can have."""
    step = group_size
    while segment_size is not None and step % segment_size:
        step += group_size
    return step
