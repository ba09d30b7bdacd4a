"""Connections to the lasting store for many callers: one shared by all that is quick, one each for what may block.

A store has no errors: it cuts off whoever asks for what it does not do, and everybody when it dies. What that means is
found out here. Knows neither gRPC nor which keys there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nvrx.store.client import StoreClient, StoreGone

from .lasting import Lasting

T = TypeVar("T")

MAX_QUICK = 1024
"""Quick operations asked for at once; beyond it TooManyCalls."""
MAX_BLOCKED = 4096
"""Connections of their own at once; beyond it TooManyCalls."""
MAX_CONNECTING = 16
"""Connections being made at once: a Unix socket refuses those beyond its backlog; the others wait here."""
ANSWER_WITHIN_S = 10.0
"""A store that takes longer counts as gone."""


class TooManyCalls(Exception):
    """As many operations as are allowed are under way; the text says which limit."""


class StoreRefuses(Exception):
    """The store is up and cuts off whoever asks for this. Asked for in due form, it means: it would hold too much."""


class Connections:
    """All connections of one service."""

    def __init__(self, lasting: Lasting) -> None:
        self._lasting = lasting
        self._shared: StoreClient | None = None
        self._turn = asyncio.Lock()
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._quick: set[asyncio.Task[object]] = set()
        self._blocked = 0
        self._own: set[StoreClient] = set()
        self.is_closed = False

    @property
    def quick_ones(self) -> int:
        """How many quick operations are under way."""
        return len(self._quick)

    @property
    def blocked(self) -> int:
        """How many operations have, or wait for, a connection of their own."""
        return self._blocked

    # ---- quick operations ---------------------------------------------------------------------------------

    async def quick(self, operation: Callable[[StoreClient], Awaitable[T]], *, may_repeat: bool) -> T:
        """Do what the store answers at once, over the shared connection.

        `may_repeat`: doing it twice is as good as once. Raises StoreGone, StoreRefuses, TooManyCalls.
        """
        if len(self._quick) >= MAX_QUICK:
            raise TooManyCalls(f"{MAX_QUICK} operations on the store are under way")
        # A caller that goes away must not cut the connection off under all others: the operation is finished anyway.
        task: asyncio.Task[T] = asyncio.create_task(self._in_turn(operation, may_repeat))
        self._quick.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._quick.discard(task)
        if not task.cancelled():
            task.exception()  # also where nobody waits for it any more

    async def _in_turn(self, operation: Callable[[StoreClient], Awaitable[T]], may_repeat: bool) -> T:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self._turn:
                try:
                    return await operation(await self._known_to_answer())
                except StoreGone:
                    if may_repeat:
                        try:
                            return await operation(await self._known_to_answer())
                        except StoreGone:
                            pass
                # Raises StoreGone where it is down.
                await self._known_to_answer()
                raise StoreRefuses
        except TimeoutError as error:
            raise StoreGone(f"the store did not answer within {ANSWER_WITHIN_S:g} s") from error

    async def _known_to_answer(self) -> StoreClient:
        """The shared connection: it has just answered. What is not to be repeated is never tried on a dead one."""
        if self._shared is not None:
            try:
                await self._shared.count()
                return self._shared
            except StoreGone:
                self._shared = None
        self._shared = await self._connect()
        return self._shared

    async def _connect(self) -> StoreClient:
        async with self._connecting:
            client = await self._lasting.connect()
        if self.is_closed:
            client.close()
            raise StoreGone("the coordinator goes down")
        return client

    # ---- what may block -----------------------------------------------------------------------------------

    async def alone(self, operation: Callable[[StoreClient], Awaitable[T]], within_s: float) -> T:
        """Do what may block, or takes long, over a connection of its own, and once more on a new one if that breaks.

        Whoever is cancelled frees it at once. Raises StoreGone, also after `within_s` plus ANSWER_WITHIN_S;
        TooManyCalls.
        """
        if self._blocked >= MAX_BLOCKED:
            raise TooManyCalls(f"{MAX_BLOCKED} calls wait on the store")
        self._blocked += 1
        try:
            async with asyncio.timeout(within_s + ANSWER_WITHIN_S):
                try:
                    return await self._on_own(operation)
                except StoreGone:
                    return await self._on_own(operation)
        except TimeoutError as error:
            raise StoreGone(f"the store did not answer within {ANSWER_WITHIN_S:g} s") from error
        finally:
            self._blocked -= 1

    async def _on_own(self, operation: Callable[[StoreClient], Awaitable[T]]) -> T:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            client = await self._connect()
        self._own.add(client)
        try:
            return await operation(client)
        finally:
            self._own.discard(client)
            client.close()

    # ---- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections: what waits on one raises StoreGone."""
        self.is_closed = True
        for client in (self._shared, *self._own):
            if client is not None:
                client.close()
