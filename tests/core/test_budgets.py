"""Budgets (rule D5): how many cycles may end by what."""

import pytest

from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.commands import Drain, Promote, Undrain
from nvrx.core.facts import Cause, CycleEnded, RunClosed, RunState, WorkerExit, WorldChosen
from nvrx.core.ids import CycleNumber, LocalRank, NodeId
from nvrx.core.shape import SettingsWish

from .driver import World, trained


def closed(world: World) -> RunClosed:
    fact = world.facts[-1]
    assert isinstance(fact, RunClosed)
    return fact


@pytest.mark.rule("D5")
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_one_more_cycle_than_restarts_allowed(allowed: int) -> None:
    world = trained(2, 3, wish=SettingsWish(max_restarts=allowed, restart_backoff_s=0.0, max_node_failures=0))
    for _ in range(allowed):
        world.exit("n0", 0, 1)
        world.start()
    assert world.is_training
    world.exit("n1", 1, 7)
    assert len(world.of(WorldChosen)) == allowed + 1
    assert (world.run.state, world.run.exit_code) == (RunState.FAILED, 1)
    assert f"max_restarts {allowed} is used up" in closed(world).reason
    assert "rank 3 (local rank 1) on n1 failed with exit 7" in closed(world).reason


@pytest.mark.rule("D5")
@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("how", ["failure", "loss", "leave"])
def test_no_second_cycle_with_max_restarts_0(how: str, is_running: bool) -> None:
    """Field case C027, also where the cycle ends while its workers start."""
    world = World(2, 3, wish=SettingsWish(max_restarts=0))
    world.join("n0", "n1", "n2")
    if is_running:
        world.start()
    if how == "failure":
        world.exit("n1", 0, 1)
    elif how == "loss":
        world.kill("n1")
        world.advance(3)
    else:
        world.leave("n1", stopped=True)
    assert len(world.of(WorldChosen)) == 1
    assert world.run.state is RunState.FAILED
    assert "max_restarts 0 is used up" in closed(world).reason


@pytest.mark.rule("D5", "F1")
def test_planned_changes_are_free_with_max_restarts_0() -> None:
    world = trained(2, 3, wish=SettingsWish(max_restarts=0))
    world.submit(Drain(NodeId("n1"), immediate=True))
    world.stopped("n0", "n1")
    assert world.active() == ["n0", "n2"]
    world.start()
    world.submit(Undrain(NodeId("n1")))
    world.submit(Promote(NodeId("n1"), NodeId("n0"), immediate=True))
    world.stopped("n0", "n2")
    assert world.active() == ["n1", "n2"]
    world.start()
    world.exit("n1", 0, 1)
    assert "max_restarts 0 is used up" in closed(world).reason


def hang(world: World, name: str) -> None:
    world.report(name, [WorkerExit(LocalRank(0), message="no heartbeat for 30.0 s", hung=True)])


@pytest.mark.rule("D5", "D7", "G9")
def test_a_hang_costs_what_a_failure_costs() -> None:
    world = trained(1, 2, wish=SettingsWish(max_restarts=2, max_node_failures=2))
    hang(world, "n0")
    world.start()
    world.exit("n0", 0, 1)
    assert NodeId("n0") in world.run.quarantined, "it hung, then it failed"
    world.stopped("n0")
    world.report("n0", [WorkerExit(LocalRank(0), None, "SIGKILL", "", True, hung=True)], CycleNumber(0))
    world.advance(20)
    assert world.active() == ["n1"]
    world.start()
    hang(world, "n1")
    assert world.run.state is RunState.FAILED
    assert closed(world).reason == (
        "cycle 2: rank 0 (local rank 0) on n1 hung: no heartbeat for 30.0 s; max_restarts 2 is used up"
    )


@pytest.mark.rule("D6", "G9")
def test_cycles_that_hang_without_progress_end_the_run() -> None:
    wish = SettingsWish(max_restarts=9, max_no_progress_cycles=2, max_node_failures=0, restart_backoff_s=0.0)
    world = trained(1, 1, wish=wish)
    world.progress("n0", 10)
    for _ in range(3):
        hang(world, "n0")
        world.start()
    assert closed(world).exit_code == EXIT_NO_RESTART


@pytest.mark.rule("D5")
def test_losses_are_counted_apart_from_failures() -> None:
    world = trained(2, 5, wish=SettingsWish(max_restarts=1, max_replacements=1))
    world.kill("n0")
    world.advance(3)
    world.start()
    world.exit("n1", 0, 1)
    world.start()
    assert world.is_training
    world.kill("n1")
    world.advance(3)
    assert world.run.state is RunState.FAILED
    assert "max_replacements 1 is used up" in closed(world).reason


@pytest.mark.rule("D5")
def test_replacements_are_unlimited_by_default() -> None:
    world = trained(1, 6, wish=SettingsWish(max_restarts=1))
    for name in ("n0", "n1", "n2", "n3", "n4"):
        assert world.active() == [name]
        world.kill(name)
        world.advance(3)
        world.start()
    assert world.is_training


@pytest.mark.rule("D3", "D5")
def test_a_cycle_that_dies_before_it_runs_by_a_loss_costs_nothing() -> None:
    world = World(2, 4, wish=SettingsWish(max_restarts=1, max_replacements=0))
    world.join("n0", "n1", "n2", "n3")
    world.kill("n1")
    world.advance(3)
    assert world.is_training
    world.start()
    world.kill("n2")
    world.advance(3)
    assert world.run.state is RunState.FAILED


@pytest.mark.rule("D5")
def test_a_cycle_that_dies_before_it_runs_by_a_worker_costs_a_restart() -> None:
    world = World(2, 3, wish=SettingsWish(max_restarts=1))
    world.join("n0", "n1", "n2")
    world.exit("n0", 0, 1)
    world.exit("n0", 0, 1)
    assert world.run.state is RunState.FAILED


@pytest.mark.rule("D5")
def test_a_fresh_node_refills_nothing() -> None:
    """Field case C026."""
    world = trained(2, 3, wish=SettingsWish(max_restarts=1))
    world.exit("n0", 0, 1)
    world.start()
    world.kill("n1")
    world.advance(3)
    world.rejoin("n1")
    world.start()
    assert world.cycle.number == 2
    assignment = world.desired("n2").assignment
    assert assignment is not None
    assert assignment.cycle == 2
    world.exit("n2", 0, 1)
    assert world.run.state is RunState.FAILED


@pytest.mark.rule("D4", "D5")
def test_a_failure_that_a_loss_explains_costs_no_restart() -> None:
    world = trained(2, 3, wish=SettingsWish(max_restarts=1))
    world.kill("n1")
    world.exit("n0", 0, signal="SIGABRT")
    world.advance(3)
    world.start()
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert (failure.cause, failure.node_id) == (Cause.NODE_LOST, "n1")
    world.exit("n0", 0, 1)
    assert world.is_training, "the one restart was still there"
    assert len(world.of(CycleEnded)) == 2
