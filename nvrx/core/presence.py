"""What the coordinator hears from nodes right now: leases, streams, phases, free ports.

Volatile: never journaled, renewed as heartbeats are decoded, rebuilt after a restart of the coordinator.
All times are seconds on the run's clock and come in as arguments. Decides nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from .ids import CycleNumber, Incarnation, NodeId

DEFAULT_HEARTBEAT_INTERVAL_S = 1.0
DEFAULT_LEASE_TTL_S = 10.0
DEFAULT_RECONNECT_GRACE_S = 2.0
RECOVERY_AT_LEAST_S = 15.0
HEARD_WITHIN_INTERVALS = 2.0
MEMBERS_PER_INTERVAL_S = 1000.0
"""So many members are heard in a second: with more of them each speaks less often (rule E1)."""
INTERVAL_MOST_S = 5.0
LEASE_INTERVALS = 5.0
"""A lease outlasts this many heartbeats that were lost."""


class AgentPhase(enum.Enum):
    """What an agent says it is doing."""

    IDLE = "IDLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    SUCCEEDED = "SUCCEEDED"

    @property
    def has_started(self) -> bool:
        """Workers of the cycle told with it were started: nothing is left of earlier ones."""
        return self is not AgentPhase.IDLE and self is not AgentPhase.STARTING


class Health(enum.Enum):
    """How a node says it is: degraded ones are chosen last, unhealthy ones not (rule C1)."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    UNHEALTHY = "UNHEALTHY"


@dataclass(frozen=True)
class HealthReport:
    """What a node's checks say together: the state of the worst one, its name, and why in one sentence."""

    state: Health = Health.HEALTHY
    check: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}" if self.check else self.reason


WELL = HealthReport()
MAX_CHECK = 64
MAX_REASON = 256


def health_report(state: Health, check: str, reason: str) -> HealthReport:
    """A report in words that fit in a line, whatever a check printed."""
    return HealthReport(state, _line(check, MAX_CHECK), _line(reason, MAX_REASON))


