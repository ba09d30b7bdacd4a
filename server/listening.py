"""How coordinators listen: one gRPC server's options, address and reflection. Knows no service."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as reflection_messages

from nvrx.core.endpoint import HostPort

from .services.store import MAX_REQUEST_BYTES

STOP_WITHIN_S = 3.0

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    # gRPC sheds calls above 1,000 pending ones by default, silently: a join storm would lose nodes (rule J5).
    ("grpc.server.max_pending_requests", 30_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Agents ping every 10 s, also when idle; the server must not answer that with too_many_pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class AddressTaken(Exception):
    """The address to listen on cannot be had; the message is one line."""


def listen_on(server: grpc.aio.Server, listen: HostPort) -> HostPort:
    """Have a server listen; the address with its real port. Raises AddressTaken."""
    try:
        port = server.add_insecure_port(str(listen))
    except RuntimeError as error:
        raise AddressTaken(
            f"cannot listen on {listen}: the port is taken or the address is not this machine's; give another with "
            "--listen HOST:PORT"
        ) from error
    if port == 0:
        raise AddressTaken(f"cannot listen on {listen}; give another with --listen HOST:PORT")
    return HostPort(listen.host, port)


def enable_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Reflection under both of its names: newer tools ask for v1, which grpcio-reflection does not register."""
    servicer = reflection.aio.ReflectionServicer(names)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_messages.ServerReflectionRequest.FromString,
        response_serializer=reflection_messages.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(
        "grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": method}
    )
    server.add_generic_rpc_handlers((handler,))
