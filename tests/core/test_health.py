"""What nodes say of their health: who is replaced, who is kept, which check is the suspect (rules G11, C1, E8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvrx.core.budgets import restarts_used
from nvrx.core.commands import Join
from nvrx.core.facts import (
    Cause,
    CheckSuspected,
    CheckTrusted,
    CycleEnded,
    NodeFailedCheck,
    NodeRecovered,
    RunState,
)
from nvrx.core.health import MASS_WITHIN_S
from nvrx.core.ids import GroupId, NodeId
from nvrx.core.presence import Health
from nvrx.core.ranks import NodeState, node_reason, node_state
from nvrx.core.replacement import health_notices
from nvrx.core.shape import SettingsWish, Shape
from nvrx.core.topology import OrderSource

from .driver import World, trained

MANY = SettingsWish(max_restarts=50)


def notices(world: World) -> str:
    return "\n".join(health_notices(world.run, world.presence, world.now))


def settle(world: World) -> None:
    """Who left the world has stopped its workers, and the next cycle runs."""
    for _ in range(3):
        if not world.is_training:
            world.stopped(*(one for one in world.active() if world.run.live(NodeId(one)) is not None))
            world.tick()
    world.start()


@pytest.mark.rule("G11", "E8", "D5")
class TestReplacing:
    def test_an_unhealthy_node_is_replaced_now_and_the_cycle_says_why(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        failure = world.cycle.failure
        assert failure is not None
        assert (failure.cause, failure.node_id, failure.message) == (Cause.NODE_UNHEALTHY, "n1", "disk: is full")
        settle(world)
        assert world.active() == ["n0", "n2"]
        assert restarts_used(world.run) == 1

    def test_its_workers_are_given_time_to_end(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        assert not world.is_training
        assert "n1 leaves the world and its workers are still stopping" in world.waiting()
        world.advance(17.0)
        assert world.active() == ["n0", "n2"]

    def test_it_stays_a_member_without_workers_and_its_agent_may_end(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        told = world.desired("n1")
        assert told.excluded
        assert told.reason == "excluded: unhealthy, disk: is full"
        member = world.run.members[NodeId("n1")]
        assert node_state(world.run, member) is NodeState.UNHEALTHY
        assert node_reason(world.run, member) == "unhealthy: disk: is full"
        shown = {one.node.node_id: one.reason for one in world.cycle.standbys}
        assert shown == {"n1": "unhealthy (disk: is full)"}

    def test_a_node_that_is_well_again_may_be_chosen(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        world.heals("n1")
        assert len(world.of(NodeRecovered)) == 1
        assert not world.desired("n1").excluded
        assert world.active() == ["n0", "n2"], "it takes nobody's place"
        world.kill("n2")
        world.advance(3)
        assert world.active() == ["n0", "n1"]

    def test_an_unhealthy_standby_ends_nothing_and_is_not_chosen(self) -> None:
        world = trained(2, 4)
        world.ails("n2")
        assert world.is_training
        assert world.desired("n2").excluded
        world.exit("n1", 0, 1)
        world.kill("n1")
        world.advance(3)
        assert world.active() == ["n0", "n3"]

    def test_where_there_is_no_world_without_it_it_stays_and_status_says_so(self) -> None:
        world = trained(2, 2)
        world.ails("n1")
        world.advance(5)
        assert world.is_training
        assert not world.of(CycleEnded)
        assert notices(world) == (
            "unhealthy, and kept in the world: n1 (disk: is full); there is no world without: "
            "1 of 2 nodes are ready: n1 unhealthy (disk: is full)"
        )
        member = world.run.members[NodeId("n1")]
        assert node_state(world.run, member) is NodeState.ACTIVE
        assert "kept in the world" in node_reason(world.run, member)

    def test_it_is_replaced_as_soon_as_another_joins(self) -> None:
        world = World(2, 3)
        world.join("n0", "n1")
        world.advance(2)
        world.start()
        world.ails("n0")
        assert world.is_training
        world.join("n2")
        assert world.cycle.failure is not None
        settle(world)
        assert world.active() == ["n1", "n2"]

    def test_one_that_is_well_again_in_time_stays(self) -> None:
        world = trained(2, 2)
        world.ails("n1")
        world.heals("n1")
        world.advance(5)
        assert world.is_training
        assert notices(world) == ""

    def test_a_cycle_is_not_ended_when_the_run_would_end_with_it(self) -> None:
        for wish in (SettingsWish(max_restarts=0), SettingsWish(max_restarts=1)):
            world = trained(2, 3, wish=wish)
            if wish.max_restarts == 1:
                world.exit("n0", 0, 1)
                world.start()
            number = world.cycle.number
            world.advance(5)
            world.ails("n1")
            world.advance(5)
            assert world.is_training
            assert world.cycle.number == number
            assert "is used up, and the run would end" in notices(world)

    def test_what_is_found_while_a_failure_settles_costs_nothing_more(self) -> None:
        """D3: a GPU dies, its worker fails, and only then the check finds it."""
        world = trained(2, 3, wish=SettingsWish(max_restarts=1))
        world.exit("n1", 0, 1)
        world.advance(0.2)
        world.ails("n1", check="gpu", reason="GPU 0 fell off the bus")
        settle(world)
        assert world.active() == ["n0", "n2"]
        assert restarts_used(world.run) == 1
        assert [one.cause for one in world.run.cycles[0].consequences] == [Cause.NODE_UNHEALTHY]

    def test_before_the_first_world_it_is_waited_for_a_healthy_one(self) -> None:
        world = World(2, 3)
        world.join("n0", "n1")
        world.ails("n1")
        world.advance(5)
        assert "n1 unhealthy (disk: is full)" in world.waiting()
        world.join("n2")
        world.advance(2)
        assert world.active() == ["n0", "n2"]

    def test_a_run_that_only_unhealthy_nodes_could_go_on_gives_up_in_the_end(self) -> None:
        world = trained(2, 2, wish=SettingsWish(join_timeout_s=30.0))
        world.ails("n1")
        world.advance(20)
        world.exit("n0", 0, 1)
        assert "n1 unhealthy (disk: is full)" in world.waiting()
        world.advance(31)
        assert world.run.state is RunState.FAILED

    def test_one_that_has_finished_is_waited_for_no_more(self) -> None:
        world = trained(2, 3)
        world.finish("n1")
        world.ails("n1")
        assert world.is_training

    def test_a_new_incarnation_is_out_until_its_checks_have_told(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        world.kill("n1")
        world.advance(3)
        world.node("n1").health = None
        world.rejoin("n1")
        assert world.desired("n1").excluded
        world.heals("n1")
        assert not world.desired("n1").excluded

    def test_another_node_may_come_in_its_place(self) -> None:
        """A5: it does not count against MAX; when it is well again it waits for a place."""
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        world.join("n3")
        world.heals("n1")
        assert world.of(NodeRecovered) == []
        assert "well again, and waiting for a place" in notices(world)
        world.leave("n3")
        world.tick()
        assert len(world.of(NodeRecovered)) == 1


@pytest.mark.rule("G11", "C2")
def test_the_sisters_of_an_unhealthy_node_stand_by() -> None:
    world = _grouped()
    world.ails("n0")
    settle(world)
    assert world.active() == ["n2", "n3", "n4", "n5"]
    reasons = {one.node.node_id: one.reason for one in world.cycle.standbys}
    assert reasons[NodeId("n1")] == "its group g0 has 1 of 2 nodes here (n0 unhealthy (disk: is full))"


def _grouped() -> World:
    world = _Grouped(4, 6, 1, MANY)
    world.join(*(f"n{number}" for number in range(6)))
    world.start()
    return world


class _Grouped(World):
    """A world of groups of two."""

    @property
    def shape(self) -> Shape:
        return replace(super().shape, replacement_group_size=2)

    def join_command(self, name: str, *, reopen: bool = False) -> Join:
        command = super().join_command(name, reopen=reopen)
        group = GroupId(f"g{int(name[1:]) // 2}")
        return replace(command, node=replace(command.node, replacement_group_id=group))


@pytest.mark.rule("G11", "C1")
class TestDegraded:
    def test_it_ends_no_cycle_and_is_chosen_last_for_the_next_world(self) -> None:
        world = trained(2, 3)
        world.ails("n1", Health.DEGRADED, "disk", "is slow")
        world.advance(30)
        assert world.is_training
        assert notices(world) == "degraded, and chosen last for the next world: n1 (disk: is slow)"
        world.exit("n0", 0, 1)
        settle(world)
        assert world.active() == ["n0", "n2"]
        assert [one.reason for one in world.cycle.standbys] == ["degraded (disk: is slow): chosen last"]
        assert not world.desired("n1").excluded

    def test_it_trains_where_there_is_no_other(self) -> None:
        world = trained(2, 2)
        world.ails("n1", Health.DEGRADED)
        world.exit("n0", 0, 1)
        assert world.active() == ["n0", "n1"]
        assert world.is_training


def mass(world: World, *names: str, within_s: float = 1.0) -> None:
    for name in names:
        world.ails(name)
        world.advance(within_s)


@pytest.mark.rule("G11")
class TestMass:
    def test_a_check_that_fails_on_many_nodes_replaces_nobody(self) -> None:
        world = trained(2, 4, wish=MANY)
        world.nodes[NodeId("n0")].health = world.nodes[NodeId("n1")].health = None
        world.ails("n2")  # a standby: nobody is replaced for it
        mass(world, "n0", "n1", "n3")
        world.advance(30)
        assert world.is_training
        assert not world.of(CycleEnded)
        (fact,) = world.of(CheckSuspected)
        assert isinstance(fact, CheckSuspected)
        assert (fact.check, fact.node_ids, fact.nodes) == ("disk", ("n0", "n2"), 4)
        assert "check disk failed on 2 of 4 nodes within a minute (n0, n2): it is itself the suspect" in notices(world)

    def test_nodes_replaced_before_stay_out(self) -> None:
        world = trained(2, 4, wish=MANY)
        world.ails("n0")
        settle(world)
        assert world.active() == ["n1", "n2"]
        mass(world, "n1", "n2", "n3")
        assert world.active() == ["n1", "n2"]
        assert world.is_training
        world.exit("n1", 0, 1)
        settle(world)
        assert world.active() == ["n1", "n2"]
        assert [str(one.node.node_id) for one in world.cycle.standbys] == ["n3", "n0"]

    def test_a_suspect_check_keeps_nobody_out_of_the_next_world(self) -> None:
        world = trained(2, 2, wish=MANY)
        mass(world, "n0", "n1")
        assert len(world.of(NodeFailedCheck)) == 1, "only the first, which had to stay for want of another"
        world.heals("n0")
        world.exit("n1", 0, 1)
        settle(world)
        assert world.is_training

    @pytest.mark.parametrize(("nodes", "most"), [(20, 2), (30, 3), (9, 1)])
    def test_a_tenth_is_not_too_many(self, nodes: int, most: int) -> None:
        world = trained(2, nodes, 1, wish=MANY)
        names = [f"n{number}" for number in range(2, 3 + most)]
        mass(world, *names[:most], within_s=0.0)
        assert len(world.of(NodeFailedCheck)) == most
        assert not world.of(CheckSuspected)
        mass(world, names[most], within_s=0.0)
        assert len(world.of(CheckSuspected)) == 1
        assert len(world.of(NodeFailedCheck)) == most

    def test_failures_far_apart_or_of_other_checks_do_not_add_up(self) -> None:
        world = trained(2, 6, wish=MANY)
        world.ails("n3")
        world.advance(MASS_WITHIN_S)
        world.ails("n4")
        world.ails("n5", check="gpu")
        assert len(world.of(NodeFailedCheck)) == 3
        assert not world.of(CheckSuspected)

    def test_nodes_that_ended_because_they_are_out_count_too(self) -> None:
        """In an array an excluded node's agent exits: the next must not look like the first."""
        world = trained(2, 4, wish=MANY)
        world.ails("n0")
        settle(world)
        world.leave("n0", stopped=True)
        world.ails("n1")
        assert len(world.of(CheckSuspected)) == 1
        assert world.is_training

    def test_it_counts_again_a_minute_after_it_failed_on_many(self) -> None:
        world = trained(2, 5, wish=MANY)
        mass(world, "n2", "n0", "n1", "n3", within_s=0.0)
        world.advance(100)
        assert not world.of(CheckTrusted)
        world.heals("n2", "n0", "n3")
        world.advance(MASS_WITHIN_S - 2)
        assert world.is_training
        assert not world.of(CheckTrusted)
        world.advance(3)
        assert len(world.of(CheckTrusted)) == 1
        settle(world)
        assert "n1" not in world.active(), "it still fails there"
        assert world.run.cycles[0].failure is not None
        assert world.run.cycles[0].failure.node_id == "n1"

    def test_the_others_heal_one_after_the_other_and_the_last_is_not_replaced(self) -> None:
        world = trained(2, 4, wish=MANY)
        mass(world, "n2", "n0", "n1", within_s=0.0)
        world.advance(100)
        for name in ("n2", "n0", "n1"):
            world.heals(name)
            world.advance(30)
        world.advance(100)
        assert len(world.of(CheckTrusted)) == 1
        assert not world.of(CycleEnded)
        assert notices(world) == ""

    def test_the_one_replaced_before_it_was_suspect_speaks_against_it_too(self) -> None:
        """Two nodes fail, one is replaced, the check is suspect: it stays so while it fails on both."""
        world = trained(2, 4, wish=MANY)
        world.ails("n0")
        settle(world)
        world.ails("n1")
        assert len(world.of(CheckSuspected)) == 1
        world.advance(5 * MASS_WITHIN_S)
        assert not world.of(CheckTrusted)
        assert world.is_training
        world.heals("n0")
        world.advance(MASS_WITHIN_S + 2)
        assert len(world.of(CheckTrusted)) == 1
        settle(world)
        assert "n1" not in world.active()

    def test_one_that_is_gone_speaks_for_a_minute_only(self) -> None:
        world = trained(2, 4, wish=MANY)
        world.ails("n0")
        settle(world)
        world.leave("n0", stopped=True)
        world.ails("n1")
        world.advance(MASS_WITHIN_S - 2)
        assert not world.of(CheckTrusted)
        world.advance(4)
        assert len(world.of(CheckTrusted)) == 1
        assert world.run.cycles[-1].failure is not None or "n1" not in world.active()

    def test_it_stays_suspect_for_a_minute_even_if_all_are_well_at_once(self) -> None:
        world = trained(2, 4, wish=MANY)
        mass(world, "n2", "n0", within_s=0.0)
        world.heals("n2", "n0")
        world.advance(MASS_WITHIN_S - 1)
        assert not world.of(CheckTrusted)
        world.advance(2)
        assert len(world.of(CheckTrusted)) == 1

    def test_a_node_on_which_a_suspect_check_fails_is_chosen_last(self) -> None:
        world = trained(2, 4, wish=MANY)
        mass(world, "n3", "n0")
        world.exit("n1", 0, 1)
        settle(world)
        assert world.active() == ["n1", "n2"]
        reasons = {str(one.node.node_id): one.reason for one in world.cycle.standbys}
        assert reasons["n0"] == "degraded (disk: is full; but that check is suspect itself): chosen last"


