"""WatchFacts: from a revision on, over a restart, and with watchers that do not keep up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx.core.ids import RunId
from nvrx.server import hosted as hosted_module
from nvrx.v1 import common_pb2, run_pb2

from .coordination import RUN, SUCCEEDED, WAIT_S, HandAgent, Served, exited, info_of, refused, serving, world

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def watch_from(served: Served, revision: int) -> Any:
    return served.runs.WatchFacts(run_pb2.WatchFactsRequest(run_id=RUN, from_revision=revision), timeout=WAIT_S)


async def take(watch: Any, count: int) -> list[tuple[int, str]]:
    found = [(await watch.read()).fact for _ in range(count)]
    return [(one.revision, one.kind) for one in found]


async def all_of(watch: Any) -> list[int]:
    return [told.fact.revision async for told in watch]


@pytest.mark.rule("H1", "E5")
async def test_a_watch_goes_on_over_a_restart_without_gap_or_repetition(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await HandAgent(served, "n0").join()
        watch = watch_from(served, 0)
        assert await take(watch, 2) == [(1, "RunOpened"), (2, "NodeJoined")]
        await HandAgent(served, "n1").join()
        assert await take(watch, 1) == [(3, "NodeJoined")]
        await HandAgent(served, "n2").join()
        served.coordinator.stop()
        assert await take(watch, 1) == [(4, "NodeJoined")]
        await refused(watch.read(), grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    async with serving(tmp_path) as served:
        watch = watch_from(served, 4)
        assert await take(watch, 1) == [(4, "NodeJoined")]
        await HandAgent(served, "n2").leave()
        assert await take(watch, 1) == [(5, "NodeLeft")]


@pytest.mark.rule("H1")
async def test_a_watch_from_a_revision_to_come_shows_nothing_earlier() -> None:
    async with serving() as served:
        await HandAgent(served, "n0").join()
        early = watch_from(served, 1)
        late = watch_from(served, 4)
        assert await take(early, 2) == [(1, "RunOpened"), (2, "NodeJoined")]
        await _watched(served, 2)
        await HandAgent(served, "n1").join()
        await HandAgent(served, "n2").join()
        assert await take(early, 2) == [(3, "NodeJoined"), (4, "NodeJoined")]
        assert await take(late, 1) == [(4, "NodeJoined")]


async def _watched(served: Served, count: int) -> None:
    """Returns once `count` watches are open."""
    async with asyncio.timeout(WAIT_S):
        while len(served.engine.runs[RunId(RUN)].watches) != count:
            await served.run_state()


@pytest.mark.rule("H1", "D8")
async def test_a_watch_ends_with_its_run() -> None:
    async with serving() as served:
        agents = await world(served)
        watching = asyncio.create_task(all_of(watch_from(served, 1)))
        await _watched(served, 1)
        for agent in agents[:2]:
            await agent.report(exited(0, 0), exited(1, 0), phase=SUCCEEDED)
        seen = await watching
        assert seen == list(range(1, len(await served.facts()) + 1))
        assert (await served.run_state()).state == common_pb2.RUN_STATE_SUCCEEDED
        assert await all_of(watch_from(served, 3)) == seen[2:]
        await _watched(served, 0)


@pytest.mark.rule("H1")
async def test_a_watch_that_hung_up_is_forgotten() -> None:
    async with serving() as served:
        await HandAgent(served, "n0").join()
        watch = watch_from(served, 1)
        await take(watch, 2)
        watch.cancel()
        await _watched(served, 0)


@pytest.mark.rule("H1")
async def test_a_watch_replays_more_facts_than_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvrx.server.services.run.FACTS_AT_ONCE", 7)
    async with serving() as served:
        for one in range(40):
            await HandAgent(served, f"n{one}", nnodes=(2, 50)).join()
        watch = watch_from(served, 1)
        assert [revision for revision, _ in await take(watch, 41)] == list(range(1, 42))
        listed = await served.runs.ListFacts(run_pb2.ListFactsRequest(run_id=RUN), timeout=WAIT_S)
        assert [one.revision for one in listed.facts] == list(range(1, 8))
        assert listed.next_page_token == "8"
        watch.cancel()


@pytest.mark.rule("J4")
async def test_a_watcher_that_does_not_read_is_told_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_module, "MAX_WATCHED", 4)
    large = [common_pb2.Device(local_rank=one % 2, uuid="u" * 128, pci_bus_id="p" * 128) for one in range(500)]
    async with serving() as served:
        await HandAgent(served, "n0", nnodes=(2, 500)).join()
        slow = watch_from(served, 1)
        quick = watch_from(served, 1)
        await take(quick, 2)
        await _watched(served, 2)
        hosted = served.engine.runs[RunId(RUN)]
        joined = 0
        while not any(one.overflowed for one in hosted.watches):
            joined += 1
            assert joined < 400
            await HandAgent(served, f"n{joined}", nnodes=(2, 500)).join(devices=large)
            await take(quick, 1)
        with pytest.raises(grpc.aio.AioRpcError) as seen:
            await all_of(slow)
        assert seen.value.code() is EXHAUSTED
        assert info_of(seen.value).reason == "WATCH_TOO_SLOW"
        await HandAgent(served, "n400", nnodes=(2, 500)).join()
        assert await take(quick, 1) == [(joined + 3, "NodeJoined")]
        quick.cancel()
