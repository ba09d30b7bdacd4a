"""Which nodes train, in which order, or why there is no world (rules C1-C8).

One pure function. Today's form: MIN nodes, survivors of the previous world first, then infra order; ranks in
infra order. Replacement groups and segments find their place here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from .ids import NodeId
from .shape import Shape
from .topology import OrderKey


@dataclass(frozen=True)
class Candidate:
    """A node that may be chosen."""

    node_id: NodeId
    order: OrderKey


@dataclass(frozen=True)
class Unplaced:
    """A node left out, and why, in words for a person."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True)
class Placement:
    """A world: its nodes in group-rank order, and those left out in infra order."""

    chosen: tuple[NodeId, ...]
    left_out: tuple[Unplaced, ...]


@dataclass(frozen=True)
class Shortage:
    """No world is possible; `reason` says what is missing."""

    reason: str


Outcome: TypeAlias = Placement | Shortage


def place(candidates: Sequence[Candidate], shape: Shape, previous: Set[NodeId]) -> Outcome:
    """Choose exactly `shape.min_nodes` of `candidates`, or say why not.

    Deterministic: independent of the order of `candidates` (rule C8). As many of `previous` as possible are
    kept, so a standby never displaces a healthy active node; among equals infra order decides (rule C5).
    """
    in_order = sorted(candidates, key=lambda one: (one.order, one.node_id))
    if len(in_order) < shape.min_nodes:
        return Shortage(f"{len(in_order)} of {shape.min_nodes} nodes are ready")
    survivors_first = sorted(in_order, key=lambda one: one.node_id not in previous)
    chosen = {one.node_id for one in survivors_first[: shape.min_nodes]}
    kept = len(chosen & previous)
    reason = (
        f"the world of {shape.min_nodes} keeps {kept} nodes of the cycle before"
        if previous
        else f"{shape.min_nodes} nodes come before it in infra order"
    )
    return Placement(
        chosen=tuple(one.node_id for one in in_order if one.node_id in chosen),
        left_out=tuple(Unplaced(one.node_id, reason) for one in in_order if one.node_id not in chosen),
    )
