"""Training that fails again and again: without progress, in a loop, on the same node (rules D6, D7, D11, E8)."""

from __future__ import annotations

import pytest

from nvrx.core.budgets import EXIT_NO_RESTART, restarts_used
from nvrx.core.commands import Undrain
from nvrx.core.facts import NodeQuarantined, ProgressMade, QuarantineEnded, RunState
from nvrx.core.ids import NodeId
from nvrx.core.ranks import Action, NodeState, node_reason, node_state
from nvrx.core.shape import RestartBudget, SettingsWish

from .driver import World, trained

PATIENT = SettingsWish(max_restarts=100, restart_backoff_s=0.0, max_node_failures=0)


def fail(world: World, name: str = "n0", *, after_s: float = 11.0) -> None:
    """A worker fails some time after the cycle was RUNNING, and the next cycle runs if there is one."""
    world.start()
    world.advance(after_s)
    world.exit(name, 0, 1)
    if world.run.is_open and world.is_training:
        world.start()


@pytest.mark.rule("D6")
class TestProgress:
    def test_cycles_without_progress_end_the_run_with_93(self) -> None:
        world = trained(wish=PATIENT)
        world.progress("n0", 100)
        for _ in range(3):
            fail(world)
            assert world.run.is_open, "the first made progress"
        fail(world)
        assert (world.run.state, world.run.exit_code) == (RunState.FAILED, EXIT_NO_RESTART)
        assert "3 cycles in a row made no progress beyond step 100" in world.run.close_reason
        assert [world.desired(name).exit_code for name in ("n0", "n1", "n2")] == [EXIT_NO_RESTART] * 3

    def test_one_step_further_begins_the_count_anew(self) -> None:
        world = trained(wish=PATIENT)
        for step in range(1, 8):
            world.progress("n0", step)
            fail(world)
            fail(world)
        assert world.run.is_open

    def test_to_reach_again_what_was_reached_before_is_no_progress(self) -> None:
        world = trained(wish=PATIENT)
        world.progress("n0", 100)
        fail(world)
        for step in (50, 100, 90):
            world.progress("n0", step)
            fail(world)
        assert world.run.exit_code == EXIT_NO_RESTART

    def test_a_program_that_never_gets_beyond_its_start_is_no_progress_either(self) -> None:
        world = trained(wish=PATIENT)
        world.progress("n0", 0)
        for _ in range(3):
            fail(world)
        assert world.run.exit_code == EXIT_NO_RESTART

    def test_where_nobody_tells_progress_nothing_ends(self) -> None:
        world = trained(wish=PATIENT)
        for _ in range(10):
            fail(world)
        assert world.run.is_open

    def test_0_turns_it_off(self) -> None:
        world = trained(wish=SettingsWish(100, restart_backoff_s=0, max_node_failures=0, max_no_progress_cycles=0))
        world.progress("n0", 0)
        for _ in range(5):
            fail(world)
        assert world.run.is_open

    def test_what_an_operator_changes_is_no_cycle_without_progress(self) -> None:
        world = trained(2, 3, wish=PATIENT)
        world.progress("n0", 0)
        for _ in range(4):
            standby = next(name for name in ("n0", "n1", "n2") if name not in world.active())
            world.promote(standby, immediate=True)
            world.stopped(*(seat.node.node_id for seat in world.cycle.seats))
            world.advance(20)
            world.start()
        assert world.run.is_open

    def test_it_is_told_once_per_cycle_and_how_far_when_that_ends(self) -> None:
        world = trained(wish=PATIENT)
        for step in (10, 20, 30):
            world.progress("n0", step)
            world.progress("n1", step - 5)
        fail(world)
        steps = [one.step for one in world.of(ProgressMade) if isinstance(one, ProgressMade)]
        assert steps == [10, 30]
        assert world.run.progress == 30

    def test_what_an_old_cycle_reached_does_not_count_for_the_next(self) -> None:
        world = trained(wish=PATIENT)
        world.node("n0").progress = 10
        fail(world)
        assert [one.progressed for one in world.run.cycles] == [True, False]

    def test_per_progress_gives_the_restart_budget_back(self) -> None:
        wish = SettingsWish(1, restart_backoff_s=0, max_node_failures=0, restart_budget=RestartBudget.PER_PROGRESS)
        world = trained(wish=wish)
        for step in range(1, 6):
            world.progress("n0", step)
            fail(world)
            assert restarts_used(world.run) == 1
        fail(world)
        assert world.run.state is RunState.FAILED

    def test_it_survives_the_coordinator(self) -> None:
        world = trained(wish=PATIENT)
        world.progress("n0", 100)
        fail(world)
        fail(world)
        world.restart_coordinator()
        for name in ("n0", "n1", "n2"):
            world.connect(name)
        fail(world)
        assert world.run.is_open
        fail(world)
        assert world.run.exit_code == EXIT_NO_RESTART


