"""What runs show of themselves on a real lasting store, driven by a real coordinator or by facts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeInfo,
    NodeJoined,
    Placed,
    RunOpened,
    Seat,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, GroupRank, Incarnation, InfraRank, LocalRank, NodeId, RunId
from nvrx.core.run import Run, evolve
from nvrx.core.shape import Settings, Shape
from nvrx.core.topology import OrderSource
from nvrx.server.store_host import mirror as mirror_module
from nvrx.server.store_host.mirror import KEPT_CYCLES, Mirror, _Shown
from nvrx.store.client import StoreClient, StoreGone
from nvrx.wire import views
from nvrx.wire.text import to_json

from .coordination import QUICK, RUN, WAIT_S, exited, serving, world
from .storing import StoreProcess
from .story import tell_story

pytestmark = pytest.mark.rule("I3")
PATIENT_S = 3600.0
NAMES = ("n0", "n1")


@contextlib.asynccontextmanager
async def keeping(lasting: Any, **given: float) -> AsyncIterator[Mirror]:
    mirror = Mirror(lasting, **({"settle_s_per_node": 0.0, "retry_s": 0.01} | given))
    task = asyncio.create_task(mirror.keep())
    try:
        yield mirror
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def up_to_date(mirror: Mirror) -> None:
    async with asyncio.timeout(WAIT_S):
        await mirror.up_to_date.wait()


async def waited(client: StoreClient, key: str) -> bytes:
    """The value, waited for as a worker does."""
    await client.wait([key], WAIT_S)
    return await client.get(key)


# ---- a run by hand ----------------------------------------------------------------------------------------


@dataclass
class Told:
    """A run of two nodes with one worker each, as facts tell it; satisfies HasRun."""

    run: Run

    @classmethod
    def open(cls, name: str = RUN) -> Told:
        told = cls(evolve(None, RunOpened(0.0, RunId(name), Shape(2, 2, 1), Settings())))
        for node in NAMES:
            told.tell(NodeJoined(0.0, NodeInfo(NodeId(node), Incarnation("x"), "10.0.0.1", 1)))
        return told

    def tell(self, *facts: Fact) -> Told:
        for fact in facts:
            self.run = evolve(self.run, fact)
        return self

    def choose(self, number: int) -> Told:
        placed = [Placed(NodeId(name), Incarnation("x"), "10.0.0.1", InfraRank(0), name) for name in NAMES]
        seats = tuple(Seat(one, GroupRank(rank)) for rank, one in enumerate(placed))
        return self.tell(WorldChosen(1.0, CycleNumber(number), OrderSource.NODE_ID, seats, (), None, time=1e9))

    def fail(self, number: int, message: str = "CUDA error") -> Told:
        return self.tell(CycleEnded(2.0, CycleNumber(number), failure(message), time=1e9))

    def map_of(self, number: int) -> bytes:
        cycle = self.run.find_cycle(CycleNumber(number))
        assert cycle is not None
        return to_json(views.whole_rank_map(self.run, cycle)).encode()


def failure(message: str, cause: Cause = Cause.WORKER_FAILED) -> Failure:
    return Failure(cause, NodeId("n0"), GroupRank(0), LocalRank(0), 1, message=message)


async def shown(client: StoreClient, run: str = RUN) -> list[str]:
    """Keys of a run, without what they all begin with."""
    begin = f"nvrx/{run}/"
    return sorted(key.removeprefix(begin) for key in await client.list_keys() if key.startswith(begin))


class Recorded(StoreClient):
    """Writes down the keys that are set, of all clients."""

    keys: list[str] = []  # noqa: RUF012

    async def set(self, key: str, value: bytes) -> None:
        Recorded.keys.append(key.removeprefix(f"nvrx/{RUN}/"))
        await super().set(key, value)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("tests.server.storing.StoreClient", Recorded)
    Recorded.keys = []
    return Recorded.keys


# ---- with a real coordinator ------------------------------------------------------------------------------


async def test_workers_read_the_cycle_its_map_and_why_it_ended(process: StoreProcess) -> None:
    worker = await process.worker()
    async with keeping(process) as mirror, serving(timing=QUICK) as served:
        served.engine.observers.append(mirror.observe)
        await tell_story(served)
        await waited(worker, f"nvrx/{RUN}/cycles/2/rank_map")
        await up_to_date(mirror)
        assert await worker.get(f"nvrx/{RUN}/cycle") == b"2"
        for number in range(3):
            found = json.loads(await worker.get(f"nvrx/{RUN}/cycles/{number}/rank_map"))
            assert found == json.loads(to_json(await served.rank_map(number)))
        why = json.loads(await worker.get(f"nvrx/{RUN}/cycles/0/failure"))
        assert (why["cause"], why["node_id"], why["rank"], why["exit_code"]) == ("CAUSE_WORKER_FAILED", "n0", 0, 7)
        why = json.loads(await worker.get(f"nvrx/{RUN}/cycles/1/failure"))
        assert (why["cause"], why["node_id"]) == ("CAUSE_NODE_LOST", "n1")
        assert not await worker.check([f"nvrx/{RUN}/cycles/2/failure"])
    worker.close()


async def test_who_waits_for_the_next_cycle_is_woken_by_it(process: StoreProcess) -> None:
    workers = [await process.worker() for _ in range(100)]
    async with keeping(process) as mirror, serving() as served:
        served.engine.observers.append(mirror.observe)
        agents = await world(served)
        await up_to_date(mirror)
        keys = [f"nvrx/{RUN}/cycles/1/rank_map", f"nvrx/{RUN}/cycles/0/failure"]
        waiting = [asyncio.create_task(one.wait(keys, WAIT_S)) for one in workers]
        await agents[0].report(exited(0, 7, message="CUDA error"))
        await asyncio.gather(*waiting)
        assert json.loads(await workers[0].get(keys[0]))["cycle"] == 1
        assert json.loads(await workers[0].get(keys[1]))["message"] == "CUDA error"
    for one in workers:
        one.close()


async def test_a_coordinator_started_again_shows_its_runs(process: StoreProcess, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with serving(state) as served:
        await world(served)
    worker = await process.worker()
    async with keeping(process) as mirror, serving(state) as served:
        served.engine.observers.append(mirror.observe)
        assert json.loads(await waited(worker, f"nvrx/{RUN}/cycles/0/rank_map"))["state"] == "CYCLE_STATE_RUNNING"
    worker.close()


# ---- by hand ----------------------------------------------------------------------------------------------


async def test_a_run_without_a_cycle_shows_nothing(process: StoreProcess) -> None:
    worker = await process.worker()
    async with keeping(process) as mirror:
        mirror.observe(Told.open("empty"))
        mirror.observe(Told.open().choose(0))
        await up_to_date(mirror)
        assert await shown(worker, "empty") == []
        assert await shown(worker) == ["cycle", "cycles/0/rank_map"]
    worker.close()


async def test_a_map_is_there_before_its_number(process: StoreProcess, recorded: list[str]) -> None:
    async with keeping(process) as mirror:
        told = Told.open().choose(0)
        mirror.observe(told)
        await up_to_date(mirror)
        assert recorded == ["cycles/0/rank_map", "cycle"]
        recorded.clear()
        mirror.observe(told.fail(0).choose(1))
        await up_to_date(mirror)
        assert recorded == ["cycles/0/failure", "cycles/1/rank_map", "cycle", "cycles/0/rank_map"]


async def test_only_what_changed_is_written(process: StoreProcess, recorded: list[str]) -> None:
    async with keeping(process) as mirror:
        told, other = Told.open().choose(0), Told.open("other").choose(0)
        mirror.observe(told)
        mirror.observe(other)
        await up_to_date(mirror)
        recorded.clear()
        mirror.observe(told)
        mirror.observe(other)
        assert mirror.up_to_date.is_set()
        mirror.observe(told.tell(CycleRunning(1.5, CycleNumber(0))))
        assert not mirror.up_to_date.is_set()
        await up_to_date(mirror)
        assert recorded == ["cycles/0/rank_map"]


@pytest.mark.parametrize("cause", [Cause.SUCCEEDED, Cause.STOPPED])
async def test_a_cycle_that_did_not_fail_has_no_failure(process: StoreProcess, cause: Cause) -> None:
    worker = await process.worker()
    async with keeping(process) as mirror:
        told = Told.open().choose(0).tell(CycleEnded(2.0, CycleNumber(0), Failure(cause)))
        mirror.observe(told)
        await up_to_date(mirror)
        assert await shown(worker) == ["cycle", "cycles/0/rank_map"]
        assert await worker.get(f"nvrx/{RUN}/cycles/0/rank_map") == told.map_of(0)
    worker.close()


async def test_what_is_learned_later_is_shown_too(process: StoreProcess) -> None:
    worker = await process.worker()
    async with keeping(process) as mirror:
        told = Told.open().choose(0).fail(0).choose(1)
        mirror.observe(told)
        await up_to_date(mirror)
        exits = (WorkerExit(LocalRank(0), None, "SIGTERM", stopped_by_agent=True),)
        told.tell(WorkersExited(3.0, CycleNumber(0), NodeId("n1"), exits))
        told.tell(CauseRevised(3.0, CycleNumber(0), failure("silent", Cause.NODE_LOST)))
        mirror.observe(told)
        await up_to_date(mirror)
        assert await worker.get(f"nvrx/{RUN}/cycles/0/rank_map") == told.map_of(0)
        why = json.loads(await worker.get(f"nvrx/{RUN}/cycles/0/failure"))
        assert (why["cause"], why["consequences"][0]["message"]) == ("CAUSE_NODE_LOST", "CUDA error")
    worker.close()


async def test_the_last_cycles_are_kept_there(process: StoreProcess) -> None:
    worker = await process.worker()
    await worker.set(f"runs/{RUN}/own", b"stays")
    async with keeping(process) as mirror:
        told = Told.open().choose(0)
        for number in range(KEPT_CYCLES + 4):
            mirror.observe(told)
            await up_to_date(mirror)
            told.fail(number).choose(number + 1)
        mirror.observe(told)
        await up_to_date(mirror)
        kept = range(5, KEPT_CYCLES + 5)
        maps = [f"cycles/{number}/rank_map" for number in kept]
        assert await shown(worker) == sorted(["cycle", *maps, *(f"cycles/{number}/failure" for number in kept[:-1])])
        assert await worker.get(f"runs/{RUN}/own") == b"stays"
    worker.close()


async def test_what_an_earlier_coordinator_left_is_put_right(process: StoreProcess) -> None:
    before = await process.connect()
    await before.set(f"nvrx/{RUN}/cycle", b"17")
    await before.set(f"nvrx/{RUN}/cycles/17/rank_map", b"{}")
    await before.set("nvrx/other/cycle", b"3")
    async with keeping(process) as mirror:
        mirror.observe(Told.open().choose(0))
        await up_to_date(mirror)
        assert await shown(before) == ["cycle", "cycles/0/rank_map"]
        assert await before.get(f"nvrx/{RUN}/cycle") == b"0"
        assert await shown(before, "other") == ["cycle"]
    before.close()


async def test_a_store_that_was_restarted_empty_is_filled_again(process: StoreProcess) -> None:
    async with keeping(process) as mirror:
        told = Told.open().choose(0).fail(0).choose(1)
        mirror.observe(told)
        await up_to_date(mirror)
        await process.kill()
        await process.start()
        worker = await process.worker()
        assert await waited(worker, f"nvrx/{RUN}/cycles/1/rank_map") == told.map_of(1)
        await up_to_date(mirror)
        assert await shown(worker) == ["cycle", "cycles/0/failure", "cycles/0/rank_map", "cycles/1/rank_map"]
        worker.close()


async def test_what_happens_while_the_store_is_away_is_shown_once_it_is_back(process: StoreProcess) -> None:
    await process.kill()
    async with keeping(process) as mirror:
        told = Told.open().choose(0)
        mirror.observe(told)
        mirror.observe(told.fail(0).choose(1))
        await process.start()
        await up_to_date(mirror)
        worker = await process.worker()
        assert await worker.get(f"nvrx/{RUN}/cycle") == b"1"
        worker.close()


async def test_a_new_cycle_is_left_alone_until_it_has_settled(process: StoreProcess, recorded: list[str]) -> None:
    async with keeping(process, settle_s_per_node=PATIENT_S) as mirror:
        mirror.observe(Told.open().choose(0))
        quick = Told.open("quick").choose(0)
        mirror._settle_s_per_node = 0.0
        mirror.observe(quick)
        worker = await process.worker()
        await waited(worker, "nvrx/quick/cycle")
        assert await shown(worker) == []
        assert not mirror.up_to_date.is_set()
        worker.close()


def test_how_long_changes_are_left_alone() -> None:
    told = Told.open().choose(0)
    shown = _Shown(told.run)
    shown.change(100.0, 1.0)
    assert (shown.urgent_at, shown.all_at, shown.due_at) == (101.0, 110.0, 101.0)
    shown.change(105.0, 1.0)
    assert (shown.urgent_at, shown.all_at) == (101.0, 110.0)


async def test_outcomes_trickle_in_without_a_map_for_each(process: StoreProcess, recorded: list[str]) -> None:
    """What somebody may wait for does not wait for them, nor does it make the maps that are there anew."""
    async with keeping(process) as mirror:
        told = Told.open().choose(0)
        mirror.observe(told)
        await up_to_date(mirror)
        recorded.clear()
        mirror._settle_s_per_node = PATIENT_S
        mirror.observe(told.tell(CycleRunning(3.0, CycleNumber(0))))
        assert not mirror.up_to_date.is_set()
        mirror._settle_s_per_node = 0.0
        mirror.observe(told.fail(0))
        worker = await process.worker()
        await waited(worker, f"nvrx/{RUN}/cycles/0/failure")
        mirror.observe(told.choose(1))
        await waited(worker, f"nvrx/{RUN}/cycle")
        await waited(worker, f"nvrx/{RUN}/cycles/1/rank_map")
        other = Told.open("other").choose(0)
        mirror.observe(other)
        await waited(worker, "nvrx/other/cycle")
        assert recorded[:3] == ["cycles/0/failure", "cycles/1/rank_map", "cycle"]
        assert all(key.startswith("nvrx/other/") for key in recorded[3:])
        worker.close()


async def test_a_map_is_made_without_holding_others_up(process: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the map of an older cycle is made, a new cycle comes: it is shown first."""
    made: list[int] = []
    told = Told.open().choose(0).fail(0).choose(1).fail(1).choose(2)
    loop = asyncio.get_running_loop()
    real = mirror_module._rank_map

    def slowly(run: Run, cycle: Any) -> bytes:
        made.append(cycle.number)
        if made == [2, 1]:
            asyncio.run_coroutine_threadsafe(next_cycle(), loop).result(WAIT_S)
        return real(run, cycle)

    async def next_cycle() -> None:
        mirror.observe(told.fail(2).choose(3))

    monkeypatch.setattr(mirror_module, "_rank_map", slowly)
    async with keeping(process) as mirror:
        mirror.observe(told)
        await up_to_date(mirror)
        assert made == [2, 1, 3, 2, 0]


