"""The client without torch, over real sockets: to our server, and to one that answers what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from nvrx.server.store_host.bridge import BridgeServer
from nvrx.server.store_host.ports import Ports
from nvrx.store.client import KeyTimeout, StoreClient, StoreGone
from nvrx.store.opcodes import MAGIC, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Opcode

from .reference import encode

WAIT_S = 30.0
HOST = "127.0.0.1"


@pytest.fixture
async def server() -> AsyncIterator[BridgeServer]:
    server = await BridgeServer.start(Ports(HOST, None).lasting(0), b"/nvrx/")
    yield server
    await server.close()


@pytest.fixture
async def connect(server: BridgeServer) -> AsyncIterator[Callable[[], Awaitable[StoreClient]]]:
    clients: list[StoreClient] = []

    async def connect() -> StoreClient:
        clients.append(await StoreClient.connect(HOST, server.port))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
async def client(connect: Callable[[], Awaitable[StoreClient]]) -> StoreClient:
    return await connect()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not what():  # noqa: ASYNC110 (what the server knows has no event)
            await asyncio.sleep(0)


def waits(server: BridgeServer, key: str) -> Callable[[], bool]:
    return lambda: f"/{key}".encode() in vars(server.space)["_waiting"]


# ---- operations -------------------------------------------------------------------------------------------


async def test_all_operations(server: BridgeServer, client: StoreClient) -> None:
    assert await client.get("k") == b""
    assert not await client.check(["k"])
    await client.set("k", b"\0\xff")
    assert await client.get("k") == b"\0\xff"
    assert server.space.values == {b"/k": b"\0\xff"}
    await client.multi_set({"a": b"1", "b": b"", "": b"the slash alone"})
    await client.multi_set({})
    assert await client.check(["k", "a", "b", ""])
    assert await client.check([])
    assert await client.add("a", 2**40) == 2**40 + 1
    assert await client.add("n", -5) == -5
    assert await client.compare_set("c", b"", b"1") == b"1"
    assert await client.compare_set("c", b"2", b"3") == b"1"
    assert await client.compare_set("no", b"2", b"3") == b"2"
    assert await client.count() == 6
    assert await client.list_keys() == ["k", "a", "b", "", "n", "c"]
    assert await client.delete("k")
    assert not await client.delete("k")
    await client.wait(["a", "b"])
    await client.wait([])
    assert server.clients == 1


async def test_keys_are_any_text(client: StoreClient) -> None:
    for key in ("ключ", "a/b//c", "\0", "\udcff\udc80", "x" * (MAX_KEY_BYTES - 1)):
        await client.set(key, key.encode("utf-8", "surrogateescape"))
        assert await client.get(key) == key.encode("utf-8", "surrogateescape")
        assert key in await client.list_keys()


async def test_large_and_many(client: StoreClient) -> None:
    large = bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    await client.set("large", large)
    assert await client.get("large") == large
    many = {f"{number:05}": b"v" for number in range(20_000)}
    await client.multi_set(many)
    assert await client.check(many)
    assert await client.list_keys() == ["large", *many]


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.set("k", bytes(MAX_VALUE_BYTES + 1)),
        lambda client: client.get("x" * MAX_KEY_BYTES),
        lambda client: client.check(["k"] * (MAX_KEYS + 1)),
        lambda client: client.add("text", 1),
        lambda client: client.set("nvrx/k", b""),
        lambda client: client.delete("nvrx/k"),
    ],
)
async def test_what_is_not_allowed_ends_that_connection_alone(
    connect: Callable[[], Awaitable[StoreClient]], act: Callable[[StoreClient], Awaitable[object]]
) -> None:
    client, other = await connect(), await connect()
    await other.set("text", b"x")
    await other.count()
    with contextlib.suppress(StoreGone):  # not every command has an answer
        await act(client)
    with pytest.raises(StoreGone):
        await client.count()
    with pytest.raises(StoreGone):
        await client.set("k", b"")
    assert await other.get("text") == b"x"


async def test_many_at_once_take_turns(client: StoreClient) -> None:
    sums = await asyncio.gather(*(client.add("n", 1) for _ in range(200)))
    assert sums == list(range(1, 201))
    await asyncio.gather(*(client.set(f"{number}", b"%d" % number) for number in range(100)))
    values = await asyncio.gather(*(client.get(f"{number}") for number in range(100)))
    assert values == [b"%d" % number for number in range(100)]


# ---- waiting ----------------------------------------------------------------------------------------------


async def test_a_wait_ends_when_the_last_key_comes(
    server: BridgeServer, connect: Callable[[], Awaitable[StoreClient]]
) -> None:
    client, other = await connect(), await connect()
    waiting = asyncio.create_task(client.wait(["a", "b"], WAIT_S))
    later = asyncio.create_task(client.get("a"))
    await until(waits(server, "b"))
    await other.set("a", b"1")
    await other.count()
    assert not waiting.done()
    await other.set("b", b"2")
    await waiting
    assert await later == b"1"


@pytest.mark.parametrize("timeout_s", [0.0, 0.001])
async def test_a_wait_in_vain_leaves_the_client_usable(client: StoreClient, timeout_s: float) -> None:
    for _ in range(5):
        with pytest.raises(KeyTimeout):
            await client.wait(["no"], timeout_s)
        assert await client.add("n", 0) == 0


async def test_waits_that_end_as_they_time_out_leave_no_answer_behind(
    server: BridgeServer, connect: Callable[[], Awaitable[StoreClient]]
) -> None:
    """Whichever comes first, the client and the server agree about the next answer."""
    client = await connect()
    outcomes = set()
    for number in range(120):
        waiting = asyncio.create_task(client.wait([f"{number}"], 0.0))
        for _ in range(number % 12):
            await asyncio.sleep(0)
        server.space.set(f"/{number}".encode(), b"")
        try:
            await waiting
            outcomes.add("came")
        except KeyTimeout:
            outcomes.add("timed out")
        assert await client.add("n", 1) == number + 1
    assert outcomes == {"came", "timed out"}


@pytest.mark.parametrize("answers", [b"\1", b"\0\1"])
async def test_what_a_cancelled_wait_was_answered(answers: bytes) -> None:
    """Where the keys came just before, they are there."""
    async with told() as (client, server):
        waiting = asyncio.create_task(client.wait(["k"], 0.0))
        await server.heard(encode([Opcode.WAIT, [b"/k"]]) + encode([Opcode.CANCEL_WAIT]))
        server.say(answers)
        if answers == b"\1":
            with pytest.raises(KeyTimeout):
                await waiting
        else:
            await waiting
        counting = asyncio.create_task(client.count())
        await server.heard(encode([Opcode.GETNUMKEYS]))
        server.say((7).to_bytes(8, "little"))
        assert await counting == 7


# ---- cancellation and ends --------------------------------------------------------------------------------


class Told:
    """A server that says what the test says."""

    def __init__(self) -> None:
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.connected = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.connected.set()

    async def heard(self, expected: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            assert await self.reader.readexactly(len(expected)) == expected

    async def greeted(self, change: int = 0) -> None:
        await self.connected.wait()
        await self.heard(encode([Opcode.VALIDATE, MAGIC]) + bytes([Opcode.PING]))
        nonce = await self.reader.readexactly(4)
        self.say(bytes([nonce[0] ^ change]) + nonce[1:])

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read(1) == b""


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, Told]]:
    """A server of the test's own, and its port."""
    server = Told()
    listener = await asyncio.start_server(server.accept, HOST, 0)
    try:
        yield listener.sockets[0].getsockname()[1], server
    finally:
        listener.close()
        if server.connected.is_set():
            server.writer.close()


