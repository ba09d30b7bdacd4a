"""What operators ask of a run: promote, drain, undrain, stop."""

from __future__ import annotations

import pytest

from nvrx.core.budgets import replacements_used, restarts_used
from nvrx.core.commands import Drain, Promote, StopRun, Undrain
from nvrx.core.facts import Cause, RunState
from nvrx.core.ids import NodeId
from nvrx.core.operate import preview
from nvrx.core.ranks import Action, NodeState, active_nodes, node_state
from nvrx.core.refused import Reason, Refused

from .driver import World, trained
from .test_groups import grouped


def n(name: str) -> NodeId:
    return NodeId(name)


def refused(world: World, command: Promote | Drain | Undrain | StopRun) -> Refused:
    """The refusal of a command; `preview` must give the same."""
    before = world.run
    with pytest.raises(Refused) as seen:
        world.submit(command)
    assert world.run == before
    if isinstance(command, Promote | Drain):
        with pytest.raises(Refused) as foreseen:
            preview(world.run, world.presence, command, world.now)
        assert foreseen.value.message == seen.value.message
    return seen.value


def foreseen(world: World, command: Promote | Drain) -> list[str]:
    return list(map(str, preview(world.run, world.presence, command, world.now).placement.chosen))


@pytest.mark.rule("F1")
def test_a_promotion_waits_for_the_next_cycle_boundary() -> None:
    world = trained(2, 4)
    command = Promote(n("n3"))
    assert foreseen(world, command) == ["n0", "n3"]
    world.submit(command)
    assert world.active() == ["n0", "n1"]
    assert world.cycle.is_live
    world.exit("n0", 0, 1)
    world.stopped("n1")
    assert world.active() == ["n0", "n3"]
    world.start()
    world.exit("n0", 0, 1)
    assert world.active() == ["n0", "n3"], "the wish is granted; from now on it is a survivor like any other"


@pytest.mark.rule("F1")
def test_a_promotion_may_name_whom_it_replaces() -> None:
    world = trained(2, 4)
    command = Promote(n("n3"), replace=n("n0"), immediate=True)
    assert foreseen(world, command) == ["n1", "n3"]
    left_out = preview(world.run, world.presence, command, world.now).placement.left_out
    assert ("n0", "replaced by an operator") in [(one.node_id, one.reason) for one in left_out]
    world.submit(command)
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert (failure.cause, failure.node_id) == (Cause.PROMOTED, n("n3"))
    assert "in place of n0" in failure.message
    assert world.desired("n0").action is Action.STOP
    world.stopped("n0")
    assert world.active() == ["n1", "n3"]
    world.start()
    world.exit("n1", 0, 1)
    world.exit("n3", 0, 1)
    assert "n0" not in world.active(), "survivors stay"


@pytest.mark.rule("F1", "D2")
def test_nothing_new_starts_while_a_replaced_node_writes_its_checkpoint() -> None:
    world = trained(2, 3)
    world.submit(Drain(n("n0"), immediate=True))
    assert not world.is_training
    assert world.waiting() == "n0 leaves the world and its workers are still stopping"
    world.advance(16)
    assert not world.is_training
    world.advance(2)
    assert world.active() == ["n1", "n2"], "its stop grace is over"


@pytest.mark.rule("F1", "D5")
def test_changes_by_hand_cost_nothing() -> None:
    world = trained(2, 4)
    for name in ("n3", "n2", "n1", "n0"):
        active = world.active()
        if name in active:
            continue
        world.submit(Promote(n(name), immediate=True))
        world.stopped(*(one for one in active if one not in foreseen_names(world)))
        world.advance(20)
        world.start()
    assert world.run.is_open
    assert restarts_used(world.run) + replacements_used(world.run) == 0


def foreseen_names(world: World) -> set[str]:
    return {str(one) for one in world.run.promoted}


@pytest.mark.rule("F1")
def test_a_drained_node_stays_a_member_and_is_not_chosen() -> None:
    world = trained(2, 3)
    world.submit(Drain(n("n1")))
    assert world.active() == ["n0", "n1"]
    assert node_state(world.run, world.run.members[n("n1")]) is NodeState.DRAINING
    assert active_nodes(world.run) == 2, "it trains on until the cycle ends"
    world.exit("n0", 0, 1)
    world.stopped("n1")
    assert world.active() == ["n0", "n2"]
    world.start()
    assert world.desired("n1").action is Action.WAIT
    world.kill("n2")
    world.advance(4)
    assert not world.is_training
    assert "n1" in world.waiting()
    world.submit(Undrain(n("n1")))
    assert world.active() == ["n0", "n1"]
    assert world.submit(Undrain(n("n1"))) == []


@pytest.mark.rule("F1")
def test_a_drain_outlives_the_agent() -> None:
    """It is the machine that is bad, whoever runs on it."""
    world = trained(2, 3)
    world.submit(Drain(n("n2")))
    world.kill("n2")
    world.advance(4)
    world.rejoin("n2")
    world.kill("n1")
    world.advance(4)
    assert not world.is_training
    world.restart_coordinator()
    assert n("n2") in world.run.drained