async def test_a_map_too_large_is_written_in_fewer_bytes_or_left_out(
    process: StoreProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await process.worker()
    told = Told.open().choose(0)
    indented = told.map_of(0)
    compact = json.dumps(json.loads(indented), separators=(",", ":")).encode()
    monkeypatch.setattr(mirror_module, "MAX_VALUE_BYTES", len(compact))
    async with keeping(process) as mirror:
        mirror.observe(told)
        await up_to_date(mirror)
        assert await worker.get(f"nvrx/{RUN}/cycles/0/rank_map") == compact
        for message in ("x" * 1000, "y" * 2000):
            mirror.observe(told.tell(CauseRevised(3.0, CycleNumber(0), failure(message))))
            await up_to_date(mirror)
        assert await shown(worker) == ["cycle", "cycles/0/failure"]
        assert caplog.text.count("the rank map of cycle 0 is not on the lasting store") == 1
        mirror.observe(told.choose(1))
        await up_to_date(mirror)
        assert await worker.get(f"nvrx/{RUN}/cycle") == b"1"
    worker.close()


class Full:
    """A store that cuts off whoever writes; counts how often it was asked."""

    def __init__(self, process: StoreProcess) -> None:
        self._process = process
        self.asked = asyncio.Semaphore(0)

    async def connect(self) -> StoreClient:
        client = await self._process.connect()

        async def refuse(key: str, value: bytes) -> None:
            self.asked.release()
            raise StoreGone("cut off")

        client.set = refuse  # type: ignore[method-assign]
        return client


async def test_a_store_that_refuses_is_asked_ever_more_rarely_and_mourned_once(
    process: StoreProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    naps: list[float] = []

    class Clockless:
        """asyncio, its sleep only noted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, delay: float) -> None:
            naps.append(delay)
            await asyncio.sleep(0)

    monkeypatch.setattr(mirror_module, "asyncio", Clockless())
    full = Full(process)
    async with keeping(full, retry_s=1.0) as mirror:
        mirror.observe(Told.open().choose(0))
        async with asyncio.timeout(WAIT_S):
            for _ in range(8):
                await full.asked.acquire()
    assert naps[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert caplog.text.count("the lasting store is away") == 1
