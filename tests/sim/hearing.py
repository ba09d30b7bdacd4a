"""Who was heard when by the coordinator that lives now, as seen on the wire: a second opinion on leases (E1, E5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvrx.core.ids import Incarnation, NodeId
from nvrx.core.presence import Timing
from nvrx.v1 import heartbeat_pb2

from .calls import ServerCall

RECOVERY_AT_LEAST_S = 15.0
FRESH_INTERVALS = 2.0
ROUNDING_S = 0.01
STALL_UNNOTICED_S = 0.5
"""Looked for by a pulse every 0.25 s that is later than as much again: that much may go unnoticed."""


@dataclass(frozen=True)
class Span:
    from_s: float
    to_s: float


@dataclass
class Hearing:
    """One life of the coordinator. Times are simulated seconds."""

    began_s: float
    timing: Timing
    away: dict[NodeId, Incarnation]
    """Members that were known at its start and have not been heard since."""
    loaded: Mapping[NodeId, Incarnation] = field(default_factory=dict)
    heard_s: dict[Incarnation, float] = field(default_factory=dict)
    joined_s: dict[Incarnation, float] = field(default_factory=dict)
    streams: dict[Incarnation, ServerCall] = field(default_factory=dict)
    taken: dict[ServerCall, None] = field(default_factory=dict)
    """Streams whose words count."""
    broke_s: dict[Incarnation, float] = field(default_factory=dict)
    stalls: list[Span] = field(default_factory=list)
    """When the coordinator was suspended: that time is held against nobody (rule E1)."""

    @property
    def slack_s(self) -> float:
        return ROUNDING_S + STALL_UNNOTICED_S * len(self.stalls)

    def stalled_s(self, since_s: float, until_s: float) -> float:
        """How much of a span the coordinator was suspended."""
        return sum(max(0.0, min(one.to_s, until_s) - max(one.from_s, since_s)) for one in self.stalls)

    @property
    def recovered_s(self) -> float:
        """From here on nobody is waited for any more after the restart."""
        span_s = max(self.timing.lease_ttl_s, RECOVERY_AT_LEAST_S) + self.stalled_s(self.began_s, math.inf)
        return self.began_s + span_s - self.slack_s

    def heard(self, call: ServerCall, message: heartbeat_pb2.HeartbeatRequest, now_s: float) -> None:
        node_id, incarnation = NodeId(message.node_id), Incarnation(message.incarnation)
        if message is call.first:
            current = self.streams.get(incarnation)
            if current is not None and message.sequence < current.first.sequence:
                return  # a stream that was given up before the current one was opened
            self.streams[incarnation] = call
            self.broke_s.pop(incarnation, None)
            self.taken[call] = None
        if call not in self.taken:
            return
        self.heard_s[incarnation] = now_s
        if self.away.get(node_id) == incarnation:
            del self.away[node_id]

    def over(self, call: ServerCall, now_s: float) -> None:
        self.taken.pop(call, None)
        for incarnation, stream in list(self.streams.items()):
            if stream is call:
                del self.streams[incarnation]
                self.broke_s[incarnation] = now_s

    def forget(self, node_id: NodeId) -> None:
        """The node is no longer a member, or as another incarnation."""
        self.away.pop(node_id, None)

    def may_be_lost_from_s(self, node_id: NodeId, incarnation: Incarnation, *, is_replaced: bool) -> float:
        """Before this nobody may call the incarnation lost.

        `is_replaced`: a newer one of the same node takes its place (B2), which judges nobody by silence.
        """
        earliest_s = self.recovered_s if self.away and not is_replaced else 0.0
        heard_s = self.heard_s.get(incarnation)
        if heard_s is None and self.loaded.get(node_id) == incarnation:
            return self.recovered_s
        since_s = heard_s if heard_s is not None else self.joined_s.get(incarnation, self.began_s)
        lease_s = since_s + self.timing.lease_ttl_s + self.stalled_s(since_s, math.inf)
        if incarnation in self.broke_s:
            broke_s = self.broke_s[incarnation]
            grace_s = self.timing.reconnect_grace_s + self.stalled_s(broke_s, math.inf)
            lease_s = min(lease_s, broke_s + grace_s)
        return max(earliest_s, lease_s - self.slack_s)

    def may_be_fresh(self, incarnation: Incarnation, now_s: float) -> bool:
        """Connected, and heard within the last two intervals (rule C1), or just over: clocks are read in turn."""
        is_connected = incarnation in self.streams or now_s - self.broke_s.get(incarnation, 0.0) <= ROUNDING_S
        return is_connected and self._silent_s(incarnation, now_s) <= self._fresh_s + ROUNDING_S

    def is_surely_fresh(self, incarnation: Incarnation, now_s: float) -> bool:
        """As `may_be_fresh`, and by more than clocks that are read in turn may differ."""
        return incarnation in self.streams and self._silent_s(incarnation, now_s) <= self._fresh_s - ROUNDING_S

    @property
    def _fresh_s(self) -> float:
        return FRESH_INTERVALS * self.timing.heartbeat_interval_s

    def _silent_s(self, incarnation: Incarnation, now_s: float) -> float:
        heard_s = self.heard_s.get(incarnation)
        return math.inf if heard_s is None else now_s - heard_s - self.stalled_s(heard_s, now_s)
