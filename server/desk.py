"""Where calls arrive at one of several coordinators: handed to who leads here, else refused with the leader's address.

Guards each word of a leader: once its term may be over none goes out, not even a refusal (rule E6). Knows no service's
meaning, and decides nothing about who leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_status import rpc_status

from nvrx.core.refused import Reason, Refused
from nvrx.errors import to_status

from .access import Handler, handler_of
from .services.answering import Context

WRITE_ENDS_WITHIN_S = 1.0
"""How long the end of a term waits for a message that is being sent to somebody who does not read."""


class TermOfOffice:
    """The handlers that answer during one term. Also takes the place of a server where services register."""

    def __init__(self, is_valid: Callable[[], bool]) -> None:
        self.is_valid = is_valid
        self.handlers: dict[str, Handler] = {}
        self.calls: set[asyncio.Task[Any]] = set()
        self.ended_by: Refused | None = None

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers once more, as older servers take them."""


class Desk(grpc.GenericRpcHandler):
    """The handler of all services of a server. `refusal` says who leads, if anybody is known to."""

    def __init__(self, services: Mapping[str, ServiceDescriptor], refusal: Callable[[], Refused]) -> None:
        self._methods = {
            f"/{name}/{method.name}": method for name, service in services.items() for method in service.methods
        }
        self._refusal = refusal
        self._term: TermOfOffice | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """What gRPC calls to find the handler of a call."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        term = self._term
        handler = term.handlers.get(handler_call_details.method) if term is not None else None
        if term is None or handler is None:
            return self._refusing(method)
        return self._guarded(method, handler, term)

    def open(self, term: TermOfOffice) -> None:
        """From now on calls are for this term."""
        self._term = term

    def close(self, refusal: Refused) -> None:
        """The term is over: every call under way ends with the refusal, and says nothing else."""
        term, self._term = self._term, None
        if term is not None:
            term.ended_by = refusal
            for call in term.calls:
                call.cancel()

    def _refusing(self, method: MethodDescriptor) -> Handler:
        async def refuse(request: Any, context: Context) -> None:
            await _abort(context, self._refusal())

        return handler_of(refuse, method.client_streaming, method.server_streaming)

    def _guarded(self, method: MethodDescriptor, handler: Handler, term: TermOfOffice) -> Handler:
        behave: Callable[[Any, Any], Awaitable[Any]] = _behaviour(handler)

        async def guarded(request: Any, context: Context) -> Any:
            task = asyncio.current_task()
            assert task is not None
            term.calls.add(task)
            try:
                answer = await behave(request, _GuardedContext(context, term, self._refusal))
                if term.is_valid():
                    return answer
            except asyncio.CancelledError:
                if term.ended_by is None:
                    raise
                task.uncancel()
            finally:
                term.calls.discard(task)
            return await _abort(context, term.ended_by or self._refusal())

        return handler_of(guarded, method.client_streaming, method.server_streaming, like=handler)


class _GuardedContext:
    """A call's context through which nothing goes out once the term may be over."""

    def __init__(self, context: Context, term: TermOfOffice, refusal: Callable[[], Refused]) -> None:
        self._context = context
        self._term = term
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if not self._term.is_valid():
            raise self._refusal()
        writing = asyncio.ensure_future(self._context.write(message))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # gRPC takes no status while it still sends: the call would end without one, and its client not know.
            await asyncio.wait([writing], timeout=WRITE_ENDS_WITHIN_S)
            if writing.done() and not writing.cancelled():
                writing.exception()
            raise

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        if not self._term.is_valid():
            await _abort(self._context, self._refusal())
        await self._context.abort(code, details)

    async def abort_with_status(self, status: grpc.Status) -> None:
        if not self._term.is_valid():
            await _abort(self._context, self._refusal())
        await self._context.abort_with_status(status)


def _behaviour(handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    found = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert found is not None
    return found  # type: ignore[return-value]


async def _abort(context: Context, refused: Refused) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(refused)))


def not_leading(own: object, leader: str | None) -> Refused:
    """What who does not lead answers, with the leader's address if one is known."""
    if leader is None or leader == str(own):
        return Refused(Reason.NOT_LEADER, f"coordinator {own} does not lead, and no leader is known; try again", {})
    return Refused(Reason.NOT_LEADER, f"coordinator {own} does not lead, {leader} does; go there", {"leader": leader})
