"""gRPC over the simulated network: a channel for the real stubs, a server for the real services.

Requests and answers are serialised as on the wire. Behaves as grpc.aio does where the code under test relies on it:
a handler is cancelled when its call is over, an answer may be lost, a call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any, Protocol

import grpc

from .loop import simulated_loop
from .network import Connection, Link


class Status:
    """How a call ended."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, bytes], ...] = ()) -> None:
        self.code = code
        self.details = details
        self.trailing = trailing

    def error(self) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(
            self.code, grpc.aio.Metadata(), grpc.aio.Metadata(*self.trailing), self.details, None
        )


OK = Status(grpc.StatusCode.OK, "")


def unavailable(why: str) -> Status:
    return Status(grpc.StatusCode.UNAVAILABLE, why)


class ServerEar(Protocol):
    """Hears what goes over the wire at the coordinator's end, at the moment when it is read, written or over."""

    def heard(self, call: ServerCall, message: Any) -> None: ...
    def told(self, call: ServerCall, message: Any) -> None: ...
    def over(self, call: ServerCall) -> None: ...


class Server:
    """The coordinator's end. `is_up` False: the process is gone and nothing of it speaks any more."""

    def __init__(self, ear: ServerEar, context: Context) -> None:
        self.is_up = True
        self.context = context
        self.refuses = False
        self.ear = ear
        self.methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.calls: dict[ServerCall, None] = {}

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = handler

    def die(self) -> None:
        """The process ends without a word; its connections break."""
        self.is_up = False
        for call in list(self.calls):
            call.die("the coordinator's connection was reset")


class ServerCall:
    """A call as its handler sees it: the part of grpc.aio.ServicerContext that our services use."""

    def __init__(self, server: Server, connection: Connection, path: str) -> None:
        self._server = server
        self._connection = connection
        self.first: Any = None
        """The first message of the caller; None before it is read."""
        self._method = server.methods[path]
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status: Status | None = None
        self._is_over = False
        self.on_message: Callable[[bytes], None] | None = None
        self.on_end: Callable[[Status], None] | None = None
        connection.on_broken_at_coordinator = self.cancel
        server.calls[self] = None
        self.task = simulated_loop().watched(self._run(), path, server.context.copy())

    def arrived(self, request: bytes | None) -> None:
        """A message of the caller; None: it will send no more."""
        self._inbox.put_nowait(request)

    async def read(self) -> Any:
        raw = await self._inbox.get()
        if raw is None:
            return grpc.aio.EOF
        message = self._method.request_deserializer(raw)  # type: ignore[misc]
        if self._server.is_up:
            self.first = message if self.first is None else self.first
            self._server.ear.heard(self, message)
        return message

    async def write(self, message: Any) -> None:
        self._send(message)

    def _send(self, message: Any) -> None:
        if self._is_over or not self._server.is_up:
            return
        self._server.ear.told(self, message)
        raw = self._method.response_serializer(message)  # type: ignore[misc]
        assert self.on_message is not None
        deliver = self.on_message
        self._connection.send_down(lambda: deliver(raw))

    async def abort_with_status(self, status: Any) -> None:
        self._status = Status(status.code, status.details, tuple(status.trailing_metadata))
        raise grpc.aio.AbortError

    async def _run(self) -> None:
        method: Any = self._method
        status = OK
        try:
            if method.request_streaming:
                await method.stream_stream(self, self)
            else:
                request = await self.read()
                if method.response_streaming:
                    await method.unary_stream(request, self)
                else:
                    self._send(await method.unary_unary(request, self))
        except grpc.aio.AbortError:
            assert self._status is not None
            status = self._status
        self._end(status)

    def _end(self, status: Status) -> None:
        was_over = self._is_over
        self._close()
        if was_over or not self._server.is_up:
            return
        assert self.on_end is not None
        deliver = self.on_end
        self._connection.send_down(lambda: deliver(status))

    def cancel(self, why: str) -> None:
        """The caller is gone, or has cancelled."""
        self._close()
        self.task.cancel()

    def _close(self) -> None:
        if not self._is_over and self._server.is_up:
            # The coordinator learns it when it runs again, if it is suspended now.
            simulated_loop().call_soon(self._server.ear.over, self, context=self._server.context.copy())
        self._is_over = True
        self._server.calls.pop(self, None)

    def die(self, why: str) -> None:
        self.cancel(why)
        self._connection.break_from_coordinator(why)


class Caller:
    """An agent's process as far as the network sees it: when it dies, its calls end."""

    def __init__(self, link: Link, find_server: Callable[[], Server | None]) -> None:
        self.link = link
        self.find_server = find_server
        self.is_alive = True
        self.open: dict[Connection, None] = {}
        self.connected_to: Server | None = None
        """Where something of it has arrived: only there may something arrive once it is dead."""

    def die(self, *, silently: bool) -> None:
        """`silently`: nothing tells the coordinator, as when power fails."""
        self.is_alive = False
        for connection in list(self.open):
            if silently:
                connection.on_broken_at_node = None
            else:
                connection.break_from_node("the node's connection was reset")
        self.open.clear()

    def connect(self, path: str, status: Callable[[Status], None], message: Callable[[bytes], None]) -> Opening | None:
        """Begin a call; `status` hears its end, once. None where the process is dead."""
        return Opening(self, path, status, message) if self.is_alive else None


