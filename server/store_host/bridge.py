"""Our store server: one listening socket, one key space, and the sessions of those who connect.

Asks no name server: a client is named in the log by its number. Knows nothing of coordinators, runs or cycles.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import cast

from nvrx.store.codec import BadCommand
from nvrx.store.opcodes import MAX_SPACE_BYTES
from nvrx.store.session import Session
from nvrx.store.space import KeySpace

log = logging.getLogger("nvrx.store")

_READ_BYTES = 64 * 1024


class BridgeServer:
    """A store on one port. `read_only_below`: keys that only privileged sessions write."""

    def __init__(self, read_only_below: bytes | None = None) -> None:
        self.space = KeySpace(read_only_below, MAX_SPACE_BYTES)
        self.connections: set[_Connection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, listening: socket.socket, read_only_below: bytes | None = None) -> BridgeServer:
        """Serve on a socket that already listens."""
        self = cls(read_only_below)
        self.port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listening)
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

    __slots__ = ("_server", "_session", "_transport")

    _session: Session
    _transport: asyncio.Transport

    def __init__(self, server: BridgeServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._session = Session(self._server.space, self._transport.write)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._session.feed(data)
        except BadCommand as error:
            self._cut_off(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._session.close()
        self._server.connections.discard(self)

    def pause_writing(self) -> None:
        self._session.pause()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        try:
            self._session.resume()
        except BadCommand as error:
            self._cut_off(error)

    def _cut_off(self, error: BadCommand) -> None:
        log.warning("cut off %s on port %d: %s", self._name(), self._server.port, error)
        self._session.close()
        self._transport.close()  # what was asked before has its answer

    def abort(self) -> None:
        self._session.close()
        self._transport.abort()

    def _name(self) -> str:
        name = self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a client"
