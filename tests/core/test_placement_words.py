"""What `place` says: why a node is left out, what a shortage lacks, which wish cannot be met."""

import pytest

from nvrx.core.ids import DomainId, GroupId, NodeId
from nvrx.core.placement import Absent, Bounds, Candidate, Placement, Shortage, Wanted, place
from nvrx.core.shape import RankPolicy, Shape

from .placement_twin import node, seats, shape_of


def reasons(found: Placement | Shortage) -> dict[str, str]:
    assert isinstance(found, Placement), found
    return {str(one.node_id): one.reason for one in found.left_out}


def shortage(found: Placement | Shortage) -> str:
    assert isinstance(found, Shortage), found
    return found.reason


def nodes(*rows: str) -> list[Candidate]:
    """`name group domain`, with `-` for none and a final `!` for a last resort."""
    made = []
    for row in rows:
        name, group, domain = row.rstrip("!").split()
        made.append(
            node(name, None if group == "-" else group, None if domain == "-" else domain, last_resort=row[-1] == "!")
        )
    return made


def ids(*names: str) -> frozenset[NodeId]:
    return frozenset(map(NodeId, names))


GONE = Absent(NodeId("n7"), GroupId("g3"), DomainId("B"), "lost 12 s ago")


@pytest.mark.rule("C5")
def test_why_a_node_is_left_out() -> None:
    some = nodes("n0 - -", "n1 - -!", "n2 - -", "n3 - -")
    assert reasons(place(some, shape_of(2, 1, None), {})) == {
        "n1": "quarantined or degraded: chosen last",
        "n3": "2 nodes come before it in infra order",
    }
    found = place(some, shape_of(2, 1, None), seats(map(NodeId, ["n2", "n3"])))
    assert reasons(found)["n0"] == "the world of 2 keeps 2 nodes of the cycle before"
    found = place(some, shape_of(2, 1, None), {}, Wanted(exclude=ids("n0")))
    assert reasons(found)["n0"] == "drained"
    found = place(some, shape_of(2, 1, None), seats(map(NodeId, ["n2", "n3"])), Wanted(include=ids("n0")))
    assert reasons(found)["n3"] == "nodes asked for by hand take its place"


@pytest.mark.rule("C2")
def test_why_a_node_of_a_broken_group_is_left_out() -> None:
    some = nodes("n0 g0 -", "n1 g0 -", "n2 g1 -!", "n3 g1 -", "n4 - -", "n5 g2 -", "n6 g3 -", "n8 g4 -", "n9 g4 -")
    found = place(some, shape_of(2, 2, None), {}, Wanted(exclude=ids("n9")), [GONE])
    assert reasons(found) == {
        "n2": "quarantined or degraded: chosen last",
        "n3": "n2 of its group g1 is quarantined or degraded: chosen last",
        "n4": "it has no replacement group id, and groups have 2 nodes",
        "n5": "its group g2 has 1 of 2 nodes here",
        "n6": "its group g3 has 1 of 2 nodes here (n7 lost 12 s ago)",
        "n8": "its group g4 has 1 of 2 nodes here (n9 drained)",
        "n9": "drained",
    }
    found = place(nodes("n0 g0 -", "n1 g0 -", "n2 g0 -", "n3 g1 -", "n4 g1 -"), shape_of(2, 2, None), {})
    assert reasons(found)["n0"] == "its group g0 has 3 nodes here, and groups have 2"


@pytest.mark.rule("C3")
def test_why_a_node_of_a_domain_is_left_out() -> None:
    some = nodes("n0 - A", "n1 - A", "n2 - A", "n3 - -", "n4 - B", "n5 - B", "n6 - C", "n7 - C")
    assert reasons(place(some, shape_of(4, 1, 2), {})) == {
        "n2": "domain A gives 2 of its 3 nodes: segments have 2",
        "n3": "it has no domain, and segments have 2 nodes of one domain",
        "n6": "4 nodes come before it in infra order",
        "n7": "4 nodes come before it in infra order",
    }
    some = nodes("n0 g0 A", "n1 g0 -", "n2 g1 A", "n3 g1 A")
    assert reasons(place(some, shape_of(2, 2, 2), {})) == {
        "n0": "n1 of its group g0 has no domain",
        "n1": "it has no domain, and segments have 2 nodes of one domain",
    }


