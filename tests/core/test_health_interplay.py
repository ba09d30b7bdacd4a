"""Nodes' health together with what else happens: suspect checks, ended cycles, other limits (rules G11, E8, D6)."""

from __future__ import annotations

import pytest

from nvrx.core.facts import CheckSuspected, CycleEnded, NodeRecovered, RunState
from nvrx.core.health import MASS_WITHIN_S
from nvrx.core.ids import NodeId
from nvrx.core.narrate import tell
from nvrx.core.ranks import Action, node_reason
from nvrx.core.shape import SettingsWish

from .driver import World, trained
from .test_health import MANY, mass, notices, settle


@pytest.mark.rule("G11", "C1")
class TestTheFirstOnWhichASuspectCheckFailed:
    """It was believed before the others followed: what speaks against it is no more than against them."""

    def test_it_may_train_on_when_a_worker_fails(self) -> None:
        world = trained(2, 2, wish=MANY)
        mass(world, "n0", "n1")
        assert [tell(one) for one in world.of(NodeRecovered)] == [
            "node n0 may be chosen again: check disk is itself the suspect"
        ]
        world.exit("n1", 0, 1)
        assert world.is_training
        assert world.active() == ["n0", "n1"]

    def test_it_is_not_replaced_when_another_joins(self) -> None:
        world = World(2, 3, wish=MANY)
        world.join("n0", "n1")
        world.advance(2)
        world.start()
        mass(world, "n0", "n1")
        world.join("n2")
        world.advance(30)
        assert world.is_training
        assert not world.of(CycleEnded)
        assert "unhealthy" not in notices(world)

    def test_one_that_was_replaced_takes_nobodys_place(self) -> None:
        world = trained(2, 3, wish=MANY)
        world.ails("n0")
        settle(world)
        mass(world, "n1", "n2")
        assert not world.desired("n0").excluded
        assert world.active() == ["n1", "n2"]
        assert world.is_training

    def test_one_that_failed_long_before_stays_out(self) -> None:
        world = trained(2, 5, wish=MANY)
        world.ails("n4")
        world.advance(MASS_WITHIN_S + 1)
        mass(world, "n2", "n3", within_s=0.0)
        assert len(world.of(CheckSuspected)) == 1
        assert world.desired("n4").excluded
        assert not world.desired("n2").excluded
        assert "n4" not in notices(world).split("degraded, and chosen last")[1]

    def test_it_is_replaced_once_the_check_counts_again_and_fails_on_it_alone(self) -> None:
        world = trained(2, 3, wish=MANY)
        world.ails("n0")
        settle(world)
        mass(world, "n1")
        world.heals("n0")
        world.advance(2 * MASS_WITHIN_S + 2)
        settle(world)
        assert world.active() == ["n0", "n2"]


@pytest.mark.rule("E8", "G11")
def test_an_unhealthy_node_of_an_ended_cycle_may_end_so_that_another_can_come() -> None:
    """In an array its agent ends, and Slurm starts the node again; else all would wait for the join timeout."""
    world = trained(2, 2)
    world.ails("n1")
    world.advance(20)
    assert not world.desired("n1").excluded, "it trains on"
    world.exit("n0", 0, 1)
    told = world.desired("n1")
    assert (told.action, told.excluded, told.reason) == (Action.STOP, True, "excluded: unhealthy, disk: is full")
    assert node_reason(world.run, world.run.members[NodeId("n1")]) == "unhealthy: disk: is full"
    assert "kept out of the world: n1" in notices(world)
    world.leave("n1")
    world.advance(20)
    world.join("n2")
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("E8", "F1")
def test_a_drained_node_of_an_ended_cycle_may_end() -> None:
    world = trained(2, 3)
    world.drain("n1")
    assert not world.desired("n1").excluded
    world.kill("n2")
    world.advance(3)
    world.exit("n0", 0, 1)
    assert not world.is_training
    assert world.desired("n1").excluded
    assert not world.desired("n0").excluded


@pytest.mark.rule("G11", "D6")
def test_status_names_the_limit_for_which_an_unhealthy_node_is_kept() -> None:
    world = trained(2, 3, wish=SettingsWish(max_no_progress_cycles=1, max_restarts=9))
    world.advance(1)
    world.progress("n0", 5)
    world.exit("n0", 0, 1)
    world.start()
    world.ails("n1")
    assert world.run.state is RunState.OPEN
    assert notices(world).endswith(
        "; 1 cycles in a row made no progress beyond step 5 (max_no_progress_cycles), and the run would end"
    )


@pytest.mark.rule("G11", "E5")
def test_a_node_that_trains_on_is_not_said_to_be_out_while_the_coordinator_recovers() -> None:
    world = trained(2, 2)
    world.ails("n1")
    world.restart_coordinator()
    world.connect("n1")
    assert "kept out" not in notices(world)
    world.connect("n0")
    assert "kept in the world: n1" in notices(world)


@pytest.mark.rule("G11", "C5", "A5")
def test_a_kept_node_that_is_well_again_is_not_replaced_though_others_have_its_place_among_max() -> None:
    world = trained(1, 2, wish=SettingsWish(max_restarts=1))
    world.exit("n0", 0, 1)
    world.start()
    world.advance(5)
    world.ails("n0")
    world.join("n2")
    world.heals("n0")
    assert world.is_training
    assert world.active() == ["n0"]
    assert notices(world) == "well again, and waiting for a place (the run has its MAX nodes): n0"
