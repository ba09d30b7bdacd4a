"""The engine: one task owns the state of all runs. Persist, then speak.

Commands queue up; the engine drains the queue, decides each on a working copy, writes all facts in one durable
transaction, and only then shows the new state, answers and publishes. A journal that cannot be written ends the
engine: memory is never ahead of disk. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nvrx.core.commands import Command, Drain, Join, Promote, Tick
from nvrx.core.decide import decide, is_news, next_deadline, require_member
from nvrx.core.facts import Fact, NodeJoined, NodeLeft, NodeLost, RunOpened
from nvrx.core.ids import Incarnation, JournalId, NodeId, Revision, RunId, name_problem
from nvrx.core.join import check_join
from nvrx.core.narrate import order_warning, tell
from nvrx.core.operate import preview
from nvrx.core.presence import HostedStores, Presence, StoreMode, Timing, Word
from nvrx.core.ranks import Action, Desired, desired
from nvrx.core.refused import DETAIL_NEWER_STREAM, DETAIL_SERVED_RUN, Reason, Refused
from nvrx.core.run import Run, evolve
from nvrx.core.world import Wait, describe_recovery, describe_silence, next_world, world_chosen

from .hosted import Hosted, Session, Watch
from .journals import Journal, Row

log = logging.getLogger("nvrx.coord")

MAX_RUNS = 1000
ONLY_TERM = 1
"""One coordinator leads for ever; several take turns, each with a term of its own."""
DEFAULT_RUN = RunId("default")
_ASKED_AGAIN = {Reason.RUN_FULL, Reason.NODE_ALREADY_JOINED, Reason.DUPLICATE_INFRA_RANK}
_PULSE_S = 0.25
_STALL_S = 0.25
"""A pulse later than this means that the coordinator itself was stalled."""


@dataclass
class _Pending:
    """A command in the queue; `answer` is None for a Tick that nobody waits for."""

    run_id: RunId
    command: Command
    answer: asyncio.Future[None] | None


@dataclass
class _Work:
    """A working copy of what a batch changes, before it is durable."""

    runs: dict[RunId, Run] = field(default_factory=dict)
    opening: dict[RunId, Hosted] = field(default_factory=dict)
    revisions: dict[RunId, Revision] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


class Engine:
    """All runs of a coordinator. `clock` is monotonic, `wall` the time of day; both in seconds."""

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        timing: Timing,
        store: StoreMode,
        declared_run: RunId | None = None,
        term: int = ONLY_TERM,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._wall = wall
        self.timing = timing
        self._store = store
        self.declared_run = declared_run
        self.term = term
        self.runs: dict[RunId, Hosted] = {}
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        self._writer = ThreadPoolExecutor(1, "nvrx-journal")
        self._timer_at: float | None = None
        self._pulse_at: float | None = None
        self.parted = asyncio.Event()
        """Set whenever a run closes, or somebody may have learned that one has."""
        self.observers: list[Callable[[Hosted], None]] = []
        """Called with each run whose durable state may have changed, once it is shown. Must not wait."""

    @property
    def journal_id(self) -> JournalId:
        return self._journal.journal_id

    # ---- what is known ------------------------------------------------------------------------------------

    def load(self) -> None:
        """Take all runs from the journal; every known node gets a full lease to come back in (rule E5)."""
        state: dict[RunId, tuple[Run, Revision]] = {}
        for row in self._journal.load():
            before = state.get(row.run_id)
            state[row.run_id] = (evolve(before[0] if before else None, row.fact), row.revision)
        for run_id, (run, revision) in state.items():
            hosted = self._host(run, self._clock() - run.last_at)
            hosted.revision = revision
            members = [(one.info.node_id, one.info.incarnation) for one in run.live_members()]
            hosted.presence.recover(members, run.last_at)
            log.info("run %s resumed at revision %d with %d nodes", run_id, revision, len(members))
        self._pace()

    def _host(self, run: Run, clock_origin: float) -> Hosted:
        hosted = Hosted(run, Presence(self.timing, self._store), clock_origin)
        self.runs[run.run_id] = hosted
        return hosted

    def now(self, hosted: Hosted) -> float:
        """The run's clock."""
        return self._clock() - hosted.clock_origin

    def resolve(self, run_id: str) -> RunId:
        """The run that a node means; empty means the declared one, else `default` (rule A3)."""
        if not run_id:
            return self.declared_run or DEFAULT_RUN
        if self.declared_run is not None and run_id != self.declared_run:
            raise Refused(
                Reason.UNKNOWN_RUN,
                f"this coordinator serves run {self.declared_run} only, not {run_id[:128]!a}; correct --run-id or "
                "--coordinator",
                {"run_id": run_id, DETAIL_SERVED_RUN: self.declared_run},
            )
        return RunId(run_id)

    def find(self, run_id: str) -> Hosted:
        """The run meant by a request; empty means the only one there is. Raises Refused UNKNOWN_RUN."""
        resolved = next(iter(self.runs)) if not run_id and len(self.runs) == 1 else self.resolve(run_id)
        hosted = self.runs.get(resolved)
        if hosted is None:
            known = ", ".join(sorted(self.runs)[:8]) or "none"
            raise Refused(
                Reason.UNKNOWN_RUN,
                f"there is no run {resolved[:128]!a} here; known runs: {known}",
                {"run_id": resolved[:128]},
            )
        return hosted

    def desired(self, session: Session) -> Desired:
        """What a session's node is to do. Raises Refused once it is no longer a member."""
        hosted = self.runs[session.run_id]
        require_member(hosted.run, session.node_id, session.incarnation, may_have_left=True)
        return desired(hosted.run, session.node_id, session.incarnation, hosted.waiting)

    def preview(self, hosted: Hosted, command: Promote | Drain) -> Run:
        """The run as it would stand with its next world chosen after an operator's change. Raises Refused."""
        now = self.now(hosted)
        found = preview(hosted.run, hosted.presence, command, now)
        return evolve(found.run, world_chosen(found.run, hosted.presence, found.placement, None, now))

    async def read_facts(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        """Rows of a run's journal, from revision `first` on."""
        return await asyncio.get_running_loop().run_in_executor(None, self._journal.read, run_id, first, limit)

    # ---- sessions and watches -----------------------------------------------------------------------------

    def open_session(self, run_id: str, node_id: NodeId, incarnation: Incarnation, sequence: int = 1) -> Session:
        """A member's stream opened; an older stream of the same member is superseded. Raises Refused.

        `sequence` is the number of the stream's first request. A stream that its agent gave up may arrive after the
        one that it opened instead, when the connection of each had been cut off: it supersedes nothing. 0: not told.
        """
        self._bear_own_stall()
        hosted = self.find(run_id)
        require_member(hosted.run, node_id, incarnation)
        session = Session(hosted.run.run_id, node_id, incarnation, sequence)
        older = hosted.sessions.get(node_id)
        if older is not None and older.incarnation == incarnation and 0 < sequence < older.sequence:
            raise superseded(node_id)
        if older is not None:
            older.is_superseded = True
            older.news.set()
        hosted.sessions[node_id] = session
        if _is_present(hosted, session):
            hosted.presence.connected(node_id, self.now(hosted))
            self.nudge(session.run_id)
        return session

    def close_session(self, session: Session) -> None:
        """A stream ended: the node's lease shrinks to the reconnect grace, unless a newer stream took over."""
        self._bear_own_stall()
        hosted = self.runs[session.run_id]
        if session.said is not None and session.said.desired.action is Action.EXIT:
            hosted.partings.told.add(session.incarnation)
        self.parted.set()
        if hosted.sessions.get(session.node_id) is not session:
            return
        del hosted.sessions[session.node_id]
        hosted.presence.disconnected(session.node_id, session.incarnation, self.now(hosted))
        self.nudge(session.run_id)

    def heard(self, session: Session, word: Word) -> None:
        """Renew a lease at once, not behind the journal. Raises Refused once the session's node is no member."""
        self._bear_own_stall()
        hosted = self.runs[session.run_id]
        require_member(hosted.run, session.node_id, session.incarnation, may_have_left=True)
        if not _is_present(hosted, session):
            return
        has_news = hosted.presence.heard(session.node_id, word, self.now(hosted))
        if has_news or is_news(hosted.run, word):
            self.nudge(session.run_id)

    def watch(self, hosted: Hosted) -> Watch:
        """New rows of a run from now on. End it with `unwatch`."""
        watch = Watch(hosted.revision)
        hosted.watches.add(watch)
        return watch

    def end_watches(self) -> None:
        """The coordinator goes down: every watch ends while its run goes on."""
        for hosted in self.runs.values():
            for watch in hosted.watches:
                watch.put(None)

    def unwatch(self, hosted: Hosted, watch: Watch) -> None:
        hosted.watches.discard(watch)

    # ---- commands -----------------------------------------------------------------------------------------

    async def submit(self, run_id: RunId, command: Command) -> None:
        """Have a command decided; returns once its facts are durable and published. Raises Refused."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Pending(run_id, command, answer))
        await answer

    def offer_stores(self, run_id: RunId, stores: HostedStores) -> None:
        """Tell a run what the store process has for it."""
        self.runs[run_id].presence.stores = stores
        self.nudge(run_id)

    def nudge(self, run_id: RunId) -> None:
        """Have the run decided anew; nobody waits for the answer."""
        self._queue.put_nowait(_Pending(run_id, Tick(), None))

    async def serve(self) -> None:
        """Decide until cancelled. Raises JournalError when facts can no longer be kept."""
        for run_id in self.runs:
            self.nudge(run_id)
        pulse = asyncio.create_task(self._pulse(), name="pulse")
        try:
            while True:
                await self._step(await self._next_batch())
        finally:
            pulse.cancel()

    async def _pulse(self) -> None:
        while True:
            self._bear_own_stall()
            await asyncio.sleep(_PULSE_S)

    async def _next_batch(self) -> list[_Pending]:
        batch: list[_Pending] = []
        delay = None if self._timer_at is None else max(0.0, self._timer_at - self._clock())
        try:
            async with asyncio.timeout(delay):
                batch.append(await self._queue.get())
        except TimeoutError:
            pass
        while not self._queue.empty():
            batch.append(self._queue.get_nowait())
        self._bear_own_stall()
        return batch

    def _bear_own_stall(self) -> None:
        """E1: suspended, paused or starved for a while, the coordinator holds that time against nobody.

        Called by a steady pulse, and before anything is heard or decided: after a stall no lease is judged first, and
        what was heard after it is not extended by it.
        """
        now = self._clock()
        late_s = 0.0 if self._pulse_at is None else now - self._pulse_at
        self._pulse_at = now + _PULSE_S
        if late_s > _STALL_S:
            log.warning("the coordinator was stalled for %.1f s; all leases are extended by that", late_s)
            for hosted in self.runs.values():
                hosted.presence.extend(late_s)
                hosted.presence.hear_out(self.now(hosted))

    def _bear_slow_journal(self, took_s: float) -> None:
        """D12: nobody was told yet of what was being written, and so could act on it."""
        if took_s > _STALL_S:
            log.warning("the journal took %.1f s to write; nodes get their time from now on", took_s)
            for hosted in self.runs.values():
                hosted.presence.hear_out(self.now(hosted))

    async def _step(self, batch: list[_Pending]) -> None:
        work = _Work()
        answers: list[tuple[asyncio.Future[None], Refused | None]] = []
        ticked = {one.run_id for one in batch if one.answer is None} if batch else set(self.runs)
        for pending in batch:
            if pending.answer is None:
                continue
            try:
                self._decide(pending.run_id, pending.command, work)
                answers.append((pending.answer, None))
            except Refused as refused:
                answers.append((pending.answer, refused))
        for run_id in ticked & self.runs.keys():
            self._decide(run_id, Tick(), work)
        if work.rows:
            began = self._clock()
            await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.append, work.rows)
            self._bear_slow_journal(self._clock() - began)
        self._show(work, ticked)
        for answer, refusal in answers:
            if answer.cancelled():
                continue
            if refusal is None:
                answer.set_result(None)
            else:
                answer.set_exception(refusal)
        self._arm()

    def _decide(self, run_id: RunId, command: Command, work: _Work) -> None:
        facts: list[Fact] = []
        hosted = self.runs.get(run_id) or work.opening.get(run_id)
        if hosted is None:
            hosted, opened = self._open(run_id, command, len(self.runs) + len(work.opening))
            facts.append(opened)
        run = work.runs.get(run_id, hosted.run)
        now = self.now(hosted)
        try:
            facts += decide(run, hosted.presence, command, now)
        except Refused as refused:
            if isinstance(command, Join):
                self._note_refusal(hosted, command, refused, now)
            raise
        finally:
            if isinstance(command, Join):  # also one that is refused
                hosted.presence.somebody_spoke(now)
        if run_id not in self.runs:
            work.opening[run_id] = hosted
        time = self._wall()
        revision = work.revisions.get(run_id, hosted.revision)
        for fact in facts:
            stamped = dataclasses.replace(fact, time=time)
            run = evolve(run, stamped)
            revision = Revision(revision + 1)
            work.rows.append(Row(run_id, revision, stamped))
            self._note_presence(hosted, stamped, now)
        work.runs[run_id] = run
        work.revisions[run_id] = revision

    def _open(self, run_id: RunId, command: Command, there: int) -> tuple[Hosted, RunOpened]:
        """The first Join of an id opens a run (rule A3). Raises Refused, and then there is none."""
        if not isinstance(command, Join):
            raise Refused(Reason.UNKNOWN_RUN, f"there is no run {run_id[:128]!a} here", {"run_id": run_id[:128]})
        problem = name_problem("run id", run_id)
        if problem is not None:
            raise Refused(Reason.INVALID_FIELD, problem, {"run_id": ascii(run_id[:128])})
        if there >= MAX_RUNS:
            raise Refused(Reason.LIMIT_EXCEEDED, f"this coordinator keeps at most {MAX_RUNS} runs", {})
        opened = RunOpened(0.0, run_id, command.shape, check_join(command))
        hosted = Hosted(evolve(None, opened), Presence(self.timing, self._store), self._clock())
        return hosted, opened

    def _note_refusal(self, hosted: Hosted, command: Join, refused: Refused, now: float) -> None:
        if refused.reason in _ASKED_AGAIN:
            hosted.partings.turn_away(command.node.node_id, now)
        else:
            hosted.partings.turned_away.pop(command.node.node_id, None)
            self.parted.set()

    def _note_presence(self, hosted: Hosted, fact: Fact, now: float) -> None:
        if isinstance(fact, NodeJoined):
            hosted.presence.joined(fact.node.node_id, fact.node.incarnation, now)
            hosted.partings.turned_away.pop(fact.node.node_id, None)
        elif isinstance(fact, NodeLeft | NodeLost):
            hosted.presence.forget(fact.node_id)

    def _show(self, work: _Work, ticked: set[RunId]) -> None:
        """Make durable state visible, and wake those whom it concerns."""
        self.runs.update(work.opening)
        for run_id, run in work.runs.items():
            self.runs[run_id].run = run
            self.runs[run_id].revision = work.revisions[run_id]
        if any(isinstance(row.fact, NodeJoined) for row in work.rows):
            self._pace()
        for row in work.rows:
            log.info("run %s: %s", row.run_id, tell(row.fact))
            warning = order_warning(self.runs[row.run_id].run, row.fact)
            if warning is not None:
                log.warning("%s", warning)
            for watch in self.runs[row.run_id].watches:
                watch.put(row)
        changed = {row.run_id for row in work.rows}
        for run_id in changed | (ticked & self.runs.keys()):
            self._explain(self.runs[run_id])
        for run_id in changed:
            hosted = self.runs[run_id]
            for session in hosted.sessions.values():
                session.news.set()
            if not hosted.run.is_open:
                self.parted.set()
                for watch in hosted.watches:
                    watch.put(None)
        for run_id in changed | (ticked & self.runs.keys()):
            for observe in self.observers:
                observe(self.runs[run_id])

    def _pace(self) -> None:
        """E1: the more members there are, the less often each is heard."""
        timing = self.timing.at_size(sum(len(hosted.presence.nodes) for hosted in self.runs.values()))
        if timing != self.timing:
            self.timing = timing
            for hosted in self.runs.values():
                hosted.presence.timing = timing

    def _explain(self, hosted: Hosted) -> None:
        """Keep the one sentence that says why nothing runs; log it when it changes."""
        run = hosted.run
        waiting = ""
        if run.is_open and hosted.presence.is_recovering(self.now(hosted)):
            waiting = describe_recovery(hosted.presence)
        elif run.is_open and (silence := describe_silence(run, hosted.presence, self.now(hosted))):
            waiting = silence
        elif run.is_open and (run.cycle is None or not run.cycle.is_live):
            found = next_world(run, hosted.presence, self.now(hosted))
            waiting = found.reason if isinstance(found, Wait) else ""
            if isinstance(found, Wait):
                hosted.presence.note_world(found.allows_world, self.now(hosted))
        elif run.is_open:
            hosted.presence.note_world(True, self.now(hosted))
        if waiting and waiting != hosted.waiting:
            log.info("run %s: waiting: %s", run.run_id, waiting)
        hosted.waiting = waiting

    def _arm(self) -> None:
        """One timer: when the earliest run has to be looked at again."""
        times = [
            hosted.clock_origin + deadline
            for hosted in self.runs.values()
            if (deadline := next_deadline(hosted.run, hosted.presence, self.now(hosted))) is not None
        ]
        self._timer_at = min(times) if times else None

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)
        self._journal.close()


def superseded(node_id: NodeId) -> Refused:
    """What an older stream of a member is told."""
    return Refused(
        Reason.STALE_INCARNATION,
        f"a newer stream of node {node_id} took over",
        {"node_id": node_id, DETAIL_NEWER_STREAM: "true"},
    )


def _is_present(hosted: Hosted, session: Session) -> bool:
    """False while the loss of the session's incarnation is being written: what it says then changes nothing."""
    known = hosted.presence.nodes.get(session.node_id)
    return known is not None and known.incarnation == session.incarnation