def pauses(world: World, count: int, *, after_s: float = 0.0) -> list[float]:
    """How long the run waits after each of `count` failures."""
    found = []
    for _ in range(count):
        world.start()
        world.advance(after_s)
        world.exit(world.active()[0], 0, 1)
        began = world.now
        while not world.is_training:
            due = world.deadline()
            assert due is not None
            world.advance(due - world.now)
        found.append(round(world.now - began, 6))
    return found


@pytest.mark.rule("D11")
class TestCrashLoops:
    def test_they_are_slowed_down(self) -> None:
        world = trained(wish=SettingsWish(100, max_node_failures=0))
        assert pauses(world, 9) == [0, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_a_cycle_that_held_on_begins_anew(self) -> None:
        world = trained(wish=SettingsWish(100, max_node_failures=0))
        assert pauses(world, 3) == [0, 1, 2]
        assert pauses(world, 1, after_s=11) == [0]
        assert pauses(world, 2) == [0, 1]

    def test_a_loss_is_never_delayed(self) -> None:
        world = trained(2, 4, wish=SettingsWish(100, max_node_failures=0))
        pauses(world, 3)
        world.start()
        world.kill(world.active()[0])
        world.advance(2)
        assert world.is_training
        assert pauses(world, 1) == [0], "nor does a failure after it count with those before"

    @pytest.mark.parametrize(
        ("first_s", "expected"), [(0.0, [0, 0, 0, 0]), (7.0, [0, 7, 14, 28]), (60.0, [0, 60, 60, 60])]
    )
    def test_the_first_wait_can_be_chosen(self, first_s: float, expected: list[float]) -> None:
        world = trained(wish=SettingsWish(100, restart_backoff_s=first_s, max_node_failures=0))
        assert pauses(world, 4) == expected

    def test_the_wait_says_what_it_is(self) -> None:
        world = trained(wish=SettingsWish(100, max_node_failures=0))
        pauses(world, 1)
        world.start()
        world.exit("n0", 0, 1)
        assert world.waiting() == "workers fail soon after every start: the next waits 1 s"

    def test_a_budget_that_is_used_up_ends_the_run_without_a_wait(self) -> None:
        world = trained(wish=SettingsWish(1))
        pauses(world, 1)
        world.start()
        world.exit("n0", 0, 1)
        assert not world.run.is_open


def offend(world: World, times: int = 3, name: str = "n1") -> None:
    """One node's workers fail first, again and again."""
    for _ in range(times):
        fail(world, name)


@pytest.mark.rule("D7", "C1")
class TestQuarantine:
    WISH = SettingsWish(max_restarts=100)

    def test_a_node_that_fails_first_three_times_is_replaced(self) -> None:
        world = trained(2, 3, wish=self.WISH)
        offend(world, 2)
        assert world.active() == ["n0", "n1"]
        offend(world, 1)
        world.advance(20)
        assert world.active() == ["n0", "n2"]
        member = world.run.members[NodeId("n1")]
        assert node_state(world.run, member) is NodeState.QUARANTINED
        assert "its workers failed first in 3 cycles in a row" in node_reason(world.run, member)

    def test_failures_of_others_between_break_the_row(self) -> None:
        world = trained(2, 3, wish=self.WISH)
        offend(world, 2)
        fail(world, "n0")
        offend(world, 2)
        assert world.of(NodeQuarantined) == []

    def test_where_no_world_is_left_without_it_it_stays_and_the_reason_says_so(self) -> None:
        world = trained(2, 2, wish=self.WISH)
        offend(world, 4)
        world.start()
        assert world.active() == ["n0", "n1"]
        member = world.run.members[NodeId("n1")]
        assert node_state(world.run, member) is NodeState.ACTIVE
        assert "kept in the world" in node_reason(world.run, member)
        assert len(world.of(NodeQuarantined)) == 1

    def test_a_newcomer_takes_its_place_though_the_run_seemed_full(self) -> None:
        world = trained(2, 2, wish=self.WISH)
        offend(world, 3)
        world.join("n2")
        offend(world, 1)
        world.advance(20)
        assert world.active() == ["n0", "n2"]

    def test_it_may_be_for_some_time(self) -> None:
        world = trained(2, 3, wish=SettingsWish(100, quarantine_s=60.0))
        offend(world)
        world.advance(20)
        world.start()
        world.advance(59)
        assert len(world.of(QuarantineEnded)) == 1
        assert world.active() == ["n0", "n2"], "its end restarts nothing"
        world.kill("n2")
        world.advance(3)
        assert world.active() == ["n0", "n1"]
        offend(world, 2)
        assert len(world.of(NodeQuarantined)) == 1, "what was before does not count again"

    @pytest.mark.rule("A5")
    def test_a_node_whose_place_was_taken_waits_for_one_when_its_time_is_over(self) -> None:
        world = trained(2, 2, wish=SettingsWish(100, quarantine_s=5.0))
        offend(world, 3)
        world.join("n2")
        world.advance(20)
        assert world.of(QuarantineEnded) == []
        world.kill("n2")
        world.advance(3)
        assert len(world.of(QuarantineEnded)) == 1

    def test_an_operator_ends_it(self) -> None:
        world = trained(2, 3, wish=self.WISH)
        offend(world)
        world.submit(Undrain(NodeId("n1")))
        assert not world.run.quarantined

    def test_a_new_incarnation_of_the_node_is_still_in_quarantine(self) -> None:
        world = trained(2, 3, wish=self.WISH)
        offend(world)
        world.advance(20)
        world.start()
        world.kill("n1")
        world.advance(3)
        world.rejoin("n1")
        assert node_state(world.run, world.run.members[NodeId("n1")]) is NodeState.QUARANTINED

    def test_0_turns_it_off(self) -> None:
        world = trained(2, 3, wish=SettingsWish(100, max_node_failures=0))
        offend(world, 5)
        assert world.of(NodeQuarantined) == []

    def test_the_next_life_of_the_run_begins_without(self) -> None:
        world = trained(2, 3, wish=SettingsWish(3, max_node_failures=3, restart_backoff_s=0.0))
        offend(world)
        assert world.run.quarantined
        world.advance(20)
        fail(world, "n0")
        assert not world.run.is_open
        world.rejoin("n1", reopen=True)
        assert not world.run.quarantined


@pytest.mark.rule("E8")
def test_an_excluded_node_is_told_so_once_it_is_out_of_the_world() -> None:
    world = trained(2, 3)
    world.drain("n1")
    assert not world.desired("n1").excluded, "it trains until the cycle ends"
    fail(world, "n0")
    assert world.desired("n1").action is Action.STOP
    world.stopped("n1")
    world.advance(20)
    world.start()
    wanted = world.desired("n1")
    assert (wanted.action, wanted.excluded) == (Action.WAIT, True)
    assert wanted.reason == "excluded: drained by an operator"
    assert not world.desired("n0").excluded


@pytest.mark.rule("E8", "D7")
def test_a_quarantined_node_is_excluded_only_while_others_train() -> None:
    world = trained(2, 3, wish=SettingsWish(100))
    offend(world)
    world.advance(20)
    assert world.desired("n1").excluded
    world.start()
    world.kill("n2")
    world.advance(3)
    assert world.active() == ["n0", "n1"]
    assert not world.desired("n1").excluded
