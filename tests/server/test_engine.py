"""The engine alone, with journals that block or fail and with clocks that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from nvrx.core.commands import CycleExits, Join, Leave, Report
from nvrx.core.facts import Fact, NodeInfo, NodeJoined, NodeLost, RunOpened, WorkerExit
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, NodeId, Revision, RunId
from nvrx.core.presence import AgentPhase, StoreMode, Timing, Word
from nvrx.core.ranks import Action
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import Settings, SettingsWish, Shape
from nvrx.server import engine as engine_module
from nvrx.server import hosted as hosted_module
from nvrx.server.engine import Engine
from nvrx.server.hosted import Hosted, Session, Watch
from nvrx.server.journals import JournalError, Row
from nvrx.server.journals.memory import MemoryJournal

from .coordination import WAIT_S

RUN = RunId("run-1")
TIMING = Timing(heartbeat_interval_s=1.0, lease_ttl_s=10.0, reconnect_grace_s=2.0)


class HeldJournal(MemoryJournal):
    """Holds each append until it is let go; `appends` are the batches in order."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: list[list[Row]] = []
        self.is_holding = True
        self._held = threading.Event()
        self._go = threading.Semaphore(0)

    def append(self, rows: Sequence[Row]) -> None:
        self.appends.append(list(rows))
        self._held.set()
        if self.is_holding:
            assert self._go.acquire(timeout=WAIT_S)
        super().append(rows)

    def hold(self) -> None:
        self._held.clear()
        self.is_holding = True

    async def held(self) -> None:
        """Wait until an append is in flight."""
        assert await asyncio.to_thread(self._held.wait, WAIT_S)
        self._held.clear()

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)


class FailingJournal(MemoryJournal):
    def append(self, rows: Sequence[Row]) -> None:
        raise JournalError("cannot write the journal: disk full")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make(journal: MemoryJournal, clock: Clock, timing: Timing = TIMING) -> Engine:
    return Engine(journal, clock=clock, wall=lambda: 1.7e9 + clock.now, timing=timing, store=StoreMode.OFF)


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(engine.serve())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, JournalError):
            await task
        engine.close()


def joining(node: str, *, nnodes: tuple[int, int] = (1, 1), incarnation: str = "", last_call_s: float = 0.0) -> Join:
    info = NodeInfo(NodeId(node), Incarnation(incarnation or f"{node}-1"), "10.0.0.1", 7)
    return Join(info, Shape(*nnodes, 1), SettingsWish(last_call_s=last_call_s))


async def settled(engine: Engine, run_id: RunId = RUN) -> Hosted:
    """Returns once all that was asked before has been decided."""
    with contextlib.suppress(Refused):
        async with asyncio.timeout(WAIT_S):
            await engine.submit(run_id, Leave(NodeId("nobody"), Incarnation("x"), "", True, 0.0))
    return engine.runs[run_id]


async def passing(engine: Engine, clock: Clock, seconds: float) -> None:
    """Time goes on and the engine is awake."""
    for _ in range(round(seconds / 0.2)):
        clock.now += 0.2
        engine.nudge(RUN)
        await settled(engine)


async def enter(engine: Engine, node: str, **given: object) -> Session:
    await engine.submit(RUN, joining(node, **given))  # type: ignore[arg-type]
    session = engine.open_session(RUN, NodeId(node), Incarnation(f"{node}-1"))
    engine.heard(session, Word(AgentPhase.IDLE))
    return session


def kinds(engine: Engine, run_id: RunId = RUN) -> list[str]:
    return [type(row.fact).__name__ for row in engine._journal.read(run_id, Revision(1), 1000)]


@pytest.mark.rule("E5")
async def test_nothing_is_seen_or_answered_before_it_is_kept() -> None:
    journal = HeldJournal()
    engine = make(journal, Clock())
    async with serving(engine):
        first = asyncio.create_task(engine.submit(RUN, joining("n0", nnodes=(2, 2))))
        await journal.held()
        assert not first.done()
        assert not engine.runs
        journal.let_go()
        await first
        hosted = engine.runs[RUN]
        watch = engine.watch(hosted)
        second = asyncio.create_task(engine.submit(RUN, joining("n1", nnodes=(2, 2))))
        await journal.held()
        assert not second.done()
        assert list(hosted.run.members) == ["n0"]
        assert hosted.revision == 2
        assert watch.rows.empty()
        journal.let_go()
        await second
        assert hosted.revision == 3
        row = watch.rows.get_nowait()
        assert row is not None
        assert isinstance(row.fact, NodeJoined)


