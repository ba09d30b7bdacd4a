"""What the facts so far amount to, kept in a second way: no code of the core's `run`, `decide` or `invariants`.

Frozen: each fact makes a new ledger, so that what held at any revision can still be asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CheckSuspected,
    CheckTrusted,
    CycleEnded,
    CycleRunning,
    Fact,
    Failure,
    NodeFailedCheck,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeQuarantined,
    NodeRecovered,
    NodesDrained,
    NodeStopped,
    NodesUndrained,
    ProgressMade,
    RunClosed,
    RunOpened,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, NodeId
from nvrx.core.shape import Settings, Shape

Value = TypeVar("Value")


@dataclass(frozen=True)
class Seated:
    """A cycle as far as the checks need it. Times are simulated seconds of the decision."""

    number: CycleNumber
    ranks: Mapping[NodeId, int]
    incarnations: Mapping[NodeId, Incarnation]
    chosen_s: float
    ran: bool = False
    progressed: bool = False
    ended_s: float | None = None
    ended_at: float = 0.0
    """On the run's clock, which stands still while no coordinator runs."""
    suspects: frozenset[NodeId] = frozenset()
    failure: Failure | None = None

    @property
    def is_live(self) -> bool:
        return self.ended_s is None


@dataclass(frozen=True)
class Ledger:
    """`live`: the incarnation of each member. `stopping`: since when a node that left is ending its workers."""

    revision: int = 0
    shape: Shape | None = None
    settings: Settings | None = None
    live: Mapping[NodeId, Incarnation] = field(default_factory=dict)
    left: frozenset[Incarnation] = frozenset()
    lost: frozenset[Incarnation] = frozenset()
    joined_ever: frozenset[Incarnation] = frozenset()
    stopping: Mapping[NodeId, float] = field(default_factory=dict)
    drained: frozenset[NodeId] = frozenset()
    excluded_ever: frozenset[NodeId] = frozenset()
    """Nodes that were drained, quarantined or unhealthy once: their agents may hear of it late."""
    unhealthy: frozenset[NodeId] = frozenset()
    suspected_checks: frozenset[str] = frozenset()
    cycles: tuple[Seated, ...] = ()
    exits: Mapping[tuple[CycleNumber, NodeId], Mapping[LocalRank, WorkerExit]] = field(default_factory=dict)
    progress: int | None = None
    closed: RunClosed | None = None

    @property
    def cycle(self) -> Seated | None:
        return self.cycles[-1] if self.cycles else None

    @property
    def is_open(self) -> bool:
        return self.shape is not None and self.closed is None

    def find(self, number: CycleNumber) -> Seated | None:
        return next((one for one in self.cycles if one.number == number), None)

    def ended_by(self, *causes: Cause) -> list[Seated]:
        return [one for one in self.cycles if one.failure is not None and one.failure.cause in causes]

    def after(self, fact: Fact, now_s: float) -> Ledger:
        """The ledger with one more fact."""
        return dataclasses.replace(self._with(fact, now_s), revision=self.revision + 1)

    def _with(self, fact: Fact, now_s: float) -> Ledger:
        match fact:
            case RunOpened():
                return dataclasses.replace(self, shape=fact.shape, settings=fact.settings)
            case NodeJoined():
                node_id, incarnation = fact.node.node_id, fact.node.incarnation
                return dataclasses.replace(
                    self,
                    live={**self.live, node_id: incarnation},
                    joined_ever=self.joined_ever | {incarnation},
                    stopping=_without(self.stopping, node_id),
                )
            case NodeLeft() | NodeLost():
                return self._gone(fact, now_s)
            case NodeStopped():
                return dataclasses.replace(self, stopping=_without(self.stopping, fact.node_id))
            case NodesDrained():
                drained = {*fact.node_ids}
                return dataclasses.replace(
                    self, drained=self.drained | drained, excluded_ever=self.excluded_ever | drained
                )
            case NodesUndrained():
                return dataclasses.replace(self, drained=self.drained - {*fact.node_ids})
            case NodeQuarantined():
                return dataclasses.replace(self, excluded_ever=self.excluded_ever | {fact.node_id})
            case NodeFailedCheck():
                return dataclasses.replace(
                    self,
                    unhealthy=self.unhealthy | {fact.node_id},
                    excluded_ever=self.excluded_ever | {fact.node_id},
                )
            case NodeRecovered():
                return dataclasses.replace(self, unhealthy=self.unhealthy - {fact.node_id})
            case CheckSuspected():
                return dataclasses.replace(self, suspected_checks=self.suspected_checks | {fact.check})
            case CheckTrusted():
                return dataclasses.replace(self, suspected_checks=self.suspected_checks - {fact.check})
            case WorkersExited():
                key = (fact.cycle, fact.node_id)
                known = {**self.exits.get(key, {}), **{one.local_rank: one for one in fact.exits}}
                return dataclasses.replace(self, exits={**self.exits, key: known})
            case RunClosed():
                return dataclasses.replace(self, closed=fact)
            case _:
                return self._with_cycle(fact, now_s)

    def _gone(self, fact: NodeLeft | NodeLost, now_s: float) -> Ledger:
        if self.live.get(fact.node_id) != fact.incarnation:
            return self
        ledger = dataclasses.replace(self, live=_without(self.live, fact.node_id))
        if isinstance(fact, NodeLost):
            return dataclasses.replace(ledger, lost=self.lost | {fact.incarnation})
        stopping = self.stopping if fact.stopping_until is None else {**self.stopping, fact.node_id: now_s}
        return dataclasses.replace(ledger, left=self.left | {fact.incarnation}, stopping=stopping)

    def _with_cycle(self, fact: Fact, now_s: float) -> Ledger:
        match fact:
            case WorldChosen():
                ranks = {seat.node.node_id: seat.group_rank for seat in fact.seats}
                incarnations = {seat.node.node_id: seat.node.incarnation for seat in fact.seats}
                new = Seated(fact.cycle, ranks, incarnations, now_s)
                return dataclasses.replace(self, cycles=(*self.cycles, new), stopping={})
            case ProgressMade():
                came_further = fact.step > (self.progress or 0)
                ledger = self._changed(fact.cycle, progressed=True) if came_further else self
                return dataclasses.replace(ledger, progress=max(fact.step, self.progress or 0))
            case CycleRunning():
                return self._changed(fact.cycle, ran=True)
            case CycleEnded():
                return self._changed(
                    fact.cycle,
                    ended_s=now_s,
                    ended_at=fact.at,
                    failure=fact.failure,
                    suspects=frozenset(fact.suspects),
                )
            case CauseRevised():
                return self._changed(fact.cycle, failure=fact.failure)
            case _:
                return self

    def _changed(self, number: CycleNumber, **changes: object) -> Ledger:
        cycles = tuple(
            dataclasses.replace(one, **changes) if one.number == number else one  # type: ignore[arg-type]
            for one in self.cycles
        )
        return dataclasses.replace(self, cycles=cycles)


def _without(mapping: Mapping[NodeId, Value], node_id: NodeId) -> dict[NodeId, Value]:
    return {name: value for name, value in mapping.items() if name != node_id}
