"""The coordinator is started on every beginning of a journal: nobody is expelled for it, stopped for it or charged.

The journals are those of the scenarios. A coordinator leaves whole transactions; a repair may leave any beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path

import pytest

from nvrx.core.budgets import replacements_used, restarts_used
from nvrx.core.facts import CauseRevised, CycleRunning, Fact, NodeLost, RunClosed, WorldChosen
from nvrx.core.ids import CycleNumber, NodeId, Revision
from nvrx.core.invariants import check_state
from nvrx.core.presence import RECOVERY_AT_LEAST_S, AgentPhase
from nvrx.core.ranks import Action
from nvrx.core.refused import Refused
from nvrx.core.run import CycleState, Run, SeatState, evolve
from nvrx.server.engine import Engine
from nvrx.server.journals import Row
from nvrx.server.journals.memory import MemoryJournal

from ..core.driver import RUN_ID, Node, World
from ..core.transcript import COMMAND, Teller

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
ALMOST = 0.999
SETTLES_WITHIN_S = 40.0
"""Recovery, leases and the longest stop grace, one after the other."""


def replayed(facts: Sequence[Fact]) -> Run:
    return reduce(evolve, facts[1:], evolve(None, facts[0]))


def played(path: Path) -> World:
    """The world at the end of a scenario."""
    teller = Teller()
    for line in path.read_text().splitlines():
        if line.startswith(COMMAND):
            teller.do(line.removeprefix(COMMAND))
    return teller.world


def restarted(was: World, facts: Sequence[Fact]) -> World:
    """A coordinator on the first facts of a world, its nodes as they stood then, none of them back yet."""
    world = World(was.min_nodes, was.max_nodes, was.workers, was.wish, was.timing, was.store)
    world.facts = list(facts)
    world.opened = replayed(facts)
    for number, member in enumerate(world.run.members.values()):
        info = member.info
        life = int(info.incarnation.rpartition(".")[2])
        node = Node(info.node_id, number, info.order_sources, life, info.restart_count, info.last_cycle)
        node.phase, node.cycle = _state_of(world.run, info.node_id, world.workers)
        world.nodes[info.node_id] = node
    return world


def _state_of(run: Run, node_id: NodeId, workers: int) -> tuple[AgentPhase, CycleNumber | None]:
    """What an agent does whose coordinator went away with these facts."""
    cycle = run.cycle
    seat = cycle.seat_of.get(node_id) if cycle is not None else None
    member = run.live(node_id)
    if cycle is None or seat is None or member is None or member.info.incarnation != seat.node.incarnation:
        return AgentPhase.IDLE, None
    if cycle.has_finished(node_id, workers):
        return AgentPhase.SUCCEEDED, cycle.number
    return (AgentPhase.RUNNING if cycle.is_live else AgentPhase.STOPPED), cycle.number


def live(world: World) -> list[str]:
    return [str(one.info.node_id) for one in world.run.live_members()]


def check_recovery(world: World, is_whole: bool, back: Sequence[str]) -> None:
    """E5: while a node may still come back nobody is judged, nobody is told to stop, and no world is chosen."""
    before, seen = world.run, len(world.facts)
    told = {name: world.desired(name) for name in live(world)}
    world.restart_coordinator()
    for name in back:
        world.connect(name)
    world.advance(max(world.timing.lease_ttl_s, RECOVERY_AT_LEAST_S) * ALMOST)
    new = world.facts[seen:]
    assert not [one for one in new if isinstance(one, NodeLost)], new
    if live(world):
        assert not [one for one in new if isinstance(one, WorldChosen)], new
    if is_whole and before.cycle is not None and before.cycle.is_live:
        assert [type(one) for one in new] in ([], [CycleRunning])
        assert {name: world.desired(name) for name in live(world)} == told
    if is_whole:
        assert (restarts_used(world.run), replacements_used(world.run)) == (
            restarts_used(before),
            replacements_used(before),
        )


def check_return(world: World, is_whole: bool) -> None:
    """All come back: a live cycle goes on as it was, and whatever it was before, something runs or is over."""
    before, seen = world.run, len(world.facts)
    world.restart_coordinator()
    for name in live(world):
        world.connect(name)
    world.tick()
    if is_whole and before.cycle is not None and before.cycle.is_live:
        assert [type(one) for one in world.facts[seen:]] in ([], [CycleRunning]), world.facts[seen:]
        for name in live(world):
            assert world.desired(name).action in {Action.RUN, Action.WAIT}
        assert world.run.cycles[:-1] == before.cycles[:-1]
    elif is_whole:
        assert all(isinstance(one, WorldChosen | CycleRunning | CauseRevised | RunClosed) for one in world.facts[seen:])
    assert not [one for one in world.facts[seen:] if isinstance(one, NodeLost)]
    _train_on(world)


def _train_on(world: World) -> None:
    """With as many nodes as it takes the run trains, and reaches its end."""
    for name in itertools.chain(list(map(str, world.nodes)), (f"spare{number}" for number in range(world.max_nodes))):
        if world.run.is_open and len(live(world)) < world.min_nodes and name not in live(world):
            with suppress(Refused):  # its place in order is taken
                world.rejoin(name)
    for _ in range(int(SETTLES_WITHIN_S)):
        world.advance(1.0)
        if world.is_training:
            world.start()
    if not world.run.is_open:
        return
    assert world.is_training, world.waiting()
    assert world.cycle.running_at is not None
    states = {name: world.cycle.seat_state(NodeId(name), world.workers) for name in world.active()}
    if SeatState.STOPPED_BY_AGENT in states.values():
        return  # a scenario says so of workers that its agent does not stop again
    for name, state in states.items():
        if state is not SeatState.SUCCEEDED:
            world.finish(name)
    assert not world.run.is_open


def prefixes(world: World) -> Iterator[tuple[list[Fact], bool]]:
    """Every beginning of a world's journal, and whether a coordinator can have left it so."""
    for count in range(1, len(world.facts) + 1):
        yield world.facts[:count], count in world.transactions


