"""Facts: `evolve` is total and makes the state alone; each fact is one line for a person."""

from dataclasses import replace
from functools import reduce
from typing import get_args

import pytest

from nvrx.core.commands import Drain, Promote, Tick, Undrain
from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CheckSuspected,
    CheckTrusted,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeFailedCheck,
    NodeLeft,
    NodeLost,
    NodeRecovered,
    NodesPromoted,
    NodeStopped,
    RunClosed,
    RunState,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.health import MASS_WITHIN_S
from nvrx.core.ids import CycleNumber, GlobalRank, GroupRank, Incarnation, LocalRank, NodeId
from nvrx.core.invariants import Broken, check_state, check_step
from nvrx.core.narrate import Subject, subject_of, tell
from nvrx.core.presence import Health
from nvrx.core.run import MAX_CONSEQUENCES, evolve
from nvrx.core.shape import SettingsWish

from .driver import World, ended, trained

N0, GHOST = NodeId("n0"), Incarnation("ghost")
CYCLE = CycleNumber(9)
FAILURE = Failure(Cause.WORKER_FAILED, N0, GroupRank(0), LocalRank(0), 1, rank=GlobalRank(0))


def eventful() -> World:
    """A world in which every kind of fact has happened."""
    world = trained(2, 4, wish=SettingsWish(max_restarts=1, max_node_failures=1, quarantine_s=1.0))
    world.progress("n0", 10)
    world.kill("n1")
    world.exit("n0", 0, signal="SIGABRT")
    world.advance(3)
    world.start()
    world.leave("n2")
    world.leave("n2", stopped=True)
    world.start()
    world.exit("n0", 0, 1)
    world.exit("n0", 1, 1)
    world.rejoin("n1", reopen=True)
    world.join("n5", "n6", "n7")
    world.start()
    world.submit(Promote(NodeId("n7"), NodeId("n1")))
    world.submit(Drain(NodeId("n6")))
    world.submit(Undrain(NodeId("n6")))
    world.ails("n5", Health.UNHEALTHY)
    world.ails("n6", Health.UNHEALTHY)
    world.heals("n5", "n6")
    world.advance(2 * MASS_WITHIN_S)
    return world


def test_every_kind_of_fact_has_one_line() -> None:
    world = eventful()
    assert {type(fact) for fact in world.facts} == set(get_args(Fact))
    for fact in world.facts:
        line = tell(fact)
        assert line
        assert line.isprintable(), line
        assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        (NodeLeft(1, N0, GHOST, "SIGTERM"), "node n0 left: SIGTERM"),
        (NodeStopped(1, N0, GHOST), "the workers of node n0, which had left, are gone"),
        (NodeLost(1, N0, GHOST, "silent for 10.0 s"), "node n0 lost: silent for 10.0 s"),
        (CycleRunning(1, CYCLE), "cycle 9 running"),
        (
            WorkersExited(1, CYCLE, N0, (ended(0, 3), ended(1, signal="SIGTERM", stopped=True))),
            "cycle 9: workers of n0 ended: local rank 0: exit 3, local rank 1: SIGTERM (stopped by agent)",
        ),
        (
            WorkersExited(1, CYCLE, N0, (WorkerExit(LocalRank(0), message="no heartbeat for 30.0 s", hung=True),)),
            "cycle 9: workers of n0: local rank 0 hangs: no heartbeat for 30.0 s",
        ),
        (
            WorkersExited(1, CYCLE, N0, (WorkerExit(LocalRank(0), None, "SIGKILL", "", True, hung=True),)),
            "cycle 9: workers of n0 ended: local rank 0: SIGKILL (stopped by agent), after it hung",
        ),
        (
            CycleEnded(1, CYCLE, replace(FAILURE, cause=Cause.HANG, exit_code=None, message="no heartbeat for 30.0 s")),
            "cycle 9 ended: rank 0 (local rank 0) on n0 hung: no heartbeat for 30.0 s",
        ),
        (CycleEnded(1, CYCLE, FAILURE), "cycle 9 ended: rank 0 (local rank 0) on n0 failed with exit 1"),
        (CycleEnded(1, CYCLE, Failure(Cause.SUCCEEDED)), "cycle 9 ended: succeeded"),
        (
            CauseRevised(1, CYCLE, Failure(Cause.NODE_LOST, N0, message="silent")),
            "cycle 9 had ended because of node lost on n0: silent",
        ),
        (RunClosed(1, RunState.FAILED, "no nodes", 1), "run closed, failed: no nodes"),
    ],
)
def test_lines(fact: Fact, line: str) -> None:
    assert tell(fact) == line


def test_a_line_about_many_nodes_is_bounded() -> None:
    world = trained(20, 22, 1)
    chosen = world.of(WorldChosen)[0]
    assert tell(chosen).endswith("n15 and 4 more; 2 standby")


def test_subjects() -> None:
    world = eventful()
    seen = {type(fact): subject_of(fact) for fact in world.facts}
    assert seen[CauseRevised] == Subject(CycleNumber(0), NodeId("n1"))
    assert seen[NodeStopped] == Subject(None, NodeId("n2"))
    assert seen[CycleRunning] == Subject(CycleNumber(4), None)
    assert seen[NodesPromoted] == Subject(None, NodeId("n7"))
    assert seen[RunClosed] == Subject(None, None)


