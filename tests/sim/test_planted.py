"""Mistakes planted in the product, each a small replaced function: the simulator finds every one of them.

A check that no mistake can fail is no check. Each mistake names the rules of which the simulator may say that they are
broken, and within how many seeds it has to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvrx.core import agent, budgets, decide, facts, health, join, presence, run, world
from nvrx.core.commands import CycleExits
from nvrx.core.facts import Cause, CycleEnded, Failure
from nvrx.core.run import evolve
from nvrx.server import engine
from nvrx.server.services import heartbeat

from .disk import DiskJournal
from .plan import make_plan
from .simulation import simulate

WITHIN_SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`plant` puts it into the product."""

    name: str
    plant: Plant
    rules: frozenset[str]


MISTAKES: list[Mistake] = []


def mistake(*rules: str) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        MISTAKES.append(Mistake(plant.__name__, plant, frozenset(rules)))
        return plant

    return note


@mistake("D4", "journal")
def a_stale_report_counts_for_the_current_cycle(patch: pytest.MonkeyPatch) -> None:
    original = decide._news

    def news(run: Any, command: Any, told: CycleExits) -> Any:
        current = told.cycle if run.cycle is None else run.cycle.number
        return original(run, command, dataclasses.replace(told, cycle=current))

    patch.setattr(decide, "_news", news)


@mistake("journal", "watch")
def it_speaks_before_it_persists(patch: pytest.MonkeyPatch) -> None:
    original = engine.Engine._step

    async def step(self: Any, batch: Any) -> None:
        decided = self._decide

        def decide_and_show(run_id: Any, command: Any, work: Any) -> None:
            decided(run_id, command, work)
            self._show(work, set())

        self._decide = decide_and_show
        try:
            await original(self, batch)
        finally:
            del self._decide

    patch.setattr(engine.Engine, "_step", step)


@mistake("journal")
def a_report_is_acknowledged_before_it_is_kept(patch: pytest.MonkeyPatch) -> None:
    original = heartbeat.HeartbeatService._take

    async def take(self: Any, session: Any, request: Any) -> None:
        session.acknowledged = max(session.acknowledged, request.sequence)
        session.heard += 1
        session.news.set()
        await original(self, session, request)

    patch.setattr(heartbeat.HeartbeatService, "_take", take)


@mistake("journal", "revisions")
def a_row_of_the_journal_is_dropped(patch: pytest.MonkeyPatch) -> None:
    original = DiskJournal.append
    patch.setattr(DiskJournal, "append", lambda self, rows: original(self, rows[:1] if len(rows) > 3 else rows))


@mistake("D1", "revisions")
def revisions_begin_anew_with_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    original = engine.Engine.load

    def load(self: Any) -> None:
        original(self)
        for hosted in self.runs.values():
            hosted.revision = 0

    patch.setattr(engine.Engine, "load", load)


@mistake("C1", "D1", "E5")
def words_of_an_old_incarnation_count_for_the_new(patch: pytest.MonkeyPatch) -> None:
    original = decide.require_member

    def require_member(before: Any, node_id: Any, incarnation: Any, **given: Any) -> Any:
        member = before.live(node_id)
        return original(before, node_id, member.info.incarnation if member else incarnation, **given)

    patch.setattr(engine, "_is_present", lambda hosted, session: session.node_id in hosted.presence.nodes)
    patch.setattr(engine, "require_member", require_member)


@mistake("C1")
def a_silent_node_is_chosen(patch: pytest.MonkeyPatch) -> None:
    def fresh(before: Any, heard: Any, now: float) -> Any:
        return [one for one in before.live_members() if one.info.node_id in heard.nodes]

    patch.setattr(world, "_fresh", fresh)


@mistake("C1", "internal error")
def a_lost_node_is_chosen_again(patch: pytest.MonkeyPatch) -> None:
    original = world._fresh

    def fresh(run: Any, presence: Any, now: float) -> Any:
        lost = [one for one in run.members.values() if one.membership.value == "LOST"]
        return [*original(run, presence, now), *lost]

    patch.setattr(world, "_fresh", fresh)


@mistake("journal")
def a_leave_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decide, "_leave", lambda run, command, now: [])


@mistake("D1")
def a_restart_of_the_coordinator_ends_the_cycle(patch: pytest.MonkeyPatch) -> None:
    original = engine.Engine.load

    def load(self: Any) -> None:
        original(self)
        for hosted in self.runs.values():
            cycle = hosted.run.cycle
            if cycle is not None and cycle.is_live:
                seat = cycle.seats[0].node
                failure = Failure(Cause.NODE_LOST, seat.node_id, at=hosted.run.last_at)
                hosted.run = evolve(hosted.run, CycleEnded(hosted.run.last_at, cycle.number, failure))

    patch.setattr(engine.Engine, "load", load)