@pytest.mark.rule("E5", "D2", "D5")
@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_a_restart_at_every_beginning_of_a_journal(path: Path) -> None:
    world = played(path)
    for facts, is_whole in prefixes(world):
        known = restarted(world, facts)
        if is_whole:
            check_state(known.run)
        check_recovery(known, is_whole, [])
        for missing in live(known):
            again = restarted(world, facts)
            check_recovery(again, is_whole, [name for name in live(again) if name != missing])
        check_return(restarted(world, facts), is_whole)


@pytest.mark.rule("E5")
@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_an_engine_loads_every_beginning_of_a_journal(path: Path) -> None:
    world = played(path)
    for facts, _ in prefixes(world):
        journal = MemoryJournal()
        journal.append([Row(RUN_ID, Revision(place), fact) for place, fact in enumerate(facts, start=1)])
        engine = Engine(journal, clock=lambda: 1000.0, wall=lambda: 0.0, timing=world.timing, store=world.store)
        engine.load()
        hosted = engine.runs[RUN_ID]
        assert hosted.run == replayed(facts)
        assert hosted.revision == len(facts)
        assert engine.now(hosted) == pytest.approx(hosted.run.last_at)
        assert hosted.presence.returning == {one.info.node_id for one in hosted.run.live_members()}
        engine.close()


@pytest.mark.rule("E5")
def test_the_scenarios_have_every_state_in_which_a_coordinator_can_end() -> None:
    ends = [replayed(facts) for path in SCENARIOS for facts, _ in prefixes(played(path))]
    assert any(run.stopping for run in ends), "nodes that left, their workers still stopping"
    assert any(run.is_open and run.cycle is None for run in ends), "the first world being formed"
    states = {run.cycle.state for run in ends if run.cycle is not None and run.is_open}
    assert states == set(CycleState)
    assert any(not run.is_open for run in ends)
