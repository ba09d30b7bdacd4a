"""Lengths of time and moments on the wire."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def duration(seconds: float) -> Duration:
    """A length of time, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """A length of time in seconds."""
    return float(message.ToNanoseconds()) / 1e9


def timestamp(epoch_s: float) -> Timestamp:
    """A moment, to the microsecond."""
    message = Timestamp()
    message.FromMicroseconds(round(epoch_s * 1e6))
    return message
