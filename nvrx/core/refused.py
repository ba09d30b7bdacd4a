"""Refusals: the peer asked for something that it may not have, and can act on the answer.

Knows no wire format; `nvrx.errors` turns a refusal into a `google.rpc.Status` and back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

DETAIL_SERVED_RUN = "served_run_id"
"""With UNKNOWN_RUN: the only run that the coordinator serves."""
DETAIL_NEWER_STREAM = "newer_stream"
"""With STALE_INCARNATION: another stream of the same incarnation took over."""


class Reason(enum.Enum):
    """Stable reasons that programs may rely on (`ErrorInfo.reason`)."""

    RUN_FULL = "RUN_FULL"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    NODE_ALREADY_JOINED = "NODE_ALREADY_JOINED"
    DUPLICATE_INFRA_RANK = "DUPLICATE_INFRA_RANK"
    STALE_INCARNATION = "STALE_INCARNATION"
    STALE_CYCLE = "STALE_CYCLE"
    UNKNOWN_NODE = "UNKNOWN_NODE"
    UNKNOWN_RUN = "UNKNOWN_RUN"
    UNKNOWN_CYCLE = "UNKNOWN_CYCLE"
    RUN_CLOSED = "RUN_CLOSED"
    GROUP_CONFLICT = "GROUP_CONFLICT"
    ILLEGAL_WORLD = "ILLEGAL_WORLD"
    BAD_TOKEN = "BAD_TOKEN"
    INVALID_FIELD = "INVALID_FIELD"
    WIRE_VERSION_MISMATCH = "WIRE_VERSION_MISMATCH"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    NOT_LEADER = "NOT_LEADER"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    WATCH_TOO_SLOW = "WATCH_TOO_SLOW"
    STORE_OFF = "STORE_OFF"
    STORE_DOWN = "STORE_DOWN"
    STORE_TIMEOUT = "STORE_TIMEOUT"
    KEY_READ_ONLY = "KEY_READ_ONLY"
    VALUE_NOT_A_NUMBER = "VALUE_NOT_A_NUMBER"


class Refused(Exception):
    """A request that is not carried out and changed nothing.

    `message` is one line for a person: what, the values, what to do. `details` are the values by name.
    """

    def __init__(
        self, reason: Reason, message: str, details: Mapping[str, str] | None = None, *, by_state: bool = False
    ) -> None:
        """`by_state`: nothing is wrong with what was asked for; how the run stands is against it."""
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.details = dict(details or {})
        self.by_state = by_state