@pytest.mark.rule("E5")
async def test_a_refusal_waits_for_what_it_was_decided_upon() -> None:
    journal = HeldJournal()
    engine = make(journal, Clock())
    async with serving(engine):
        joined = asyncio.create_task(engine.submit(RUN, joining("n0")))
        refused = asyncio.create_task(engine.submit(RUN, joining("n1")))
        await journal.held()
        assert not refused.done()
        journal.let_go()
        await joined
        with pytest.raises(Refused) as seen:
            await refused
        assert seen.value.reason is Reason.RUN_FULL


@pytest.mark.rule("E5")
async def test_a_journal_that_fails_ends_the_engine_and_nothing_is_said() -> None:
    engine = make(FailingJournal(), Clock())
    async with serving(engine) as task:
        asked = asyncio.create_task(engine.submit(RUN, joining("n0")))
        with pytest.raises(JournalError, match="disk full"):
            async with asyncio.timeout(WAIT_S):
                await task
        assert not asked.done()
        assert not engine.runs
        asked.cancel()


@pytest.mark.rule("E5")
async def test_what_comes_while_an_append_is_in_flight_is_kept_in_one_more() -> None:
    journal = HeldJournal()
    engine = make(journal, Clock())
    async with serving(engine):
        first = asyncio.create_task(engine.submit(RUN, joining("n0", nnodes=(1, 200))))
        await journal.held()
        rest = [asyncio.create_task(engine.submit(RUN, joining(f"n{one}", nnodes=(1, 200)))) for one in range(1, 101)]
        other = asyncio.create_task(engine.submit(RunId("other"), joining("n0")))
        await asyncio.sleep(0)
        journal.let_go(2)
        await asyncio.gather(first, other, *rest)
    assert [len(one) for one in journal.appends] == [2, 102]
    assert [one.revision for one in journal.appends[1] if one.run_id == RUN] == list(range(3, 103))


@pytest.mark.rule("E1")
async def test_the_timer_finds_a_node_lost_without_any_news() -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(
        MemoryJournal(),
        clock=loop.time,
        wall=lambda: 0.0,
        timing=Timing(heartbeat_interval_s=0.05, lease_ttl_s=0.1, reconnect_grace_s=0.05),
        store=StoreMode.OFF,
    )
    async with serving(engine):
        await engine.submit(RUN, joining("n0", nnodes=(2, 2)))
        watch = engine.watch(engine.runs[RUN])
        async with asyncio.timeout(WAIT_S):
            row = await watch.rows.get()
        assert row is not None
        assert isinstance(row.fact, NodeLost)


@pytest.mark.rule("E1")
async def test_silence_is_borne_for_a_lease_and_no_longer() -> None:
    clock = Clock()
    engine = make(MemoryJournal(), clock)
    async with serving(engine):
        await enter(engine, "n0", nnodes=(2, 2))
        await settled(engine)
        await passing(engine, clock, 9.8)
        assert "NodeLost" not in kinds(engine)
        await passing(engine, clock, 0.4)
        assert "NodeLost" in kinds(engine)


@pytest.mark.rule("E1")
async def test_its_own_stall_is_held_against_nobody() -> None:
    clock = Clock()
    engine = make(MemoryJournal(), clock)
    async with serving(engine):
        await enter(engine, "n0", nnodes=(2, 2))
        await settled(engine)
        clock.now += 60.0
        engine.nudge(RUN)
        hosted = await settled(engine)
        assert "NodeLost" not in kinds(engine)
        assert hosted.presence.nodes[NodeId("n0")].lease_until == pytest.approx(69.75)
        await passing(engine, clock, 9.6)
        assert "NodeLost" not in kinds(engine)
        await passing(engine, clock, 0.4)
        assert "NodeLost" in kinds(engine)


