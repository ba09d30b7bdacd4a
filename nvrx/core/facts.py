"""What has happened: the journal's rows, the watch's deltas, the audit log and the history of rank maps.

Every fact is in the past tense and carries `at`, the run's clock: seconds since the run's first fact.
Knows nothing of why a fact was decided (`decide`) or what follows from it (`run.evolve`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .ids import (
    ArrayRank,
    CycleNumber,
    DomainId,
    GlobalRank,
    GroupId,
    GroupRank,
    Incarnation,
    InfraRank,
    LocalRank,
    NodeId,
    RunId,
)
from .shape import Settings, Shape
from .topology import OrderSource

MAX_STDERR_TAIL = 4096
MAX_MESSAGE = 1024


DEFAULT_STOP_GRACE_S = 15.0


class Cause(enum.Enum):
    """Why a cycle ended."""

    WORKER_FAILED = "WORKER_FAILED"
    NODE_LOST = "NODE_LOST"
    NODE_LEFT = "NODE_LEFT"
    HANG = "HANG"
    NODE_UNHEALTHY = "NODE_UNHEALTHY"
    DRAINED = "DRAINED"
    PROMOTED = "PROMOTED"
    STORE_LOST = "STORE_LOST"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"


LOSSES = frozenset({Cause.NODE_LOST, Cause.NODE_LEFT})
"""Causes charged to `max_replacements` (rule D5)."""
OWN_FAILURES = frozenset({Cause.WORKER_FAILED, Cause.HANG})
"""Causes charged to `max_restarts`: workers ended the cycle by themselves."""
UNHEALTHY = frozenset({Cause.NODE_UNHEALTHY})
"""Causes charged to `max_restarts` as well, though no worker failed: no part of a crash loop (rule D11)."""
TAKEN_AWAY = LOSSES | UNHEALTHY
"""Causes that take a node away: found while a failure settles they are part of it (rule D3)."""
PLANNED = frozenset({Cause.DRAINED, Cause.PROMOTED, Cause.STOPPED, Cause.SUCCEEDED})
"""Causes that are no failure: they cost nothing."""


class RunState(enum.Enum):
    """How a run stands."""

    OPEN = "OPEN"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclass(frozen=True)
class Device:
    """The GPU of one worker, as far as its node knows it."""

    local_rank: LocalRank
    uuid: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None


@dataclass(frozen=True)
class NodeInfo:
    """What a node says of itself when it joins."""

    node_id: NodeId
    incarnation: Incarnation
    address: str
    pid: int
    version: str = ""
    order_sources: Mapping[OrderSource, str] = field(default_factory=dict)
    array_rank: ArrayRank | None = None
    replacement_group_id: GroupId | None = None
    domain_id: DomainId | None = None
    devices: tuple[Device, ...] = ()
    restart_count: int = 0
    last_cycle: CycleNumber | None = None
    group_array_job_id: str = ""
    """The array job that the group id is a task of; empty where the group has a name of its own (rule B6)."""
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    """How long its workers get to end after SIGTERM."""
    host: str = ""
    """What its pid is relative to: a boot of a machine, and a pid namespace there; empty where it does not tell."""


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended: an exit code, or the name of the signal that ended it.

    `hung`: it was silent for too long and has to be stopped; told at once, and again when it has ended.
    """

    local_rank: LocalRank
    exit_code: int | None = None
    signal: str = ""
    message: str = ""
    stopped_by_agent: bool = False
    stderr_tail: str = ""
    hung: bool = False

    @property
    def succeeded(self) -> bool:
        """Ended well by itself: one that answers its agent's SIGTERM with exit code 0 has not finished its work."""
        return self.exit_code == 0 and not self.signal and not self.stopped_by_agent and not self.hung

    @property
    def failed(self) -> bool:
        """Ended badly by itself, not because its agent stopped it; or had to be stopped because it hung."""
        return self.hung or (not self.succeeded and not self.stopped_by_agent)

    @property
    def has_ended(self) -> bool:
        """Its process is gone: a worker that was found hung may still be there."""
        return not self.hung or self.exit_code is not None or bool(self.signal)

    def adds_to(self, known: WorkerExit | None) -> bool:
        """Whether it tells what is not `known`, of the same worker."""
        return known is None or (self.has_ended and not known.has_ended)


@dataclass(frozen=True)
class Failure:
    """What ended a cycle. The ranks of a worker are None where a whole node was at fault."""

    cause: Cause
    node_id: NodeId | None = None
    group_rank: GroupRank | None = None
    local_rank: LocalRank | None = None
    exit_code: int | None = None
    signal: str = ""
    message: str = ""
    stderr_tail: str = ""
    at: float = 0.0
    rank: GlobalRank | None = None


@dataclass(frozen=True)
class Placed:
    """A node as it stood when a world was chosen, in it or not."""

    node_id: NodeId
    incarnation: Incarnation
    address: str
    infra_rank: InfraRank
    order_key: str
    replacement_group_id: GroupId | None = None
    domain_id: DomainId | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Seat:
    """A node in a cycle's world."""

    node: Placed
    group_rank: GroupRank


@dataclass(frozen=True)
class Standby:
    """A node left out of a cycle's world, and why."""

    node: Placed
    reason: str


