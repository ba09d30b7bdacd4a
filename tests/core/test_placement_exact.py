"""`place` against a dumb twin that tries every set and every seating (C1-C6, F1)."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nvrx.core.ids import GroupRank, NodeId
from nvrx.core.placement import Bounds, Candidate, Placement, Shortage, Wanted, place
from nvrx.core.placement.choosing import choose
from nvrx.core.placement.units import lay_out
from nvrx.core.shape import RankPolicy

from .placement_twin import (
    Instance,
    at_rest,
    best_world,
    has_whole_segments,
    instances,
    is_legal,
    lost,
    most_at_rest,
    node,
    seats,
    shape_of,
)

RING = ("AB", "BC", "CD", "DA", "EF", "FG", "GH", "HE")
"""Two rings of four domains, tied by pairs that lie across their borders."""


def placed(instance: Instance, bounds: Bounds | None = None) -> Placement | Shortage:
    return place(instance.candidates, instance.shape, instance.previous, instance.wanted, bounds=bounds or Bounds())


def chosen(found: Placement, instance: Instance) -> list[Candidate]:
    by_id = {one.node_id: one for one in instance.candidates}
    return [by_id[one] for one in found.chosen]


def check_against_twin(instance: Instance) -> None:
    found = placed(instance)
    expected = best_world(instance)
    if expected is None:
        assert isinstance(found, Shortage)
        assert "undecided" not in found.reason
        return
    assert isinstance(found, Placement), found
    assert found.proven
    assert not found.remark
    assert len(found.chosen) == len(expected)
    assert frozenset(found.chosen) == expected
    others = [one.node_id for one in instance.in_order if one.node_id not in expected]
    assert [one.node_id for one in found.left_out] == others
    assert all(one.reason for one in found.left_out)


@pytest.mark.rule("C1", "C2", "C3", "C4", "C5")
@settings(max_examples=700)
@given(instances())
def test_the_same_set_as_the_twin(instance: Instance) -> None:
    check_against_twin(instance)


@pytest.mark.rule("C4", "F1")
@settings(max_examples=300)
@given(instances(wishes=True))
def test_the_same_set_as_the_twin_with_wishes(instance: Instance) -> None:
    check_against_twin(instance)


@st.composite
def tied(draw: st.DrawFn) -> Instance:
    """Twelve nodes, whole groups of 2 or 3 over 2 to 4 domains at random: most groups span domains."""
    group_size = draw(st.sampled_from([2, 3]))
    segment_size = draw(st.sampled_from([2, 3, 4]))
    domains = draw(st.permutations([index % draw(st.integers(2, 4)) for index in range(12)]))
    names = draw(st.permutations(range(12)))
    candidates = tuple(
        node(f"n{names[index]}", f"g{index // group_size}", f"d{domains[index]}", last_resort=draw(st.booleans()))
        if draw(st.integers(0, 3)) == 0
        else node(f"n{names[index]}", f"g{index // group_size}", f"d{domains[index]}")
        for index in range(12)
    )
    step = {2: {2: 2, 3: 6, 4: 4}, 3: {2: 6, 3: 3, 4: 12}}[group_size][segment_size]
    min_nodes = step * draw(st.integers(1, 12 // step))
    before = draw(st.lists(st.sampled_from([one.node_id for one in candidates]), max_size=min_nodes, unique=True))
    return Instance(candidates, shape_of(min_nodes, group_size, segment_size), seats(before))


@pytest.mark.rule("C2", "C3", "C4", "C5")
@settings(max_examples=500)
@given(tied())
def test_the_same_set_where_groups_span_domains(instance: Instance) -> None:
    check_against_twin(instance)


@pytest.mark.rule("C4", "C8")
@settings(max_examples=250)
@given(tied(), st.integers(0, 60), st.integers(0, 120))
def test_past_the_bound_nothing_is_claimed(instance: Instance, component: int, total: int) -> None:
    found = placed(instance, Bounds(component, total))
    expected = best_world(instance)
    if isinstance(found, Shortage):
        assert expected is None or found.reason.startswith("undecided: ")
    elif found.proven:
        assert frozenset(found.chosen) == expected
    else:
        assert is_legal(chosen(found, instance), instance)
        assert found.remark.startswith("not proven best: ")


@pytest.mark.rule("C8")
@settings(max_examples=150)
@given(instances(wishes=True), st.data())
def test_the_order_of_the_inputs_does_not_matter(instance: Instance, data: st.DataObject) -> None:
    shuffled = replace(
        instance,
        candidates=tuple(data.draw(st.permutations(instance.candidates))),
        previous=dict(data.draw(st.permutations(list(instance.previous.items())))),
    )
    assert placed(shuffled) == placed(instance)
    tight = Bounds(data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20)))
    assert placed(shuffled, tight) == placed(instance, tight)


# ---- ranks ----------------------------------------------------------------------------------------------


@pytest.mark.rule("C6")
@settings(max_examples=150)
@given(instances())
def test_ranks_in_infra_order(instance: Instance) -> None:
    instance = replace(instance, shape=replace(instance.shape, rank_policy=RankPolicy.INFRA))
    found = placed(instance)
    assume(isinstance(found, Placement))
    assert isinstance(found, Placement)
    ranks = chosen(found, instance)
    size = instance.shape.segment_size
    if size is None:
        assert ranks == sorted(ranks, key=lambda one: one.order)
        return
    assert has_whole_segments(ranks, size)
    first = {one.domain: min(other.order for other in ranks if other.domain == one.domain) for one in ranks}
    assert ranks == sorted(ranks, key=lambda one: (first[one.domain], one.order))


@st.composite
def successors(draw: st.DrawFn) -> Instance:
    """A legal world, the nodes it lost, and others that may take their places."""
    group_size, segment_size, min_nodes = draw(
        st.sampled_from([(1, None, 5), (1, 2, 6), (1, 3, 6), (2, 2, 6), (2, None, 6), (1, 1, 5), (3, 2, 6), (2, 3, 6)])
    )
    count = draw(st.integers(min_nodes, 12))
    names = draw(st.permutations(range(count)))
    domains = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    candidates = tuple(
        node(f"n{names[index]}", f"g{index // group_size}", f"d{domains[index]}") for index in range(count)
    )
    shape = shape_of(min_nodes, group_size, segment_size, RankPolicy.STICKY)
    everyone = Instance(candidates, shape)
    late = draw(st.lists(st.sampled_from([one.node_id for one in candidates]), max_size=3))
    before = lost(everyone, late)
    for _ in range(2):
        found = placed(before)
        assume(isinstance(found, Placement))
        assert isinstance(found, Placement)
        gone = draw(st.lists(st.sampled_from([one.node_id for one in candidates]), max_size=4))
        before = replace(lost(everyone, gone), previous=seats(found.chosen))
    return before


@pytest.mark.rule("C6")
@settings(max_examples=200)
@given(successors())
def test_sticky_ranks_move_as_few_survivors_as_possible(instance: Instance) -> None:
    found = placed(instance)
    assume(isinstance(found, Placement))
    assert isinstance(found, Placement)
    assert frozenset(found.chosen) == best_world(instance)
    ranks = chosen(found, instance)
    assert has_whole_segments(ranks, instance.shape.segment_size or 1)
    assert at_rest(ranks, instance) == most_at_rest(ranks, instance)
    size = instance.shape.segment_size
    if size is None:
        survivors = [one for one in ranks if one.node_id in instance.previous]
        assert at_rest(ranks, instance) == len(survivors), "nobody who stays is moved"
        newcomers = [one for one in ranks if one.node_id not in instance.previous]
        assert newcomers == sorted(newcomers, key=lambda one: one.order), "freed ranks in ascending order"
    else:
        for domain in {one.domain for one in ranks}:
            moved = [
                one
                for rank, one in enumerate(ranks)
                if one.domain == domain and instance.previous.get(one.node_id) != rank
            ]
            assert moved == sorted(moved, key=lambda one: one.order), "in infra order within the domain"


@pytest.mark.rule("C6")
def test_a_rank_that_is_no_longer_there_is_not_kept() -> None:
    """A mapping of another world: a rank beyond MIN, and one that two nodes claim."""
    shape = shape_of(2, 1, None, RankPolicy.STICKY)
    previous = {NodeId("a"): GroupRank(7), NodeId("b"): GroupRank(0)}
    found = place([node("a"), node("b")], shape, previous)
    assert isinstance(found, Placement)
    assert found.chosen == ("b", "a")
    found = place([node("a"), node("b")], shape, {NodeId("a"): GroupRank(1), NodeId("b"): GroupRank(1)})
    assert isinstance(found, Placement)
    assert found.chosen == ("b", "a")


@pytest.mark.rule("C6")
def test_a_newcomer_takes_the_freed_rank_of_its_segment() -> None:
    nodes = [node(f"n{index}", None, f"d{index // 4}") for index in range(8)]
    shape = shape_of(4, 1, 2, RankPolicy.STICKY)
    previous = dict(zip(map(NodeId, ["n4", "n5", "n0", "n1"]), map(GroupRank, range(4)), strict=True))
    found = place([one for one in nodes if one.node_id != "n4"], shape, previous)
    assert isinstance(found, Placement)
    assert found.chosen == ("n6", "n5", "n0", "n1")
    found = place(nodes[:4] + nodes[5:6], shape, previous)
    assert isinstance(found, Placement)
    assert found.chosen == ("n2", "n3", "n0", "n1"), "a whole segment takes the place of a broken one"


@pytest.mark.rule("C6")
def test_a_domain_keeps_the_segment_in_which_most_stay() -> None:
    nodes = [node(f"n{index}", None, "A" if index < 6 else "B") for index in range(9)]
    previous = seats(NodeId(f"n{index}") for index in range(6))
    found = place(nodes[2:], shape_of(6, 1, 3, RankPolicy.STICKY), previous)
    assert isinstance(found, Placement)
    assert found.chosen == ("n6", "n7", "n8", "n3", "n4", "n2")


# ---- single mistakes ------------------------------------------------------------------------------------


@pytest.mark.rule("C5")
def test_survivors_are_counted_by_node_not_by_group() -> None:
    """g0 has one node of the world before, g1 two; g2 and g3 one each."""
    nodes = [node(f"n{index}", f"g{index // 2}") for index in range(8)]
    previous = seats(map(NodeId, ["n0", "n6", "n7", "n4"]))
    found = place(nodes, shape_of(4, 2, None), previous)
    assert isinstance(found, Placement)
    assert found.chosen == ("n0", "n1", "n6", "n7")


@pytest.mark.rule("C1", "C5")
def test_a_last_resort_gives_way_even_if_it_trained_before() -> None:
    nodes = [node("n0", last_resort=True), node("n1"), node("n2")]
    found = place(nodes, shape_of(2, 1, None), seats(map(NodeId, ["n0", "n1"])))
    assert isinstance(found, Placement)
    assert found.chosen == ("n1", "n2")
    found = place(nodes, shape_of(3, 1, None), {})
    assert isinstance(found, Placement), "last, not never"


@pytest.mark.rule("C1", "C2")
def test_last_resorts_are_counted_by_node_not_by_group() -> None:
    nodes = [node(f"n{index}", f"g{index // 2}", last_resort=index < 3) for index in range(4)]
    found = place(nodes, shape_of(2, 2, None), {})
    assert isinstance(found, Placement)
    assert found.chosen == ("n2", "n3"), "one last resort rather than two"


@pytest.mark.rule("C1", "C5")
def test_a_tied_world_with_a_last_resort_is_not_kept_either() -> None:
    """Pairs across A and B: two of four are taken, and one of the two before is unwell."""
    nodes = [
        node(f"n{index}", f"g{index // 2}", "AB"[index % 2] if index < 8 else "B", last_resort=index == 0)
        for index in range(10)
    ]
    found = place(nodes, shape_of(4, 2, 2), seats(map(NodeId, ["n0", "n1", "n2", "n3"])))
    assert isinstance(found, Placement)
    assert set(found.chosen) == {"n2", "n3", "n4", "n5"}
    ring = [node(f"{one}{end}", one, one["pq".index(end)], last_resort=one == "AB") for one in RING for end in "pq"]
    found = place(ring, shape_of(8, 2, 2), seats(one.node_id for one in ring[:8]))
    assert isinstance(found, Placement)
    assert "ABp" not in found.chosen, "the ring that is well takes the place of the other"


@pytest.mark.rule("C2")
def test_a_group_with_too_many_members_does_not_count() -> None:
    nodes = [node("n0", "g0"), node("n1", "g0"), node("n2", "g0"), node("n3", "g1"), node("n4", "g1")]
    found = place(nodes, shape_of(2, 2, None), {})
    assert isinstance(found, Placement)
    assert found.chosen == ("n3", "n4")


@pytest.mark.rule("C3", "C4")
def test_two_groups_across_the_same_two_domains() -> None:
    """Neither group alone makes whole segments; both together do."""
    nodes = [node(f"n{index}", f"g{index // 2}", f"d{index % 2}") for index in range(4)]
    found = place(nodes, shape_of(4, 2, 2), {})
    assert isinstance(found, Placement)
    assert found.chosen == ("n0", "n2", "n1", "n3"), "domains unbroken"


@pytest.mark.rule("C3", "C4")
def test_two_units_may_be_whole_in_one_domain_and_not_in_the_other() -> None:
    """Groups of 3 with 2 nodes in one domain and 1 in another: two fill a segment of 4 in the first, four in both."""
    nodes = [
        node(f"{pair}{group}-{index}", f"{pair}{group}", f"{pair}{'AAB'[index]}")
        for pair in "xy"
        for group in range(4)
        for index in range(3)
    ]
    shape = shape_of(12, 3, 4)
    three_each = [one for one in nodes if one.group not in {"x0", "y0"}]
    assert isinstance(place(three_each, shape, {}), Shortage)
    found = place([one for one in nodes if one.group != "x0"], shape, {})
    assert isinstance(found, Placement)
    assert {one[0] for one in found.chosen} == {"y"}


@pytest.mark.rule("C4", "C5")
def test_more_may_be_worth_more_than_twice_as_much() -> None:
    """Four pairs in a ring of domains, all kept, and a fifth beside the first: two pairs keep one, four keep four."""
    rings = [("A", "B"), ("B", "C"), ("C", "D"), ("D", "A"), ("A", "B")]
    nodes = [
        node(f"{ring}{group}{end}", f"{ring}{group}", f"{ring}{pair['ab'.index(end)]}")
        for ring in "xy"
        for group, pair in enumerate(rings)
        for end in "ab"
    ]
    kept = [one.node_id for one in nodes if not str(one.group).endswith("4")]
    found = place(nodes, shape_of(8, 2, 2), seats(kept))
    assert isinstance(found, Placement)
    assert sorted(found.chosen) == kept[:8]
    found = place(nodes, shape_of(4, 2, 2), seats(kept))
    assert isinstance(found, Placement)
    assert sorted(found.chosen) == ["x0a", "x0b", "x4a", "x4b"]


@pytest.mark.rule("C4")
def test_the_bound_is_counted_over_all_components() -> None:
    """Many small components, each within its own bound: the sum has one as well."""
    nodes = [
        node(f"n{block}-{index}", f"g{block}-{index // 2}", f"d{block}-{'aabbab'[index]}")
        for block in range(12)
        for index in range(6)
    ]
    shape = shape_of(24, 2, 2)
    field = lay_out(nodes, shape, {}, Wanted(), ())
    full = choose(field.units, 12, 2, Bounds())
    assert full.proven
    assert Counter(one for one in full.positions or ()).total() == 24
    cut = choose(field.units, 12, 2, Bounds(total=10))
    assert not cut.proven or cut.positions == full.positions