@pytest.mark.rule("E1", "D12", "E6")
async def test_the_time_that_a_write_takes_is_held_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while etcd chooses a leader of its own: a node cannot take up a place before it is told of it."""
    monkeypatch.setattr(engine_module, "_PULSE_S", 0.0)
    clock, journal = Clock(), HeldJournal()
    journal.is_holding = False
    engine = make(journal, clock)
    async with serving(engine):
        sessions = [await enter(engine, name, nnodes=(1, 2), last_call_s=600.0) for name in ("n0", "n1")]
        for session in sessions:
            engine.heard(session, Word(AgentPhase.RUNNING, CycleNumber(0), acknowledged=CycleNumber(0)))
        await settled(engine)
        assert kinds(engine)[-1] == "CycleRunning"
        failed = CycleExits(CycleNumber(0), (WorkerExit(LocalRank(0), 1),))
        journal.hold()
        telling = asyncio.create_task(engine.submit(RUN, Report(NodeId("n0"), Incarnation("n0-1"), (failed,))))
        await journal.held()
        await _living(engine, clock, sessions, 3.0)
        journal.is_holding = False
        journal.let_go()
        await telling
        await settled(engine)
        assert kinds(engine)[-2:] == ["CycleEnded", "WorldChosen"]
        assert kinds(engine).count("CycleEnded") == 1
        await _living(engine, clock, sessions, 1.8)
        await settled(engine)
        assert kinds(engine).count("CycleEnded") == 1
        await _living(engine, clock, sessions, 0.4)
        await settled(engine)
        assert kinds(engine).count("CycleEnded") == 2


async def _living(engine: Engine, clock: Clock, sessions: list[Session], seconds: float) -> None:
    """Time goes on, and nodes say that they know of cycle 0 and of no later one."""
    for _ in range(round(seconds / 0.2)):
        clock.now += 0.2
        for session in sessions:
            engine.heard(session, Word(AgentPhase.RUNNING, CycleNumber(0), acknowledged=CycleNumber(0)))
        engine.nudge(RUN)
        await asyncio.sleep(0)


@pytest.mark.rule("C1", "E1")
async def test_what_is_heard_first_after_a_stall_is_not_extended_by_it() -> None:
    """Read before the pulse: the node was fresh, and its lease over, as much later as the stall had lasted."""
    clock = Clock()
    engine = make(MemoryJournal(), clock)
    async with serving(engine):
        session = await enter(engine, "n0", nnodes=(2, 2))
        hosted = await settled(engine)
        clock.now += 60.0
        engine.heard(session, Word(AgentPhase.IDLE))
        hosted = await settled(engine)
        node = hosted.presence.nodes[NodeId("n0")]
        assert node.heard_at == pytest.approx(engine.now(hosted))
        assert node.lease_until == pytest.approx(engine.now(hosted) + 10.0)
        await passing(engine, clock, 2.4)
        assert not hosted.presence.is_fresh(NodeId("n0"), engine.now(hosted))


@pytest.mark.rule("E1", "E5")
async def test_who_came_back_and_fell_silent_again_does_not_prolong_the_wait_for_others() -> None:
    """The lease of one ends before the others' time to come back: the engine neither spins nor thinks it stalled."""
    clock = Clock()
    journal = MemoryJournal()
    info = [joining(f"n{one}").node for one in range(2)]
    facts: list[Fact] = [RunOpened(0.0, RUN, Shape(2, 2, 1), Settings()), *(NodeJoined(0.0, one) for one in info)]
    journal.append([Row(RUN, Revision(place), fact) for place, fact in enumerate(facts, start=1)])
    engine = make(journal, clock)
    engine.load()
    async with serving(engine):
        session = engine.open_session(RUN, NodeId("n0"), Incarnation("n0-1"))
        engine.close_session(session)
        hosted = await settled(engine)
        await passing(engine, clock, 14.0)
        assert engine._timer_at is not None
        assert engine._timer_at > clock.now
        assert hosted.presence.recovering_until == pytest.approx(15.0)
        assert "NodeLost" not in kinds(engine)
        assert hosted.waiting == "the coordinator restarted; n1 may still come back"
        await passing(engine, clock, 1.2)
        assert hosted.waiting.startswith("none of 2 nodes is heard"), "its time is over, and yet nobody is judged"
        assert engine._timer_at is not None
        assert engine._timer_at > clock.now
        clock.now = engine._timer_at
        engine._pulse_at = None  # nobody thinks that this was a stall
        await passing(engine, clock, 0.2)
        assert kinds(engine).count("NodeLost") == 2


