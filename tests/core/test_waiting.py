"""What is waited for between two cycles, and for how long (C7, D2, D9, E1, E5)."""

import pytest

from nvrx.core.facts import CycleEnded, Endpoint, NodeLost, NodeStopped, RunState, WorldChosen
from nvrx.core.shape import SettingsWish

from .driver import World, trained


@pytest.mark.rule("C7", "E1")
def test_a_broken_stream_is_waited_for_as_long_as_the_reconnect_grace() -> None:
    world = trained(2, 3)
    world.kill("n1")
    world.exit("n0", 0, 1)
    assert not world.is_training
    assert "stream just broke" in world.waiting()
    world.advance(1.9)
    assert not world.is_training
    world.advance(0.2)
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("C7", "C5")
def test_a_node_that_reconnects_within_the_grace_keeps_its_seat() -> None:
    """Field case C060."""
    world = trained(2, 3)
    world.kill("n1")
    world.exit("n0", 0, 1)
    world.advance(1)
    world.connect("n1")
    assert world.active() == ["n0", "n1"]
    assert not world.of(NodeLost)


@pytest.mark.rule("C7")
def test_a_new_incarnation_that_does_not_connect_is_not_waited_for() -> None:
    """Only a stream that just broke is: this one never opened, and its lease is a whole one."""
    world = trained(2, 3)
    world.kill("n1")
    world.advance(3)
    world.kill("n0", "n2")
    world.advance(3)
    world.rejoin("n0")
    node = world.node("n2")
    node.life += 1
    world.submit(world.join_command("n2"))
    world.rejoin("n1")
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("E1")
def test_a_silent_node_is_lost_when_its_lease_is_over() -> None:
    world = trained(2, 3)
    world.advance(5)
    world.freeze("n1")
    world.advance(9.9)
    assert world.active() == ["n0", "n1"]
    world.advance(0.2)
    assert world.active() == ["n0", "n2"]
    assert [(one.at, one.node_id) for one in world.facts if isinstance(one, NodeLost)] == [(15.0, "n1")]


@pytest.mark.rule("C1")
def test_a_silent_node_keeps_its_place_but_is_not_chosen_anew() -> None:
    world = trained(2, 3)
    world.freeze("n1")
    world.advance(4)
    assert world.active() == ["n0", "n1"]
    world.exit("n0", 0, 1)
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("E1")
def test_a_stalled_coordinator_judges_nobody_for_that_time() -> None:
    world = trained(2, 3)
    world.now += 60
    world.presence.extend(60)
    world.tick()
    world.advance(20)
    assert world.is_training
    assert not world.of(NodeLost)


@pytest.mark.rule("D2")
def test_the_next_world_waits_for_the_workers_of_a_node_that_left() -> None:
    world = trained(2, 3)
    world.leave("n1", grace_s=15)
    world.advance(16.9)
    assert not world.is_training
    assert world.waiting() == "the workers of n1, which left, are still stopping"
    world.advance(0.2)
    assert world.active() == ["n0", "n2"]
    assert not world.of(NodeStopped)


@pytest.mark.rule("D2", "E2")
def test_a_node_that_left_says_that_its_workers_are_gone() -> None:
    world = trained(2, 3)
    assert world.leave("n1")[-1] == world.of(CycleEnded)[0]
    assert world.leave("n1") == [], "said again, and nothing new"
    assert [type(one) for one in world.leave("n1", stopped=True)] == [NodeStopped, WorldChosen]
    assert world.leave("n1", stopped=True) == []


@pytest.mark.rule("D2")
def test_workers_of_an_ended_cycle_are_waited_for_too() -> None:
    """Told to leave while it stops the workers of a cycle that ended, a node may still write a checkpoint."""
    world = trained(2, 2)
    world.kill("n1")
    world.advance(3)
    world.leave("n0", grace_s=5)
    world.rejoin("n1")
    world.join("n2")
    assert not world.is_training
    assert world.waiting() == "the workers of n0, which left, are still stopping"
    world.leave("n0", stopped=True)
    assert world.active() == ["n1", "n2"]


@pytest.mark.rule("D2")
def test_a_standby_that_leaves_delays_nothing() -> None:
    world = trained(2, 4)
    world.leave("n3")
    world.exit("n0", 0, 1)
    assert world.is_training