@dataclass(frozen=True)
class Endpoint:
    """Where the workers of a cycle find their store (MASTER_ADDR, MASTER_PORT).

    `lasting_port`: the coordinator hosts it, and its lasting store beside it; None: rank 0's worker hosts it. An empty
    address is the host at which a node reaches the coordinator.
    """

    address: str
    port: int
    lasting_port: int | None = None


@dataclass(frozen=True)
class Happened:
    """`at`: seconds on the run's clock. `time`: seconds since the epoch, stamped by the engine, for people only."""

    at: float
    time: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class RunOpened(Happened):
    run_id: RunId
    shape: Shape
    settings: Settings


@dataclass(frozen=True)
class RunReopened(Happened):
    """A closed run began its next life: cycles number on, budgets start anew."""

    settings: Settings
    shape: Shape
    restart_count: int


@dataclass(frozen=True)
class NodeJoined(Happened):
    node: NodeInfo


@dataclass(frozen=True)
class NodeLeft(Happened):
    """A node took itself out. `stopping_until`: its workers may still write a checkpoint until then."""

    node_id: NodeId
    incarnation: Incarnation
    reason: str
    stopping_until: float | None = None


@dataclass(frozen=True)
class NodeStopped(Happened):
    """The workers of a node that had left are gone."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True)
class NodeLost(Happened):
    """A node was not heard for its lease, or a newer incarnation took its place."""

    node_id: NodeId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True)
class WorldChosen(Happened):
    """A cycle got its number and its world; its assignments may be sent. `remark`: the search came to its bound."""

    cycle: CycleNumber
    order_source: OrderSource
    seats: tuple[Seat, ...]
    standbys: tuple[Standby, ...]
    master: Endpoint | None
    remark: str = ""


@dataclass(frozen=True)
class CycleRunning(Happened):
    """All active nodes started their workers."""

    cycle: CycleNumber


@dataclass(frozen=True)
class WorkersExited(Happened):
    """Workers of one node ended, in this cycle or, told late, in an earlier one."""

    cycle: CycleNumber
    node_id: NodeId
    exits: tuple[WorkerExit, ...]


@dataclass(frozen=True)
class CycleEnded(Happened):
    """`suspects`: nodes that did not take up their place in it, passed over until they say something new (rule D12)."""

    cycle: CycleNumber
    failure: Failure
    suspects: tuple[NodeId, ...] = ()


@dataclass(frozen=True)
class ProgressMade(Happened):
    """Training came further in this cycle than ever before (rule D6). `step`: the furthest that a worker told."""

    cycle: CycleNumber
    step: int


@dataclass(frozen=True)
class CauseRevised(Happened):
    """The loss of a node turned out to be what ended a cycle; the cause first seen is a consequence."""

    cycle: CycleNumber
    failure: Failure


@dataclass(frozen=True)
class NodesPromoted(Happened):
    """An operator wants these nodes in the next world, and those they replace out of it."""

    node_ids: tuple[NodeId, ...]
    replaced: tuple[NodeId, ...] = ()


@dataclass(frozen=True)
class NodesDrained(Happened):
    """An operator wants these nodes out of every world from the next on."""

    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True)
class NodesUndrained(Happened):
    """An operator allows these nodes to be chosen again."""

    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True)
class NodeQuarantined(Happened):
    """A node's own workers failed first too often in a row: it is chosen last (rule D7).

    `until`: seconds on the run's clock; None: for the rest of the run.
    """

    node_id: NodeId
    reason: str
    until: float | None


@dataclass(frozen=True)
class QuarantineEnded(Happened):
    """The time of a node's quarantine is over."""

    node_id: NodeId


@dataclass(frozen=True)
class NodeFailedCheck(Happened):
    """A node is unhealthy: it is in no further world until it is well again (rule G11)."""

    node_id: NodeId
    incarnation: Incarnation
    check: str
    reason: str


@dataclass(frozen=True)
class NodeRecovered(Happened):
    """An unhealthy node is well again, and may be chosen; or it is chosen last, as the check that failed on it turned
    out to be itself the `suspect`."""

    node_id: NodeId
    suspect: str = ""


@dataclass(frozen=True)
class CheckSuspected(Happened):
    """A check failed on so many nodes at once that it is itself the suspect: it replaces nobody (rule G11).

    `node_ids`: those on which it failed within a minute; `nodes`: how many there are in all.
    """

    check: str
    node_ids: tuple[NodeId, ...]
    nodes: int


@dataclass(frozen=True)
class CheckTrusted(Happened):
    """A check that was suspected fails on few nodes only: it counts again."""

    check: str


@dataclass(frozen=True)
class RunClosed(Happened):
    state: RunState
    reason: str
    exit_code: int


Fact: TypeAlias = (
    RunOpened
    | RunReopened
    | NodeJoined
    | NodeLeft
    | NodeStopped
    | NodeLost
    | WorldChosen
    | CycleRunning
    | WorkersExited
    | CycleEnded
    | CauseRevised
    | ProgressMade
    | NodesPromoted
    | NodesDrained
    | NodesUndrained
    | NodeQuarantined
    | QuarantineEnded
    | NodeFailedCheck
    | NodeRecovered
    | CheckSuspected
    | CheckTrusted
    | RunClosed
)