@pytest.mark.rule("A3")
async def test_two_runs_do_not_mix() -> None:
    clock = Clock()
    engine = make(MemoryJournal(), clock)
    other = RunId("run-2")
    async with serving(engine):
        session = await enter(engine, "n0")
        await settled(engine)
        clock.now += 5.0
        await engine.submit(other, joining("n0", incarnation="x"))
        await settled(engine)
        assert engine.desired(session).action is Action.RUN
        assert engine.runs[other].run.cycle is None
        assert engine.now(engine.runs[other]) == pytest.approx(0.0)
        assert engine.now(engine.runs[RUN]) == pytest.approx(5.0)
        with pytest.raises(Refused) as seen:
            engine.open_session(other, NodeId("n0"), Incarnation("n0-1"))
        assert seen.value.reason is Reason.STALE_INCARNATION
        await engine.submit(other, Leave(NodeId("n0"), Incarnation("x"), "", True, 0.0))
        assert engine.desired(session).action is Action.RUN
        assert kinds(engine) == ["RunOpened", "NodeJoined", "WorldChosen"]
        assert kinds(engine, other) == ["RunOpened", "NodeJoined", "NodeLeft"]
        with pytest.raises(Refused) as which:
            engine.find("")
        assert which.value.reason is Reason.UNKNOWN_RUN


@pytest.mark.rule("J4")
async def test_runs_are_limited_also_when_they_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_RUNS", 3)
    engine = make(MemoryJournal(), Clock())
    async with serving(engine):
        asked = [engine.submit(RunId(f"r{one}"), joining("n0")) for one in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert len(engine.runs) == 3
        refused = [one for one in answers if isinstance(one, Refused)]
        assert [one.reason for one in refused] == [Reason.LIMIT_EXCEEDED] * 2


@pytest.mark.rule("A3")
async def test_only_a_join_opens_a_run_and_only_one_that_is_let_in() -> None:
    engine = make(MemoryJournal(), Clock())
    async with serving(engine):
        with pytest.raises(Refused) as seen:
            await engine.submit(RUN, Leave(NodeId("n0"), Incarnation("x"), "", True, 0.0))
        assert seen.value.reason is Reason.UNKNOWN_RUN
        with pytest.raises(Refused):
            await engine.submit(RUN, joining("a/b"))
        assert not engine.runs
        assert kinds(engine) == []


@pytest.mark.rule("B2", "E5")
async def test_words_said_while_the_loss_is_being_written_change_nothing() -> None:
    clock = Clock()
    journal = HeldJournal()
    journal.is_holding = False
    engine = make(journal, clock)
    async with serving(engine):
        session = await enter(engine, "n0", nnodes=(2, 2))
        hosted = await settled(engine)
        engine.close_session(session)
        await passing(engine, clock, 1.8)
        journal.hold()
        clock.now += 0.24
        engine.nudge(RUN)
        await journal.held()
        engine.heard(session, Word(AgentPhase.RUNNING))
        again = engine.open_session(RUN, NodeId("n0"), Incarnation("n0-1"))
        assert NodeId("n0") not in hosted.presence.nodes
        journal.is_holding = False
        journal.let_go()
        await settled(engine)
        with pytest.raises(Refused) as seen:
            engine.desired(again)
        assert seen.value.reason is Reason.STALE_INCARNATION


@pytest.mark.rule("J4")
async def test_a_watch_that_is_not_read_overflows_and_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_module, "MAX_WATCHED", 4)
    engine = make(MemoryJournal(), Clock())
    async with serving(engine):
        await engine.submit(RUN, joining("n0", nnodes=(1, 50)))
        hosted = engine.runs[RUN]
        slow: Watch = engine.watch(hosted)
        gone: Watch = engine.watch(hosted)
        engine.unwatch(hosted, gone)
        for one in range(1, 8):
            await engine.submit(RUN, joining(f"n{one}", nnodes=(1, 50)))
        assert slow.overflowed
        assert slow.rows.qsize() == 4
        assert gone.rows.empty()


@pytest.mark.rule("E1")
@pytest.mark.parametrize("step_s", [300.0, -3600.0])
async def test_a_step_of_the_wall_clock_expels_nobody(step_s: float) -> None:
    """C050, C051: leases run on the monotonic clock; the time of day is stamped on facts, for people only."""
    clock = Clock()
    stepped = [0.0]
    engine = Engine(
        MemoryJournal(),
        clock=clock,
        wall=lambda: 1.7e9 + clock.now + stepped[0],
        timing=TIMING,
        store=StoreMode.OFF,
    )
    async with serving(engine):
        session = await enter(engine, "n0", nnodes=(1, 1))
        await settled(engine)
        before = kinds(engine)
        stepped[0] = step_s
        for _ in range(10):
            clock.now += 0.2
            engine.heard(session, Word(AgentPhase.IDLE))
            engine.nudge(RUN)
            await settled(engine)
        assert kinds(engine) == before
