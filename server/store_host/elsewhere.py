"""Stores that run on other coordinators' hosts, for cycles that began when those led (rules E6, I6).

A connection to each keeps it there, also before its cycle's workers come, and tells when it is gone: then a worker that
fails for want of it costs no restart. Knows no run and opens no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection

from nvrx.core.facts import Endpoint
from nvrx.store.client import StoreClient, StoreGone

log = logging.getLogger("nvrx.coord")

CONNECT_WITHIN_S = 5.0
TRIES = 3
"""Before a store counts as gone: a connection may break for lesser reasons."""
AGAIN_AFTER_S = 0.3
_NEVER = "nvrx/./never"
"""A key that nobody sets: waiting for it ends with the connection."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A host that vanishes closes no connection: it is missed after eleven seconds."""


class Elsewhere:
    """Those stores that were asked for last; `on_lost` is called when one of them is gone. Must not wait."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._watching: dict[Endpoint, asyncio.Task[None]] = {}
        self.lost: frozenset[Endpoint] = frozenset()

    def follow(self, stores: Collection[Endpoint]) -> None:
        """Watch just these."""
        for store in self._watching.keys() - stores:
            self._watching.pop(store).cancel()
        for store in stores:
            if store not in self._watching:
                self._watching[store] = asyncio.create_task(self._watch(store), name=f"store {store.port} elsewhere")
        self.lost &= frozenset(stores)

    async def _watch(self, store: Endpoint) -> None:
        failed = 0
        while failed < TRIES:
            try:
                client = await _connect(store)
                failed = 0
                with contextlib.closing(client):
                    await client.wait([_NEVER])
            except (OSError, StoreGone, TimeoutError) as error:
                log.debug("the store at %s:%d does not answer: %s", store.address, store.port, error)
            failed += 1
            await asyncio.sleep(AGAIN_AFTER_S)
        log.warning("the store at %s:%d is gone, on which workers may still rely", store.address, store.port)
        self.lost |= {store}
        self._on_lost()

    def close(self) -> None:
        for task in self._watching.values():
            task.cancel()


async def _connect(store: Endpoint) -> StoreClient:
    """Raises OSError, StoreGone or TimeoutError."""
    async with asyncio.timeout(CONNECT_WITHIN_S):
        reader, writer = await asyncio.open_connection(store.address, store.port)
        try:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            return await StoreClient.greet(reader, writer)
        except BaseException:  # also where the caller is cancelled: nobody else closes it
            writer.close()
            raise
