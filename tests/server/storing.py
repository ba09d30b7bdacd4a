"""A real store process, started, killed and reached as a coordinator does, and StoreService before it.

Every wait is for an answer, bounded by WAIT_S; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from nvrx.channel import CHANNEL_OPTIONS
from nvrx.server.listening import SERVER_OPTIONS
from nvrx.server.services.store import MAX_REQUEST_BYTES, StoreService
from nvrx.server.store_host.control import Paths, read_message, read_record, write_message
from nvrx.server.store_host.lasting import Lasting
from nvrx.store.client import StoreClient, StoreGone
from nvrx.v1 import store_pb2, store_pb2_grpc

from .coordination import WAIT_S

_LIMIT = "grpc.max_receive_message_length"


def with_large(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Channel or server options with which values of any size come through."""
    return [(_LIMIT, MAX_REQUEST_BYTES), *(one for one in options if one[0] != _LIMIT)]


class StoreProcess:
    """The store process of a directory; satisfies Lasting. `connected` counts the connections made."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.paths = Paths(directory, "k")
        self.port = port
        self.connected = 0
        self._process: Process | None = None

    async def start(self) -> None:
        command = ["-m", "nvrx.server.store_host.process", "--kind", "bridge", "--host", "127.0.0.1"]
        command += ["--lasting-port", str(self.port), "--directory", str(self.paths.directory), "--key", "k"]
        self._process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await self._process.stdout.readline() == b"ready\n"
        record = read_record(self.paths)
        assert record is not None
        self.port = record.lasting_port

    def descriptors(self) -> int:
        """How many descriptors it has open: each connection is one."""
        assert self._process is not None
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Returns once it is dead."""
        if self._process is not None and self._process.returncode is None:
            self.signal(signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                await self._process.wait()

    async def connect(self) -> StoreClient:
        record = read_record(self.paths)
        if record is None:
            raise StoreGone("there is no store process")
        try:
            reader, writer = await asyncio.open_unix_connection(self.paths.socket)
        except OSError as error:
            raise StoreGone(f"the store process does not answer: {error.strerror}") from error
        try:
            for asked in ({"secret": record.secret}, {"do": "store"}):
                write_message(writer, asked)
                answer = await read_message(reader)
                if answer is None or not answer["ok"]:
                    raise StoreGone("the store process ended the conversation")
            client = await StoreClient.greet(reader, writer)
        except BaseException:
            writer.close()
            raise
        self.connected += 1
        return client

    async def worker(self) -> StoreClient:
        """A client as a worker is one: over TCP, without privileges."""
        async with asyncio.timeout(WAIT_S):
            return await StoreClient.connect("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def store_process(directory: Path) -> AsyncIterator[StoreProcess]:
    store = StoreProcess(directory)
    await store.start()
    try:
        yield store
    finally:
        await store.kill()


class Stores:
    """StoreService served in this process, and a channel to it."""

    def __init__(self, service: StoreService, address: str) -> None:
        self.service = service
        self.connections: Any = service.connections
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=with_large(CHANNEL_OPTIONS))
        self.stub: Any = store_pb2_grpc.StoreServiceStub(self.channel)

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        request = store_pb2.GetRequest(key=key)
        if timeout_s is not None:
            request.timeout.FromNanoseconds(round(timeout_s * 1e9))
        return (await self.stub.Get(request, timeout=WAIT_S)).value  # type: ignore[no-any-return]

    async def set(self, key: str, value: bytes) -> None:
        await self.stub.Set(store_pb2.SetRequest(key=key, value=value), timeout=WAIT_S)

    async def add(self, key: str, amount: int) -> int:
        return (await self.stub.Add(store_pb2.AddRequest(key=key, amount=amount), timeout=WAIT_S)).value  # type: ignore[no-any-return]

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        request = store_pb2.CompareSetRequest(key=key, expected=expected, desired=desired)
        return (await self.stub.CompareSet(request, timeout=WAIT_S)).value  # type: ignore[no-any-return]

    def wait(self, *keys: str, timeout_s: float | None = None, deadline_s: float | None = WAIT_S) -> Any:
        """The call, under way."""
        request = store_pb2.WaitRequest(keys=keys)
        if timeout_s is not None:
            request.timeout.FromNanoseconds(round(timeout_s * 1e9))
        return self.stub.Wait(request, timeout=deadline_s)

    async def delete(self, key: str) -> bool:
        return (await self.stub.Delete(store_pb2.DeleteRequest(key=key), timeout=WAIT_S)).deleted  # type: ignore[no-any-return]

    async def keys(self, prefix: str = "", page_size: int = 0) -> list[list[str]]:
        """All pages."""
        request = store_pb2.ListKeysRequest(prefix=prefix, page_size=page_size)
        pages = []
        while True:
            answer = await self.stub.ListKeys(request, timeout=WAIT_S)
            pages.append(list(answer.keys))
            if not answer.next_page_token:
                return pages
            request.page_token = answer.next_page_token

    async def until_blocked(self, count: int) -> None:
        """Returns once just so many calls wait on the store."""
        await until(lambda: self.connections.blocked == count)


async def until(condition: Any) -> None:
    """Let others go on until it holds."""
    async with asyncio.timeout(3 * WAIT_S):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving_store(lasting: Lasting | None) -> AsyncIterator[Stores]:
    service = StoreService(lasting)
    server = grpc.aio.server(options=with_large(SERVER_OPTIONS))
    store_pb2_grpc.add_StoreServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stores = Stores(service, f"127.0.0.1:{port}")
    try:
        yield stores
    finally:
        service.close()
        await stores.channel.close()
        await server.stop(None)