@pytest.mark.rule("C4", "D9")
def test_what_a_shortage_lacks() -> None:
    assert shortage(place(nodes("n0 - -"), shape_of(2, 1, None), {})) == "1 of 2 nodes are ready"
    assert shortage(place([], shape_of(2, 1, 2), {})) == "0 of 2 nodes are ready"
    some = nodes("n1 g1 A", "n2 g1 A", "n3 g2 A", "n4 g2 B", "n5 g3 B")
    assert shortage(place(some, shape_of(6, 2, 2), {}, absent=[GONE])) == (
        "5 of 6 nodes are ready: group g3 has 1 of 2 (n7 lost 12 s ago); "
        "domain A gives 2 of its 3 (segments of 2); domain B has 1 of 2 (segments of 2)"
    )
    some = nodes("n1 g1 A", "n2 g1 A", "n3 g2 A", "n4 - B", "n5 g3 B", "n6 g4 -")
    assert shortage(place(some, shape_of(4, 2, 2), {}, Wanted(exclude=ids("n3")))) == (
        "5 nodes are ready, but at most 2 of 4 can train together: group g2 has 0 of 2 (n3 drained); "
        "group g3 has 1 of 2; group g4 has 1 of 2; n4: no replacement group id; n6: no domain"
    )
    some = nodes("n0 g0 A", "n1 g0 B", "n2 g1 A", "n3 g1 C", "n4 g2 B", "n5 g2 D", "n6 g3 C", "n7 g3 D")
    assert shortage(place(some, shape_of(6, 2, 2), {})) == (
        "8 nodes are ready, but no 6 of them make whole groups and whole segments"
    )
    assert shortage(place(some, shape_of(6, 2, 2), {}, bounds=Bounds(0, 0))) == (
        "undecided: 4 groups tie 4 domains; no world was found among 8 ready nodes so far"
    ), "past the bound it is never called impossible"
    gone = [Absent(NodeId("n1"), None, None, "lost 3 s ago")]
    assert shortage(place(nodes("n0 - -"), shape_of(2, 1, None), {}, absent=gone)) == (
        "1 of 2 nodes are ready: n1 lost 3 s ago"
    )
    many = nodes(*(f"n{index} g{index} -" for index in range(10, 22)))
    assert shortage(place(many, shape_of(12, 2, None), {})).endswith("group g17 has 1 of 2; and 4 more")


@pytest.mark.rule("F1")
def test_which_wish_cannot_be_met() -> None:
    some = nodes("n0 g0 A", "n1 g0 A", "n2 g1 B", "n3 g1 B", "n4 g2 C", "n5 g2 D", "n6 g3 A")
    shape = shape_of(2, 2, 2)

    def wish(include: frozenset[NodeId], exclude: frozenset[NodeId] = frozenset()) -> str:
        return shortage(place(some, shape, {}, Wanted(include, exclude), [GONE]))

    assert wish(ids("n0"), ids("n0")) == "n0 cannot be in the world and drained at once"
    assert wish(ids("n0"), ids("n1")) == ("n0 cannot be in the world: its group g0 has 1 of 2 nodes here (n1 drained)")
    assert wish(ids("n7")) == "n7 cannot be in the world: lost 12 s ago"
    assert wish(ids("n8")) == "n8 cannot be in the world: it is not ready"
    assert wish(ids("n6")) == "n6 cannot be in the world: its group g3 has 1 of 2 nodes here (n7 lost 12 s ago)"
    assert wish(ids("n0", "n2")) == "4 nodes are asked for, with their groups, and the world has 2"
    assert wish(ids("n4")) == (
        "n4 cannot be in the world: no 2 of 7 ready nodes make whole groups and whole segments with it"
    )
    found = place(some, shape, seats(map(NodeId, ["n0", "n1"])), Wanted(ids("n3")))
    assert isinstance(found, Placement)
    assert found.chosen == ("n2", "n3"), "with its group, even where the world before was another"


@pytest.mark.rule("A7")
@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (Shape(6, 8, 1, segment_size=3, replacement_group_size=2), None),
        (Shape(6, 8, 1, segment_size=4), "MIN 6 is no multiple of the segment size 4"),
        (Shape(6, 8, 1, replacement_group_size=4), "MIN 6 is no multiple of the replacement group size 4"),
        (Shape(6, 8, 1, segment_size=0), "the segment size is 0; a whole number from 1 up is possible"),
        (
            Shape(6, 8, 1, replacement_group_size=-1),
            "the replacement group size is -1; a whole number from 1 up is possible",
        ),
    ],
)
def test_min_is_a_multiple_of_groups_and_segments(shape: Shape, problem: str | None) -> None:
    assert shape.problem() == problem
    assert shape.rank_policy is RankPolicy.INFRA
