"""What happens together costs once (rule D3), and what a late loss explains (rules D4, D12)."""

from __future__ import annotations

import pytest

from nvrx.core.budgets import replacements_used, restarts_used
from nvrx.core.facts import Cause, CauseRevised, CycleEnded, WorldChosen
from nvrx.core.ids import CycleNumber
from nvrx.core.presence import Timing
from nvrx.core.run import CycleState
from nvrx.core.shape import SettingsWish

from .driver import World, ended, trained

AT_ONCE = Timing(reconnect_grace_s=0.0)


def trained_at_once(settle_s: float = 0.5, spares: int = 2) -> World:
    """Two nodes train, and a node whose stream breaks is lost at once."""
    world = World(2, 2 + spares, wish=SettingsWish(settle_s=settle_s), timing=AT_ONCE)
    world.join(*(f"n{number}" for number in range(2 + spares)))
    world.start()
    return world


@pytest.mark.rule("D3")
@pytest.mark.parametrize(("later_s", "charged"), [(0.4, 1), (0.6, 2)])
def test_a_loss_that_settles_with_one_before_costs_nothing_more(later_s: float, charged: int) -> None:
    world = trained_at_once()
    world.kill("n0")
    world.start()
    assert world.cycle.state is CycleState.RUNNING
    world.advance(later_s)
    world.kill("n1")
    world.start()
    assert world.active() == ["n2", "n3"]
    assert replacements_used(world.run) == charged
    joined = [one.node_id for one in world.run.cycles[0].consequences]
    assert joined == (["n1"] if charged == 1 else [])


@pytest.mark.rule("D3")
def test_a_loss_that_settles_with_a_workers_failure_costs_nothing_more() -> None:
    world = trained_at_once()
    world.exit("n0", 0, 1)
    world.start()
    world.advance(0.3)
    world.kill("n1")
    assert (restarts_used(world.run), replacements_used(world.run)) == (1, 0)


@pytest.mark.rule("D3", "D11")
def test_a_worker_that_fails_again_at_once_is_charged_again() -> None:
    world = trained_at_once()
    for _ in range(2):
        world.exit("n0", 0, 1)
        world.start()
    assert restarts_used(world.run) == 2


@pytest.mark.rule("D3")
def test_settling_counts_from_the_first_failure_not_from_one_that_joined_it() -> None:
    world = trained_at_once(spares=4)
    world.kill("n0")
    for name, charged in (("n1", 1), ("n2", 2)):
        world.start()
        world.advance(0.4)
        world.kill(name)
        assert replacements_used(world.run) == charged


@pytest.mark.rule("D3")
def test_sixteen_nodes_lost_together_make_one_new_cycle() -> None:
    world = trained(32, 48)
    lost = [f"n{number}" for number in range(0, 32, 2)]
    world.kill(*lost)
    world.advance(3)
    world.start()
    assert len(world.of(WorldChosen)) == 2
    assert not set(world.active()) & set(lost)
    assert replacements_used(world.run) == 1


@pytest.mark.rule("D3")
def test_sixteen_nodes_that_are_missed_one_after_another_make_two_cycles_at_most() -> None:
    world = trained(32, 48)
    for number in range(16):
        world.kill(f"n{number}")
        world.advance(0.02)
    world.advance(3)
    world.start()
    assert len(world.of(WorldChosen)) <= 3
    assert replacements_used(world.run) == 1


@pytest.mark.rule("D4")
@pytest.mark.parametrize(("broke_after_s", "cause"), [(1.0, Cause.NODE_LOST), (3.0, Cause.WORKER_FAILED)])
def test_a_node_that_was_passed_over_and_is_lost_soon_was_the_cause(broke_after_s: float, cause: Cause) -> None:
    world = trained(2, 3)
    world.freeze("n1")
    world.exit("n0", 0, 1)
    world.advance(2.5)  # n1 does not take up its place and is passed over
    world.start()
    assert world.active() == ["n0", "n2"]
    assert world.cycle.state is CycleState.RUNNING
    world.now = max(broke_after_s, 2.5)
    world.kill("n1")
    world.presence.nodes[world.node("n1").name].lease_until = broke_after_s + 2.0
    world.advance(4)
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert failure.cause is cause


@pytest.mark.rule("D5")
def test_a_drain_is_free_even_where_no_second_cycle_is_allowed() -> None:
    world = trained(2, 3, wish=SettingsWish(max_restarts=0))
    world.drain("n1", immediate=True)
    world.stopped("n1")
    world.start()
    assert world.active() == ["n0", "n2"]
    world.exit("n0", 0, 1)
    assert not world.run.is_open


