"""Field cases of membership that no other test has: names alike, many at once, silent clocks (rules B1, B2, E1)."""

from __future__ import annotations

import pytest

from nvrx.core.facts import WorldChosen
from nvrx.core.refused import Reason, Refused
from nvrx.core.run import CycleState

from .driver import World, trained


@pytest.mark.rule("B2")
def test_two_nodes_of_one_name_are_never_merged() -> None:
    """C045: every container calls itself `worker`; the second is refused, by name and by both addresses."""
    world = World(2, 3)
    world.join("worker")
    command = world.join_command("worker")
    world.node("worker").life += 1
    second = world.join_command("worker")
    with pytest.raises(Refused) as caught:
        world.submit(second)
    assert caught.value.reason is Reason.NODE_ALREADY_JOINED
    assert "node worker has already joined from 10.0.0.0" in caught.value.message
    assert world.run.members[command.node.node_id].info.incarnation == command.node.incarnation


@pytest.mark.rule("B1")
def test_names_that_share_a_long_prefix_are_two_nodes() -> None:
    """C046: they differ in the last character, or in their domain only."""
    names = [
        "trainer-a100-pool-0000000000000001",
        "trainer-a100-pool-0000000000000002",
        "trainer-a100-pool-0000000000000001.west",
        "trainer-a100-pool-0000000000000001.east",
    ]
    world = World(4, 4)
    world.join(*names)
    assert sorted(world.active()) == sorted(names)


@pytest.mark.rule("D3", "C5")
def test_many_nodes_that_join_and_fail_at_once_make_one_map_each() -> None:
    """C139, C140: 64 join, 16 die at once: one cycle of 48, then one more of 48."""
    world = trained(48, 64)
    assert len({seat.group_rank for seat in world.cycle.seats}) == 48
    world.kill(*(f"n{number}" for number in range(16)))
    world.advance(3)
    world.start()
    assert len(world.of(WorldChosen)) == 2
    assert world.cycle.state is CycleState.RUNNING
    assert sorted(seat.group_rank for seat in world.cycle.seats) == list(range(48))
