"""Stores on other coordinators' hosts: held while they are needed, missed when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from nvrx.core.facts import Endpoint
from nvrx.server.store_host.elsewhere import TRIES, Elsewhere

from .coordination import WAIT_S

_HELLO_BYTES = 1 + 4 + 1 + 4
_NONCE_BYTES = 4


class PlayedStore:
    """Greets as a store does, and says nothing more."""

    def __init__(self) -> None:
        self.opened = 0
        self.is_opened = asyncio.Event()
        self.is_closed = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(_HELLO_BYTES)
        writer.write(hello[-_NONCE_BYTES:])
        self.opened += 1
        self.writers.append(writer)
        self.is_opened.set()
        with contextlib.suppress(OSError):
            while await reader.read(1024):
                pass
        self.is_closed.set()
        writer.close()


@contextlib.asynccontextmanager
async def played() -> AsyncIterator[tuple[PlayedStore, Endpoint, asyncio.Server]]:
    store = PlayedStore()
    server = await asyncio.start_server(store.talk, "127.0.0.1", 0)
    yield store, Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], 1), server
    server.close()


@pytest.fixture
def lost() -> asyncio.Event:
    """Set when a store is told to be gone."""
    return asyncio.Event()


@pytest.fixture
def elsewhere(lost: asyncio.Event) -> Iterator[Elsewhere]:
    watching = Elsewhere(lost.set)
    yield watching
    watching.close()


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


@pytest.mark.rule("E6", "I6")
async def test_a_store_is_held_as_long_as_it_is_needed(elsewhere: Elsewhere, lost: asyncio.Event) -> None:
    async with played() as (first, one, _), played() as (second, other, _):
        elsewhere.follow({one, other})
        await soon(first.is_opened)
        await soon(second.is_opened)
        elsewhere.follow({other})
        await soon(first.is_closed)
        assert not second.is_closed.is_set()
        assert (first.opened, second.opened) == (1, 1)
        assert not lost.is_set()


@pytest.mark.rule("E6", "I6")
async def test_a_store_that_is_gone_is_told_until_nobody_needs_it(elsewhere: Elsewhere, lost: asyncio.Event) -> None:
    async with played() as (store, one, server):
        elsewhere.follow({one})
        await soon(store.is_opened)
        server.close()
        store.writers[0].close()
        await soon(lost)
        assert elsewhere.lost == {one}
        elsewhere.follow(())
        assert elsewhere.lost == frozenset()


@pytest.mark.rule("E6", "I6")
async def test_a_connection_that_breaks_is_no_loss(elsewhere: Elsewhere, lost: asyncio.Event) -> None:
    """More often than it is tried in a row: each time it is there again."""
    async with played() as (store, one, _):
        elsewhere.follow({one})
        for number in range(TRIES):
            await soon(store.is_opened)
            store.is_opened.clear()
            store.writers[number].close()
        await soon(store.is_opened)
        assert not lost.is_set()
        assert elsewhere.lost == frozenset()
