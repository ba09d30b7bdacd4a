"""Groups, segments and sticky ranks through whole cycles: shape, groups and domains reach `place`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from nvrx.core.facts import NodeInfo
from nvrx.core.ids import DomainId, GroupId, NodeId
from nvrx.core.shape import RankPolicy, Shape
from nvrx.core.topology import OrderSource

from .driver import Node, World


@dataclass
class GroupedNode(Node):
    """Nodes n0 and n1 are group g0, and so on; n0 to n3 are domain d0, and so on."""

    def info(self) -> NodeInfo:
        number = int(self.name[1:])
        return dataclasses.replace(
            super().info(),
            replacement_group_id=GroupId(f"g{number // 2}"),
            domain_id=DomainId(f"d{number // 4}"),
        )


@dataclass
class GroupedWorld(World):
    policy: RankPolicy = RankPolicy.INFRA

    @property
    def shape(self) -> Shape:
        return dataclasses.replace(super().shape, segment_size=2, replacement_group_size=2, rank_policy=self.policy)

    def node(self, name: str, order: Mapping[OrderSource, str] | None = None) -> Node:
        node_id = NodeId(name)
        return self.nodes.setdefault(node_id, GroupedNode(node_id, len(self.nodes), order or {}))


@pytest.mark.rule("C2", "C3", "C6")
@pytest.mark.parametrize(
    ("policy", "after_one_loss", "after_two"),
    [
        (RankPolicy.INFRA, ["n2", "n3", "n4", "n5"], ["n4", "n5", "n6", "n7"]),
        (RankPolicy.STICKY, ["n4", "n5", "n2", "n3"], ["n4", "n5", "n6", "n7"]),
    ],
)
def test_a_lost_node_takes_its_group_out_of_the_world(
    policy: RankPolicy, after_one_loss: list[str], after_two: list[str]
) -> None:
    world = GroupedWorld(4, 8, policy=policy)
    world.join(*(f"n{number}" for number in range(8)))
    world.start()
    assert world.active() == ["n0", "n1", "n2", "n3"]
    world.kill("n1")
    world.advance(5)
    world.stopped("n0")
    assert world.active() == after_one_loss
    assert {str(one.node.node_id): one.reason for one in world.cycle.standbys} == {
        "n0": "its group g0 has 1 of 2 nodes here (n1 lost)",
        "n6": "the world of 4 keeps 2 nodes of the cycle before",
        "n7": "the world of 4 keeps 2 nodes of the cycle before",
    }
    world.start()
    world.kill("n2")
    world.advance(5)
    world.stopped("n3")
    assert world.active() == after_two
    world.start()
    world.kill("n5")
    world.advance(5)
    assert world.waiting() == (
        "5 nodes are ready, but at most 2 of 4 can train together: group g0 has 1 of 2 (n1 lost); "
        "group g1 has 1 of 2 (n2 lost); group g2 has 1 of 2 (n5 lost) "
        "(5 of 4 joined: n0, n3, n4, n6, n7; gone: n5 (its stream broke; silent for 2.0 s))"
    )
