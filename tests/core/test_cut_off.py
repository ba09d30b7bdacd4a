"""Nobody at all is heard: the coordinator may be cut off itself (E1), and the run ends all the same (D9)."""

from __future__ import annotations

import pytest

from nvrx.core.facts import CycleEnded, NodeLost, RunState
from nvrx.core.refused import Refused
from nvrx.core.shape import SettingsWish
from nvrx.core.world import describe_silence

from .driver import World, trained


def lost(world: World) -> list[tuple[float, str]]:
    return [(one.at, str(one.node_id)) for one in world.facts if isinstance(one, NodeLost)]


@pytest.mark.rule("E1")
@pytest.mark.parametrize("streams_break", [False, True])
def test_a_coordinator_that_was_cut_off_from_all_disturbs_nobody(streams_break: bool) -> None:
    """Also when its own keep-alive gave the streams up meanwhile."""
    world = trained(2, 3)
    world.freeze("n0", "n1", "n2")
    world.advance(20)
    if streams_break:
        world.kill("n0", "n1", "n2")
    world.advance(100)
    assert not lost(world)
    assert "none of 3 nodes is heard" in describe_silence(world.run, world.presence, world.now)
    world.connect("n1")
    world.advance(9)
    world.connect("n0")
    world.connect("n2")
    world.advance(60)
    assert world.is_training
    assert not lost(world)
    assert len(world.of(CycleEnded)) == 0
    assert not describe_silence(world.run, world.presence, world.now)


@pytest.mark.rule("E1")
def test_the_engine_looks_when_leases_end_to_say_that_nobody_is_judged() -> None:
    """Long before that nobody was heard for two intervals, which is no reason to look away."""
    world = trained(2, 2)
    world.advance(5)
    world.freeze("n0", "n1")
    world.now += 4
    world.tick()
    assert world.deadline() == 15.0
    world.now = 15.0
    world.tick()
    assert world.deadline() == 15.0 + world.run.settings.join_timeout_s
    assert describe_silence(world.run, world.presence, world.now)


@pytest.mark.rule("E1")
def test_leases_that_end_one_after_another_are_withheld_too() -> None:
    """Nodes speak at different moments: the first one's lease is over a little before the last one's."""
    world = World(2, 2)
    world.join("n0")
    world.now = 0.9
    world.join("n1")
    world.start()
    world.freeze("n0", "n1")
    world.advance(50)
    assert not lost(world)


@pytest.mark.rule("E1")
def test_whoever_does_not_come_back_when_another_does_is_lost_after_a_lease() -> None:
    world = trained(2, 3)
    world.freeze("n0", "n1", "n2")
    world.advance(60)
    world.connect("n0")
    world.connect("n2")
    world.advance(9.9)
    assert not lost(world)
    world.advance(0.2)
    assert lost(world) == [(70.0, "n1")]
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("E1")
def test_one_that_is_heard_now_and_then_keeps_no_dead_one_alive() -> None:
    """Heard every five seconds, n0 leaves the coordinator deaf in between: n1 gets its time once."""
    world = trained(2, 3)
    world.freeze("n0", "n1", "n2")
    for _ in range(6):
        world.advance(5)
        world.hear("n0")
        world.node("n0").is_heard = False
    assert [node for _, node in lost(world)] == ["n1", "n2"]


@pytest.mark.rule("E1", "D9")
def test_agents_that_were_all_killed_are_lost_at_once() -> None:
    """Their streams end while they are heard: a process that is only out of reach does no such thing."""
    world = trained(2, 3, wish=SettingsWish(join_timeout_s=30))
    world.kill("n0", "n1", "n2")
    world.advance(2.1)
    assert [node for _, node in lost(world)] == ["n0", "n1", "n2"]
    world.advance(30)
    assert world.run.state is RunState.FAILED


@pytest.mark.rule("E1", "D9")
def test_nodes_that_all_vanished_end_the_run_when_the_join_timeout_is_over() -> None:
    """Measured from when their leases were over, as if they had been declared lost then."""
    world = trained(2, 3, wish=SettingsWish(join_timeout_s=30))
    world.freeze("n0", "n1", "n2")
    world.advance(39.9)
    assert world.run.is_open
    assert world.is_training
    world.advance(0.2)
    assert world.run.state is RunState.FAILED
    assert world.run.exit_code == 1
    assert world.run.close_reason.startswith("0 of 2 joined; gone: n0 (silent for 40.0 s), n1 (silent for 40.0 s)")
    assert world.run.close_reason.endswith("after waiting 30 s (join_timeout)")


@pytest.mark.rule("E1")
def test_the_only_node_of_a_run_is_judged_by_its_lease() -> None:
    world = trained(1, 1)
    world.freeze("n0")
    world.advance(10.1)
    assert lost(world) == [(10.0, "n0")]


@pytest.mark.rule("E1", "E5")
def test_a_coordinator_restarted_while_it_is_cut_off_judges_nobody() -> None:
    world = trained(2, 3)
    world.restart_coordinator()
    world.advance(100)
    assert not lost(world)
    for name in ("n0", "n1", "n2"):
        world.connect(name)
    world.advance(60)
    assert world.is_training
    assert not lost(world)


@pytest.mark.rule("E1", "A5")
def test_a_node_that_asks_to_join_shows_that_the_coordinator_is_reached() -> None:
    """All hosts are gone and others come: refused at first, because the run is full, and let in a lease later."""
    world = trained(2, 2)
    world.freeze("n0", "n1")
    world.advance(60)
    for _ in range(12):
        with pytest.raises(Refused):
            world.join("n2")
        world.advance(0.9)
    assert [node for _, node in lost(world)] == ["n0", "n1"]
    world.join("n2", "n3")
    assert world.active() == ["n2", "n3"]


@pytest.mark.rule("E1")
def test_nodes_that_joined_and_never_spoke_are_lost_after_their_leases() -> None:
    world = World(2, 2)
    for name in ("n0", "n1"):
        world.node(name)
        world.submit(world.join_command(name))
    world.advance(10.1)
    assert [node for _, node in lost(world)] == ["n0", "n1"]


@pytest.mark.rule("E1")
def test_a_coordinator_that_is_stalled_again_and_again_finds_a_dead_node() -> None:
    """Starved for a moment every second, for as long as it lives: what is granted to a silence is granted once."""
    world = trained(2, 3)
    world.kill("n1")
    for _ in range(10):
        world.now += 0.7
        world.presence.extend(0.3)
        world.presence.hear_out(world.now)
        world.beat()
        world.tick()
    assert [node for _, node in lost(world)] == ["n1"]
    assert world.active() == ["n0", "n2"]
