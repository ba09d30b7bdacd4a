"""Rank maps, both ways, and what each node is told (C6, H1, H2; D1)."""

import pytest

from nvrx.core.ids import CycleNumber, GlobalRank, GroupRank, Incarnation, LocalRank, NodeId, first_rank, global_rank
from nvrx.core.ranks import (
    Action,
    NodeState,
    Replacement,
    desired,
    find_gpu,
    find_node,
    find_rank,
    mapped_nodes,
    node_state,
    replacements,
)
from nvrx.core.run import SeatState
from nvrx.core.shape import SettingsWish

from .driver import World, trained


@pytest.mark.rule("C6")
@pytest.mark.parametrize(
    ("group_rank", "local_rank", "workers", "rank"), [(0, 0, 8, 0), (0, 7, 8, 7), (3, 2, 8, 26), (5, 0, 1, 5)]
)
def test_global_rank(group_rank: int, local_rank: int, workers: int, rank: int) -> None:
    assert global_rank(GroupRank(group_rank), LocalRank(local_rank), workers) == rank
    assert first_rank(GroupRank(group_rank), workers) == rank - local_rank


@pytest.mark.rule("H2")
def test_lookup_both_ways() -> None:
    """Field case C023: the failed cycle's map and the current one."""
    world = trained(2, 3)
    world.exit("n1", 0, 9)
    world.kill("n1")
    world.advance(3)
    first, last = world.run.cycles[0], world.cycle
    was = find_rank(world.run, first, GlobalRank(2))
    now = find_rank(world.run, last, GlobalRank(2))
    assert was is not None
    assert now is not None
    assert (was.seat.node.node_id, was.local_rank) == ("n1", 0)
    assert (now.seat.node.node_id, now.local_rank) == ("n2", 0)
    for cycle in (first, last):
        for rank in range(world.run.shape.world_size):
            place = find_rank(world.run, cycle, GlobalRank(rank))
            assert place is not None
            assert global_rank(place.seat.group_rank, place.local_rank, world.workers) == rank
    ranks = [(one.cycle.number, one.seat.group_rank, one.local_rank) for one in find_node(world.run, NodeId("n2"))]
    assert ranks == [(2, 1, 0), (2, 1, 1)]
    gpus = [(one.cycle.number, one.seat.group_rank, one.local_rank) for one in find_gpu(world.run, "GPU-n1")]
    assert gpus == [(1, 1, 0), (0, 1, 0)], "the latest cycle first"
    assert not list(find_gpu(world.run, "GPU-n9"))
    assert not list(find_node(world.run, NodeId("n9")))


@pytest.mark.rule("H2")
@pytest.mark.parametrize("rank", [-1, 4, 1 << 40])
def test_ranks_that_no_world_has(rank: int) -> None:
    world = trained(2, 3)
    assert find_rank(world.run, world.cycle, GlobalRank(rank)) is None


@pytest.mark.rule("H1")
def test_the_map_says_how_each_node_ended() -> None:
    world = trained(3, 4)
    world.finish("n2")
    world.exit("n0", 1, 1)
    world.exit("n0", 1, 1)
    rows = list(mapped_nodes(world.run, world.run.cycles[0]))
    assert [row.node.node_id for row in rows] == ["n0", "n1", "n2"]
    assert [row.state for row in rows] == [SeatState.FAILED, None, SeatState.SUCCEEDED]
    assert [one.local_rank for one in rows[2].exits] == [0, 1]
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert failure.rank == 1


@pytest.mark.rule("H1")
def test_who_replaced_whom() -> None:
    world = trained(3, 6)
    world.kill("n0", "n2")
    world.advance(3)
    assert list(replacements(world.run, world.cycle)) == [
        Replacement(NodeId("n0"), NodeId("n3")),
        Replacement(NodeId("n2"), NodeId("n4")),
    ]
    assert list(replacements(world.run, world.run.cycles[0])) == []


@pytest.mark.rule("H1")
def test_who_replaced_whom_across_a_gap_in_the_numbers() -> None:
    world = trained(1, 3)
    world.node("n9").last_cycle = CycleNumber(40)
    world.leave("n2", stopped=True)
    world.join("n9")
    world.kill("n0")
    world.advance(3)
    assert world.cycle.number == 41
    assert list(replacements(world.run, world.cycle)) == [Replacement(NodeId("n0"), NodeId("n1"))]


def told(world: World, name: str) -> tuple[Action, int | None, int | None]:
    wanted = world.desired(name)
    assignment = wanted.assignment
    assert (assignment is not None) == (wanted.action is Action.RUN)
    return wanted.action, wanted.cycle, None if assignment is None else assignment.group_rank


@pytest.mark.rule("D1", "D2")
def test_what_nodes_are_told() -> None:
    world = World(2, 3, wish=SettingsWish(max_restarts=1))
    world.join("n0")
    assert told(world, "n0") == (Action.WAIT, None, None)
    world.join("n1", "n2")
    assert [told(world, name) for name in ("n0", "n1", "n2")] == [
        (Action.RUN, 0, 0),
        (Action.RUN, 0, 1),
        (Action.WAIT, 0, None),
    ]
    world.start()
    world.kill("n1")
    world.exit("n0", 0, 1)
    assert [told(world, name) for name in ("n0", "n2")] == [(Action.STOP, 0, None), (Action.WAIT, 0, None)]
    world.advance(3)
    assert [told(world, name) for name in ("n0", "n2")] == [(Action.RUN, 1, 0), (Action.RUN, 1, 1)]
    assert world.desired("n0").failed_cycle == 0
    assert world.desired("n2").failed_cycle is None, "it had no part in it"
    world.exit("n0", 0, 1)
    world.exit("n0", 0, 1)
    assert [told(world, name)[0] for name in ("n0", "n2")] == [Action.EXIT, Action.EXIT]
    assert world.desired("n2").exit_code == 1
    assert "max_restarts 1" in world.desired("n2").reason


@pytest.mark.rule("B2")
def test_another_incarnation_has_no_seat() -> None:
    world = trained(2, 3)
    assert desired(world.run, NodeId("n0"), Incarnation("other"), "").action is Action.WAIT


@pytest.mark.rule("G1")
def test_all_nodes_see_the_same_world() -> None:
    """Field case C025."""
    world = trained(4, 6)
    world.exit("n0", 0, 1)
    assignments = [world.desired(name).assignment for name in world.active()]
    seen = {
        (one.cycle, one.world_size, one.group_world_size, one.master, one.max_restarts) for one in assignments if one
    }
    assert len(seen) == 1
    assert [one.group_rank for one in assignments if one] == [0, 1, 2, 3]


@pytest.mark.rule("H1")
def test_node_states() -> None:
    world = trained(2, 5)
    world.kill("n0")
    world.leave("n4", stopped=True)
    world.advance(3)
    states = {str(name): node_state(world.run, member) for name, member in world.run.members.items()}
    assert states == {
        "n0": NodeState.LOST,
        "n1": NodeState.ACTIVE,
        "n2": NodeState.ACTIVE,
        "n3": NodeState.STANDBY,
        "n4": NodeState.LEFT,
    }