@contextlib.asynccontextmanager
async def told() -> AsyncIterator[tuple[StoreClient, Told]]:
    """A client of such a server."""
    async with listening() as (port, server):
        connecting = asyncio.create_task(StoreClient.connect(HOST, port))
        await server.greeted()
        client = await connecting
        try:
            yield client, server
        finally:
            client.close()


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.get("k"),
        lambda client: client.add("k", 1),
        lambda client: client.list_keys(),
        lambda client: client.wait(["k"]),
    ],
)
async def test_one_that_is_cancelled_midway_is_closed(act: Callable[[StoreClient], Awaitable[object]]) -> None:
    """Else the next would read its answer."""
    async with told() as (client, server):
        task = asyncio.ensure_future(act(client))
        await server.reader.readexactly(1)
        await cancel(task)
        with pytest.raises(StoreGone):
            await client.count()


async def test_a_wait_that_is_cancelled_while_it_is_called_off_is_closed() -> None:
    async with told() as (client, server):
        task = asyncio.create_task(client.wait(["k"], 0.0))
        await server.heard(encode([Opcode.WAIT, [b"/k"]]) + encode([Opcode.CANCEL_WAIT]))
        await cancel(task)
        server.say(b"\1")
        with pytest.raises(StoreGone):
            await client.count()
        assert await server.ended()


