"""Refusals on the wire: `Refused` <-> `google.rpc.Status` with one ErrorInfo (domain `nvrx`).

Knows no rule: which code a reason has, and how it is packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from nvrx.core.endpoint import HostPort, parse_endpoint
from nvrx.core.refused import Reason, Refused
from nvrx.logs import one_line

DOMAIN = "nvrx"
# A status travels in headers: a default client refuses more than 16 KiB of them, and above 8 KiB some of them.
MAX_STATUS_TEXT = 1024
MAX_DETAILS = 64
MAX_DETAIL_BYTES = 4096
_VALUE_LENGTHS = (256, 64, 16)

_CODES = {
    Reason.RUN_FULL: code_pb2.RESOURCE_EXHAUSTED,
    Reason.LIMIT_EXCEEDED: code_pb2.RESOURCE_EXHAUSTED,
    Reason.SHAPE_MISMATCH: code_pb2.INVALID_ARGUMENT,
    Reason.INVALID_FIELD: code_pb2.INVALID_ARGUMENT,
    Reason.ILLEGAL_WORLD: code_pb2.INVALID_ARGUMENT,
    Reason.NODE_ALREADY_JOINED: code_pb2.FAILED_PRECONDITION,
    Reason.DUPLICATE_INFRA_RANK: code_pb2.FAILED_PRECONDITION,
    Reason.STALE_INCARNATION: code_pb2.FAILED_PRECONDITION,
    Reason.STALE_CYCLE: code_pb2.FAILED_PRECONDITION,
    Reason.GROUP_CONFLICT: code_pb2.FAILED_PRECONDITION,
    Reason.RUN_CLOSED: code_pb2.FAILED_PRECONDITION,
    Reason.WIRE_VERSION_MISMATCH: code_pb2.FAILED_PRECONDITION,
    Reason.UNKNOWN_NODE: code_pb2.NOT_FOUND,
    Reason.UNKNOWN_RUN: code_pb2.NOT_FOUND,
    Reason.UNKNOWN_CYCLE: code_pb2.NOT_FOUND,
    Reason.BAD_TOKEN: code_pb2.UNAUTHENTICATED,
    Reason.SHUTTING_DOWN: code_pb2.UNAVAILABLE,
    Reason.NOT_LEADER: code_pb2.UNAVAILABLE,
    Reason.WATCH_TOO_SLOW: code_pb2.RESOURCE_EXHAUSTED,
    Reason.STORE_OFF: code_pb2.FAILED_PRECONDITION,
    Reason.STORE_DOWN: code_pb2.UNAVAILABLE,
    Reason.STORE_TIMEOUT: code_pb2.DEADLINE_EXCEEDED,
    Reason.KEY_READ_ONLY: code_pb2.PERMISSION_DENIED,
    Reason.VALUE_NOT_A_NUMBER: code_pb2.FAILED_PRECONDITION,
}


def to_status(refused: Refused) -> status_pb2.Status:
    """The refusal as a `google.rpc.Status`; long texts and lists are cut to what fits in a header."""
    info = error_details_pb2.ErrorInfo(reason=refused.reason.value, domain=DOMAIN, metadata=_fitting(refused.details))
    packed = any_pb2.Any()
    packed.Pack(info)
    code = code_pb2.FAILED_PRECONDITION if refused.by_state else _CODES[refused.reason]
    return status_pb2.Status(code=code, message=_cut(refused.message), details=[packed])


def _cut(message: str) -> str:
    """One line: as much of a message as fits in MAX_STATUS_TEXT when percent-encoded, as gRPC sends it."""
    message = one_line(message[:MAX_STATUS_TEXT])
    while len(quote(message, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")) > MAX_STATUS_TEXT:
        message = message[: len(message) * 3 // 4]
    return message


def _fitting(details: Mapping[str, str]) -> dict[str, str]:
    """Details with values shortened until all fit in MAX_DETAIL_BYTES; the last ones go where even that is too much."""
    given = [(key[:128], value) for key, value in list(details.items())[:MAX_DETAILS]]
    for length in _VALUE_LENGTHS:
        shown = {key: value[:length] for key, value in given}
        if _bytes(shown) <= MAX_DETAIL_BYTES:
            return shown
    while _bytes(shown) > MAX_DETAIL_BYTES:
        shown.popitem()
    return shown


def _bytes(details: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in details.items())


def leader_named_in(refused: Refused) -> HostPort | None:
    """Where the coordinator that leads is, as one that does not was able to say."""
    if refused.reason is not Reason.NOT_LEADER:
        return None
    try:
        return parse_endpoint(refused.details.get("leader", ""))
    except ValueError:
        return None


def refused_from(error: grpc.Call | grpc.aio.AioRpcError) -> Refused | None:
    """The refusal that an rpc failed with; None if it failed for another reason."""
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            assert status is not None
            return Refused(Reason(info.reason), status.message, info.metadata)
    return None
