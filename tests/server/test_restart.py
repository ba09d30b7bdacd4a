"""A coordinator that ends and comes back on the same state (rules E5, E7)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from nvrx.server.journals import JournalError
from nvrx.server.journals.memory import MemoryJournal

from .coordination import (
    QUICK,
    RUN_WORKERS,
    STOPPED,
    WAIT,
    WAIT_S,
    HandAgent,
    Served,
    exited,
    info_of,
    refused,
    serving,
    world,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def moved(agents: list[HandAgent], served: Served) -> list[HandAgent]:
    """The same incarnations, speaking to the coordinator that came back."""
    for agent in agents:
        agent.served = served
        agent.last = None
    return agents


@pytest.mark.rule("E5", "B2")
async def test_after_a_restart_the_same_cycle_goes_on_with_the_same_places(tmp_path: Path) -> None:
    async with serving(tmp_path, timing=QUICK) as served:
        agents = await world(served)
        before = await served.facts()
        journal_id = served.engine.journal_id
        assignments = [(await agent.until(RUN_WORKERS, 0)).desired.assignment for agent in agents[:2]]
        run = await served.run_state()
    async with serving(tmp_path, timing=QUICK) as served:
        assert served.engine.journal_id == journal_id
        assert await served.facts() == before
        for agent, assignment in zip(moved(agents, served)[:2], assignments, strict=False):
            answer = await agent.open()
            assert answer.desired.action == RUN_WORKERS
            assert answer.desired.assignment == assignment
            assert answer.revision == run.revision
            assert answer.journal_id == journal_id
        await agents[2].join()
        await agents[2].open()
        for agent in agents:
            await agent.acknowledged(await agent.say())
        again = await served.run_state()
        assert await served.facts() == before
        assert (again.cycle, again.phase, again.restarts_used, again.replacements_used) == (0, run.phase, 0, 0)
        assert (again.active_nodes, again.standby_nodes) == (2, 1)
        await agents[0].report(exited(0, 1))
        assert (await agents[2].until(WAIT, 1)).desired.reason == "standby of cycle 1"
        assert (await agents[1].until(RUN_WORKERS, 1)).revision > run.revision
        assert [one.revision for one in await served.facts()] == list(range(1, len(await served.facts()) + 1))


@pytest.mark.rule("E5")
async def test_after_a_restart_no_world_is_chosen_before_the_known_nodes_are_back(tmp_path: Path) -> None:
    async with serving(tmp_path, timing=QUICK) as served:
        agents = await world(served)
    async with serving(tmp_path, timing=QUICK) as served:
        moved(agents, served)
        await agents[0].open()
        await agents[2].open()
        await agents[0].report(exited(0, 1))
        run = await served.run_state()
        assert run.phase == 1
        assert run.waiting_reason == "the coordinator restarted; n1 may still come back"
        # A stream that breaks now is no loss yet either.
        await agents[2].break_stream()
        await agents[2].open()
        await agents[1].open()
        given = (await agents[1].until(RUN_WORKERS, 1)).desired.assignment
        assert given.group_rank == 1
        kinds = [one.kind for one in await served.facts()]
        assert "NodeLost" not in kinds
        assert kinds.count("WorldChosen") == 2


@pytest.mark.rule("E5")
async def test_reports_that_were_acknowledged_are_there_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        agents = await world(served)
        await agents[0].report(exited(1, 9, message="first"))
        told = await served.rank_map(0)
    async with serving(tmp_path) as served:
        assert await served.rank_map(0) == told
        moved(agents, served)
        for agent in agents:
            await agent.open()
        before = len(await served.facts())
        await agents[0].acknowledged(await agents[0].say(STOPPED, 0, [exited(1, 9, message="first")]))
        assert len(await served.facts()) == before


@pytest.mark.rule("E7")
async def test_stopping_tells_every_stream_to_come_back() -> None:
    async with serving() as served:
        agents = await world(served)
        served.coordinator.stop()
        for agent in agents:
            error = await agent.ended()
            assert error.code() is UNAVAILABLE
            assert info_of(error).reason == "SHUTTING_DOWN"
        async with asyncio.timeout(5):
            await served.running


@pytest.mark.rule("E7")
async def test_a_stream_that_opens_while_stopping_is_told_so_too() -> None:
    async with serving() as served:
        agent = HandAgent(served, "n0")
        await agent.join()
        served.coordinator.office.heartbeats.close()
        agent.call = served.heartbeats.Heartbeat()
        await agent.say()
        await refused(agent.read(), UNAVAILABLE, "SHUTTING_DOWN")


class Breaking(MemoryJournal):
    """Fails from a given append on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def append(self, rows: object) -> None:
        if self.is_broken:
            raise JournalError("cannot write the journal: disk full")
        super().append(rows)  # type: ignore[arg-type]


@pytest.mark.rule("E5", "E7")
async def test_a_coordinator_that_cannot_write_ends_and_shows_nothing_of_it() -> None:
    journal = Breaking()
    async with serving(journal) as served:
        agents = await world(served)
        count = len(await served.facts())
        journal.is_broken = True
        asking = asyncio.ensure_future(agents[0].leave())
        error = await agents[1].ended()
        assert info_of(error).reason == "SHUTTING_DOWN"
        assert agents[1].last is not None
        assert agents[1].last.desired.action == RUN_WORKERS
        with pytest.raises(JournalError, match="disk full"):
            async with asyncio.timeout(WAIT_S):
                await served.running
        with pytest.raises(grpc.aio.AioRpcError):
            await asking
        assert served.engine.runs[next(iter(served.engine.runs))].revision == count