async def test_one_that_is_cancelled_before_its_turn_costs_nothing() -> None:
    async with told() as (client, server):
        first = asyncio.create_task(client.count())
        second = asyncio.create_task(client.count())
        await server.heard(encode([Opcode.GETNUMKEYS]))
        await cancel(second)
        server.say((3).to_bytes(8, "little"))
        assert await first == 3
        third = asyncio.create_task(client.get("k"))
        await server.heard(encode([Opcode.GET, b"/k"]))
        server.say(bytes(8))
        assert await third == b""


async def test_a_server_that_closes_in_the_middle_of_an_answer() -> None:
    for said in (b"", b"\5\0\0", (5).to_bytes(8, "little") + b"four"):
        async with told() as (client, server):
            getting = asyncio.create_task(client.get("k"))
            await server.heard(encode([Opcode.GET, b"/k"]))
            server.say(said)
            server.writer.close()
            with pytest.raises(StoreGone, match="closed the connection"):
                await getting
            with pytest.raises(StoreGone):
                await client.count()


async def test_all_who_wait_learn_that_the_server_ends(
    server: BridgeServer, connect: Callable[[], Awaitable[StoreClient]]
) -> None:
    waiting = []
    for number in range(20):
        waiting.append(asyncio.create_task((await connect()).wait([f"{number}"], WAIT_S)))
    await until(waits(server, "19"))
    await server.close()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in found} == {StoreGone}
    await until(lambda: server.clients == 0)
    assert vars(server.space)["_waiting"] == {}


async def test_what_answers_but_is_no_store_is_let_go() -> None:
    async with listening() as (port, server):
        connecting = asyncio.create_task(StoreClient.connect(HOST, port))
        await server.greeted(change=1)
        with pytest.raises(StoreGone, match="not a store"):
            await connecting
        assert await server.ended()


async def test_a_connection_that_is_cancelled_as_it_greets_is_closed() -> None:
    async with listening() as (port, server):
        connecting = asyncio.create_task(StoreClient.connect(HOST, port))
        await server.connected.wait()
        await server.heard(encode([Opcode.VALIDATE, MAGIC]) + bytes([Opcode.PING]))
        await server.reader.readexactly(4)
        await cancel(connecting)
        assert await server.ended()


async def test_nobody_listens() -> None:
    async with listening() as (port, _):
        pass
    with pytest.raises(StoreGone, match=f"{HOST}:{port}: "):
        await StoreClient.connect(HOST, port)


async def test_a_wait_that_is_answered_with_something_else() -> None:
    async with told() as (client, server):
        waiting = asyncio.create_task(client.wait(["k"]))
        await server.heard(encode([Opcode.WAIT, [b"/k"]]))
        server.say(b"\7")
        with pytest.raises(StoreGone, match="something else"):
            await waiting