def _line(text: str, most: int) -> str:
    words = " ".join("".join(one if one.isprintable() else " " for one in text[: 4 * most]).split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


class StoreMode(enum.Enum):
    """Who hosts the TCPStore that workers of a cycle meet at (rule I1)."""

    BRIDGE = "bridge"
    TORCH = "torch"
    RANK0 = "rank0"
    OFF = "off"

    @property
    def is_hosted(self) -> bool:
        """Whether the coordinator has it served, by a process of its own."""
        return self in {StoreMode.BRIDGE, StoreMode.TORCH}


@dataclass(frozen=True)
class HostedStores:
    """What the coordinator's store process offers a run now. `lost`: its earlier ports that died with a process."""

    address: str = ""
    lasting_port: int | None = None
    ports: tuple[int, ...] = ()
    lost: frozenset[int] = frozenset()
    problem: str = ""
    """Why no port can be had."""


@dataclass(frozen=True)
class Timing:
    """How often nodes are heard and how long silence is borne, in seconds. They may grow with the members (rule E1)."""

    heartbeat_interval_s: float = DEFAULT_HEARTBEAT_INTERVAL_S
    lease_ttl_s: float = DEFAULT_LEASE_TTL_S
    reconnect_grace_s: float = DEFAULT_RECONNECT_GRACE_S
    interval_grows: bool = False
    lease_grows: bool = False

    @property
    def acknowledged_within_s(self) -> float:
        """How long a node may take to say that it has its assignment (rule D12): it does so with a heartbeat."""
        return max(self.reconnect_grace_s, HEARD_WITHIN_INTERVALS * self.heartbeat_interval_s)

    def at_size(self, members: int) -> Timing:
        """E1: the timing for so many members. It never gets shorter: nodes go on with what they were told last."""
        interval_s, lease_s = self.heartbeat_interval_s, self.lease_ttl_s
        if self.interval_grows:
            interval_s = max(interval_s, min(members / MEMBERS_PER_INTERVAL_S, INTERVAL_MOST_S))
        if self.lease_grows:
            lease_s = max(lease_s, LEASE_INTERVALS * interval_s)
        return dataclasses.replace(self, heartbeat_interval_s=interval_s, lease_ttl_s=lease_s)


@dataclass
class NodePresence:
    """What is known of one incarnation of a node."""

    incarnation: Incarnation
    lease_until: float
    connected: bool = False
    heard_at: float | None = None
    phase: AgentPhase = AgentPhase.IDLE
    cycle: CycleNumber | None = None
    store_ports: tuple[int, ...] = ()
    health: HealthReport | None = None
    """None where this incarnation has not told yet."""
    failing_from: float = 0.0
    """Since when its present check fails, where it is unhealthy."""
    failing_until: float | None = None
    """When a check of it was last heard to fail, and which; None: never."""
    failing_check: str = ""
    connected_at: float | None = None
    acknowledged: CycleNumber | None = None
    """The cycle that it knows of, from what it is to do; None where it does not tell."""
    progress: int | None = None
    """The furthest step of training that its workers told in `cycle`; None where they do not."""
    hung_up: bool = False
    """It ended its stream while it was heard, as a process that dies does, or joined and opened none."""
    heard_out: bool = False
    """It was given time after a stall of the coordinator, and has not been heard since."""
    reprieved: bool = False
    """It was given time when the coordinator heard somebody again, and has not been heard since."""

    def speaks(self, now: float) -> None:
        """It is heard: what was granted to its silence may be granted again."""
        self.heard_at = now
        self.hung_up = self.heard_out = self.reprieved = False

    def note_health(self, told: HealthReport, now: float) -> None:
        """Take in what its checks say, and remember since when and until when one of them fails."""
        if told.state is Health.UNHEALTHY:
            was = self.health
            if was is None or was.state is not Health.UNHEALTHY or was.check != told.check:
                self.failing_from = now
            self.failing_until, self.failing_check = now, told.check
        self.health = told


@dataclass(frozen=True)
class Word:
    """What a node says in a heartbeat, beside how its workers ended."""

    phase: AgentPhase
    cycle: CycleNumber | None = None
    store_ports: tuple[int, ...] = ()
    acknowledged: CycleNumber | None = None
    progress: int | None = None
    health: HealthReport | None = None
    """None where it does not tell: what it told before holds."""


@dataclass
class Presence:
    """All nodes of one run, as heard."""

    timing: Timing = field(default_factory=Timing)
    store: StoreMode = StoreMode.RANK0
    nodes: dict[NodeId, NodePresence] = field(default_factory=dict)
    recovering_until: float | None = None
    stores: HostedStores = field(default_factory=HostedStores)
    returning: set[NodeId] = field(default_factory=set)
    """Nodes known before a restart of the coordinator that have not come back yet."""
    stalled_at: float = 0.0
    """When the coordinator was last stalled itself."""
    last_heard_at: float | None = None
    """When anybody was heard last, member or not; None: nobody since the coordinator started."""
    short_since: float | None = None
    """Since when those who may be chosen have allowed no world, however many members there are (rule D9)."""

    def joined(self, node_id: NodeId, incarnation: Incarnation, now: float) -> None:
        """Give a node that joined its first lease; the same incarnation keeps what is known of it."""
        known = self.nodes.get(node_id)
        if known is None or known.incarnation != incarnation:
            self.nodes[node_id] = NodePresence(incarnation, now + self.timing.lease_ttl_s, hung_up=True)
        else:
            known.lease_until = max(known.lease_until, now + self.timing.lease_ttl_s)

    def connected(self, node_id: NodeId, now: float) -> None:
        """A node's stream opened."""
        self.somebody_spoke(now)
        node = self.nodes[node_id]
        self.returning.discard(node_id)
        node.connected = True
        node.connected_at = now
        node.speaks(now)
        node.lease_until = now + self.timing.lease_ttl_s

    def heard(self, node_id: NodeId, word: Word, now: float) -> bool:
        """Renew a lease. True if the run may have to be decided anew because of what was said.

        Progress alone is told all the time and changes little: who asks for it looks (rule D6).
        """
        self.somebody_spoke(now)
        node = self.nodes[node_id]
        was = (node.phase, node.cycle, node.store_ports, node.acknowledged, self.is_fresh(node_id, now))
        was_health = node.health
        node.phase, node.cycle, node.store_ports = word.phase, word.cycle, word.store_ports
        node.acknowledged, node.progress = word.acknowledged, word.progress
        if word.health is not None:
            node.note_health(word.health, now)
        node.speaks(now)
        node.lease_until = now + self.timing.lease_ttl_s
        return was_health != node.health or was != (word.phase, word.cycle, word.store_ports, word.acknowledged, True)

    def disconnected(self, node_id: NodeId, incarnation: Incarnation, now: float) -> None:
        """A node's stream broke: its lease shrinks to the reconnect grace (rule E1)."""
        node = self.nodes.get(node_id)
        if node is None or node.incarnation != incarnation:
            return
        node.hung_up = self.is_fresh(node_id, now)
        node.connected = False
        node.lease_until = min(node.lease_until, now + self.timing.reconnect_grace_s)

    def recover(self, nodes: Iterable[tuple[NodeId, Incarnation]], now: float) -> None:
        """After a restart of the coordinator: every known node gets a full lease to come back in (E5)."""
        span_s = max(self.timing.lease_ttl_s, RECOVERY_AT_LEAST_S)
        self.recovering_until = now + span_s
        for node_id, incarnation in nodes:
            self.nodes[node_id] = NodePresence(incarnation, now + span_s)
            self.returning.add(node_id)

    def extend(self, late_s: float) -> None:
        """The coordinator itself was stalled for `late_s`: nobody is judged for that time (rule E1)."""
        for node in self.nodes.values():
            node.lease_until += late_s
            if node.heard_at is not None:
                node.heard_at += late_s
        if self.recovering_until is not None:
            self.recovering_until += late_s
        if self.last_heard_at is not None:
            self.last_heard_at += late_s

    def hear_out(self, now: float) -> None:
        """The coordinator was stalled: what nodes said meanwhile is still unread, and their streams may have broken.

        Once for each silence: else one that is stalled again and again would never find that a node is gone.
        """
        self.stalled_at = now
        for node in self.nodes.values():
            if not node.heard_out:
                node.heard_out = True
                node.lease_until = max(node.lease_until, now + self.timing.reconnect_grace_s)

    def somebody_spoke(self, now: float) -> None:
        """A node was heard, or asked to join: if nobody had been, it may have been the coordinator that was cut off.

        Then whoever is still silent gets time to come back: a whole lease where the own one is over. Once for each
        silence: one node that is heard now and then does not keep a dead one alive.
        """
        was_deaf = self.hears_nobody(now)
        self.last_heard_at = now
        if not was_deaf:
            return
        for node in self.nodes.values():
            if not (node.reprieved or node.hung_up):
                given_s = self.timing.lease_ttl_s if now >= node.lease_until else self.timing.reconnect_grace_s
                node.reprieved = now + given_s > node.lease_until
                node.lease_until = max(node.lease_until, now + given_s)

    def note_world(self, allows_world: bool | None, now: float) -> None:
        """Whether there is a world, or one that could be chosen; None: that is not known now, and what was holds."""
        if allows_world:
            self.short_since = None
        elif allows_world is False and self.short_since is None:
            self.short_since = now

    def hears_nobody(self, now: float) -> bool:
        """Whether no node at all was heard within the last two intervals."""
        return self.last_heard_at is None or now - self.last_heard_at > self._heard_within_s

    @property
    def last_lease_until(self) -> float:
        """When the last lease of all is over; there has to be one."""
        return max(node.lease_until for node in self.nodes.values())

    @property
    def _heard_within_s(self) -> float:
        return HEARD_WITHIN_INTERVALS * self.timing.heartbeat_interval_s

    def is_recovering(self, now: float) -> bool:
        """Whether some node that was known before a restart may still come back unjudged."""
        return bool(self.returning) and self.recovering_until is not None and now < self.recovering_until

    def is_fresh(self, node_id: NodeId, now: float) -> bool:
        """Connected and heard within the last two intervals: may be chosen for a world (rule C1)."""
        node = self.nodes.get(node_id)
        if node is None or not node.connected or node.heard_at is None:
            return False
        return now - node.heard_at <= self._heard_within_s

    def has_taken_up(self, node_id: NodeId, cycle: CycleNumber, since: float) -> bool:
        """Whether a node has said that it has its assignment of a cycle, which was sent at `since` (rule D12)."""
        node = self.nodes.get(node_id)
        if node is None:
            return False
        if node.cycle is not None and node.cycle >= cycle:
            return True
        if node.acknowledged is None:
            return node.heard_at is not None and node.heard_at > since
        return node.acknowledged >= cycle

    def health_of(self, node_id: NodeId) -> HealthReport:
        """What is known of a node's health; without a word it is well."""
        node = self.nodes.get(node_id)
        return WELL if node is None or node.health is None else node.health

    def forget(self, node_id: NodeId) -> None:
        """A node is no longer a member."""
        self.nodes.pop(node_id, None)
        self.returning.discard(node_id)
