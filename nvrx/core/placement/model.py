"""What `place` is asked and what it answers. Knows no way of choosing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..ids import DomainId, GroupId, NodeId
from ..topology import OrderKey


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be chosen. `last_resort`: quarantined or degraded, so chosen last, not never (rule C1)."""

    node_id: NodeId
    order: OrderKey
    group: GroupId | None = None
    domain: DomainId | None = None
    last_resort: bool = False
    why_last: str = ""
    """Why it is chosen last, in words; empty where nobody says."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A node that cannot be chosen now; named in reasons only. `why` as in "lost 12 s ago"."""

    node_id: NodeId
    group: GroupId | None
    domain: DomainId | None
    why: str


@dataclass(frozen=True)
class Wanted:
    """Nodes that must be in the world, and nodes that must not, each with its group (rule F1)."""

    include: frozenset[NodeId] = frozenset()
    exclude: frozenset[NodeId] = frozenset()
    replaced: frozenset[NodeId] = frozenset()
    """Those of `exclude` that make room for promoted nodes; the others are drained."""

    def why_not(self, node_id: NodeId) -> str:
        """Why a node of `exclude` must not be in the world."""
        return "replaced by an operator" if node_id in self.replaced else "drained"


NO_WISHES = Wanted()


@dataclass(frozen=True)
class Bounds:
    """How far `place` searches where groups tie domains together: states looked at, never time (rule C8)."""

    component: int = 200_000
    total: int = 2_000_000


BOUNDS = Bounds()


@dataclass(frozen=True)
class Unplaced:
    """A node left out, and why, in words for a person."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class Placement:
    """A world: its nodes in group-rank order, and those left out in infra order.

    `proven`: no possible world is better. If not, `remark` says why in one line: the search came to its bound.
    """

    chosen: tuple[NodeId, ...]
    left_out: tuple[Unplaced, ...]
    proven: bool = True
    remark: str = ""


@dataclass(frozen=True)
class Shortage:
    """No world is possible, or none was found within the bound; `reason` says what is missing, or `undecided`."""

    reason: str


Outcome: TypeAlias = Placement | Shortage
