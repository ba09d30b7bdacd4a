"""The order in which nodes and places are listed, as the contract promises it (RunService, RankMapService)."""

from __future__ import annotations

from functools import reduce

import pytest

from nvrx.core.facts import (
    Cause,
    CycleEnded,
    Fact,
    Failure,
    NodeInfo,
    NodeJoined,
    NodeLost,
    Placed,
    RunOpened,
    Seat,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, GroupRank, Incarnation, InfraRank, NodeId, RunId
from nvrx.core.ranks import find_node, members_in_order
from nvrx.core.run import Run, evolve
from nvrx.core.shape import Settings, Shape
from nvrx.core.topology import OrderSource


def seat(name: str, group_rank: int) -> Seat:
    return Seat(Placed(NodeId(name), Incarnation(f"{name}-1"), "h", InfraRank(0), name), GroupRank(group_rank))


def joined(name: str) -> NodeJoined:
    sources = {OrderSource.NODE_ID: name}
    return NodeJoined(0.0, NodeInfo(NodeId(name), Incarnation(f"{name}-1"), "h", 1, order_sources=sources))


def chosen(cycle: int, *names: str) -> WorldChosen:
    seats = tuple(seat(name, group_rank) for group_rank, name in enumerate(names))
    return WorldChosen(1.0, CycleNumber(cycle), OrderSource.NODE_ID, seats, (), None)


@pytest.fixture
def run() -> Run:
    """n10, n9 and n2 joined in this order; n2 was lost, n9 and n10 train in cycle 1."""
    facts: list[Fact] = [
        RunOpened(0.0, RunId("r"), Shape(2, 4, 2), Settings()),
        *map(joined, ("n10", "n9", "n2", "n1")),
        chosen(0, "n2", "n9"),
        NodeLost(2.0, NodeId("n2"), Incarnation("n2-1"), "silent"),
        CycleEnded(2.0, CycleNumber(0), Failure(Cause.NODE_LOST, NodeId("n2"))),
        chosen(1, "n10", "n9"),
    ]
    first, *rest = facts
    return reduce(evolve, rest, evolve(None, first))


def test_nodes_are_listed_active_first_then_in_infra_order(run: Run) -> None:
    assert [one.info.node_id for one in members_in_order(run)] == ["n10", "n9", "n1", "n2"]


@pytest.mark.rule("H2")
def test_places_of_a_node_are_listed_latest_cycle_first_then_by_rank(run: Run) -> None:
    places = [(one.cycle.number, one.seat.group_rank, one.local_rank) for one in find_node(run, NodeId("n9"))]
    assert places == [(1, 1, 0), (1, 1, 1), (0, 1, 0), (0, 1, 1)]
