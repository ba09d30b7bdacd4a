"""Who may call: one bearer token for all services but health (rules J1, J2). Never logs a token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status

from nvrx.core.refused import Reason, Refused
from nvrx.errors import to_status

_OPEN_TO_ALL = "/grpc.health.v1.Health/"

# Generic in its stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]


class RequireToken(grpc.aio.ServerInterceptor):
    """Refuses every call that does not carry the token, before its request is read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if handler_call_details.method.startswith(_OPEN_TO_ALL):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            return await continuation(handler_call_details)
        return _refusing(await continuation(handler_call_details), given != "")


def _refusing(handler: Handler | None, has_token: bool) -> Handler:
    what = "the token is not the one this coordinator was started with" if has_token else "no token came with the call"
    refused = Refused(Reason.BAD_TOKEN, f"{what}; give the coordinator's token with --token-file", {})

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(rpc_status.to_status(to_status(refused)))

    streams_in = handler is not None and handler.request_streaming
    streams_out = handler is not None and handler.response_streaming
    return handler_of(refuse, streams_in, streams_out)


def handler_of(
    behave: Callable[[Any, Any], Awaitable[Any]], streams_in: bool, streams_out: bool, like: Handler | None = None
) -> Handler:
    """A handler of one of gRPC's four kinds; it reads and writes messages as `like` does, else bytes."""
    kinds: dict[tuple[bool, bool], Callable[..., Handler]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    reads = like.request_deserializer if like is not None else None
    writes = like.response_serializer if like is not None else None
    return kinds[streams_in, streams_out](behave, request_deserializer=reads, response_serializer=writes)
