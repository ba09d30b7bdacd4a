"""What is held against nodes: why they are chosen last, passed over, or not chosen at all. Knows no run."""

from __future__ import annotations

from dataclasses import dataclass

from .ids import CycleNumber, Incarnation


@dataclass(frozen=True)
class Quarantine:
    """Why a node is chosen last, and until when; None: for the rest of the run (rule D7)."""

    reason: str
    until: float | None


@dataclass(frozen=True)
class Suspicion:
    """A node did not take up its place in `cycle`: it is passed over until it says that it has (rule D12)."""

    incarnation: Incarnation
    cycle: CycleNumber


@dataclass(frozen=True)
class Ailment:
    """Why a node is in no further world, and since when (rule G11). It outlives the incarnation that told of it."""

    incarnation: Incarnation
    check: str
    reason: str
    at: float

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}"
