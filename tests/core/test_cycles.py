"""A cycle's life (D1-D4, D8, D12): how it starts, what ends it, what it is put down to."""

from dataclasses import replace

import pytest

from nvrx.core.commands import CycleExits, Report, Tick
from nvrx.core.decide import decide
from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CycleEnded,
    CycleRunning,
    Failure,
    NodeLost,
    RunClosed,
    RunState,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, GlobalRank, LocalRank
from nvrx.core.presence import AgentPhase, StoreMode
from nvrx.core.ranks import Action
from nvrx.core.run import CycleState, SeatState
from nvrx.core.shape import SettingsWish
from nvrx.core.world import STOPPING_MARGIN_S

from .driver import World, ended, trained


def failure(world: World, number: int) -> Failure:
    cycle = world.run.find_cycle(CycleNumber(number))
    assert cycle is not None
    assert cycle.failure is not None
    return cycle.failure


@pytest.mark.rule("D1")
def test_a_cycle_runs_when_all_active_nodes_say_so() -> None:
    world = World(2, 3)
    world.join("n0", "n1", "n2")
    states = [world.cycle.state]
    for name in ("n0", "n1"):
        world.start(name)
        states.append(world.cycle.state)
    assert states == [CycleState.STARTING, CycleState.STARTING, CycleState.RUNNING]
    assert len(world.of(CycleRunning)) == 1


@pytest.mark.rule("D1")
@pytest.mark.parametrize("phase", [AgentPhase.IDLE, AgentPhase.STARTING, AgentPhase.STOPPING, AgentPhase.STOPPED])
def test_other_phases_are_not_running(phase: AgentPhase) -> None:
    world = World(1, 1)
    world.join("n0")
    node = world.node("n0")
    node.phase, node.cycle = phase, world.cycle.number
    world.hear("n0")
    assert world.cycle.state is CycleState.STARTING


@pytest.mark.rule("D1")
def test_running_in_an_old_cycle_is_not_running_in_this_one() -> None:
    world = trained(1, 1)
    world.exit("n0", 0, 1)
    world.advance(5)
    assert world.node("n0").cycle == 0
    assert world.cycle.state is CycleState.STARTING


@pytest.mark.rule("D1", "D8")
def test_workers_that_are_done_before_they_were_seen_running() -> None:
    world = World(2, 2)
    world.join("n0", "n1")
    world.finish("n0")
    world.start("n1")
    assert world.cycle.state is CycleState.RUNNING
    world.finish("n1")
    assert world.run.state is RunState.SUCCEEDED


@pytest.mark.rule("D2")
@pytest.mark.parametrize("is_running", [True, False])
def test_a_failed_worker_ends_the_cycle_at_once(is_running: bool) -> None:
    world = World(2, 3)
    world.join("n0", "n1", "n2")
    if is_running:
        world.start()
    facts = world.exit("n1", 1, signal="SIGSEGV")
    assert [type(one) for one in facts] == [WorkersExited, CycleEnded, WorldChosen]
    assert failure(world, 0) == Failure(
        Cause.WORKER_FAILED,
        world.node("n1").name,
        world.cycle.seats[1].group_rank,
        LocalRank(1),
        signal="SIGSEGV",
        rank=GlobalRank(3),
    )


@pytest.mark.rule("D4")
def test_the_record_keeps_what_the_worker_said() -> None:
    world = trained(1, 1)
    told = WorkerExit(LocalRank(0), 3, "", "ValueError: no", stderr_tail="Traceback\n...")
    world.report("n0", [told])
    record = failure(world, 0)
    assert (record.exit_code, record.message, record.stderr_tail) == (3, "ValueError: no", "Traceback\n...")


@pytest.mark.rule("D3", "D4")
def test_later_failures_are_consequences() -> None:
    world = trained(2, 2)
    world.report("n0", [ended(1, 5), ended(0, 6)])
    assert failure(world, 0).exit_code == 5
    world.report("n1", [ended(0, signal="SIGABRT"), ended(1, 1, stopped=True)], CycleNumber(0))
    assert [one.exit_code or one.signal for one in world.run.cycles[0].consequences] == [6, "SIGABRT"]
    assert world.cycle.number == 1
    assert world.is_training
    seat_state = world.run.cycles[0].seat_state
    assert seat_state(world.node("n0").name, 2) is SeatState.FAILED
    assert seat_state(world.node("n1").name, 2) is SeatState.FAILED


def hung(local_rank: int, text: str = "no heartbeat for 30.0 s") -> WorkerExit:
    return WorkerExit(LocalRank(local_rank), message=text, hung=True)


def hung_and_ended(local_rank: int) -> WorkerExit:
    return replace(hung(local_rank), signal="SIGKILL", stopped_by_agent=True)