@mistake("D5")
def planned_changes_use_up_a_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(budgets, "PLANNED", frozenset())
    patch.setattr(budgets, "OWN_FAILURES", frozenset({Cause.WORKER_FAILED, Cause.DRAINED, Cause.PROMOTED}))


@mistake("C1", "G11", "internal error")
def unhealthy_nodes_are_chosen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world, "may_train", lambda run, presence, node_id: True)


@mistake("G11", "internal error")
def a_suspect_check_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "is_excused", lambda run, report: False)


@mistake("E5")
def there_is_no_time_to_come_back_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(presence.Presence, "is_recovering", lambda self, now: False)


@mistake("E1", "E5")
def a_stall_of_the_coordinator_is_held_against_the_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.Engine, "_bear_own_stall", lambda self: None)


@mistake("E1", "liveness")
def the_end_of_an_older_stream_shortens_the_lease(patch: pytest.MonkeyPatch) -> None:
    def close_session(self: Any, session: Any) -> None:
        hosted = self.runs[session.run_id]
        if hosted.sessions.get(session.node_id) is session:
            del hosted.sessions[session.node_id]
        hosted.presence.disconnected(session.node_id, session.incarnation, self.now(hosted))
        self.nudge(session.run_id)

    patch.setattr(engine.Engine, "close_session", close_session)


@mistake("E5")
def a_stream_that_comes_late_takes_over(patch: pytest.MonkeyPatch) -> None:
    original = engine.Engine.open_session

    def open_session(self: Any, run_id: str, node_id: Any, incarnation: Any, sequence: int) -> Any:
        return original(self, run_id, node_id, incarnation)

    patch.setattr(engine.Engine, "open_session", open_session)


@mistake("D2")
def a_new_world_does_not_wait_for_workers_that_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world, "_wait_for_leaving", lambda *_: None)


@mistake("A3")
def an_agent_starts_a_cycle_a_second_time(patch: pytest.MonkeyPatch) -> None:
    original = agent._work_towards

    def work_towards(before: Any, deeds: Any) -> Any:
        workers, wanted = before.workers, before.desired
        if workers is not None and workers.tree_gone and wanted is not None and wanted.assignment is not None:
            before = dataclasses.replace(before, workers=None)
        return original(before, deeds)

    patch.setattr(agent, "_work_towards", work_towards)


@mistake("A3", "liveness")
def cycles_that_nodes_have_seen_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = run._joined

    def joined(before: Any, fact: Any) -> Any:
        return original(before, dataclasses.replace(fact, node=dataclasses.replace(fact.node, last_cycle=None)))

    patch.setattr(run, "_EVOLVE", {**run._EVOLVE, facts.NodeJoined: joined})


@mistake("E4")
def an_agent_joins_anew_before_its_workers_are_gone(patch: pytest.MonkeyPatch) -> None:
    original = agent._work_towards

    def work_towards(before: Any, deeds: Any) -> Any:
        if before.ending is agent.Ending.EXPELLED:
            deeds.append(agent.Rejoin(before.reason))
            return agent.Agent(workers=before.workers)
        return original(before, deeds)

    patch.setattr(agent, "_work_towards", work_towards)


@mistake("D1")
def a_cycle_runs_when_its_first_node_does(patch: pytest.MonkeyPatch) -> None:
    original = decide._all_started

    def all_started(before: Any, presence: Any, now: float) -> Iterator[Any]:
        cycle = before.cycle
        if cycle is None or cycle.state is not run.CycleState.STARTING:
            return
        short = dataclasses.replace(cycle, seats=cycle.seats[:1])
        yield from original(dataclasses.replace(before, cycles=(*before.cycles[:-1], short)), presence, now)

    patch.setattr(decide, "_RULES", tuple(all_started if one is original else one for one in decide._RULES))


@mistake("D8", "liveness")
def a_finished_node_counts_as_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run.Cycle, "has_finished", lambda self, node_id, workers: False)


@mistake("B2")
def a_join_said_twice_makes_two_members(patch: pytest.MonkeyPatch) -> None:
    original = join.decide_join

    def decide_join(before: Any, heard: Any, command: Any, now: float) -> Any:
        return original(before, heard, command, now) or [facts.NodeJoined(now, command.node)]

    patch.setattr(decide, "decide_join", decide_join)


@mistake("F1")
def a_drained_node_is_chosen(patch: pytest.MonkeyPatch) -> None:
    original = world._place

    def place(before: Any, *given: Any) -> Any:
        return original(dataclasses.replace(before, drained=frozenset()), *given)

    patch.setattr(world, "_place", place)


@pytest.mark.parametrize("planted", MISTAKES, ids=lambda one: one.name)
def test_a_planted_mistake_is_found(planted: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    for seed in range(WITHIN_SEEDS):
        broken = simulate(make_plan(seed)).broken
        if broken is not None:
            assert broken.rule in planted.rules, f"seed {seed}: {broken}"
            return
    pytest.fail(f"{planted.name}: not found within {WITHIN_SEEDS} seeds")
