"""Enough members, and yet no world: the run does not wait for ever (D9). What a new life of a run begins with (A3)."""

from __future__ import annotations

import pytest

from nvrx.core.budgets import replacements_used, restarts_used
from nvrx.core.facts import RunState
from nvrx.core.ids import NodeId
from nvrx.core.presence import Health, HealthReport
from nvrx.core.shape import SettingsWish

from .driver import World, trained

SOON = SettingsWish(join_timeout_s=10, restart_backoff_s=0)


@pytest.mark.rule("D9")
def test_a_drained_node_is_none_to_wait_with_for_ever() -> None:
    world = trained(2, 3, wish=SOON)
    world.drain("n2")
    world.kill("n0")
    world.advance(2 + 9.9)
    assert world.run.is_open
    world.advance(0.2)
    assert (world.run.state, world.run.exit_code) == (RunState.FAILED, 1)
    assert world.run.close_reason == (
        "1 of 2 nodes are ready: n2 drained, n0 lost (2 of 2 joined: n1, n2; gone: n0 (its stream broke; silent for "
        "2.0 s)); after waiting 10 s (join_timeout)"
    )


@pytest.mark.rule("D9")
def test_an_unhealthy_node_is_none_to_wait_with_for_ever() -> None:
    world = trained(2, 2, wish=SOON)
    world.presence.nodes[NodeId("n1")].health = HealthReport(Health.UNHEALTHY, "disk", "full")
    world.exit("n0", 0, 1)
    world.advance(10.1)
    assert world.run.state is RunState.FAILED
    assert "n1 unhealthy" in world.run.close_reason


@pytest.mark.rule("D9")
def test_a_world_that_was_possible_for_a_moment_starts_the_wait_anew() -> None:
    world = trained(2, 3, wish=SOON)
    world.drain("n2")
    world.kill("n0")
    world.advance(8)
    world.rejoin("n0")
    assert world.is_training
    world.start()
    world.advance(30)
    world.kill("n0")
    world.advance(2 + 9.5)
    assert world.run.is_open
    world.advance(1)
    assert not world.run.is_open


@pytest.mark.rule("D9", "C7")
def test_a_stream_that_breaks_meanwhile_does_not_start_the_wait_anew() -> None:
    world = trained(2, 3, wish=SOON)
    world.drain("n2")
    world.kill("n0")
    world.advance(7)
    world.kill("n1")
    world.advance(1)
    world.connect("n1")
    world.advance(4.5)
    assert world.run.state is RunState.FAILED


def failing(world: World, times: int) -> None:
    for _ in range(times):
        if world.is_training:
            world.start()
            world.exit("n0", 0, 1)


@pytest.mark.rule("A3", "D6")
def test_in_a_new_life_progress_is_counted_anew() -> None:
    """Nobody tells it any more: then no cycle is without it, and the run does not end with 93."""
    world = trained(1, 1, 1, SettingsWish(max_restarts=0, restart_backoff_s=0))
    world.progress("n0", 100)
    failing(world, 1)
    assert not world.run.is_open
    world.node("n0").progress = None
    world.wish = SettingsWish(max_restarts=5, max_no_progress_cycles=2, restart_backoff_s=0)
    world.rejoin("n0", reopen=True)
    failing(world, 5)
    assert world.is_training
    assert world.run.progress is None


@pytest.mark.rule("A3", "F1")
def test_a_promotion_of_a_former_life_is_forgotten() -> None:
    world = trained(2, 3, wish=SettingsWish(max_restarts=0))
    world.promote("n2")
    world.exit("n0", 0, 1)
    world.rejoin("n0", reopen=True)
    world.rejoin("n1", "n2")
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("D4", "D5")
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_a_node_that_is_killed_whole_uses_up_no_last_restart(signal: str) -> None:
    """Its workers are dead a moment before its agent is: the loss is the cause, and a standby takes over."""
    world = trained(2, 3, wish=SettingsWish(max_restarts=1, restart_backoff_s=0))
    world.exit("n0", 0, 1)
    world.start()
    world.advance(5)
    world.exit("n1", 0, signal=signal)
    assert not world.is_training
    assert world.waiting().endswith("; its node may be about to be lost")
    world.advance(0.5)
    world.kill("n1")
    world.advance(2)
    assert world.active() == ["n0", "n2"]
    assert restarts_used(world.run) == 1
    assert replacements_used(world.run) == 1


@pytest.mark.rule("D5")
def test_a_killed_worker_of_a_node_that_lives_on_uses_up_the_last_restart() -> None:
    """After the reconnect grace, and at once if it ended by itself."""
    world = trained(2, 3, wish=SettingsWish(max_restarts=1, restart_backoff_s=0))
    world.exit("n0", 0, 1)
    world.start()
    world.exit("n1", 0, signal="SIGKILL")
    world.advance(1.9)
    assert world.run.is_open
    world.advance(0.2)
    assert world.run.close_reason.endswith("failed with SIGKILL; max_restarts 1 is used up")