@pytest.mark.rule("D4", "G9")
def test_a_hang_is_the_cause_however_the_worker_then_ends() -> None:
    world = trained(2, 2)
    facts = world.report("n1", [hung(1)])
    assert [type(one) for one in facts] == [WorkersExited, CycleEnded, WorldChosen]
    expected = Failure(
        Cause.HANG,
        world.node("n1").name,
        world.run.cycles[0].seats[1].group_rank,
        LocalRank(1),
        message="no heartbeat for 30.0 s",
        rank=GlobalRank(3),
    )
    assert failure(world, 0) == expected
    sister = ended(0, signal="SIGTERM", stopped=True)
    assert [type(one) for one in world.report("n1", [sister, hung_and_ended(1)], CycleNumber(0))] == [WorkersExited]
    assert world.report("n1", [hung(1), hung_and_ended(1)], CycleNumber(0)) == [], "told again"
    cycle = world.run.cycles[0]
    assert (cycle.failure, cycle.consequences) == (expected, ())
    assert cycle.exits[world.node("n1").name][LocalRank(1)] == hung_and_ended(1)
    assert cycle.seat_state(world.node("n1").name, 2) is SeatState.FAILED


@pytest.mark.rule("D4", "G9")
def test_who_hangs_in_the_wake_of_a_hang_or_fails_then_is_a_consequence() -> None:
    world = trained(2, 2)
    world.report("n0", [hung(1), hung(0, "later")])
    world.report("n1", [ended(0, signal="SIGABRT"), hung(1, "too")], CycleNumber(0))
    assert failure(world, 0).rank == 1
    assert [(one.cause, one.signal or one.message) for one in world.run.cycles[0].consequences] == [
        (Cause.HANG, "later"),
        (Cause.WORKER_FAILED, "SIGABRT"),
        (Cause.HANG, "too"),
    ]
    assert world.cycle.number == 1


@pytest.mark.rule("D12", "G9")
def test_a_lost_node_explains_a_hang() -> None:
    """With a short timeout its peers are found hung before it is found lost."""
    world = trained(2, 3)
    world.kill("n1")
    world.report("n0", [hung(0)])
    world.advance(5)
    assert (failure(world, 0).cause, failure(world, 0).node_id) == (Cause.NODE_LOST, "n1")
    assert [one.cause for one in world.run.cycles[0].consequences] == [Cause.HANG]


@pytest.mark.rule("D2", "G9")
def test_a_node_whose_hung_worker_may_still_be_there_is_waited_for() -> None:
    """It leaves the world, and its only worker is known to hang: nothing starts elsewhere before that has ended."""
    world = trained(1, 2, 1)
    world.drain("n0")
    world.report("n0", [hung(0)])
    assert not world.is_training
    assert "n0 leaves the world and its workers are still stopping" in world.waiting()
    world.report("n0", [hung_and_ended(0)], CycleNumber(0))
    assert world.is_training
    assert world.active() == ["n1"]


@pytest.mark.rule("B2", "D4")
def test_what_was_told_is_not_told_again() -> None:
    world = trained(2, 2)
    world.exit("n0", 0)
    assert world.exit("n0", 0) == []
    assert world.exit("n0", 0, 1) == [], "nor changed"
    assert world.exit("n0", 7, 1) == [], "there is no such worker"
    assert world.report("n0", [ended(1, 1)], CycleNumber(9)) == [], "nor such a cycle"


@pytest.mark.rule("D2")
def test_a_standby_ends_no_cycle() -> None:
    world = trained(2, 3)
    assert world.exit("n2", 0, 1) == []
    world.kill("n2")
    world.advance(5)
    assert world.is_training
    assert world.cycle.number == 0


@pytest.mark.rule("D4")
def test_workers_that_the_agent_stopped_end_no_cycle() -> None:
    world = trained(2, 2)
    world.report("n0", [ended(0, signal="SIGTERM", stopped=True)])
    assert world.is_training


@pytest.mark.rule("D3")
def test_sixteen_lost_together_make_one_new_cycle() -> None:
    world = trained(16, 32, 1)
    world.kill(*world.active())
    world.advance(5)
    assert len(world.of(NodeLost)) == 16
    assert world.active() == [f"n{number}" for number in range(16, 32)]
    assert len(world.of(WorldChosen)) == 2
    assert failure(world, 0).message.endswith("(and 15 more)")


@pytest.mark.rule("D3")
def test_sixteen_lost_one_after_the_other_make_two_at_most() -> None:
    world = trained(16, 32, 1)
    for name in world.active():
        world.kill(name)
        world.advance(0.05)
    world.advance(5)
    assert len(world.of(NodeLost)) == 16
    assert len(world.of(WorldChosen)) <= 3


@pytest.mark.rule("C5")
def test_a_dead_standby_is_not_promoted() -> None:
    """Field case C062."""
    world = trained(2, 4)
    world.kill("n2")
    world.advance(3)
    world.kill("n0")
    world.advance(3)
    assert world.active() == ["n1", "n3"]


@pytest.mark.rule("C6")
def test_another_node_becomes_rank_0() -> None:
    """Field case C022."""
    world = trained(2, 3)
    world.kill("n0")
    world.advance(3)
    assert world.active() == ["n1", "n2"]
    assert world.cycle.master is not None
    assert world.cycle.master.address == world.node("n1").address