@pytest.mark.rule("F1")
def test_what_leaves_no_legal_world_is_refused() -> None:
    world = trained(2, 2)
    error = refused(world, Drain(n("n1")))
    assert error.reason is Reason.ILLEGAL_WORLD
    assert "1" in error.message
    assert world.cycle.is_live
    error = refused(world, Drain(n("n9")))
    assert error.reason is Reason.UNKNOWN_NODE


@pytest.mark.rule("F1")
def test_wrong_promotions_are_refused() -> None:
    world = trained(2, 4)
    assert refused(world, Promote(n("n0"))).reason is Reason.INVALID_FIELD
    assert refused(world, Promote(n("n9"))).reason is Reason.UNKNOWN_NODE
    assert refused(world, Promote(n("n2"), replace=n("n3"))).reason is Reason.INVALID_FIELD
    world.submit(Drain(n("n2")))
    assert "undrain" in refused(world, Promote(n("n2"))).message
    world.freeze("n3")
    world.advance(3)
    assert refused(world, Promote(n("n3"))).reason is Reason.ILLEGAL_WORLD


@pytest.mark.rule("F1", "C2")
def test_groups_move_as_one() -> None:
    world = grouped("n0", "n1", "n2", "n3", "n4", "n5", nnodes=(4, 6))
    world.start()
    assert world.active() == ["n0", "n1", "n2", "n3"]
    command = Promote(n("n5"), replace=n("n0"), immediate=True)
    assert foreseen(world, command) == ["n2", "n3", "n4", "n5"]
    world.submit(command)
    world.stopped("n0", "n1")
    assert world.active() == ["n2", "n3", "n4", "n5"]
    world.start()
    world.submit(Drain(n("n3"), immediate=True))
    world.stopped("n2", "n3")
    assert world.active() == ["n0", "n1", "n4", "n5"]
    assert world.run.drained == {n("n2"), n("n3")}
    world.submit(Undrain(n("n2")))
    assert world.run.drained == set()


@pytest.mark.rule("F1")
def test_half_a_group_is_not_promoted() -> None:
    world = grouped("n0", "n1", "n2", nnodes=(2, 4))
    world.advance(2)
    world.start()
    error = refused(world, Promote(n("n2")))
    assert error.reason is Reason.ILLEGAL_WORLD
    assert "g1" in error.message


@pytest.mark.rule("F1", "D9")
def test_a_wish_that_cannot_be_met_any_more_stops_no_training() -> None:
    world = trained(2, 4)
    world.submit(Promote(n("n3")))
    world.kill("n3")
    world.advance(4)
    world.exit("n0", 0, 1)
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("F1")
def test_a_wish_for_a_node_that_is_gone_stops_no_other_change() -> None:
    world = trained(2, 5)
    world.submit(Promote(n("n4")))
    world.kill("n4")
    world.advance(4)
    assert foreseen(world, Promote(n("n3"))) == ["n0", "n3"]
    assert foreseen(world, Drain(n("n0"))) == ["n1", "n2"]
    world.submit(Drain(n("n0")))
    world.rejoin("n4")
    world.exit("n1", 0, 1)
    world.stopped("n0")
    assert world.active() == ["n1", "n4"], "it was back in time"


@pytest.mark.rule("F1", "C2")
def test_a_wish_for_a_group_with_a_hole_stops_no_other_change() -> None:
    world = grouped("n0", "n1", "n2", "n3", "n4", "n5", nnodes=(2, 6))
    world.start()
    world.submit(Promote(n("n5")))
    world.kill("n4")
    world.advance(4)
    assert foreseen(world, Promote(n("n3"))) == ["n2", "n3"]
    assert foreseen(world, Drain(n("n0"))) == ["n2", "n3"]


@pytest.mark.rule("F1")
def test_a_drain_goes_before_a_promotion_of_earlier() -> None:
    world = trained(2, 3)
    world.submit(Promote(n("n2"), replace=n("n0")))
    world.submit(Drain(n("n1")))
    world.exit("n0", 0, 1)
    world.stopped("n1")
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("F1")
def test_a_stopped_run() -> None:
    world = trained(2, 3)
    world.submit(StopRun())
    assert world.run.state is RunState.STOPPED
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert failure.cause is Cause.STOPPED
    for name in ("n0", "n2"):
        told = world.desired(name)
        assert (told.action, told.exit_code) == (Action.EXIT, 1)
    for command in (StopRun(), Drain(n("n0")), Undrain(n("n0")), Promote(n("n2"))):
        assert refused(world, command).reason is Reason.RUN_CLOSED


@pytest.mark.rule("F1", "A5")
def test_a_drained_node_keeps_no_spare_out() -> None:
    world = trained(2, 3)
    world.submit(Drain(n("n2")))
    world.join("n3")
    error = refused(world, Undrain(n("n2")))
    assert error.reason is Reason.RUN_FULL
    world.leave("n3", stopped=True)
    world.submit(Undrain(n("n2")))
    assert world.run.drained == set()
