"""What is asked of a run. `decide` answers with facts, or refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .facts import NodeInfo, WorkerExit
from .ids import CycleNumber, Incarnation, NodeId
from .shape import SettingsWish, Shape


@dataclass(frozen=True)
class Join:
    """A node asks to be a member. `reopen`: begin the run's next life if it is closed.

    `replaces`: an older incarnation of the node that the newcomer knows to be dead (rule B2).
    """

    node: NodeInfo
    shape: Shape
    wish: SettingsWish
    reopen: bool = False
    replaces: Incarnation | None = None


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
class Promote:
    """An operator wants a standby, with its group, to be active: at the next cycle boundary, or `immediate`ly.

    `replace`: the active node, with its group, that has to go for it.
    """

    node_id: NodeId
    replace: NodeId | None = None
    immediate: bool = False


@dataclass(frozen=True)
class Drain:
    """An operator wants a node, with its group, out of the world: at the next cycle boundary, or `immediate`ly."""

    node_id: NodeId
    immediate: bool = False


@dataclass(frozen=True)
class Undrain:
    """An operator allows a drained node, with its group, to be chosen again."""

    node_id: NodeId


@dataclass(frozen=True)
class StopRun:
    """An operator ends the run."""


@dataclass(frozen=True)
class Tick:
    """Time went on, or something in Presence changed."""


Command: TypeAlias = Join | Leave | Report | Promote | Drain | Undrain | StopRun | Tick
