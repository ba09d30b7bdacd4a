"""One cycle of a run: its world, and how it went. Decides nothing, and knows no other cycle."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .facts import Endpoint, Failure, Seat, Standby, WorkerExit
from .ids import CycleNumber, LocalRank, NodeId
from .shape import Shape
from .topology import OrderSource


class CycleState(enum.Enum):
    """How a cycle stands. While the next one is being formed, the current one is ENDED."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"


class SeatState(enum.Enum):
    """How an active node's workers ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED_BY_AGENT = "STOPPED_BY_AGENT"
    LOST = "LOST"


@dataclass(frozen=True)
class Cycle:
    """One attempt to train: its world, and how it went. `_at` is the run's clock, `_time` the wall's."""

    number: CycleNumber
    shape: Shape
    """The run's shape at the time: a later life of the run may have another."""
    order_source: OrderSource
    seats: tuple[Seat, ...]
    standbys: tuple[Standby, ...]
    master: Endpoint | None
    started_at: float
    started_time: float = 0.0
    running_at: float | None = None
    ended_at: float | None = None
    ended_time: float = 0.0
    failure: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    exits: Mapping[NodeId, Mapping[LocalRank, WorkerExit]] = field(default_factory=dict)
    lost: frozenset[NodeId] = frozenset()
    remark: str = ""
    """Why its world may not be the best one (rule C4); empty where it is."""
    progressed: bool = False
    """Whether training came further in it than ever before (rule D6)."""

    @cached_property
    def seat_of(self) -> Mapping[NodeId, Seat]:
        return {seat.node.node_id: seat for seat in self.seats}

    @property
    def state(self) -> CycleState:
        if self.ended_at is not None:
            return CycleState.ENDED
        return CycleState.STARTING if self.running_at is None else CycleState.RUNNING

    @property
    def is_live(self) -> bool:
        return self.ended_at is None

    def has_finished(self, node_id: NodeId, workers_per_node: int) -> bool:
        """Whether all workers of an active node exited 0."""
        exits = self.exits.get(node_id, {})
        return len(exits) == workers_per_node and all(one.succeeded for one in exits.values())

    def seat_state(self, node_id: NodeId, workers_per_node: int) -> SeatState | None:
        """How an active node's workers ended; None while they run or if nobody knows."""
        exits = self.exits.get(node_id, {}).values()
        if any(one.failed for one in exits):
            return SeatState.FAILED
        if len(exits) == workers_per_node:
            all_well = all(one.succeeded for one in exits)
            return SeatState.SUCCEEDED if all_well else SeatState.STOPPED_BY_AGENT
        return SeatState.LOST if node_id in self.lost else None