@pytest.mark.rule("E5")
def test_after_a_restart_nobody_is_judged_before_all_are_back() -> None:
    world = trained(2, 3)
    world.restart_coordinator()
    world.connect("n0")
    world.connect("n2")
    world.exit("n0", 0, 1)
    world.advance(14)
    assert not world.is_training
    assert world.waiting() == "the coordinator restarted; n1 may still come back"
    world.connect("n1")
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("E5")
def test_after_a_restart_the_span_ends() -> None:
    world = trained(2, 3)
    world.restart_coordinator()
    world.connect("n0")
    world.connect("n2")
    world.advance(14.9)
    assert not world.of(NodeLost)
    world.advance(0.2)
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("E5")
def test_the_timer_lies_ahead_while_nobody_is_judged() -> None:
    """A node that came back and fell silent: its lease is over before the span is. The driver checks the timer."""
    world = trained(2, 3)
    world.restart_coordinator()
    world.connect("n0")
    world.connect("n2")
    world.freeze("n0")
    world.advance(16)
    lost = [(one.at, str(one.node_id)) for one in world.facts if isinstance(one, NodeLost)]
    assert lost == [(15.0, "n0"), (15.0, "n1")], "nobody is judged before the span is over"
    assert len(world.of(CycleEnded)) == 1


@pytest.mark.rule("E5")
def test_a_node_that_was_not_known_before_a_restart_is_not_waited_for() -> None:
    world = trained(2, 4)
    world.leave("n3", stopped=True)
    world.restart_coordinator()
    world.node("n4")
    world.submit(world.join_command("n4"))
    for name in ("n0", "n1", "n2"):
        world.connect(name)
    world.exit("n0", 0, 1)
    assert world.is_training


@pytest.mark.rule("D9")
@pytest.mark.parametrize("joined", [["ash", "elm"], ["elm", "ash"]])
def test_too_few_nodes_end_the_run_with_their_names(joined: list[str]) -> None:
    """Field case C055."""
    world = World(3, 3, wish=SettingsWish(join_timeout_s=10))
    world.join(*joined)
    world.advance(9.9)
    named = ", ".join(joined)
    assert world.waiting() == f"2 of 3 joined: {named}"
    world.advance(0.2)
    assert (world.run.state, world.run.exit_code) == (RunState.FAILED, 1)
    assert world.run.close_reason == f"2 of 3 joined: {named}; after waiting 10 s (join_timeout)"


@pytest.mark.rule("D9")
def test_the_join_timeout_begins_anew_when_there_were_enough() -> None:
    world = trained(2, 2, wish=SettingsWish(join_timeout_s=10))
    world.advance(100)
    world.kill("n0")
    world.advance(11.9)
    assert world.run.is_open
    world.advance(0.2)
    assert world.run.state is RunState.FAILED
    assert world.run.close_reason.startswith("1 of 2 joined: n1; gone: n0 (its stream broke")


@pytest.mark.rule("D8", "D9")
def test_the_join_timeout_does_not_run_while_a_cycle_does() -> None:
    """A node may finish and go long before the last one fails."""
    world = trained(2, 2, wish=SettingsWish(join_timeout_s=10))
    world.finish("n1")
    world.kill("n1")
    world.advance(100)
    world.exit("n0", 0, 1)
    assert world.run.is_open
    world.advance(5)
    world.rejoin("n1")
    assert world.is_training


@pytest.mark.rule("D9")
def test_in_a_new_life_the_dead_of_the_old_one_are_not_listed() -> None:
    world = trained(2, 2, wish=SettingsWish(join_timeout_s=10, max_restarts=0))
    world.kill("n1")
    world.advance(3)
    world.rejoin("n0", reopen=True)
    assert world.waiting() == "1 of 2 joined: n0"


@pytest.mark.rule("C7")
def test_the_first_cycle_waits_a_last_call_for_more() -> None:
    world = World(2, 4, wish=SettingsWish(last_call_s=5))
    world.join("n0")
    world.advance(10)
    world.join("n1")
    assert world.waiting() == "last call: 2 of at most 4 nodes joined"
    world.advance(4)
    world.join("n2")
    world.advance(0.9)
    assert not world.run.cycles
    world.advance(0.2)
    assert world.cycle.started_at == 15.0


@pytest.mark.rule("C7")
def test_the_first_cycle_starts_at_once_with_max_nodes_and_later_ones_without() -> None:
    """Field case C056: 2, 3 and 8 of 2:8."""
    for count in (2, 3, 8):
        world = World(2, 8)
        world.join(*(f"n{number}" for number in range(count)))
        assert world.is_training == (count == 8)
        world.advance(1)
        assert world.is_training
        world.exit("n0", 0, 1)
        assert world.cycle.number == 1


@pytest.mark.rule("I2")
def test_the_world_waits_for_a_port_that_no_cycle_has_used() -> None:
    world = World(1, 1, offers_fresh_ports=False)
    world.join("n0")
    ports = world.node("n0").ports
    assert world.cycle.master == Endpoint("10.0.0.0", ports[0])
    world.exit("n0", 0, 1)
    assert world.cycle.master == Endpoint("10.0.0.0", ports[1])
    world.exit("n0", 0, 1)
    world.advance(1)
    assert not world.is_training, "it offers only what was used"
    assert world.waiting() == "n0 has yet to offer a port for the store of the next cycle"
    world.offers_fresh_ports = True
    world.advance(1)
    assert world.is_training