@pytest.mark.rule("C5", "D10")
def test_two_losses_and_one_standby_never_make_a_smaller_world() -> None:
    """Field case C063."""
    world = trained(3, 4)
    world.kill("n0", "n1")
    world.advance(100)
    assert not world.is_training
    world.join("n4")
    assert world.active() == ["n2", "n3", "n4"]


@pytest.mark.rule("D4", "D12")
@pytest.mark.parametrize("order", ["stream first", "failure first"])
def test_a_loss_explains_the_failure_of_a_peer(order: str) -> None:
    world = trained(2, 3)
    if order == "stream first":
        world.kill("n1")
        world.exit("n0", 0, signal="SIGABRT")
    else:
        world.exit("n0", 0, signal="SIGABRT")
        assert world.cycle.number == 1
        world.kill("n1")
    world.advance(3)
    assert failure(world, 0).cause is Cause.NODE_LOST
    assert failure(world, 0).node_id == "n1"
    assert [one.node_id for one in world.run.cycles[0].consequences] == ["n0"]
    assert len(world.of(CauseRevised)) == 1
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("D4", "D12")
@pytest.mark.parametrize("who", ["a standby", "an active node, once the next cycle runs", "an active node that left"])
def test_other_losses_explain_nothing(who: str) -> None:
    world = trained(2, 4)
    world.exit("n0", 0, 1)
    if who == "a standby":
        world.kill("n3")
    elif who == "an active node that left":
        world.leave("n1", stopped=True)
    else:
        world.start()
        world.kill("n1")
    world.advance(3)
    assert failure(world, 0).cause is Cause.WORKER_FAILED
    assert not world.of(CauseRevised)


@pytest.mark.rule("D4")
def test_a_node_that_leaves_is_the_cause() -> None:
    world = trained(2, 3)
    world.leave("n1", stopped=True)
    record = failure(world, 0)
    assert (record.cause, record.node_id, record.message) == (Cause.NODE_LEFT, "n1", "told to")


@pytest.mark.rule("D8")
def test_all_finished_and_everyone_is_told_to_exit_with_0() -> None:
    """Field case C064."""
    world = trained(2, 4)
    world.finish("n1")
    assert world.run.is_open
    world.finish("n0")
    assert (world.run.state, world.run.exit_code) == (RunState.SUCCEEDED, 0)
    for name in ("n0", "n1", "n2", "n3"):
        told = world.desired(name)
        assert (told.action, told.exit_code) == (Action.EXIT, 0)
    world.advance(1000)
    assert isinstance(world.facts[-1], RunClosed), "a closed run loses nobody"


@pytest.mark.rule("D8")
@pytest.mark.parametrize("how", ["lost", "left"])
def test_an_early_finisher_may_go(how: str) -> None:
    """Field case C066."""
    world = trained(2, 3)
    world.finish("n1")
    world.advance(20)
    if how == "lost":
        world.kill("n1")
    else:
        world.leave("n1", stopped=True)
    world.advance(5)
    assert world.is_training
    assert world.cycle.number == 0
    world.finish("n0")
    assert world.run.state is RunState.SUCCEEDED


@pytest.mark.rule("D8")
def test_a_node_of_which_one_worker_is_done_is_not_done() -> None:
    world = trained(2, 3)
    world.exit("n1", 0)
    world.kill("n1")
    world.advance(5)
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("D8")
def test_an_early_finisher_takes_part_in_the_next_cycle() -> None:
    world = trained(2, 2)
    world.finish("n1")
    world.exit("n0", 0, 1)
    assert world.active() == ["n0", "n1"]
    assert world.desired("n1").action is Action.RUN
    world.finish("n0", "n1")
    assert world.run.state is RunState.SUCCEEDED


@pytest.mark.rule("I2")
def test_no_store_port_is_used_twice() -> None:
    world = trained(2, 4, wish=SettingsWish(restart_backoff_s=0.0, max_node_failures=0))
    for _ in range(3):
        world.exit(world.active()[0], 0, 1)
        world.start()
    masters = [one.master for one in world.run.cycles]
    assert len(set(masters)) == 4
    assert None not in masters


@pytest.mark.rule("I1")
def test_without_a_store_there_is_no_master() -> None:
    world = World(1, 1, store=StoreMode.OFF)
    world.join("n0")
    assert world.cycle.master is None


@pytest.mark.rule("C8")
def test_deciding_looks_and_does_not_touch() -> None:
    world = trained(2, 3)
    command = Report(world.node("n0").name, world.node("n0").incarnation, (CycleExits(CycleNumber(0), (ended(0, 1),)),))
    first = decide(world.run, world.presence, command, world.now)
    assert first == decide(world.run, world.presence, command, world.now)
    assert decide(world.run, world.presence, Tick(), world.now) == []


def test_the_margin_beyond_the_stop_grace_is_what_the_rule_says() -> None:
    assert STOPPING_MARGIN_S == 2.0
