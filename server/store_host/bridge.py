"""Our store server: one listening socket, one key space, and the sessions of those who connect.

Asks no name server: a client is named in the log by its number. Knows nothing of coordinators, runs or cycles.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import cast

from nvrx.core.endpoint import HostPort
from nvrx.store.codec import BadCommand
from nvrx.store.opcodes import MAX_SPACE_BYTES
from nvrx.store.session import Session
from nvrx.store.space import KeySpace

from .ports import BACKLOG

log = logging.getLogger("nvrx.store")

MAX_COMPLAINTS = 100
LARGE_REPLY_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024


class Complaints:
    """Lines about clients that were cut off: at most MAX_COMPLAINTS in a minute, then how many more there were."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._minute = -1
        self._said = 0

    def say(self, client: str, port: int, why: BadCommand) -> None:
        minute = int(self._clock() // 60)
        if minute != self._minute:
            if self._said > MAX_COMPLAINTS:
                log.warning("cut off %d more clients before", self._said - MAX_COMPLAINTS)
            self._minute, self._said = minute, 0
        self._said += 1
        if self._said <= MAX_COMPLAINTS:
            log.warning("cut off %s on port %d: %s", client, port, why)


class BridgeServer:
    """A store on one port. `read_only_below`: keys that only privileged sessions write.

    `on_left` is called when a client has gone.
    """

    def __init__(
        self,
        read_only_below: bytes | None = None,
        complaints: Complaints | None = None,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self.complaints = complaints or Complaints(time.monotonic)
        self.on_left = on_left
        self.space = KeySpace(read_only_below, MAX_SPACE_BYTES)
        self.connections: set[_Connection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(
        cls,
        listening: socket.socket,
        read_only_below: bytes | None = None,
        complaints: Complaints | None = None,
        on_left: Callable[[], None] = lambda: None,
    ) -> BridgeServer:
        """Serve on a socket that already listens."""
        self = cls(read_only_below, complaints, on_left)
        self.port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listening, backlog=BACKLOG)
        return self

    @property
    def clients(self) -> int:
        return len(self.connections)

    async def close(self) -> None:
        """Stop listening and cut all clients off."""
        assert self._server is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.abort()
        await self._server.wait_closed()

    async def serve_privileged(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A session that may write every key, over a connection that is already there."""
        session = Session(self.space, writer.write, may_write_all=True)
        try:
            while data := await reader.read(_READ_BYTES):
                session.feed(data)
                await writer.drain()
        except BadCommand as error:
            log.warning("cut off a coordinator: %s", error)
        finally:
            session.close()


class _Connection(asyncio.Protocol):
    """A client. Nothing more is read from one that does not read its answers."""

    __slots__ = ("_is_full", "_server", "_session", "_transport")

    _session: Session
    _transport: asyncio.Transport

    def __init__(self, server: BridgeServer) -> None:
        self._server = server
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._session = Session(self._server.space, self._send)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._session.feed(data)
        except BadCommand as error:
            self._cut_off(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._session.close()
        self._server.connections.discard(self)
        self._server.on_left()

    def _send(self, reply: bytes) -> None:
        """One large reply at a time: uvloop keeps all of it for as long as anything of it is left to send."""
        self._transport.write(reply)
        if len(reply) > LARGE_REPLY_BYTES and not self._is_full:
            self._session.pause()
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def pause_writing(self) -> None:
        self._is_full = True
        self._session.pause()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Later: uvloop calls this in the middle of sending, where it does not notice that it is full again."""
        self._is_full = False
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_full or self._transport.is_closing():
            return
        self._transport.resume_reading()
        try:
            self._session.resume()
        except BadCommand as error:
            self._cut_off(error)

    def _cut_off(self, error: BadCommand) -> None:
        self._server.complaints.say(self._name(), self._server.port, error)
        self._session.close()
        self._transport.close()  # what was asked before has its answer

    def abort(self) -> None:
        self._session.close()
        self._transport.abort()

    def _name(self) -> str:
        name = self._transport.get_extra_info("peername")
        return str(HostPort(name[0], name[1])) if isinstance(name, tuple) else "a client"
