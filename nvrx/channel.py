"""How our own clients reach a coordinator: channel options and the token's metadata. Makes no call."""

from __future__ import annotations

import grpc

MAX_BACKOFF_MS = 1_000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # Our channels go straight to the coordinator: a proxy meant for the web would swallow them (rule J5).
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    # gRPC's own back-off reaches two minutes; after an outage agents must be back within seconds (rule E3).
    ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
    # The server permits a ping every 5 s, also on idle channels.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    # A channel of its own for each client object: no connection is shared behind our back.
    ("grpc.use_local_subchannel_pool", 1),
]

Metadata = tuple[tuple[str, str], ...]


def bearer(token: str | None) -> Metadata:
    """The metadata that carries a token; empty without one."""
    return (("authorization", f"Bearer {token}"),) if token is not None else ()


def describe(error: grpc.Call | grpc.aio.AioRpcError) -> str:
    """Why a call got no answer, in words for a person."""
    text = error.details() or ""
    code = error.code()
    lowered = text.lower()
    if "resolution failed" in lowered or "domain name" in lowered:
        return "cannot resolve its name"
    if "refused" in lowered:
        return "connection refused"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return f"{code.name.lower().replace('_', ' ')}{': ' if text else ''}{text[:200]}"
