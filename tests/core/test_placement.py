"""Which nodes train (C1-C8), against a dumb twin that tries every set."""

from collections.abc import Iterable
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx.core.ids import GroupRank, NodeId
from nvrx.core.placement import Candidate, Placement, Shortage, place
from nvrx.core.shape import Shape
from nvrx.core.topology import OrderSource, order_key

from .driver import World


def candidate(name: str) -> Candidate:
    node_id = NodeId(name)
    return Candidate(node_id, order_key(OrderSource.NODE_ID, name, node_id))


def ids(*names: str) -> frozenset[NodeId]:
    return frozenset(NodeId(name) for name in names)


def seats(nodes: Iterable[NodeId]) -> dict[NodeId, GroupRank]:
    return {node_id: GroupRank(rank) for rank, node_id in enumerate(sorted(nodes))}


def twin(candidates: list[Candidate], min_nodes: int, previous: frozenset[NodeId]) -> tuple[NodeId, ...] | None:
    """C5 word by word: of all sets the one with most survivors, then with the smallest infra positions."""
    in_order = sorted(candidates, key=lambda one: one.order)
    position = {one.node_id: index for index, one in enumerate(in_order)}
    sets = [tuple(one.node_id for one in some) for some in combinations(in_order, min_nodes)]
    if not sets:
        return None
    return min(sets, key=lambda some: (-len(previous.intersection(some)), [position[one] for one in some]))


nodes = st.lists(st.integers(0, 30).map(lambda number: f"n{number}"), max_size=8, unique=True)


@pytest.mark.rule("C4", "C5")
@settings(max_examples=300)
@given(nodes, st.integers(1, 6), st.data())
def test_the_twin_agrees(names: list[str], min_nodes: int, data: st.DataObject) -> None:
    previous = ids(*data.draw(st.lists(st.sampled_from([*names, "gone"]), max_size=6)))
    candidates = [candidate(name) for name in names]
    found = place(candidates, Shape(min_nodes, 8, 1), seats(previous))
    expected = twin(candidates, min_nodes, previous)
    if expected is None:
        assert found == Shortage(f"{len(names)} of {min_nodes} nodes are ready")
    else:
        assert isinstance(found, Placement)
        assert found.chosen == expected


@pytest.mark.rule("C4", "C5", "C8", "D10")
@settings(max_examples=200)
@given(nodes, st.integers(1, 6), st.data())
def test_laws(names: list[str], min_nodes: int, data: st.DataObject) -> None:
    previous = ids(*data.draw(st.lists(st.sampled_from([*names, "gone"]), max_size=6)))
    candidates = [candidate(name) for name in names]
    found = place(candidates, Shape(min_nodes, 8, 1), seats(previous))
    again = place(data.draw(st.permutations(candidates)), Shape(min_nodes, 8, 1), seats(previous))
    assert again == found, "whatever the order in which nodes joined"
    assert isinstance(found, Placement) == (len(names) >= min_nodes)
    if isinstance(found, Shortage):
        return
    left_out = [one.node_id for one in found.left_out]
    assert len(found.chosen) == min_nodes
    assert sorted([*found.chosen, *left_out]) == sorted(names)
    assert all(one.reason for one in found.left_out)
    displaced = previous.intersection(left_out)
    newcomers = set(found.chosen) - previous
    assert not (displaced and newcomers), "a standby never displaces a healthy active node"
    kept = place(candidates, Shape(min_nodes, 8, 1), seats(found.chosen))
    assert isinstance(kept, Placement)
    assert kept.chosen == found.chosen, "the world that was chosen is kept while its nodes are there"


@pytest.mark.rule("C5", "C6")
@pytest.mark.parametrize(
    ("present", "previous", "chosen"),
    [
        (["n0", "n1", "n2"], [], ["n0", "n1"]),
        (["n0", "n1", "n2"], ["n1", "n2"], ["n1", "n2"]),
        (["n0", "n1", "n2"], ["n2", "gone"], ["n0", "n2"]),
        (["n10", "n9", "n2"], [], ["n2", "n9"]),
        (["n0", "n1", "n2"], ["n0", "n1", "n2"], ["n0", "n1"]),
        (["n3", "n4"], ["n0", "n1"], ["n3", "n4"]),
    ],
)
def test_rows(present: list[str], previous: list[str], chosen: list[str]) -> None:
    found = place([candidate(name) for name in present], Shape(2, 8, 1), seats(ids(*previous)))
    assert isinstance(found, Placement)
    assert list(found.chosen) == chosen


@pytest.mark.rule("C8")
@pytest.mark.parametrize("joined", list(permutations(["node-c", "node-a", "node-b"])))
def test_ranks_do_not_depend_on_who_came_first(joined: tuple[str, ...]) -> None:
    """Field case C020."""
    world = World(3, 3)
    world.join(*joined)
    assert world.active() == ["node-a", "node-b", "node-c"]