@pytest.mark.rule("E5")
def test_the_journal_gives_the_state_back() -> None:
    world = eventful()
    assert reduce(evolve, world.facts, None) == world.run
    for length in range(1, len(world.facts) + 1):
        run = reduce(evolve, world.facts[:length], None)
        assert run is not None
        assert run.last_at == world.facts[length - 1].at


@pytest.mark.rule("E5")
@pytest.mark.parametrize(
    "fact",
    [
        NodeLost(9, N0, GHOST, ""),
        NodeLost(9, NodeId("stranger"), GHOST, ""),
        NodeLeft(9, NodeId("stranger"), GHOST, ""),
        NodeStopped(9, NodeId("stranger"), GHOST),
        CycleRunning(9, CYCLE),
        CycleEnded(9, CYCLE, FAILURE),
        CauseRevised(9, CYCLE, FAILURE),
        WorkersExited(9, CYCLE, N0, (ended(0),)),
        NodeFailedCheck(9, NodeId("stranger"), GHOST, "disk", "is full"),
        NodeRecovered(9, N0),
        CheckTrusted(9, "disk"),
    ],
)
def test_evolve_is_total(fact: Fact) -> None:
    """A fact about what a run does not know changes nothing but the clock."""
    world = trained()
    assert evolve(world.run, fact) == replace(world.run, last_at=9.0)


@pytest.mark.rule("D4")
def test_consequences_are_bounded() -> None:
    world = trained(1, 2, workers=100)
    world.report("n0", [ended(rank, 1) for rank in range(100)])
    assert len(world.run.cycles[0].consequences) == MAX_CONSEQUENCES


# ---- the invariants themselves see what is wrong ----------------------------------------------------------


def broken_step(fact: Fact) -> str:
    world = trained()
    with pytest.raises(Broken) as caught:
        check_step(world.run, Tick(), [fact], evolve(world.run, fact))
    return caught.value.rule


@pytest.mark.parametrize(
    ("fact", "rule"),
    [
        (NodeLost(-1, N0, Incarnation("n0.0"), ""), "D1"),
        (NodeLost(1, N0, GHOST, ""), "B2"),
        (NodeStopped(1, N0, GHOST), "D2"),
        (CycleRunning(1, CycleNumber(0)), "D1"),
        (CycleEnded(1, CYCLE, FAILURE), "D1"),
        (CycleEnded(1, CycleNumber(0), Failure(Cause.SUCCEEDED)), "D8"),
        (CycleEnded(1, CycleNumber(0), Failure(Cause.NODE_LOST, NodeId("n2"))), "A5"),
        (CauseRevised(1, CycleNumber(0), FAILURE), "D4"),
        (WorkersExited(1, CycleNumber(0), NodeId("n2"), (ended(0),)), "D4"),
        (RunClosed(1, RunState.FAILED, "why", 1), "D1"),
        (NodeFailedCheck(1, N0, GHOST, "disk", "is full"), "B2"),
        (NodeRecovered(1, N0), "G11"),
        (CheckSuspected(1, "disk", (N0,), 3), "G11"),
        (CheckSuspected(1, "disk", (N0, NodeId("n1")), 20), "G11"),
        (CheckTrusted(1, "disk"), "G11"),
        (CycleEnded(1, CycleNumber(0), Failure(Cause.NODE_UNHEALTHY, N0)), "G11"),
    ],
)
def test_wrong_facts_are_seen(fact: Fact, rule: str) -> None:
    assert broken_step(fact) == rule


def test_a_wrong_world_is_seen() -> None:
    world = trained(2, 4)
    chosen = world.of(WorldChosen)[0]
    assert isinstance(chosen, WorldChosen)
    world.kill("n1")
    before = world.run
    world.advance(3)
    ended_run = reduce(evolve, world.facts[: len(world.facts) - 1], None)
    assert ended_run is not None
    good = world.facts[-1]
    assert isinstance(good, WorldChosen)
    check_step(ended_run, Tick(), [good], evolve(ended_run, good))
    wrong = {
        "C1": replace(good, seats=chosen.seats),
        "A3": replace(good, cycle=CycleNumber(0)),
        "C6": replace(good, seats=good.seats[1:] + good.seats[:1]),
        "C5": replace(
            good,
            seats=(
                replace(good.seats[0], node=good.seats[1].node),
                replace(good.seats[1], node=good.standbys[0].node),
            ),
            standbys=(replace(good.standbys[0], node=good.seats[0].node),),
        ),
    }
    for rule, fact in wrong.items():
        with pytest.raises(Broken) as caught:
            check_step(ended_run, Tick(), [fact], evolve(ended_run, fact))
        assert caught.value.rule == rule
    with pytest.raises(Broken):
        check_state(evolve(ended_run, replace(good, seats=good.seats[:1])))
    with pytest.raises(Broken):
        check_state(evolve(ended_run, replace(good, master=chosen.master)))
    with pytest.raises(Broken):
        check_step(before, Tick(), [], world.run)
