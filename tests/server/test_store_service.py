"""StoreService before a real store process: every rpc, every refusal, and a store that dies or is full."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx.server.services import answering
from nvrx.server.services import store as store_module
from nvrx.server.store_host import connections
from nvrx.server.store_host.bridge import BridgeServer
from nvrx.store.client import StoreClient, StoreGone
from nvrx.store.opcodes import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from nvrx.store.space import KeySpace
from nvrx.v1 import store_pb2

from .coordination import WAIT_S, refused, serving
from .storing import StoreProcess, Stores, serving_store, until

Code = grpc.StatusCode
LONGEST = MAX_KEY_BYTES - 1
pytestmark = pytest.mark.rule("I4")


# ---- what the rpcs do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"text", bytes(range(256)), b"\0" * MAX_VALUE_BYTES], ids=len)
async def test_a_value_comes_back_as_it_went(process: StoreProcess, stores: Stores, value: bytes) -> None:
    await stores.set("runs/r/k", value)
    assert await stores.get("runs/r/k", 0) == value
    worker = await process.worker()
    assert await worker.get("runs/r/k") == value
    worker.close()


async def test_what_a_worker_writes_is_there_and_the_other_way_round(process: StoreProcess, stores: Stores) -> None:
    worker = await process.worker()
    await worker.set("runs/r/ä", b"1")
    assert await worker.check(["runs/r/ä"])
    assert await stores.get("runs/r/ä") == b"1"
    assert await stores.add("runs/r/ä", 2) == 3
    assert await worker.add("runs/r/ä", 1) == 4
    assert await stores.delete("runs/r/ä")
    assert not await worker.check(["runs/r/ä"])
    worker.close()


async def test_the_longest_key_and_the_empty_one_are_keys(stores: Stores) -> None:
    for key in ("k" * LONGEST, ""):
        await stores.set(key, b"v")
        assert await stores.get(key, 0) == b"v"
        assert await stores.delete(key)


async def test_add_takes_a_missing_key_as_0_and_goes_both_ways(stores: Stores) -> None:
    assert await stores.add("n", 0) == 0
    assert await stores.get("n") == b"0"
    assert await stores.add("n", 7) == 7
    assert await stores.add("n", -9) == -2
    assert await stores.get("n") == b"-2"
    assert await stores.add("large", 2**63 - 1) == 2**63 - 1
    assert await stores.add("small", -(2**63)) == -(2**63)


async def test_compare_set_answers_as_torch_does(stores: Stores) -> None:
    assert await stores.compare_set("k", b"x", b"y") == b"x"
    assert await stores.keys() == [[]]
    assert await stores.compare_set("k", b"", b"a") == b"a"
    assert await stores.compare_set("k", b"wrong", b"b") == b"a"
    assert await stores.compare_set("k", b"a", b"b") == b"b"
    assert await stores.get("k") == b"b"
    assert await stores.compare_set("k", b"b", b"") == b""
    assert await stores.get("k", 0) == b""


async def test_delete_tells_whether_there_was_something(stores: Stores) -> None:
    await stores.set("k", b"")
    assert await stores.delete("k")
    assert not await stores.delete("k")
    assert not await stores.delete("k" * (LONGEST + 1))


async def test_an_empty_value_is_no_missing_key(stores: Stores) -> None:
    await stores.set("empty", b"")
    assert await stores.get("empty", 0) == b""
    await stores.wait("empty", timeout_s=0)
    found = await refused(stores.get("missing", 0), Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")
    assert found == {"key": "missing"}


async def test_keys_come_in_byte_order_by_prefix_and_in_pages(process: StoreProcess, stores: Stores) -> None:
    keys = ["a", "a/", "a/0", "a/é", "a/\U0001f600", "a/\uffee", "b"]
    for key in reversed(keys):
        await stores.set(key, b"v")
    worker = await process.worker()
    await worker.set("a/\udcff", b"this is no text")
    assert len(await worker.list_keys()) == 8
    worker.close()
    in_order = sorted(keys, key=str.encode)
    assert await stores.keys() == [in_order]
    assert await stores.keys("a/", 2) == [["a/", "a/0"], ["a/é", "a/\uffee"], ["a/\U0001f600"]]
    assert await stores.keys("none") == [[]]


async def test_a_page_fits_a_default_client(process: StoreProcess, stores: Stores) -> None:
    names = {f"{number:04}".ljust(LONGEST, "k") for number in range(600)}
    worker = await process.worker()
    await worker.multi_set(dict.fromkeys(names, b""))
    assert await worker.count() == 600
    worker.close()
    async with grpc.aio.insecure_channel(stores.address) as plain:
        stores.channel, stores.stub = plain, type(stores.stub)(plain)
        pages = await stores.keys()
    assert len(pages) == 2
    assert [key for page in pages for key in page] == sorted(names)


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.rule("I3")
@pytest.mark.parametrize("key", ["nvrx/r/cycle", "nvrx/", "/nvrx/r/cycle", "//nvrx/r"])
async def test_the_coordinators_keys_are_only_read(process: StoreProcess, stores: Stores, key: str) -> None:
    coordinator = await process.connect()
    await coordinator.set(key, b"3")
    assert await coordinator.check([key])
    for call in (
        stores.set(key, b"4"),
        stores.add(key, 1),
        stores.compare_set(key, b"3", b"4"),
        stores.delete(key),
    ):
        assert await refused(call, Code.PERMISSION_DENIED, "KEY_READ_ONLY") == {"key": key}
    assert await stores.get(key, 0) == b"3"
    await stores.wait(key, timeout_s=0)
    coordinator.close()


@pytest.mark.parametrize("key", ["nvrx", "nvrxx/a", "runs/nvrx/a", "NVRX/a"])
async def test_keys_that_only_look_like_the_coordinators_are_written(stores: Stores, key: str) -> None:
    await stores.set(key, b"v")
    assert await stores.delete(key)


@pytest.mark.parametrize("value", [b"", b"text", b"0.5", b"1 GPU", b"-", b"9" * 19, b"9" * 5000])
async def test_add_to_what_is_no_number_changes_nothing(process: StoreProcess, stores: Stores, value: bytes) -> None:
    await stores.set("k", value)
    made = process.connected
    await refused(stores.add("k", 1), Code.FAILED_PRECONDITION, "VALUE_NOT_A_NUMBER")
    assert await stores.get("k", 0) == value
    assert process.connected == made


@pytest.mark.parametrize(("held", "amount"), [(2**63 - 1, 1), (-(2**63), -1), (-1, -(2**63)), (1, 2**63 - 1)])
async def test_a_sum_that_does_not_fit_changes_nothing(stores: Stores, held: int, amount: int) -> None:
    await stores.set("k", b"%d" % held)
    await refused(stores.add("k", amount), Code.FAILED_PRECONDITION, "VALUE_NOT_A_NUMBER")
    assert await stores.get("k") == b"%d" % held


class Meddled(StoreClient):
    """Between look and sum, another client writes `value`."""

    value = b""

    async def add(self, key: str, amount: int) -> int:
        value, Meddled.value = Meddled.value, b""
        if value:
            await self.set(key, value)
        return await super().add(key, amount)


@pytest.mark.parametrize("value", [b"text", b"%d" % (2**63 - 1)])
async def test_what_others_write_between_look_and_sum_is_seen(
    process: StoreProcess, value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.server.storing.StoreClient", Meddled)
    async with serving_store(process) as stores:
        Meddled.value = value
        waiting = stores.wait("other")
        await refused(stores.add("k", 1), Code.FAILED_PRECONDITION, "VALUE_NOT_A_NUMBER")
        assert await stores.get("k", 0) == value
        await stores.set("other", b"")
        await waiting


async def test_sums_of_many_callers_add_up(process: StoreProcess, stores: Stores) -> None:
    async def worker_adds() -> None:
        worker = await process.worker()
        for _ in range(100):
            await worker.add("n", 1)
        worker.close()

    adding = [stores.add("n", 1) for _ in range(100)]
    await asyncio.gather(worker_adds(), worker_adds(), *adding)
    assert await stores.get("n") == b"300"


async def test_what_is_too_large_is_refused_before_it_is_sent(process: StoreProcess, stores: Stores) -> None:
    long, large = "k" * (LONGEST + 1), b"v" * (MAX_VALUE_BYTES + 1)
    await stores.set("k", b"v")
    made = process.connected
    for call in (
        stores.set(long, b""),
        stores.set("k", large),
        stores.add(long, 1),
        stores.add("é" * (LONGEST // 2 + 1), 1),
        stores.compare_set(long, b"", b""),
        stores.compare_set("k", large, b""),
        stores.compare_set("k", b"", large),
    ):
        await refused(call, Code.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    for call in (
        stores.get(long),
        stores.wait("k", long),
        stores.wait(),
        stores.get("k", -1),
        stores.wait("k", timeout_s=-1e-9),
        stores.stub.ListKeys(store_pb2.ListKeysRequest(page_size=-1)),
        stores.stub.ListKeys(store_pb2.ListKeysRequest(page_token="x")),
    ):
        await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert await stores.get("k") == b"v"
    assert process.connected == made


@pytest.mark.parametrize("count", [1, MAX_KEYS, MAX_KEYS + 1])
async def test_a_wait_may_be_for_so_many_keys(stores: Stores, count: int) -> None:
    waiting = stores.wait(*(f"{number:x}" for number in range(count)), timeout_s=0)
    if count > MAX_KEYS:
        await refused(waiting, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    else:
        await refused(waiting, Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")


async def test_keys_to_wait_for_may_be_so_long_together(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_COMMAND_BYTES", 3 * 10)
    await refused(stores.wait("a", "b", "c", timeout_s=0), Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")
    await refused(stores.wait("a", "b", "cc", timeout_s=0), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_without_a_store_every_rpc_says_so() -> None:
    async with serving() as served:
        for name in ("Get", "Set", "Add", "CompareSet", "Wait", "Delete", "ListKeys"):
            call = getattr(served.stores, name)(getattr(store_pb2, f"{name}Request")(), timeout=WAIT_S)
            await refused(call, Code.FAILED_PRECONDITION, "STORE_OFF")


# ---- a store that dies, hangs or is full ------------------------------------------------------------------


async def test_a_store_that_died_is_down_and_then_works(process: StoreProcess, stores: Stores) -> None:
    await stores.set("k", b"v")
    waiting = stores.wait("late")
    await stores.until_blocked(1)
    await process.kill()
    await refused(waiting, Code.UNAVAILABLE, "STORE_DOWN")
    for call in (
        stores.get("k"),
        stores.set("k", b""),
        stores.add("k", 1),
        stores.compare_set("k", b"", b""),
        stores.wait("k"),
        stores.delete("k"),
        stores.keys(),
    ):
        await refused(call, Code.UNAVAILABLE, "STORE_DOWN")
    await process.start()
    assert await stores.add("n", 1) == 1
    await refused(stores.get("k", 0), Code.DEADLINE_EXCEEDED, "STORE_TIMEOUT")


@pytest.mark.parametrize("rpc", ["get", "set", "add", "compare_set", "delete", "wait"])
async def test_no_call_hits_the_dead_connection_of_a_store_that_is_up_again(
    process: StoreProcess, stores: Stores, rpc: str
) -> None:
    await stores.set("k", b"v")
    await process.kill()
    await process.start()
    worker = await process.worker()
    await worker.set("k", b"1")
    assert await worker.check(["k"])
    worker.close()
    calls: dict[str, Any] = {
        "get": lambda: stores.get("k", 0),
        "set": lambda: stores.set("k", b"w"),
        "add": lambda: stores.add("k", 1),
        "compare_set": lambda: stores.compare_set("k", b"1", b"2"),
        "delete": lambda: stores.delete("k"),
        "wait": lambda: stores.wait("k"),
    }
    await calls[rpc]()


async def test_a_wait_goes_on_when_its_connection_alone_broke(process: StoreProcess, stores: Stores) -> None:
    waiting = stores.wait("late")
    await stores.until_blocked(1)
    await until(lambda: stores.connections._own)
    made = process.connected
    for client in tuple(stores.connections._own):
        client.close()
    await until(lambda: process.connected == made + 1)
    await stores.set("late", b"")
    await waiting


async def test_a_store_that_hangs_is_down(
    process: StoreProcess, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stores.set("k", b"v")
    monkeypatch.setattr(connections, "ANSWER_WITHIN_S", 0.05)
    process.signal(signal.SIGSTOP)
    await refused(stores.get("k"), Code.UNAVAILABLE, "STORE_DOWN")
    await refused(stores.add("k", 1), Code.UNAVAILABLE, "STORE_DOWN")
    await refused(stores.keys(), Code.UNAVAILABLE, "STORE_DOWN")
    process.signal(signal.SIGCONT)
    monkeypatch.undo()
    assert await stores.get("k") == b"v"


class SmallStore:
    """A store in this process that holds little; satisfies Lasting."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.server = BridgeServer()
        self.server.space = KeySpace(b"/nvrx/", max_bytes)
        self.path = path

    async def connect(self) -> StoreClient:
        return await StoreClient.greet(*await asyncio.open_unix_connection(self.path))


