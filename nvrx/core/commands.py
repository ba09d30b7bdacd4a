"""What is asked of a run. `decide` answers with facts, or refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .facts import NodeInfo, WorkerExit
from .ids import CycleNumber, Incarnation, NodeId
from .shape import SettingsWish, Shape


@dataclass(frozen=True)
class Join:
    """A node asks to be a member. `reopen`: begin the run's next life if it is closed."""

    node: NodeInfo
    shape: Shape
    wish: SettingsWish
    reopen: bool = False


@dataclass(frozen=True)
class Leave:
    """A node takes itself out; said again with `workers_stopped` once its workers are gone."""

    node_id: NodeId
    incarnation: Incarnation
    reason: str
    workers_stopped: bool
    stop_grace_s: float


@dataclass(frozen=True)
class CycleExits:
    """Exits of one node's workers in one cycle."""

    cycle: CycleNumber
    exits: tuple[WorkerExit, ...]


@dataclass(frozen=True)
class Report:
    """A node tells how workers of its ended. May be repeated; what is known already changes nothing."""

    node_id: NodeId
    incarnation: Incarnation
    cycles: tuple[CycleExits, ...]


@dataclass(frozen=True)
class Tick:
    """Time went on, or something in Presence changed."""


Command: TypeAlias = Join | Leave | Report | Tick
