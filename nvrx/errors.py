"""Refusals on the wire: `Refused` <-> `google.rpc.Status` with one ErrorInfo (domain `nvrx`).

Knows no rule: which code a reason has, and how it is packed.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from nvrx.core.refused import Reason, Refused

DOMAIN = "nvrx"
MAX_STATUS_TEXT = 2048
MAX_DETAILS = 64

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
    Reason.RUN_CLOSED: code_pb2.FAILED_PRECONDITION,
    Reason.WIRE_VERSION_MISMATCH: code_pb2.FAILED_PRECONDITION,
    Reason.UNKNOWN_NODE: code_pb2.NOT_FOUND,
    Reason.UNKNOWN_RUN: code_pb2.NOT_FOUND,
    Reason.UNKNOWN_CYCLE: code_pb2.NOT_FOUND,
    Reason.BAD_TOKEN: code_pb2.UNAUTHENTICATED,
    Reason.SHUTTING_DOWN: code_pb2.UNAVAILABLE,
    Reason.WATCH_TOO_SLOW: code_pb2.RESOURCE_EXHAUSTED,
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """The status code that a reason travels under."""
    return next(code for code in grpc.StatusCode if code.value[0] == _CODES[reason])


def to_status(refused: Refused) -> status_pb2.Status:
    """The refusal as a `google.rpc.Status`; long texts and lists are cut to what fits in a header."""
    details = {key: value[:256] for key, value in list(refused.details.items())[:MAX_DETAILS]}
    info = error_details_pb2.ErrorInfo(reason=refused.reason.value, domain=DOMAIN, metadata=details)
    packed = any_pb2.Any()
    packed.Pack(info)
    return status_pb2.Status(code=_CODES[refused.reason], message=refused.message[:MAX_STATUS_TEXT], details=[packed])


def refused_from(error: grpc.aio.AioRpcError) -> Refused | None:
    """The refusal that an rpc failed with; None if it failed for another reason."""
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            assert status is not None
            return Refused(Reason(info.reason), status.message, info.metadata)
    return None