@pytest.mark.rule("G11", "E5")
class TestAfterARestartOfTheCoordinator:
    def back(self, world: World, *names: str) -> None:
        world.restart_coordinator()
        for name in names:
            world.connect(name)
        world.advance(1)

    def test_nobody_is_replaced_twice(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        self.back(world, "n0", "n1", "n2")
        world.advance(30)
        assert world.is_training
        assert world.cycle.number == 1
        assert len(world.of(NodeFailedCheck)) == 1
        assert world.desired("n1").excluded

    def test_who_healed_meanwhile_may_be_chosen(self) -> None:
        world = trained(2, 3)
        world.ails("n1")
        settle(world)
        world.nodes[NodeId("n1")].health = None
        world.restart_coordinator()
        for name in ("n0", "n1", "n2"):
            world.connect(name)
        assert world.desired("n1").excluded, "it has not told yet"
        world.heals("n1")
        assert not world.desired("n1").excluded

    def test_a_suspect_check_is_still_suspect(self) -> None:
        world = trained(2, 4, wish=MANY)
        mass(world, "n2", "n0", "n1")
        self.back(world, "n3", "n0", "n1", "n2")
        world.advance(100)
        assert world.is_training
        assert len(world.of(CheckSuspected)) == 1
        assert not world.of(CycleEnded)

    def test_nobody_is_judged_before_all_may_be_back(self) -> None:
        world = trained(2, 3)
        world.restart_coordinator()
        world.connect("n1")
        world.ails("n1")
        world.advance(1)
        assert world.is_training
        assert not world.of(NodeFailedCheck)
        world.connect("n0")
        world.connect("n2")
        world.tick()
        assert len(world.of(NodeFailedCheck)) == 1


@pytest.mark.rule("G11", "B3")
def test_the_map_shows_an_unhealthy_node_with_its_number() -> None:
    world = World(2, 3)
    for number, name in enumerate(("n0", "n1", "n2")):
        world.node(name, {OrderSource.PROCID: str(number + 10)})
    world.join("n0", "n1", "n2")
    world.start()
    world.ails("n0")
    settle(world)
    assert [(one.node.node_id, one.node.infra_rank) for one in world.cycle.standbys] == [("n0", 10)]