async def test_a_full_store_says_so(tmp_path: Path) -> None:
    small = SmallStore(tmp_path / "s", 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await small.server.serve_privileged(reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(serve, small.path)
    async with serving_store(small) as stores:
        await stores.set("k", b"v" * 900)
        for call in (
            stores.set("l", b"v" * 200),
            stores.compare_set("l", b"", b"v" * 200),
            stores.add("n" * 200, 1),
        ):
            await refused(call, Code.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        assert await stores.get("k") == b"v" * 900
        assert await stores.delete("k")
        await stores.set("l", b"v" * 200)
    server.close()


class Fragile(StoreClient):
    """Its connection breaks once an unrepeatable operation has reached the store, before the answer."""

    async def delete(self, key: str) -> bool:
        await super().delete(key)
        self.close()
        raise StoreGone("it broke")


async def test_what_may_have_been_done_is_not_done_twice(
    process: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.server.storing.StoreClient", Fragile)
    async with serving_store(process) as stores:
        await stores.set("k", b"v")
        with pytest.raises(grpc.aio.AioRpcError):
            await stores.delete("k")
        assert process.connected == 2


def test_pages_stay_below_what_a_default_client_takes() -> None:
    assert answering.MAX_PAGE_BYTES + MAX_KEY_BYTES < 4 * 1024 * 1024