class Opening:
    """The node's end of a call."""

    def __init__(
        self, caller: Caller, path: str, on_end: Callable[[Status], None], on_message: Callable[[bytes], None]
    ) -> None:
        self._caller = caller
        self._path = path
        self._on_end: Callable[[Status], None] | None = on_end
        self._on_message = on_message
        self._server_call: ServerCall | None = None
        self._server = caller.find_server()
        self.connection = Connection(caller.link)
        self.connection.on_broken_at_node = lambda why: self._ended(unavailable(why))
        caller.open[self.connection] = None

    def send(self, raw: bytes | None) -> None:
        if self._caller.is_alive and not self.connection.is_broken:
            self.connection.send_up(lambda: self._deliver(raw))

    def _deliver(self, raw: bytes | None) -> None:
        """At the coordinator's host."""
        caller, server = self._caller, self._caller.find_server()
        if self._server_call is None:
            if not caller.is_alive and caller.connected_to is not server:
                return
            if server is None or server.refuses or (self._server is not None and server is not self._server):
                self.connection.break_from_coordinator("connection refused")
                return
            caller.connected_to = server
            self._server_call = ServerCall(server, self.connection, self._path)
            self._server_call.on_message = self._arrived
            self._server_call.on_end = self._ended
        self._server_call.arrived(raw)

    def _arrived(self, raw: bytes) -> None:
        if self._on_end is not None and self._caller.is_alive:
            self._on_message(raw)

    def _ended(self, status: Status) -> None:
        self._caller.open.pop(self.connection, None)
        self.connection.close()
        if self._on_end is not None and self._caller.is_alive:
            tell, self._on_end = self._on_end, None
            tell(status)

    def cancel(self) -> None:
        """The caller wants no more of it; the coordinator hears that behind all that was sent."""
        if self._on_end is None or not self._caller.is_alive:
            return
        self._on_end = None
        self._caller.open.pop(self.connection, None)
        if not self.connection.is_broken:
            self.connection.break_from_node("cancelled")


class Channel:
    """What generated stubs need of a grpc.aio.Channel."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def close(self) -> None:
        pass

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, timeout: float | None = None, metadata: object = None) -> Any:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            got: list[bytes] = []
            link = self._caller.link

            def end(status: Status) -> None:
                if answer.done():
                    return
                if status is OK and link.answers_to_lose > 0:
                    link.answers_to_lose -= 1
                    status = unavailable("the answer was lost")
                if status is OK:
                    answer.set_result(response_deserializer(got[0]))
                else:
                    answer.set_exception(status.error())

            opening = self._caller.connect(path, end, got.append)
            if opening is None:
                return await answer
            opening.send(request_serializer(request))
            try:
                async with asyncio.timeout(timeout):
                    return await answer
            except TimeoutError:
                raise Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded").error() from None
            finally:
                opening.cancel()

        return call

    def unary_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Stream]:
        def call(request: Any, metadata: object = None) -> Stream:
            stream = Stream(self._caller, path, response_deserializer)
            stream.send(request_serializer(request))
            return stream

        return call

    def stream_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Stream]:
        def call(requests: AsyncIterator[Any], metadata: object = None) -> Stream:
            stream = Stream(self._caller, path, response_deserializer)
            stream.say(requests, request_serializer)
            return stream

        return call


class Stream:
    """A streaming call as its caller sees it."""

    def __init__(self, caller: Caller, path: str, deserialize: Callable[[bytes], Any]) -> None:
        self._deserialize = deserialize
        self._inbox: asyncio.Queue[bytes | Status] = asyncio.Queue()
        self._status: Status | None = None
        self._opening = caller.connect(path, self._inbox.put_nowait, self._inbox.put_nowait)
        self._saying: asyncio.Task[None] | None = None

    def send(self, raw: bytes) -> None:
        if self._opening is not None:
            self._opening.send(raw)

    def say(self, requests: AsyncIterator[Any], serialize: Callable[[Any], bytes]) -> None:
        async def keep_saying() -> None:
            async for request in requests:
                self.send(serialize(request))

        self._saying = simulated_loop().watched(keep_saying(), "saying")

    async def read(self) -> Any:
        if self._status is None:
            found = await self._inbox.get()
            if isinstance(found, bytes):
                return self._deserialize(found)
            self._status = found
        if self._status is OK:
            return grpc.aio.EOF
        raise self._status.error()

    async def code(self) -> grpc.StatusCode:
        assert self._status is not None
        return self._status.code

    async def details(self) -> str:
        assert self._status is not None
        return self._status.details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        assert self._status is not None
        return grpc.aio.Metadata(*self._status.trailing)

    def cancel(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
        if self._opening is not None:
            self._opening.cancel()
