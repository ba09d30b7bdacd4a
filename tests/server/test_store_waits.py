"""StoreService before a real store process: calls that wait, end, are cancelled or left alone."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc
import pytest

from nvrx.server.services import store as store_module
from nvrx.server.store_host import connections
from nvrx.store.client import StoreClient
from nvrx.v1 import store_pb2

from .coordination import WAIT_S, refused
from .storing import StoreProcess, Stores, until

Code = grpc.StatusCode
pytestmark = pytest.mark.rule("I4")


async def test_a_get_without_timeout_waits_for_its_key(stores: Stores) -> None:
    getting = [asyncio.create_task(stores.get(key)) for key in ("late", "empty")]
    await stores.until_blocked(2)
    await stores.set("late", b"v")
    await stores.set("empty", b"")
    assert await asyncio.gather(*getting) == [b"v", b""]
    await stores.until_blocked(0)


async def test_a_get_is_not_fooled_by_a_key_that_was_only_compared(process: StoreProcess, stores: Stores) -> None:
    """torch wakes those who wait for a key when somebody compares it, be it missing."""
    getting = asyncio.create_task(stores.get("k"))
    await stores.until_blocked(1)
    worker = await process.worker()
    assert await worker.compare_set("k", b"x", b"y") == b"x"
    assert not getting.done()
    await worker.set("k", b"v")
    assert await getting == b"v"
    worker.close()


async def test_a_wait_wants_all_its_keys(stores: Stores) -> None:
    waiting = stores.wait("a", "b", "a", "c")
    await stores.until_blocked(1)
    await stores.set("a", b"")
    await stores.set("c", b"")
    assert not waiting.done()
    assert await stores.add("b", 1) == 1
    await waiting


async def test_a_wait_in_vain_names_a_key_that_is_missing(stores: Stores) -> None:
    await stores.set("here", b"")
    many = [f"k{number}" for number in range(9)]
    for key in many[:7] + many[8:]:
        await stores.set(key, b"")
    for timeout_s in (0, 0.02):
        waiting = stores.wait("here", *many, timeout_s=timeout_s)
        assert await refused(waiting, Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT") == {"key": "k7"}
    await refused(stores.get("k7", 0.02), Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")
    await stores.until_blocked(0)


async def test_the_calls_deadline_ends_a_wait(stores: Stores) -> None:
    waiting = stores.wait("never", deadline_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        await waiting
    assert seen.value.code() is Code.DEADLINE_EXCEEDED
    await stores.until_blocked(0)


async def test_a_call_without_any_limit_ends_at_ours(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_WAIT_S", 0.02)
    waiting = stores.wait("never", deadline_s=None)
    await refused(waiting, Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")
    waiting = stores.wait("never", deadline_s=None, timeout_s=1e9)
    await refused(waiting, Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")


async def test_a_thousand_calls_wait_and_nobody_else_does(process: StoreProcess, stores: Stores) -> None:
    await stores.set("k", b"")
    before = process.descriptors()
    waiting = [stores.wait("go", deadline_s=100) for _ in range(1000)]
    await stores.until_blocked(1000)
    assert await stores.add("meanwhile", 1) == 1
    await stores.set("go", b"")
    await asyncio.gather(*waiting)
    await stores.until_blocked(0)
    await until(lambda: process.descriptors() == before)


async def test_waiting_calls_are_limited(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BLOCKED", 2)
    waiting = [stores.wait("go") for _ in range(2)]
    await stores.until_blocked(2)
    await refused(stores.wait("go"), Code.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    waiting[0].cancel()
    await stores.until_blocked(1)
    waiting[0] = stores.wait("go")
    await stores.until_blocked(2)
    await stores.set("go", b"")
    await asyncio.gather(*waiting)


async def test_quick_calls_are_limited(process: StoreProcess, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_QUICK", 2)
    await stores.set("k", b"")
    process.signal(signal.SIGSTOP)
    adding = [asyncio.create_task(stores.add("n", 1)) for _ in range(2)]
    await until(lambda: stores.connections.quick_ones == 2)
    await refused(stores.add("n", 1), Code.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    process.signal(signal.SIGCONT)
    assert sorted(await asyncio.gather(*adding)) == [1, 2]


async def test_a_cancelled_call_frees_its_connection_on_both_sides(process: StoreProcess, stores: Stores) -> None:
    await stores.set("k", b"")
    before = process.descriptors()
    waiting = stores.wait("go")
    getting = stores.stub.Get(store_pb2.GetRequest(key="go"))
    await until(lambda: process.descriptors() == before + 2)
    waiting.cancel()
    getting.cancel()
    await stores.until_blocked(0)
    await until(lambda: process.descriptors() == before)
    await stores.set("go", b"")
    assert await stores.get("go") == b""


async def test_a_client_that_is_killed_frees_its_connection(process: StoreProcess, stores: Stores) -> None:
    await stores.set("k", b"")
    before = process.descriptors()
    script = (
        "import grpc, sys; from nvrx.v1 import store_pb2, store_pb2_grpc as s;"
        "s.StoreServiceStub(grpc.insecure_channel(sys.argv[1])).Wait(store_pb2.WaitRequest(keys=['go']))"
    )
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stores.address)
    await until(lambda: process.descriptors() == before + 1)
    client.kill()
    await client.wait()
    await stores.until_blocked(0)
    await until(lambda: process.descriptors() == before)


async def test_a_quick_call_that_is_cancelled_harms_no_other(process: StoreProcess, stores: Stores) -> None:
    await stores.set("k", b"v")
    made = process.connected
    process.signal(signal.SIGSTOP)
    quick = asyncio.create_task(stores.connections.quick(StoreClient.count, may_repeat=True))
    await until(stores.connections._turn.locked)
    adding = asyncio.create_task(stores.add("n", 1))
    await until(lambda: stores.connections.quick_ones == 2)
    quick.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quick
    process.signal(signal.SIGCONT)
    assert await adding == 1
    assert process.connected == made


class Busy:
    """Counts how many connect at once; satisfies Lasting."""

    def __init__(self, process: StoreProcess) -> None:
        self._process = process
        self.now = self.most = 0

    async def connect(self) -> StoreClient:
        self.now += 1
        self.most = max(self.most, self.now)
        client = await self._process.connect()
        self.now -= 1
        return client


async def test_not_too_many_connect_at_once(process: StoreProcess) -> None:
    busy = Busy(process)
    many = connections.Connections(busy)
    await asyncio.gather(*(many.alone(StoreClient.count, WAIT_S) for _ in range(100)))
    assert busy.most == connections.MAX_CONNECTING


async def test_a_coordinator_that_goes_down_tells_waiting_calls_to_come_back(stores: Stores) -> None:
    waiting = stores.wait("go")
    await stores.until_blocked(1)
    stores.service.close()
    await refused(waiting, Code.UNAVAILABLE, "SHUTTING_DOWN")
    await refused(stores.get("go", 0), Code.UNAVAILABLE, "SHUTTING_DOWN")
