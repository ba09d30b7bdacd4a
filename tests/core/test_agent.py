"""The agent's own machine: rows, and a walk in which anything may be observed in any order (D2, D8, E2-E4, G4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvrx.core.agent import (
    EXIT_LOST_COORDINATOR,
    Agent,
    CoordinatorGraceOver,
    Deed,
    DesiredChanged,
    Exit,
    Expelled,
    Kill,
    LeaseOver,
    Leave,
    Observation,
    Rejoin,
    Report,
    SignalReceived,
    Spawn,
    StacksTaken,
    Stop,
    TakeStacks,
    TreeGone,
    WorkerEnded,
    WorkersHung,
    WorkersStarted,
    step,
)
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, GroupRank, LocalRank
from nvrx.core.presence import AgentPhase
from nvrx.core.ranks import EXIT_EXCLUDED, Action, Assignment, Desired

from .driver import ended

WORKERS = 2
TERM = SignalReceived(15, "SIGTERM")
CLOSED = DesiredChanged(Desired(Action.EXIT, None, None, "all exited 0", 0))


def assignment(cycle: int) -> Assignment:
    return Assignment(CycleNumber(cycle), GroupRank(0), WORKERS, 1, WORKERS, 3, 0, "", None)


def run(cycle: int) -> DesiredChanged:
    return DesiredChanged(Desired(Action.RUN, CycleNumber(cycle), assignment(cycle)))


def stop(cycle: int) -> DesiredChanged:
    return DesiredChanged(Desired(Action.STOP, CycleNumber(cycle), reason="the cycle ended"))


def wait(cycle: int | None) -> DesiredChanged:
    return DesiredChanged(Desired(Action.WAIT, None if cycle is None else CycleNumber(cycle), reason="standby"))


def gone(cycle: int) -> TreeGone:
    return TreeGone(CycleNumber(cycle))


def end(cycle: int, exit: WorkerExit) -> WorkerEnded:
    return WorkerEnded(CycleNumber(cycle), exit)


def report(cycle: int, exit: WorkerExit, at_once: bool = True) -> Report:
    return Report(CycleNumber(cycle), (exit,), at_once)


def spawn(cycle: int) -> Spawn:
    return Spawn(assignment(cycle))


def done(*observed: Observation, agent: Agent | None = None) -> list[list[Deed]]:
    """The deeds after each observation."""
    agent = agent or Agent()
    deeds: list[list[Deed]] = []
    for one in observed:
        taken = step(agent, one)
        agent = taken.agent
        deeds.append(list(taken.deeds))
    return deeds


def agents(*observed: Observation) -> list[Agent]:
    """The agent after each observation."""
    states = [Agent()]
    for one in observed:
        states.append(step(states[-1], one).agent)
    return states[1:]


OK, BAD = ended(0), ended(0, 1)
TERMED = ended(0, signal="SIGTERM")
BY_US = ended(0, signal="SIGTERM", stopped=True)
HUNG = WorkerExit(LocalRank(0), message="no heartbeat for 30.0 s", hung=True)


@pytest.mark.rule("D2")
def test_the_next_workers_start_when_nothing_of_the_old_ones_is_left() -> None:
    assert done(run(0), run(1), end(0, BY_US), run(1), gone(0)) == [
        [spawn(0)],
        [Stop("cycle 1 follows")],
        [],
        [],
        [report(0, BY_US, at_once=False), spawn(1)],
    ]


@pytest.mark.rule("D2")
def test_a_failed_worker_takes_its_sisters_with_it() -> None:
    sister = ended(1, signal="SIGTERM", stopped=True)
    assert done(run(0), end(0, BAD), end(0, sister), gone(0), run(0), run(1)) == [
        [spawn(0)],
        [report(0, BAD), Stop("a worker of this node failed")],
        [],
        [report(0, sister)],
        [],
        [spawn(1)],
    ]


@pytest.mark.rule("G9", "D2")
def test_a_hung_worker_is_told_at_once_and_stopped_when_it_is_known_where_it_hangs() -> None:
    """Even though the coordinator has the next cycle ready meanwhile. How it then ended is told, too."""
    sister = ended(1, signal="SIGTERM", stopped=True)
    ended_so = replace(HUNG, signal="SIGKILL", stopped_by_agent=True)
    killed = ended(0, signal="SIGKILL", stopped=True)
    hung = WorkersHung(CycleNumber(0), (HUNG,))
    taken = StacksTaken(CycleNumber(0))
    assert done(run(0), hung, hung, run(1), taken, end(0, sister), end(0, killed), gone(0)) == [
        [spawn(0)],
        [report(0, HUNG), TakeStacks(CycleNumber(0), (HUNG,))],
        [],
        [],
        [Stop("a worker of this node failed")],
        [],
        [],
        [Report(CycleNumber(0), (sister, ended_so), at_once=False), spawn(1)],
    ]


@pytest.mark.rule("G9")
def test_a_worker_that_ends_well_after_it_was_found_hung_has_hung() -> None:
    *_, agent = agents(run(0), WorkersHung(CycleNumber(0), (HUNG,)), end(0, OK), end(0, ended(1)), gone(0))
    assert agent.phase is AgentPhase.FAILED
    assert agent.workers is not None
    assert agent.workers.exits[LocalRank(0)] == replace(HUNG, exit_code=0)


@pytest.mark.rule("G9", "E2")
def test_an_agent_told_to_end_waits_for_no_stack() -> None:
    hung = WorkersHung(CycleNumber(0), (HUNG,))
    *_, told = done(run(0), hung, TERM)
    assert [type(one) for one in told] == [Leave, Stop]
    *_, closed, taken = done(run(0), hung, CLOSED, StacksTaken(CycleNumber(0)))
    assert closed == [], "but one whose run has ended does: the hang may be why"
    assert taken == [Stop("all exited 0")]


@pytest.mark.rule("G9")
@pytest.mark.parametrize("before", [run(1), stop(0), end(0, BAD), TERM, gone(0)])
def test_silence_of_workers_that_are_being_stopped_or_gone_means_nothing(before: Observation) -> None:
    *_, deeds = done(run(0), before, WorkersHung(CycleNumber(0), (replace(HUNG, local_rank=LocalRank(1)),)))
    assert deeds == []


@pytest.mark.rule("D2")
def test_cycles_that_were_skipped_are_not_started() -> None:
    assert done(run(0), run(1), run(2), gone(0)) == [[spawn(0)], [Stop("cycle 1 follows")], [], [spawn(2)]]


@pytest.mark.rule("D8")
def test_an_early_finisher_waits_and_takes_part_in_the_next_cycle() -> None:
    assert done(run(0), end(0, OK), end(0, ended(1)), gone(0), run(0), stop(0), run(1)) == [
        [spawn(0)],
        [report(0, OK)],
        [report(0, ended(1))],
        [],
        [],
        [],
        [spawn(1)],
    ]


@pytest.mark.rule("D2")
@pytest.mark.parametrize("told", [stop(0), wait(0), wait(None)])
def test_told_to_stop_or_wait_it_stops_once(told: DesiredChanged) -> None:
    assert done(run(0), told, told, gone(0), told) == [[spawn(0)], [Stop(told.desired.reason)], [], [], []]


@pytest.mark.rule("B2")
def test_what_is_older_is_ignored() -> None:
    assert done(run(3), run(2), stop(2), gone(2), end(2, BAD)) == [[spawn(3)], [], [], [], []]


@pytest.mark.rule("D2")
def test_a_late_end_of_the_old_tree_starts_nothing_twice() -> None:
    assert done(run(0), run(1), gone(0), gone(0), run(2), gone(0), gone(1)) == [
        [spawn(0)],
        [Stop("cycle 1 follows")],
        [spawn(1)],
        [],
        [Stop("cycle 2 follows")],
        [],
        [spawn(2)],
    ]


@pytest.mark.rule("D8")
def test_a_closed_run_ends_the_agent_once_its_workers_are_gone() -> None:
    assert done(run(0), CLOSED, CLOSED, gone(0), CLOSED, gone(0), run(1), TERM) == [
        [spawn(0)],
        [Stop("all exited 0")],
        [],
        [Exit(0, "all exited 0")],
        [],
        [],
        [],
        [],
    ]
    assert done(CLOSED) == [[Exit(0, "all exited 0")]]


@pytest.mark.rule("E2")
def test_a_signal_leaves_stops_and_exits_with_its_number() -> None:
    leaving, left = Leave("its agent received SIGTERM", False), Leave("received SIGTERM", True)
    assert done(run(0), TERM, end(0, BY_US), gone(0)) == [
        [spawn(0)],
        [leaving, Stop("received SIGTERM")],
        [],
        [report(0, BY_US), left, Exit(143, "received SIGTERM")],
    ]
    assert done(TERM) == [[Leave("its agent received SIGTERM", True), Exit(143, "received SIGTERM")]]


@pytest.mark.rule("E2")
def test_a_second_signal_kills() -> None:
    deeds = done(run(0), TERM, SignalReceived(2, "SIGINT"), TERM, gone(0))
    assert deeds[2:4] == [[Kill()], [Kill()]]
    assert deeds[4][-1] == Exit(143, "received SIGTERM"), "the first signal gives the code"


@pytest.mark.rule("E2")
def test_the_first_ending_counts() -> None:
    assert done(run(0), TERM, CLOSED, Expelled("lost"), gone(0))[-1][-1] == Exit(143, "received SIGTERM")
    assert done(run(0), CLOSED, Expelled("lost"), CoordinatorGraceOver("away"), gone(0))[-1] == [
        Exit(0, "all exited 0")
    ]


@pytest.mark.rule("E3")
def test_without_a_coordinator_for_too_long_it_stops_and_exits_with_4() -> None:
    assert done(run(0), CoordinatorGraceOver("away for 600 s"), gone(0)) == [
        [spawn(0)],
        [Stop("away for 600 s")],
        [Exit(EXIT_LOST_COORDINATOR, "away for 600 s")],
    ]


@pytest.mark.rule("E4")
def test_expelled_it_stops_its_workers_before_it_joins_again() -> None:
    assert done(run(4), Expelled("declared lost"), Expelled("declared lost"), gone(4), run(4), run(5)) == [
        [spawn(4)],
        [Stop("declared lost")],
        [],
        [Rejoin("declared lost")],
        [],
        [spawn(5)],
    ]
    assert done(Expelled("declared lost")) == [[Rejoin("declared lost")]]


@pytest.mark.rule("E3")
def test_workers_that_may_not_run_on_are_stopped_before_it_joins_again() -> None:
    assert done(run(4), LeaseOver("away for 10 s"), gone(4), run(5)) == [
        [spawn(4)],
        [Stop("away for 10 s")],
        [Rejoin("away for 10 s")],
        [spawn(5)],
    ]


@pytest.mark.rule("E8")
def test_kept_out_of_the_world_it_leaves_if_it_is_to() -> None:
    excluded = DesiredChanged(Desired(Action.WAIT, CycleNumber(1), None, "excluded: drained", excluded=True))
    told: list[Observation] = [run(0), stop(0), gone(0), excluded]
    assert done(*told)[-1] == []
    left = done(*told, agent=Agent(leaves_when_excluded=True))[-1]
    assert left == [Leave("excluded: drained", workers_stopped=True), Exit(EXIT_EXCLUDED, "excluded: drained")]


@pytest.mark.rule("E8")
def test_kept_out_with_workers_left_it_stops_them_first() -> None:
    excluded = DesiredChanged(Desired(Action.WAIT, CycleNumber(1), None, "excluded: drained", excluded=True))
    assert done(run(0), excluded, gone(0), agent=Agent(leaves_when_excluded=True)) == [
        [spawn(0)],
        [Leave("excluded: drained", workers_stopped=False), Stop("excluded: drained")],
        [Leave("excluded: drained", workers_stopped=True), Exit(EXIT_EXCLUDED, "excluded: drained")],
    ]


@pytest.mark.rule("D12")
def test_it_acknowledges_the_cycle_that_it_was_told_of() -> None:
    agent = Agent()
    known = []
    for observed in (run(0), WorkersStarted(CycleNumber(0)), run(1), stop(1)):
        agent = step(agent, observed).agent
        known.append((agent.acknowledged, agent.cycle))
    assert known == [(0, 0), (0, 0), (1, 0), (1, 0)]


@pytest.mark.rule("E4")
def test_expelled_from_a_run_that_then_closed_it_exits() -> None:
    assert done(run(0), Expelled("lost"), CLOSED, gone(0))[-1] == [Exit(0, "all exited 0")]


@pytest.mark.rule("D1")
@pytest.mark.parametrize(
    ("observed", "phase"),
    [
        ([], AgentPhase.IDLE),
        ([run(0)], AgentPhase.STARTING),
        ([run(0), WorkersStarted(CycleNumber(0))], AgentPhase.RUNNING),
        ([run(0), WorkersStarted(CycleNumber(7))], AgentPhase.STARTING),
        ([run(0), WorkersStarted(CycleNumber(0)), end(0, OK)], AgentPhase.RUNNING),
        ([run(0), end(0, OK), end(0, ended(1))], AgentPhase.SUCCEEDED),
        ([run(0), end(0, BAD)], AgentPhase.FAILED),
        ([run(0), end(0, BAD), gone(0)], AgentPhase.FAILED),
        ([run(0), stop(0)], AgentPhase.STOPPING),
        ([run(0), stop(0), end(0, BY_US)], AgentPhase.STOPPING),
        ([run(0), stop(0), gone(0)], AgentPhase.STOPPED),
        ([run(0), stop(0), gone(0), run(1)], AgentPhase.STARTING),
    ],
)
def test_phase(observed: list[Observation], phase: AgentPhase) -> None:
    agent = Agent()
    for one in observed:
        agent = step(agent, one).agent
    assert agent.phase is phase
    assert (agent.cycle is None) == (phase is AgentPhase.IDLE)


class Body(RuleBasedStateMachine):
    """An agent with a body: processes that start, end and linger; and a coordinator that says what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()
        self.alive: CycleNumber | None = None
        self.stopping = False
        self.taking_stacks = False
        self.ended: set[int] = set()
        self.spawned: list[int] = []
        self.exits = 0
        self.has_left = False

    def observe(self, observed: Observation) -> list[Deed]:
        taken = step(self.agent, observed)
        self.agent = taken.agent
        for deed in taken.deeds:
            assert self.exits == 0, f"{deed} after the agent had ended"
            self._do(deed)
        return list(taken.deeds)

    def _do(self, deed: Deed) -> None:
        if isinstance(deed, Spawn):
            assert self.alive is None, "workers of two cycles at once"
            assert not self.has_left, "workers of a node that left"
            assert all(cycle < deed.assignment.cycle for cycle in self.spawned), "a cycle was started twice"
            self.alive, self.stopping, self.ended = deed.assignment.cycle, False, set()
            self.taking_stacks = False
            self.spawned.append(deed.assignment.cycle)
        elif isinstance(deed, Stop):
            assert self.alive is not None
            assert not self.stopping, "asked to stop twice"
            self.stopping = True
        elif isinstance(deed, Kill):
            assert self.alive is not None
            assert self.stopping
        elif isinstance(deed, Rejoin):
            assert self.alive is None
            assert not self.has_left
        elif isinstance(deed, Leave):
            assert deed.workers_stopped == (self.alive is None)
            self.has_left = True
        elif isinstance(deed, Exit):
            assert self.alive is None, "it ended before its workers"
            self.exits += 1

    @rule(cycle=st.integers(0, 6))
    def told_to_run(self, cycle: int) -> None:
        self.observe(run(cycle))

    @rule(cycle=st.one_of(st.none(), st.integers(0, 6)), stops=st.booleans())
    def told_to_wait(self, cycle: int | None, stops: bool) -> None:
        self.observe(stop(cycle) if stops and cycle is not None else wait(cycle))

    @rule(cycle=st.integers(0, 6))
    def late_words_of_another_cycle(self, cycle: int) -> None:
        if self.alive != cycle:
            before = self.agent
            for late in (gone(cycle), end(cycle, BAD), WorkersStarted(CycleNumber(cycle))):
                if self.agent.cycle != cycle:
                    self.observe(late)
                    assert self.agent == before

    @precondition(lambda self: self.alive is not None)
    @rule()
    def workers_started(self) -> None:
        assert self.alive is not None
        self.observe(WorkersStarted(self.alive))

    @precondition(lambda self: self.alive is not None and len(self.ended) < WORKERS)
    @rule(well=st.booleans())
    def worker_ends(self, well: bool) -> None:
        assert self.alive is not None
        rank = len(self.ended)
        self.ended.add(rank)
        deeds = self.observe(end(self.alive, ended(rank, 0 if well else 1)))
        assert any(isinstance(one, Report) for one in deeds)
        assert self.agent.workers is not None
        assert all(one.failed for one in self.agent.workers.exits.values() if one.hung)
        assert well or self.stopping or self.taking_stacks, "after a failure its sisters are stopped"

    @precondition(lambda self: self.alive is not None and len(self.ended) < WORKERS)
    @rule()
    def worker_hangs(self) -> None:
        assert self.alive is not None
        was_stopping = self.stopping
        deeds = self.observe(WorkersHung(self.alive, (HUNG,)))
        assert not was_stopping or not deeds, "silence of workers that are being stopped means nothing"
        takes = [one for one in deeds if isinstance(one, TakeStacks)]
        self.taking_stacks = self.taking_stacks or bool(takes)
        assert not takes or not any(isinstance(one, Stop) for one in deeds)

    @precondition(lambda self: self.taking_stacks)
    @rule()
    def stacks_taken(self) -> None:
        assert self.alive is not None
        self.taking_stacks = False
        self.observe(StacksTaken(self.alive))
        assert self.stopping, "a hung worker is stopped"

    @precondition(lambda self: self.alive is not None and (self.stopping or len(self.ended) == WORKERS))
    @rule()
    def tree_gone(self) -> None:
        assert self.alive is not None
        cycle, self.alive = self.alive, None
        self.taking_stacks = False
        self.observe(TreeGone(cycle))

    @rule(message=st.sampled_from([Expelled("lost"), CLOSED, CoordinatorGraceOver("away")]))
    def membership_ends(self, message: Observation) -> None:
        self.observe(message)

    @rule()
    def signal(self) -> None:
        was_leaving, had_processes = self.has_left, self.alive is not None
        deeds = self.observe(TERM)
        if was_leaving and had_processes:
            assert deeds == [Kill()]

    @invariant()
    def ending_leads_to_an_end(self) -> None:
        if self.agent.ending is not None:
            at_work = self.alive is not None and (self.stopping or self.taking_stacks)
            assert at_work or self.exits == 1

    def teardown(self) -> None:
        self.observe(CLOSED)
        if self.taking_stacks and not self.stopping:
            self.stacks_taken()
        if self.alive is not None:
            assert self.stopping
            self.tree_gone()
        assert self.exits == 1, "told to exit and with no process left, it ends exactly once"


TestBody = pytest.mark.rule("D2", "E2", "E4")(Body.TestCase)
TestBody.settings = settings(max_examples=150, stateful_step_count=30, derandomize=True, deadline=None, database=None)