@pytest.mark.rule("D12")
class TestSuspects:
    def test_a_node_that_does_not_take_up_its_place_is_passed_over(self) -> None:
        world = trained(2, 3)
        world.freeze("n1")
        world.exit("n0", 0, 1)
        assert world.active() == ["n0", "n1"], "it was heard just now"
        world.advance(2.1)
        assert world.active() == ["n0", "n2"]
        ended_by = world.of(CycleEnded)[-1]
        assert isinstance(ended_by, CycleEnded)
        assert ended_by.suspects == ("n1",)
        assert "did not take up its place within 2 s" in ended_by.failure.message
        assert (restarts_used(world.run), replacements_used(world.run)) == (1, 0)

    def test_who_says_that_it_knows_of_its_place_may_take_its_time(self) -> None:
        world = trained(2, 3)
        world.exit("n0", 0, 1)
        world.advance(8)
        assert world.cycle.number == 1
        assert world.active() == ["n0", "n1"]

    def test_who_speaks_without_acknowledging_is_passed_over(self) -> None:
        world = trained(2, 3)
        for name in ("n0", "n1"):
            world.node(name).acknowledged = CycleNumber(0)
        world.exit("n0", 0, 1)
        world.node("n0").acknowledged = CycleNumber(1)
        world.advance(2.5)
        assert world.active() == ["n0", "n2"]

    def test_it_is_a_candidate_again_once_it_acknowledges(self) -> None:
        world = trained(2, 3)
        world.node("n1").acknowledged = CycleNumber(0)
        world.exit("n0", 0, 1)
        world.advance(2.5)
        world.start("n0", "n2")
        world.exit("n2", 0, 1)
        assert world.active() == ["n0", "n2"], "n1 is still suspect"
        world.start()
        world.node("n1").acknowledged = CycleNumber(1)
        world.hear("n1")
        world.kill("n2")
        world.advance(3)
        assert world.active() == ["n0", "n1"]

    def test_without_a_world_beside_it_it_is_waited_for(self) -> None:
        world = trained(2, 2)
        world.freeze("n1")
        world.exit("n0", 0, 1)
        world.advance(5)
        assert world.cycle.number == 1
        assert world.cycle.is_live
        world.join("n2") if world.run.shape.max_nodes > 2 else world.connect("n1")
        world.start()
        assert world.cycle.state is CycleState.RUNNING

    def test_a_standby_that_joins_meanwhile_takes_its_place_at_once(self) -> None:
        world = World(2, 3)
        world.join("n0", "n1")
        world.advance(2)
        world.start()
        world.freeze("n1")
        world.exit("n0", 0, 1)
        world.advance(5)
        assert world.active() == ["n0", "n1"]
        world.join("n2")
        assert world.active() == ["n0", "n2"]

    def test_a_loss_that_follows_is_the_cause_of_the_ended_cycle(self) -> None:
        world = trained(2, 3)
        world.freeze("n1")
        world.exit("n0", 0, signal="SIGABRT")
        world.advance(11)
        assert len(world.of(CauseRevised)) == 1
        failure = world.run.cycles[0].failure
        assert failure is not None
        assert (failure.cause, failure.node_id) == (Cause.NODE_LOST, "n1")
        assert replacements_used(world.run) == 1
        assert restarts_used(world.run) == 0

    def test_nobody_is_suspected_for_what_the_coordinator_missed_itself(self) -> None:
        world = trained(2, 3)
        world.node("n1").acknowledged = CycleNumber(0)
        world.exit("n0", 0, 1)
        world.now += 5
        world.presence.extend(5)
        world.presence.hear_out(world.now)
        world.tick()
        assert world.active() == ["n0", "n1"]

    def test_nobody_is_suspected_while_nodes_come_back_to_a_restarted_coordinator(self) -> None:
        world = trained(2, 3)
        world.exit("n0", 0, 1)
        world.restart_coordinator()
        world.advance(4)
        world.connect("n0")
        world.advance(4)
        world.connect("n1")
        world.connect("n2")
        world.start()
        assert (world.cycle.number, world.cycle.state) == (1, CycleState.RUNNING)


@pytest.mark.rule("D12")
def test_a_node_whose_old_workers_take_their_time_is_no_suspect() -> None:
    """Its phase is still about the old cycle; that it knows of the next is what counts."""
    world = trained(2, 3)
    world.exit("n0", 0, 1)
    world.node("n1").acknowledged = CycleNumber(1)
    world.advance(14)
    world.report("n1", [ended(0, signal="SIGTERM", stopped=True)], CycleNumber(0))
    assert world.active() == ["n0", "n1"]
